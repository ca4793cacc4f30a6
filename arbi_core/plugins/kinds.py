"""How each offering hook is checked and keyed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs
from attrs import frozen

__all__ = ["OFFER_KINDS", "OfferKind"]


@frozen
class OfferKind:
    """One offering hook.

    Attributes:
        hook: hook name.
        field: field of `Registry` that holds the offers.
        label: singular, for people.
        protocol: function that returns the protocol an offer must satisfy (late, to keep imports cheap).
        keys: keys under which an offer is found.
    """

    hook: str
    field: str
    label: str
    protocol: Callable[[], type]
    keys: Callable[[Any], Iterable[str]]

    def problem(self, offer: Any) -> str | None:
        """Why an offer is not acceptable, or None."""
        protocol = self.protocol()
        if isinstance(offer, type) or not isinstance(offer, protocol):
            missing = sorted(a for a in _members(protocol) if not hasattr(offer, a))
            lacks = f"; it lacks {', '.join(missing)}" if missing else ""
            return f"{self.hook} offered {offer!r}, which is not a {protocol.__name__}{lacks}"
        keys = list(self.keys(offer))
        bad = [k for k in keys if not isinstance(k, str) or not k]
        if bad or not keys:
            return f"{self.hook} offered {offer!r}, whose name is {bad[0]!r}" if bad else f"{offer!r} names nothing"
        return None


def _members(protocol: type) -> set[str]:
    if attrs.has(protocol):
        return {a.name for a in attrs.fields(protocol)}
    return {n for n in vars(protocol) if not n.startswith("_")} | set(getattr(protocol, "__annotations__", {}))


def _by_name(offer: Any) -> Iterable[str]:
    return (offer.name,)


def _offers(name: str) -> Callable[[], type]:
    def load() -> type:
        import arbi_core.offers

        protocol: type = getattr(arbi_core.offers, name)
        return protocol

    return load


def _backend() -> type:
    from arbi_core.backend.base import AttentionBackend

    return AttentionBackend


def _family() -> type:
    from arbi_core.model.base import ModelFamily

    return ModelFamily


def _checkpoint() -> type:
    from arbi_core.loader.base import CheckpointFormat

    return CheckpointFormat


def _weights() -> type:
    from arbi_core.loader.base import WeightFormat

    return WeightFormat


OFFER_KINDS = (
    OfferKind(
        "arbi_attention_backends",
        "attention_backends",
        "attention backend",
        _backend,
        lambda b: (f"{b.state_kind}:{b.name}",),
    ),
    OfferKind("arbi_model_families", "model_families", "model family", _family, lambda f: f.architectures),
    OfferKind("arbi_checkpoint_formats", "checkpoint_formats", "checkpoint format", _checkpoint, _by_name),
    OfferKind("arbi_weight_formats", "weight_formats", "weight format", _weights, _by_name),
    OfferKind("arbi_adapter_types", "adapter_types", "adapter type", _offers("AdapterType"), _by_name),
    OfferKind("arbi_drafters", "drafters", "drafter", _offers("Drafter"), _by_name),
    OfferKind("arbi_media_encoders", "media_encoders", "media encoder", _offers("MediaEncoder"), _by_name),
    OfferKind("arbi_audio_codecs", "audio_codecs", "audio codec", _offers("AudioCodec"), _by_name),
    OfferKind("arbi_tool_parsers", "tool_parsers", "tool parser", _offers("ToolParser"), _by_name),
    OfferKind(
        "arbi_reasoning_parsers",
        "reasoning_parsers",
        "reasoning parser",
        _offers("ReasoningParser"),
        _by_name,
    ),
    OfferKind(
        "arbi_logits_processors",
        "logits_processors",
        "logits processor",
        _offers("LogitsProcessor"),
        _by_name,
    ),
    OfferKind("arbi_executors", "executors", "executor", _offers("ExecutorFactory"), _by_name),
    OfferKind("arbi_routes", "routes", "route", _offers("Route"), lambda r: (r.path,)),
)
