"""Models, health, version, metrics, the OpenAPI document."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from arbi_core import __version__
from arbi_core.engine.client import EngineClient, HealthState
from arbi_core.errors import RequestError

__all__ = ["health", "metrics", "model", "models", "openapi", "ready", "version"]


def _card(request: Request) -> dict[str, object]:
    engine: EngineClient = request.app.state.engine
    info = engine.info
    return {
        "id": info.name,
        "object": "model",
        "created": request.app.state.started,
        "owned_by": "arbi",
        "max_model_len": info.max_model_len,
        "architecture": info.architecture,
    }


async def models(request: Request) -> Response:
    """``GET /v1/models``."""
    return JSONResponse({"object": "list", "data": [_card(request)]})


async def model(request: Request) -> Response:
    """``GET /v1/models/{id}``."""
    card = _card(request)
    name = request.path_params["name"]
    if name != card["id"]:
        raise RequestError(
            f"the model {name!r} is not served here; this server serves {card['id']!r}",
            param="model",
            code="model_not_found",
            status=404,
        )
    return JSONResponse(card)


async def health(request: Request) -> Response:  # noqa: ARG001
    """``GET /health``: the process answers."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """``GET /health/ready``: requests are served; 503 with the reason otherwise."""
    state = request.app.state.engine.health()
    serving = state.state in {HealthState.READY, HealthState.DEGRADED}
    body = {"status": str(state.state), "reason": state.reason}
    return JSONResponse(body, 200 if serving else 503)


async def version(request: Request) -> Response:  # noqa: ARG001
    """``GET /version``."""
    return JSONResponse({"version": __version__})


async def metrics(request: Request) -> Response:
    """``GET /metrics``: Prometheus text format."""
    return PlainTextResponse(request.app.state.metrics.render(), media_type="text/plain; version=0.0.4")


async def openapi(request: Request) -> Response:  # noqa: ARG001
    """``GET /openapi.json``."""
    from arbi_core.server.openapi import build_openapi

    return JSONResponse(build_openapi())
