"""The starlette application."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from arbi_core import __version__
from arbi_core.errors import ArbiError, PluginConflictError
from arbi_core.server import errors
from arbi_core.server.metrics import Metrics
from arbi_core.server.middleware import RequestIdMiddleware
from arbi_core.server.routes import admin, info
from arbi_core.server.routes.chat import chat_completions
from arbi_core.server.routes.completions import completions

if TYPE_CHECKING:
    from arbi_core.engine.client import EngineClient
    from arbi_core.offers import ReasoningParser
    from arbi_core.offers import Route as PluginRoute

__all__ = ["create_app"]


def create_app(
    engine: EngineClient,
    *,
    max_body_bytes: int = 4 << 20,
    plugin_routes: Iterable[PluginRoute] = (),
    reasoning_parser: ReasoningParser | None = None,
) -> Starlette:
    """Make the application.

    Args:
        engine: answers requests.
        max_body_bytes: larger bodies are refused with 413.
        plugin_routes: routes that plugins offer; one that the core has is a `PluginConflictError`.
        reasoning_parser: splits thinking from the answers of the chat endpoint.
    """
    routes = [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/admin/cache/flush", admin.flush_cache, methods=["POST"]),
        Route("/v1/models", info.models, methods=["GET"]),
        Route("/v1/models/{name:path}", info.model, methods=["GET"]),
        Route("/health", info.health, methods=["GET"]),
        Route("/health/ready", info.ready, methods=["GET"]),
        Route("/version", info.version, methods=["GET"]),
        Route("/metrics", info.metrics, methods=["GET"]),
        Route("/openapi.json", info.openapi, methods=["GET"]),
    ]
    taken = {r.path for r in routes}
    for offered in plugin_routes:
        if offered.path in taken:
            raise PluginConflictError(f"a plugin offers the route {offered.path}, which the core serves itself")
        routes.append(Route(offered.path, offered.endpoint, methods=list(offered.methods)))
    app = Starlette(
        routes=routes,
        middleware=[Middleware(RequestIdMiddleware)],
        exception_handlers={
            ArbiError: errors.on_arbi_error,
            HTTPException: errors.on_http_exception,
            Exception: errors.on_unexpected,
        },
    )
    app.state.engine = engine
    app.state.metrics = Metrics(engine)
    app.state.max_body_bytes = max_body_bytes
    app.state.reasoning_parser = reasoning_parser
    app.state.started = int(time.time())
    app.state.fingerprint = f"arbi-{__version__}"
    return app
