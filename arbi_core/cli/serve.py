"""``arbi serve``."""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING, Any

from arbi_core.cli.options import add_config_flags, resolve_args

if TYPE_CHECKING:
    from arbi_core.config.load import Resolved
    from arbi_core.engine.async_engine import AsyncEngine

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = "Serve a model with the OpenAI API. Without MODEL: the demo model."
    add_config_flags(parser)
    parser.add_argument(
        "--print-config", action="store_true", help="show every setting and where it comes from, and exit"
    )
    parser.add_argument("--ask", metavar="TEXT", help="ask this first, print the answer, then keep serving")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    resolved, registry = resolve_args(args)
    if args.print_config:
        _print_config(resolved, registry.config_sections)
        return 0
    logging.basicConfig(level=resolved.config.server.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")

    from arbi_core.engine.boot import follows

    if follows(resolved.config):
        from arbi_core.distributed.worker import run_follower

        return run_follower(resolved.config)

    from arbi_core.server.serve import bind

    sock = bind(resolved.config.server)
    try:
        return _serve(resolved, registry, sock, args.ask)
    finally:
        sock.close()


def _serve(resolved: Resolved, registry: Any, sock: Any, question: str | None) -> int:
    import asyncio
    import gc

    from rich.console import Console

    from arbi_core.engine.async_engine import AsyncEngine
    from arbi_core.engine.boot import build_engine
    from arbi_core.loader.progress import RichProgress
    from arbi_core.server.serve import serve

    console = Console(stderr=True)
    logging.getLogger("arbi.boot").setLevel(logging.WARNING)
    with RichProgress() as progress:
        built = build_engine(resolved.config, registry, progress)
    for label, value in built.report.rows:
        console.print(f"  {label:<12} {value}", highlight=False)
    gc.collect()
    gc.freeze()  # what boot made stays: later collections need not walk it in the middle of a step
    engine = AsyncEngine(built)

    async def main() -> None:
        asked: list[asyncio.Task[None]] = []

        def ready(url: str) -> None:
            if question is None:
                _announce(console, url, engine.info.name)
            else:
                asked.append(asyncio.ensure_future(_ask(engine, question, url, console)))

        await serve(engine, resolved.config.server, sock, registry=registry, ready=ready)
        await asyncio.gather(*asked)

    try:
        asyncio.run(main())
    finally:
        engine.close()
    return 0


async def _ask(engine: AsyncEngine, question: str, url: str, console: Any) -> None:
    """Answer one question on the terminal, through the same path that requests take."""
    from arbi_core.sampler.params import SamplingParams
    from arbi_core.server.generation import tokenizer_of
    from arbi_core.text.chat import encode_chat

    ids = encode_chat(tokenizer_of(engine), [{"role": "user", "content": question}])
    console.print(f"\n[bold]You:[/bold] {question}", highlight=False)
    console.print("[bold]Model:[/bold] ", end="")
    async for delta in engine.generate(ids, SamplingParams(temperature=0, max_tokens=128), request_id="ask"):
        console.print(delta.text, end="", highlight=False, markup=False)
    console.print()
    _announce(console, url, engine.info.name)


def _announce(console: Any, url: str, model: str) -> None:
    console.print(f"\nServing {model} on {url} (stop with Ctrl-C). Try:\n", highlight=False, markup=False)
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    print(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)  # noqa: T201


def _print_config(resolved: Resolved, sections: Any) -> None:
    """Every setting, its value and its origin, as TOML that ``--config`` reads back."""
    from arbi_core.config.load import settings

    section = ""
    for setting in settings(sections):
        prefix, _, name = setting.name.rpartition(".")
        if prefix != section:
            print(f"{chr(10) if section else ''}[{prefix}]")  # noqa: T201
            section = prefix
        owner: Any = resolved.config
        for part in prefix.split("."):
            owner = owner[part] if isinstance(owner, dict) else getattr(owner, part)
        value = _toml(getattr(owner, name))
        origin = resolved.origins.get(setting.name, "default")
        line = f"{name} = {value}" if value is not None else f"# {name} ="
        print(f"{line:<48} # {origin}: {setting.help}")  # noqa: T201


def _toml(value: Any) -> str | None:
    import json

    if value is None:
        return None
    if isinstance(value, tuple):
        return "[" + ", ".join(json.dumps(v) for v in value) + "]"
    return json.dumps(value)
