"""Flags of the configuration tree, made from its fields."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbi_core.config.load import Resolved, Setting, resolve, settings
from arbi_core.errors import ConfigError

if TYPE_CHECKING:
    from arbi_core.plugins import Registry

__all__ = ["add_config_flags", "resolve_args"]

TITLES = {
    "model": "model",
    "cache": "KV cache",
    "scheduler": "scheduler",
    "server": "server",
    "plugins_policy": "plugins",
}
PREFIX = "setting:"


def add_config_flags(parser: argparse.ArgumentParser, *, sections: tuple[str, ...] = tuple(TITLES)) -> None:
    """Add the positional MODEL, one flag per setting of `sections`, ``--config`` and ``--set``."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="model directory, .gguf file, hub id, or 'demo' (default)"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="read settings from a TOML file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any setting by its dotted name, for example plugins.gguf.packed=off (repeatable)",
    )
    groups = {name: parser.add_argument_group(TITLES[name]) for name in sections}
    for setting in settings():
        section = setting.name.partition(".")[0]
        if section in groups and setting.name != "model.path":
            _add_flag(groups[section], setting)


def _add_flag(group: Any, setting: Setting) -> None:
    metadata = setting.attribute.metadata
    default = setting.attribute.default
    shown = f" (default: {default})" if default not in (None, (), False) else ""
    options: dict[str, Any] = {"dest": PREFIX + setting.name, "default": None, "help": setting.help + shown}
    if setting.type is bool:
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, **options)
        return
    options["metavar"] = metadata.get("metavar") or setting.attribute.name.upper()
    if metadata.get("choices"):
        options["metavar"] = "{" + ",".join(metadata["choices"]) + "}"
    if setting.attribute.name in {"backends", "prefer", "tenant_limits"}:
        options["action"] = "append"
    group.add_argument(setting.flag, **options)


def resolve_args(args: argparse.Namespace) -> tuple[Resolved, Registry]:
    """Resolve the configuration of a command line, and load the plugins that it asks for.

    Raises:
        ConfigError: as `arbi_core.config.load.resolve`.
        PluginError: a broken plugin under ``--strict-plugins``, or a conflict.
    """
    from arbi_core.plugins import load_registry

    flags = {k.removeprefix(PREFIX): v for k, v in vars(args).items() if k.startswith(PREFIX) and v is not None}
    if args.model is not None:
        flags["model.path"] = args.model
    for entry in args.set:
        name, equals, value = entry.partition("=")
        if not equals:
            raise ConfigError("--set", f"{entry!r} is not of the form NAME=VALUE")
        flags[name] = value
    core_only = {k: v for k, v in flags.items() if not k.startswith("plugins.")}
    policy = resolve_policy(core_only, args.config)
    registry = load_registry(policy)
    return resolve(flags, file=args.config, sections=registry.config_sections), registry


def resolve_policy(flags: dict[str, Any], file: Path | None) -> Any:
    """The plugin policy alone: it decides which plugin sections exist, so it is read first."""
    from arbi_core.config.load import resolve_section

    return resolve_section("plugins_policy", flags, file=file)
