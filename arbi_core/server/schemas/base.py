"""Checks JSON against attrs classes, and describes the classes as JSON Schema.

Both read the same type hints, so the document cannot disagree with the server.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs

from arbi_core.errors import RequestError

__all__ = ["described", "json_schema", "structure"]

T = TypeVar("T")

NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
SCHEMA = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def described(default: Any, text: str, **schema: Any) -> Any:
    """Declare a request field: its default, what it means, and further JSON Schema keywords."""
    metadata = {"description": text, "schema": schema}
    if isinstance(default, (list, dict)):
        return attrs.field(factory=type(default), metadata=metadata)
    return attrs.field(default=default, metadata=metadata)


def structure(
    cls: type[T],
    data: Mapping[str, Any],
    *,
    ignored: frozenset[str] = frozenset(),
    refused: Mapping[str, str] | None = None,
) -> T:
    """Make a `cls` from a JSON object.

    Args:
        cls: attrs class; a field without default is required.
        data: the object. A null value means the default.
        ignored: keys that are accepted and change nothing.
        refused: keys that this server does not serve, with the reason; null and empty values pass.

    Raises:
        RequestError: a missing, unknown, refused or mistyped field, by name.
    """
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key in hints:
            if value is not None:
                values[key] = _check(hints[key], value, key)
        elif refused is not None and key in refused:
            if value not in (None, False, [], {}, ""):
                raise RequestError(f"{key} is not supported: {refused[key]}", param=key, code="unsupported_parameter")
        elif key not in ignored:
            near = _closest(key, hints)
            raise RequestError(f"unknown field {key!r}{near}", param=key, code="unknown_parameter")
    missing = [a.name for a in attrs.fields(cls) if a.default is attrs.NOTHING and a.name not in values]  # type: ignore[arg-type]
    if missing:
        raise RequestError(f"{missing[0]} is missing", param=missing[0], code="missing_parameter")
    return cls(**values)


def _closest(key: str, known: Mapping[str, Any]) -> str:
    import difflib

    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _check(hint: Any, value: Any, path: str) -> Any:
    """Return the value (numbers widened) or raise naming the path and the expected type."""
    result = _match(hint, value)
    if result is _MISMATCH:
        shown = repr(value)
        raise RequestError(
            f"{path} must be {_name(hint)}, not {shown if len(shown) <= 60 else shown[:57] + '...'}",
            param=path,
            code="invalid_type",
        )
    return result


_MISMATCH = object()


def _match(hint: Any, value: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in {typing.Union, types.UnionType}:
        return next((r for a in args if (r := _match(a, value)) is not _MISMATCH), _MISMATCH)
    if origin is typing.Literal:
        return value if value in args and isinstance(value, str) else _MISMATCH
    if origin is list:
        if not isinstance(value, list):
            return _MISMATCH
        items = [_match(args[0], v) for v in value]
        return _MISMATCH if any(i is _MISMATCH for i in items) else items
    if origin is dict:
        if not isinstance(value, dict):
            return _MISMATCH
        pairs = {k: _match(args[1], v) for k, v in value.items()}
        return _MISMATCH if any(v is _MISMATCH for v in pairs.values()) else pairs
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    return _MISMATCH


def _name(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        return " or ".join(_name(a) for a in args if a is not type(None))
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin is list:
        return f"a list of {_name(args[0]).removeprefix('a ')}s" if args[0] in NAMES else f"a list ({_name(args[0])})"
    if origin is dict:
        return "an object"
    return NAMES.get(hint, str(hint))


def json_schema(cls: type) -> dict[str, Any]:
    """JSON Schema of an attrs class."""
    hints = typing.get_type_hints(cls)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for attribute in attrs.fields(cls):
        entry = {**_schema(hints[attribute.name]), **attribute.metadata.get("schema", {})}
        if "description" in attribute.metadata:
            entry["description"] = attribute.metadata["description"]
        if attribute.default is attrs.NOTHING:
            required.append(attribute.name)
        elif isinstance(attribute.default, (str, int, float, bool)):
            entry["default"] = attribute.default
        properties[attribute.name] = entry
    result: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if cls.__doc__:
        result["description"] = cls.__doc__.strip().splitlines()[0]
    if required:
        result["required"] = required
    return result


def _schema(hint: Any) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if origin in {typing.Union, types.UnionType}:
        return {"anyOf": [_schema(a) for a in args]}
    if origin is typing.Literal:
        return {"type": "string", "enum": list(args)}
    if origin is list:
        return {"type": "array", "items": _schema(args[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(args[1])}
    return {"type": SCHEMA[hint]}
