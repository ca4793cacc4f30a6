"""Runs the application on hypercorn, from bind to drain."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import hypercorn.asyncio
import hypercorn.config

from arbi_core.errors import ConfigError
from arbi_core.server.app import create_app

if TYPE_CHECKING:
    from arbi_core.config.tree import HttpConfig
    from arbi_core.engine.client import EngineClient
    from arbi_core.offers import ReasoningParser
    from arbi_core.plugins import Registry

__all__ = ["bind", "serve"]

log = logging.getLogger("arbi.server")


def bind(config: HttpConfig) -> socket.socket:
    """Take the address. Raises `ConfigError` naming the port and the fix if it is in use or not to be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError(
                "server.port",
                f"port {config.port} on {config.host} is in use",
                "choose another with --port, or --port 0 for a free one",
            ) from exc
        raise ConfigError("server.host", f"{config.host}:{config.port} cannot be bound: {exc.strerror}") from exc
    sock.listen(1024)
    return sock


async def serve(
    engine: EngineClient,
    config: HttpConfig,
    sock: socket.socket,
    *,
    registry: Registry | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests finish; a second signal stops at once.

    Args:
        engine: answers requests; stays open.
        config: limits and drain time.
        sock: bound and listening.
        registry: brings plugin routes.
        ready: called with the base URL once requests are accepted.
    """
    app = create_app(
        engine,
        max_body_bytes=int(config.max_body_mib * 2**20),
        plugin_routes=() if registry is None else registry.routes,
        reasoning_parser=None
        if registry is None
        else choose_reasoning_parser(engine, registry, config.reasoning_parser),
    )
    settings = hypercorn.config.Config()
    settings.bind = [f"fd://{os.dup(sock.fileno())}"]  # hypercorn closes what it is given
    settings.accesslog = None
    settings.errorlog = logging.getLogger("hypercorn.error")
    settings.errorlog.setLevel(logging.WARNING)
    settings.graceful_timeout = 1.0
    settings.keep_alive_timeout = 30.0
    settings.include_server_header = False
    stop, stop_now = asyncio.Event(), asyncio.Event()
    _handle_signals(stop, stop_now)

    async def shutdown() -> None:
        await stop.wait()
        drain = asyncio.ensure_future(engine.drain(config.drain_timeout_s))
        await asyncio.wait({drain, asyncio.ensure_future(stop_now.wait())}, return_when=asyncio.FIRST_COMPLETED)
        drain.cancel()

    server = asyncio.ensure_future(hypercorn.asyncio.serve(app, settings, shutdown_trigger=shutdown))  # type: ignore[arg-type]  # starlette apps are ASGI apps
    if ready is not None:
        host, port = sock.getsockname()[:2]
        ready(f"http://{'127.0.0.1' if host in {'0.0.0.0', '::'} else host}:{port}")  # noqa: S104  # only compared
    await server


def choose_reasoning_parser(engine: EngineClient, registry: Registry, name: str) -> ReasoningParser | None:
    """The parser that the configuration names, or the one that recognises the chat template under ``auto``.

    Raises:
        UnknownNameError: a name that no installed plugin offers.
    """
    if name == "none" or engine.tokenizer is None:
        return None
    if name != "auto":
        return registry.pick("reasoning parser", registry.reasoning_parsers, name)
    template = engine.tokenizer.chat_templates.get("default", "")
    return next((p for p in registry.reasoning_parsers.values() if p.detect(template)), None)


def _handle_signals(stop: asyncio.Event, stop_now: asyncio.Event) -> None:
    def on_signal() -> None:
        if stop.is_set():
            stop_now.set()
        else:
            log.info("draining; a second signal stops at once")
            stop.set()

    loop = asyncio.get_running_loop()
    for sig in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(sig, on_signal)
