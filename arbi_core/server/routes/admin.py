"""Routes for operators. Until keys with an admin scope exist they answer on the loopback interface only."""

from __future__ import annotations

import ipaddress

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from arbi_core.engine.client import EngineClient
from arbi_core.errors import RequestError

__all__ = ["flush_cache"]


async def flush_cache(request: Request) -> Response:
    """``POST /v1/admin/cache/flush``: forget the prefix cache of ``?tenant=``, or of all tenants."""
    _only_from_here(request)
    unknown = sorted(set(request.query_params) - {"tenant"})
    if unknown:
        raise RequestError(f"unknown query parameter {unknown[0]!r}; known: tenant", param=unknown[0])
    if len(request.query_params.getlist("tenant")) > 1:
        raise RequestError("one tenant at a time", param="tenant")
    engine: EngineClient = request.app.state.engine
    freed = await engine.flush_cache(request.query_params.get("tenant"))
    return JSONResponse({"freed_pages": freed})


def _only_from_here(request: Request) -> None:
    client = request.client
    try:
        here = client is not None and ipaddress.ip_address(client.host).is_loopback
    except ValueError:
        here = False
    forwarded = {"forwarded", "x-forwarded-for"} & set(request.headers.keys())
    if not here or forwarded:
        raise RequestError(
            "this route answers callers on the server's own machine only", code="permission_denied", status=403
        )
