"""Reads a JSON request body within a limit."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from arbi_core.errors import RequestError

__all__ = ["read_json"]

MAX_DEPTH = 64


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """Return the body's JSON object.

    Raises:
        RequestError: larger than `limit` bytes (413), not UTF-8, not JSON, nested too deeply, or no object (400).
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
    except ClientDisconnect:
        raise RequestError("the client hung up while sending the request") from None
    return parse_object(b"".join(chunks))


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse bytes as a JSON object; the constants NaN and Infinity are refused."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as exc:
        raise RequestError(f"the body is not valid UTF-8: byte {exc.start} is wrong", code="invalid_utf8") from exc
    except json.JSONDecodeError as exc:
        raise RequestError(f"the body is not valid JSON: {exc}", code="invalid_json") from exc
    except RequestError:
        raise
    except ValueError as exc:  # Python reads no whole number of more than 4300 digits
        raise RequestError("the body holds a number of too many digits", code="invalid_json") from exc
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    if _deeper_than(value, MAX_DEPTH):
        raise RequestError(f"the body is nested more than {MAX_DEPTH} levels deep", code="invalid_json")
    return value


def _too_large(limit: int) -> RequestError:
    return RequestError(
        f"the body is larger than {limit} bytes (server.max_body_mib = {limit / 2**20:g})",
        code="body_too_large",
        status=413,
    )


def _refuse_constant(name: str) -> None:
    raise RequestError(f"the body holds {name}, which is not a JSON number", code="invalid_json")


def _deeper_than(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels):
        layer = [
            child
            for item in layer
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not layer:
            return False
    return True
