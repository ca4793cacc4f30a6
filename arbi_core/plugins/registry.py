"""The frozen result of discovery: every offer by key, and a report of every plugin."""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import field, frozen

from arbi_core.errors import UnknownNameError, UnsupportedModelError

if TYPE_CHECKING:
    from arbi_core.backend.base import AttentionBackend
    from arbi_core.engine.messages import RequestRecord
    from arbi_core.loader.base import CheckpointFormat, WeightFormat
    from arbi_core.model.base import ModelFamily
    from arbi_core.offers import (
        AdapterType,
        AudioCodec,
        Drafter,
        ExecutorFactory,
        LogitsProcessor,
        MediaEncoder,
        ReasoningParser,
        Route,
        ToolParser,
    )

__all__ = ["FAMILY_PACKAGES", "PluginInfo", "PluginStatus", "Registry"]

log = logging.getLogger("arbi.plugins")

T = TypeVar("T")

FAMILY_PACKAGES = {
    "arbi-plugin-gdn": ("Qwen3Next", "Qwen3_5", "KimiLinear"),
    "arbi-plugin-mamba": ("NemotronH",),
    "arbi-plugin-shortconv": ("Lfm2",),
    "arbi-plugin-moe": ("Qwen3Moe", "Mixtral", "GptOss", "GraniteMoe", "Glm4Moe"),
    "arbi-plugin-mla": ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "KimiK2"),
    "arbi-plugin-gemma": ("Gemma",),
    "arbi-plugin-dsv4": ("DeepseekV4",),
}
"""Which package brings architectures whose names begin so; the longest prefix wins."""


class PluginStatus(enum.StrEnum):
    """What became of a plugin."""

    ACTIVE = "active"
    BROKEN = "broken"
    DISABLED = "disabled"


@frozen
class PluginInfo:
    """One line of ``arbi plugins``.

    Attributes:
        name: entry-point name.
        distribution: distribution that ships it.
        version: its version.
        status: what became of it.
        reason: why it is not active; empty if it is.
        offers: what it brings, in words, e.g. ``model family LlamaForCausalLM``.
    """

    name: str
    distribution: str
    version: str
    status: PluginStatus
    reason: str = ""
    offers: tuple[str, ...] = ()


def _empty() -> Mapping[str, Any]:
    return MappingProxyType({})


@frozen(kw_only=True)
class Registry:
    """Every offer of every active plugin. The hot path never looks here: it holds resolved objects."""

    attention_backends: Mapping[str, AttentionBackend] = field(factory=_empty)
    model_families: Mapping[str, ModelFamily] = field(factory=_empty)
    checkpoint_formats: Mapping[str, CheckpointFormat] = field(factory=_empty)
    weight_formats: tuple[WeightFormat, ...] = ()
    adapter_types: Mapping[str, AdapterType] = field(factory=_empty)
    drafters: Mapping[str, Drafter] = field(factory=_empty)
    media_encoders: Mapping[str, MediaEncoder] = field(factory=_empty)
    audio_codecs: Mapping[str, AudioCodec] = field(factory=_empty)
    tool_parsers: Mapping[str, ToolParser] = field(factory=_empty)
    reasoning_parsers: Mapping[str, ReasoningParser] = field(factory=_empty)
    logits_processors: Mapping[str, LogitsProcessor] = field(factory=_empty)
    config_sections: Mapping[str, type] = field(factory=_empty)
    executors: Mapping[str, ExecutorFactory] = field(factory=_empty)
    routes: tuple[Route, ...] = ()
    report: tuple[PluginInfo, ...] = ()
    commands: tuple[tuple[str, Callable[[Any], None]], ...] = ()
    listeners: Mapping[str, Sequence[tuple[str, Callable[..., None]]]] = field(factory=_empty)
    notification_errors: Counter[str] = field(factory=Counter)

    # -- lookups ----------------------------------------------------------------------------------------------------

    def family(self, architecture: str) -> ModelFamily:
        """Family of an architecture. Raises `UnsupportedModelError` naming what is installed and what to install."""
        family = self.model_families.get(architecture)
        if family is None:
            installed = ", ".join(sorted(self.model_families)) or "none"
            package = _package_for(architecture)
            fix = f"; `pip install {package}` may bring it" if package else ""
            raise UnsupportedModelError(
                f"no installed plugin serves the architecture {architecture!r} (installed: {installed}){fix}"
            )
        return family

    def pick(self, what: str, offered: Mapping[str, T], name: str) -> T:
        """Look up `name`, or raise `UnknownNameError` listing what is installed. `what` is singular, for people."""
        try:
            return offered[name]
        except KeyError:
            installed = ", ".join(sorted(offered)) or "none"
            raise UnknownNameError(f"no installed plugin offers the {what} {name!r} (installed: {installed})") from None

    # -- notifications ------------------------------------------------------------------------------------------------

    def engine_built(self, engine: Any) -> None:
        """Tell every plugin that the engine is ready."""
        self._notify("arbi_engine_built", engine=engine)

    def engine_closing(self, engine: Any) -> None:
        """Tell every plugin that the engine is about to close."""
        self._notify("arbi_engine_closing", engine=engine)

    def request_finished(self, record: RequestRecord) -> None:
        """Tell every plugin that a request ended."""
        self._notify("arbi_request_finished", record=record)

    def add_commands(self, subparsers: Any) -> None:
        """Let every plugin add its CLI commands."""
        for name, call in self.commands:
            try:
                call(subparsers)
            except Exception:
                self.notification_errors[name] += 1
                log.exception("plugin %s failed to add its commands", name)

    def _notify(self, hook: str, **arguments: Any) -> None:
        for name, call in self.listeners.get(hook, ()):
            try:
                call(**arguments)
            except Exception:
                self.notification_errors[name] += 1
                log.exception("plugin %s raised in %s", name, hook)


def _package_for(architecture: str) -> str | None:
    best = max(
        (
            (len(prefix), package)
            for package, prefixes in FAMILY_PACKAGES.items()
            for prefix in prefixes
            if architecture.startswith(prefix)
        ),
        default=None,
    )
    return None if best is None else best[1]
