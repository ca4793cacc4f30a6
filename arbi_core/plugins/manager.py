"""Finds plugins, checks them, resolves conflicts and freezes a `Registry`."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from types import MappingProxyType, ModuleType
from typing import Any

import pluggy
from attrs import define, field

from arbi_core import ARBI_API_VERSION, hookspecs
from arbi_core.config.tree import PluginsConfig
from arbi_core.errors import ConfigError, PluginConflictError, PluginError
from arbi_core.plugins.kinds import OFFER_KINDS, OfferKind
from arbi_core.plugins.registry import PluginInfo, PluginStatus, Registry

__all__ = ["load_registry"]

log = logging.getLogger("arbi.plugins")

GROUP = "arbi"
CORE = "arbi-core"
NOTIFICATIONS = ("arbi_engine_built", "arbi_engine_closing", "arbi_request_finished")


@define(eq=False)
class _Candidate:
    """A plugin on its way into the registry."""

    name: str
    distribution: str
    version: str
    load: Callable[[], Any]
    module: Any = None
    broken: str = ""
    disabled: str = ""
    offers: list[tuple[OfferKind, str, Any]] = field(factory=list)
    sections: dict[str, type] = field(factory=dict)

    @property
    def usable(self) -> bool:
        return not self.broken and not self.disabled

    def info(self) -> PluginInfo:
        status = PluginStatus.BROKEN if self.broken else PluginStatus.DISABLED if self.disabled else PluginStatus.ACTIVE
        words = [f"{kind.label} {key}" for kind, key, _ in self.offers] + [
            f"config section plugins.{name}" for name in self.sections
        ]
        return PluginInfo(
            self.name, self.distribution, self.version, status, self.broken or self.disabled, tuple(words)
        )


def load_registry(
    policy: PluginsConfig | None = None,
    extra: Iterable[ModuleType | Any] = (),
    *,
    commands_only: bool = False,
) -> Registry:
    """Discover, check and freeze.

    Args:
        policy: which plugins to load and how strictly; default: everything, leniently, and ``ARBI_PLUGINS``.
        extra: plugin modules or objects to register beside the discovered ones (embedding, tests).
        commands_only: leave out the core's own plugins, which add no commands; for the help of the command line.

    Raises:
        PluginConflictError: two distributions offer one key and ``prefer`` picks neither.
        PluginError: under ``strict``, any broken plugin.
        ConfigError: ``only`` names a plugin that is not installed.
    """
    policy = policy or PluginsConfig(only=_only_from_environment())
    candidates = [*_discover(policy), *(_programmatic(p) for p in extra)]
    if commands_only:
        candidates = [c for c in candidates if c.distribution != CORE]
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for candidate in candidates:
        if candidate.usable:
            candidate.broken = _register(candidate, manager)
    for candidate in candidates:
        if candidate.usable:
            candidate.broken = _collect(candidate, manager)
    for candidate in candidates:
        if candidate.broken:
            line = f"plugin {candidate.name} ({candidate.distribution} {candidate.version}): {candidate.broken}"
            if policy.strict:
                raise PluginError(f"{line}; --strict-plugins refuses to boot with a broken plugin")
            log.warning("%s; it is skipped", line)
    return _freeze([c for c in candidates if c.usable], candidates, manager, _preferences(policy))


def _only_from_environment() -> tuple[str, ...] | None:
    raw = os.environ.get("ARBI_PLUGINS")
    return None if raw is None else tuple(p for p in (x.strip() for x in raw.split(",")) if p)


def _discover(policy: PluginsConfig) -> list[_Candidate]:
    found: dict[tuple[str, str], _Candidate] = {}
    for point in metadata.entry_points(group=GROUP):
        dist = point.dist
        candidate = _Candidate(
            point.name, dist.name if dist else "?", dist.version if dist else "?", _entry_loader(point.value)
        )
        found.setdefault((candidate.distribution, candidate.name), candidate)
    candidates = sorted(found.values(), key=lambda c: (c.distribution != CORE, c.name))
    if policy.only is not None:
        unknown = set(policy.only) - {c.name for c in candidates}
        if unknown:
            names = ", ".join(c.name for c in candidates if c.distribution != CORE) or "none"
            raise ConfigError(
                "plugins_policy.only",
                f"no installed plugin is called {', '.join(sorted(unknown))}",
                f"installed: {names}",
            )
        for c in candidates:
            if c.distribution != CORE and c.name not in policy.only:
                c.disabled = "not in --plugins"
    return candidates


def _entry_loader(value: str) -> Callable[[], Any]:
    def load() -> Any:
        module, _, attribute = value.partition(":")
        plugin = importlib.import_module(module)
        return getattr(plugin, attribute) if attribute else plugin

    return load


def _programmatic(plugin: Any) -> _Candidate:
    name = getattr(plugin, "__name__", type(plugin).__name__)
    return _Candidate(name, "(in process)", "0", lambda: plugin)


def _register(candidate: _Candidate, manager: pluggy.PluginManager) -> str:
    """Import and register; returns what is wrong, or nothing."""
    try:
        module = candidate.load()
    except Exception as exc:  # noqa: BLE001  # whatever an import raises is the plugin's problem, not ours
        return f"cannot be imported: {type(exc).__name__}: {exc}"
    version = getattr(module, "arbi_api_version", None)
    if version is None:
        return f"does not state arbi_api_version (this arbi speaks version {ARBI_API_VERSION})"
    if version != ARBI_API_VERSION:
        return f"was written for hook API version {version}; this arbi speaks version {ARBI_API_VERSION}"
    candidate.module = module
    unknown = sorted(
        n for n in dir(module) if n.startswith("arbi_") and _is_impl(getattr(module, n)) and not hasattr(hookspecs, n)
    )
    if unknown:
        return f"implements hooks that do not exist: {', '.join(unknown)}"
    try:
        manager.register(module, name=f"{candidate.distribution}/{candidate.name}")
    except pluggy.PluginValidationError as exc:
        return f"has a hook with a wrong signature: {exc}"
    except ValueError as exc:
        return f"cannot be registered: {exc}"
    return ""


def _is_impl(value: Any) -> bool:
    return getattr(value, f"{hookspecs.PROJECT}_impl", None) is not None


def _call(candidate: _Candidate, manager: pluggy.PluginManager, hook: str) -> Callable[..., Any] | None:
    """The plugin's own implementation of a hook, taking keyword arguments."""
    for impl in getattr(manager.hook, hook).get_hookimpls():
        if impl.plugin is candidate.module:
            return _by_keyword(impl.function, impl.argnames)
    return None


def _by_keyword(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Pass an implementation only the arguments that it takes."""

    def call(**arguments: Any) -> Any:
        return function(*(arguments[n] for n in names))

    return call


def _collect(candidate: _Candidate, manager: pluggy.PluginManager) -> str:
    """Ask a plugin for its offers and check each; returns what is wrong, or nothing."""
    for kind in OFFER_KINDS:
        call = _call(candidate, manager, kind.hook)
        if call is None:
            continue
        try:
            offers = call()
        except Exception as exc:  # noqa: BLE001
            return f"{kind.hook} raised {type(exc).__name__}: {exc}"
        if not isinstance(offers, Sequence) or isinstance(offers, str):
            return f"{kind.hook} must return a sequence, not {offers!r}"
        for offer in offers:
            problem = kind.problem(offer)
            if problem:
                return problem
            candidate.offers += [(kind, key, offer) for key in kind.keys(offer)]
    call = _call(candidate, manager, "arbi_config_sections")
    if call is not None:
        try:
            sections = call()
        except Exception as exc:  # noqa: BLE001
            return f"arbi_config_sections raised {type(exc).__name__}: {exc}"
        if not isinstance(sections, dict) or not all(isinstance(v, type) for v in sections.values()):
            return f"arbi_config_sections must return a dict of attrs classes, not {sections!r}"
        candidate.sections = sections
    return ""


def _preferences(policy: PluginsConfig) -> dict[str, str]:
    result = {}
    for entry in policy.prefer:
        key, equals, distribution = entry.rpartition("=")
        if not equals or not key or not distribution:
            raise ConfigError("plugins_policy.prefer", f"{entry!r} is not of the form key=distribution")
        result[key] = distribution
    return result


def _freeze(
    usable: list[_Candidate],
    candidates: list[_Candidate],
    manager: pluggy.PluginManager,
    prefer: dict[str, str],
) -> Registry:
    fields: dict[str, Any] = {}
    for kind in OFFER_KINDS:
        table: dict[str, tuple[_Candidate, Any]] = {}
        for candidate in usable:
            for offered_kind, key, offer in candidate.offers:
                if offered_kind is kind:
                    _place(table, kind.label, key, candidate, offer, prefer)
        offers = {key: offer for key, (_, offer) in table.items()}
        if kind.field == "weight_formats":
            fields[kind.field] = tuple(sorted(offers.values(), key=lambda w: (w.detection_priority, w.name)))
        elif kind.field == "routes":
            fields[kind.field] = tuple(offers.values())
        else:
            fields[kind.field] = MappingProxyType(offers)
    sections: dict[str, tuple[_Candidate, Any]] = {}
    for candidate in usable:
        for name, section in candidate.sections.items():
            _place(sections, "config section", name, candidate, section, prefer)
    commands = [(c.name, _call(c, manager, "arbi_commands")) for c in usable]
    return Registry(
        **fields,
        config_sections=MappingProxyType({name: cls for name, (_, cls) in sections.items()}),
        report=tuple(c.info() for c in candidates),
        commands=tuple((name, _with_subparsers(call)) for name, call in commands if call is not None),
        listeners=MappingProxyType({
            hook: tuple((c.name, call) for c in usable if (call := _call(c, manager, hook)) is not None)
            for hook in NOTIFICATIONS
        }),
    )  # fmt: skip


def _with_subparsers(call: Callable[..., Any]) -> Callable[[Any], None]:
    def add(subparsers: Any) -> None:
        call(subparsers=subparsers)

    return add


def _place(
    table: dict[str, tuple[_Candidate, Any]],
    label: str,
    key: str,
    candidate: _Candidate,
    offer: Any,
    prefer: dict[str, str],
) -> None:
    """Enter an offer under its key; two offers of one key need a preference."""
    holder = table.get(key)
    if holder is None:
        table[key] = (candidate, offer)
        return
    first, second = holder[0], candidate
    choice = prefer.get(key)
    if choice == second.distribution:
        table[key] = (candidate, offer)
    elif choice != first.distribution:
        raise PluginConflictError(
            f"two plugins offer the {label} {key!r}: {first.name} of {first.distribution} and {second.name} of "
            f"{second.distribution}; uninstall one or choose with --prefer-plugin {key}={first.distribution}"
        )
