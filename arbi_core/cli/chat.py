"""``arbi chat``: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import signal
from typing import TYPE_CHECKING, Any

from arbi_core.cli.options import add_config_flags, resolve_args

if TYPE_CHECKING:
    from arbi_core.engine.async_engine import AsyncEngine
    from arbi_core.sampler.params import SamplingParams

__all__ = ["configure", "run"]

HELP = """/reset   forget the conversation
/system TEXT   start over with a system message
/quit    leave (so does Ctrl-D)
Ctrl-C   stop the answer"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = "Talk to a model in the terminal.\n" + HELP
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_config_flags(parser, sections=("model", "cache", "scheduler", "plugins_policy"))
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: what the model's authors suggest")
    parser.add_argument("--max-tokens", type=int, default=1024, help="most tokens of an answer (default: 1024)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Chat until the end of input."""
    from rich.console import Console

    from arbi_core.engine.async_engine import AsyncEngine
    from arbi_core.engine.boot import build_engine
    from arbi_core.loader.progress import RichProgress
    from arbi_core.sampler.params import SamplingParams

    resolved, registry = resolve_args(args)
    logging.basicConfig(level="WARNING")
    with RichProgress() as progress:
        built = build_engine(resolved.config, registry, progress)
    defaults = dict(built.core.info.default_sampling)
    if args.temperature is not None:
        defaults["temperature"] = args.temperature
    sampling = SamplingParams(**defaults, max_tokens=args.max_tokens)
    engine = AsyncEngine(built)
    console = Console()
    console.print(f"{engine.info.name}: /help for commands, Ctrl-C stops an answer, Ctrl-D leaves", style="dim")
    try:
        _Conversation(engine, sampling, console, args.system).loop()
    finally:
        engine.close()
    return 0


class _Conversation:
    """History and commands."""

    def __init__(self, engine: AsyncEngine, sampling: SamplingParams, console: Any, system: str | None) -> None:
        self._engine = engine
        self._sampling = sampling
        self._console = console
        self._ids = itertools.count()
        self._reset(system)

    def _reset(self, system: str | None) -> None:
        self._system = system
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    def loop(self) -> None:
        """Read, answer, repeat."""
        while True:
            try:
                line = self._console.input("[bold green]> [/bold green]").strip()
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print("(Ctrl-D or /quit leaves)", style="dim")
                continue
            if line.startswith("/"):
                if line in {"/quit", "/exit"}:
                    return
                self._command(line)
            elif line:
                asyncio.run(self._turn(line))

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self._reset(self._system)
            self._console.print("(the conversation starts over)", style="dim")
        elif name == "/system" and rest:
            self._reset(rest)
            self._console.print("(the conversation starts over with this system message)", style="dim")
        else:
            self._console.print(HELP, style="dim", highlight=False)

    async def _turn(self, text: str) -> None:
        """Answer one message; Ctrl-C keeps what has been said so far."""
        from arbi_core.errors import ArbiError
        from arbi_core.server.generation import tokenizer_of
        from arbi_core.text.chat import encode_chat

        self._messages.append({"role": "user", "content": text})
        answer: list[str] = []
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  # we run inside one
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            ids = encode_chat(tokenizer_of(self._engine), self._messages)
            deltas = self._engine.generate(ids, self._sampling, request_id=f"chat-{next(self._ids)}")
            async with contextlib.aclosing(deltas):
                async for delta in deltas:
                    answer.append(delta.text)
                    self._console.print(delta.text, end="", highlight=False, markup=False)
                    if delta.finish is not None and delta.finish.reason.value not in {"stop", "length"}:
                        self._console.print(f" ({delta.finish.reason}: {delta.finish.detail})", style="red")
        except asyncio.CancelledError:
            self._console.print(" (stopped)", style="dim", end="")
        except ArbiError as exc:
            self._messages.pop()
            self._console.print(f"{exc}", style="red", highlight=False, markup=False)
            return
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        self._console.print()
        self._messages.append({"role": "assistant", "content": "".join(answer)})
