"""Brings values from flags, a TOML file and the environment into one checked tree, and remembers where each came from.

Precedence: flags, then the file, then the environment (``ARBI_CACHE__KV_DTYPE``), then defaults.
"""

from __future__ import annotations

import os
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from arbi_core.config.tree import ServerConfig
from arbi_core.errors import ConfigError

__all__ = ["Resolved", "Setting", "from_values", "resolve", "resolve_section", "settings"]

ENV_PREFIX = "ARBI_"
ALIASES = {"ARBI_PLUGINS": "plugins_policy.only"}
RESERVED = frozenset({"ARBI_CONFIG"})


@frozen
class Setting:
    """One field of the tree.

    Attributes:
        name: dotted name.
        type: its type, Optional stripped.
        attribute: the attrs field, with help text and choices in its metadata.
    """

    name: str
    type: Any
    attribute: attrs.Attribute[Any]

    @property
    def flag(self) -> str:
        """Command-line flag."""
        return "--" + (self.attribute.metadata.get("flag") or self.attribute.name.replace("_", "-"))

    @property
    def env(self) -> str:
        """Environment variable."""
        return ENV_PREFIX + self.name.upper().replace(".", "__")

    @property
    def help(self) -> str:
        """What it does."""
        text: str = self.attribute.metadata.get("help", "")
        return text


@frozen
class Resolved:
    """A checked tree.

    Attributes:
        config: the values.
        origins: where each value that is no default came from, by dotted name.
    """

    config: ServerConfig
    origins: Mapping[str, str]


def settings(sections: Mapping[str, type] | None = None) -> Iterator[Setting]:
    """Every setting of the tree, and of the given plugin sections."""
    for top in attrs.fields(ServerConfig):
        if top.name == "plugins":
            continue
        yield from _fields(top.name, typing.get_type_hints(ServerConfig)[top.name])
    for name, cls in (sections or {}).items():
        yield from _fields(f"plugins.{name}", cls)


def _fields(prefix: str, cls: type) -> Iterator[Setting]:
    hints = typing.get_type_hints(cls)
    for attribute in attrs.fields(cls):
        yield Setting(f"{prefix}.{attribute.name}", _strip_optional(hints[attribute.name]), attribute)


def _strip_optional(hint: Any) -> Any:
    if typing.get_origin(hint) in {typing.Union, types.UnionType}:
        inner = [a for a in typing.get_args(hint) if a is not type(None)]
        return inner[0] if len(inner) == 1 else hint
    return hint


def resolve(
    flags: Mapping[str, Any],
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    sections: Mapping[str, type] | None = None,
) -> Resolved:
    """Resolve the tree.

    Args:
        flags: values given on the command line, by dotted name; text or already of the right type.
        file: TOML file.
        environment: default: the process's.
        sections: plugin sections by name.

    Raises:
        ConfigError: an unknown name, a value of the wrong type or out of range; names field, source and fix.
    """
    known = {s.name: s for s in settings(sections)}
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    layers = (
        _from_environment(environment, known),
        _from_file(file) if file is not None else {},
        {name: (value, f"flag {known[name].flag}" if name in known else "flag") for name, value in flags.items()},
    )
    for layer in layers:
        for name, (value, origin) in layer.items():
            if name not in known:
                raise ConfigError(name, f"there is no such setting ({origin})", _closest(name, known))
            values[name] = _coerce(known[name], value, origin)
            origins[name] = origin
    return Resolved(_build(values, sections or {}), origins)


def resolve_section(section: str, flags: Mapping[str, Any], *, file: Path | None = None) -> Any:
    """Resolve one section of the tree alone; names that belong elsewhere are left for `resolve` to check."""
    known = {s.name: s for s in settings() if s.name.startswith(f"{section}.")}
    by_env = {s.env: name for name, s in known.items()} | ALIASES
    layers: list[dict[str, Any]] = [
        {by_env[k]: v for k, v in os.environ.items() if k in by_env},
        {name: value for name, (value, _) in _from_file(file).items()} if file is not None else {},
        dict(flags),
    ]
    merged = {k: v for layer in layers for k, v in layer.items() if k in known}
    values = {k.rpartition(".")[2]: _coerce(known[k], v, "setting") for k, v in merged.items()}
    return typing.get_type_hints(ServerConfig)[section](**values)


def from_values(values: Mapping[str, Any], base: ServerConfig | None = None) -> ServerConfig:
    """A tree from Python values by dotted name, over a base (the defaults). ``plugins`` takes sections whole."""
    from arbi_core.plugins import load_registry

    base = base or ServerConfig()
    plugin_values = values.get("plugins") or {}
    sections = load_registry(base.plugins_policy).config_sections if plugin_values else {}
    known = {s.name: s for s in settings()}
    grouped: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name == "plugins" or value is None:
            continue
        section, _, field = name.partition(".")
        grouped.setdefault(section, {})[field] = _coerce(known[name], value, "argument")
    changed = {s: attrs.evolve(getattr(base, s), **fields) for s, fields in grouped.items()}
    plugins = dict(base.plugins)
    for name, value in plugin_values.items():
        plugins[name] = value if attrs.has(type(value)) else _section(name, value, sections)
    return attrs.evolve(base, **changed, plugins=plugins)


def _section(name: str, value: Mapping[str, Any], sections: Mapping[str, type]) -> Any:
    cls = sections.get(name)
    if cls is None:
        raise ConfigError(
            f"plugins.{name}",
            "no installed plugin has this section",
            f"installed: {', '.join(sections) or 'none'}",
        )
    known = {s.name.rpartition(".")[2]: s for s in _fields(f"plugins.{name}", cls)}
    for key in value:
        if key not in known:
            raise ConfigError(f"plugins.{name}.{key}", "there is no such setting", _closest(key, known))
    return cls(**{k: _coerce(known[k], v, "argument") for k, v in value.items()})


def _build(values: Mapping[str, Any], sections: Mapping[str, type]) -> ServerConfig:
    grouped: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, field = name.rpartition(".")
        grouped.setdefault(section, {})[field] = value
    hints = typing.get_type_hints(ServerConfig)
    tops = {f.name: hints[f.name](**grouped.get(f.name, {})) for f in attrs.fields(ServerConfig) if f.name != "plugins"}
    plugins = {name: cls(**grouped.get(f"plugins.{name}", {})) for name, cls in sections.items()}
    return ServerConfig(**tops, plugins=plugins)


def _from_environment(environment: Mapping[str, str], known: Mapping[str, Setting]) -> dict[str, tuple[Any, str]]:
    by_env = {s.env: name for name, s in known.items()} | ALIASES
    found = {}
    for key, value in environment.items():
        if key in by_env:
            found[by_env[key]] = (value, f"environment {key}")
        elif key.startswith(ENV_PREFIX) and "__" in key and key not in RESERVED:
            raise ConfigError(key, "there is no such setting (environment)", _closest(key, by_env))
    return found


def _from_file(path: Path) -> dict[str, tuple[Any, str]]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError("--config", f"{path} cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError("--config", f"{path} is not valid TOML: {exc}") from exc
    return {name: (value, f"file {path}") for name, value in _flatten("", table)}


def _flatten(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            yield from _flatten(name, value)
        else:
            yield name, value


def _coerce(setting: Setting, value: Any, origin: str) -> Any:
    """Turn text (flags, environment) into the field's type and check what TOML and Python give."""
    wanted = setting.type
    if value is None:
        return None
    if typing.get_origin(wanted) is tuple:
        return _tuple(setting, value, origin)
    if isinstance(value, str) and wanted is not str:
        return _parse(setting, value, origin)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, wanted) or (wanted in {int, float} and isinstance(value, bool)):
        raise ConfigError(setting.name, f"{value!r} is not {_describe(wanted)} ({origin})")
    return value


def _tuple(setting: Setting, value: Any, origin: str) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(p, str) for p in parts):
        raise ConfigError(setting.name, f"{value!r} is not a list of strings ({origin})")
    return tuple(p for p in (x.strip() for part in parts for x in part.split(",")) if p)


def _parse(setting: Setting, text: str, origin: str) -> Any:
    wanted = setting.type
    if wanted is bool:
        truth = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if text.strip().lower() in truth:
            return truth[text.strip().lower()]
    else:
        try:
            return wanted(text)
        except ValueError:
            pass
    raise ConfigError(setting.name, f"{text!r} is not {_describe(wanted)} ({origin})")


def _describe(wanted: Any) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(wanted, str(wanted))


def _closest(name: str, known: Mapping[str, Any]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else "see arbi serve --print-config"
