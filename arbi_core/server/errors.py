"""Errors in the shape that OpenAI's clients expect."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from arbi_core.errors import ArbiError, OverloadedError, RequestError

__all__ = ["error_body", "on_arbi_error", "on_http_exception", "on_unexpected"]

log = logging.getLogger("arbi.server")

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error_body(message: str, status: int, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """``{"error": {message, type, param, code}}``."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def from_error(exc: ArbiError) -> dict[str, Any]:
    """Body of one of arbi's own errors."""
    return error_body(str(exc), exc.status, code=exc.code, param=getattr(exc, "param", None))


async def on_arbi_error(request: Request, exc: Exception) -> Response:  # noqa: ARG001  # starlette's signature
    """An error that arbi raised on purpose."""
    assert isinstance(exc, ArbiError)  # noqa: S101  # registered for this type only
    headers = {"Retry-After": str(max(1, round(exc.retry_after)))} if isinstance(exc, OverloadedError) else None
    if not isinstance(exc, RequestError):
        log.warning("request failed: %s", exc)
    return JSONResponse(from_error(exc), exc.status, headers)


async def on_http_exception(request: Request, exc: Exception) -> Response:
    """404 and 405 from routing."""
    assert isinstance(exc, HTTPException)  # noqa: S101  # registered for this type only
    where = f"{request.method} {request.url.path}"
    message = {
        404: f"there is no route {where}; GET /openapi.json lists them",
        405: f"{where} is not allowed; the Allow header names the methods",
    }.get(exc.status_code, exc.detail)
    code = HTTPStatus(exc.status_code).phrase.lower().replace(" ", "_")
    return JSONResponse(error_body(message, exc.status_code, code=code), exc.status_code, exc.headers)


async def on_unexpected(request: Request, exc: Exception) -> Response:
    """Anything else: logged whole, told without internals."""
    request_id = getattr(request.state, "request_id", "?")
    log.error("request %s failed unexpectedly", request_id, exc_info=exc)
    message = f"the server failed on this request; its log has the cause under request id {request_id}"
    return JSONResponse(error_body(message, 500, code="internal_error"), 500)
