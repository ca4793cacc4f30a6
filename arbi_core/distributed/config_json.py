"""A configuration on its way to another rank, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve
from cattrs.preconf.json import make_converter

from arbi_core.config.tree import PluginsConfig, ServerConfig
from arbi_core.errors import ConfigError

if TYPE_CHECKING:
    from arbi_core.plugins import Registry

__all__ = ["check_same", "config_to_json", "policy_from_json", "read_config"]

LOCAL = ("model.path", "model.tokenizer", "cache.disk_tier_dir", "scheduler.jobs_dir", "server.")
"""Settings that may differ from host to host."""

_converter = make_converter()


def config_to_json(config: ServerConfig) -> dict[str, Any]:
    """The whole tree as JSON values."""
    data: dict[str, Any] = _converter.unstructure(config)
    return data


def policy_from_json(data: Mapping[str, Any]) -> PluginsConfig:
    """Which plugins to load: needed before the rest can be read."""
    return _converter.structure(data["plugins_policy"], PluginsConfig)


def read_config(data: Mapping[str, Any], registry: Registry) -> ServerConfig:
    """The tree that `config_to_json` wrote.

    Raises:
        ConfigError: it has the section of a plugin that is not installed here, or a value that does not fit.
    """
    config = _converter.structure({**data, "plugins": {}}, ServerConfig)
    sections: dict[str, Any] = {}
    for name, values in data["plugins"].items():
        cls = registry.config_sections.get(name)
        if cls is None:
            raise ConfigError(f"plugins.{name}", "no plugin with this section is installed on this rank")
        sections[name] = _converter.structure(values, cls)
    return evolve(config, plugins=sections)


def check_same(mine: Mapping[str, Any], theirs: Mapping[str, Any], rank: int) -> None:
    """Raise `ConfigError` if a rank was started with another setting than rank 0 (`theirs`)."""
    here, there = dict(_flatten("", mine)), dict(_flatten("", theirs))
    for name in sorted(here.keys() | there.keys()):
        if not name.startswith(LOCAL) and here.get(name) != there.get(name):
            raise ConfigError(
                name,
                f"rank {rank} was started with {here.get(name)!r}, rank 0 with {there.get(name)!r}",
                "start all ranks with the same settings",
            )


def _flatten(prefix: str, data: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in data.items():
        name = f"{prefix}{key}"
        found += _flatten(f"{name}.", value) if isinstance(value, Mapping) else [(name, value)]
    return found
