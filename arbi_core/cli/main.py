"""Entry point of ``arbi``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from arbi_core import __version__
from arbi_core.errors import ArbiError

__all__ = ["main"]

COMMANDS = {
    "serve": ("arbi_core.cli.serve", "serve a model over HTTP"),
    "chat": ("arbi_core.cli.chat", "talk to a model in the terminal"),
    "bench": ("arbi_core.cli.bench", "time a model in this process"),
    "simulate": ("arbi_core.cli.simulate", "try the scheduler on a trace, in virtual time"),
    "plugins": ("arbi_core.cli.plugins_command", "show installed plugins and what they offer"),
    "openapi": ("arbi_core.cli.openapi", "print the OpenAPI document"),
}
"""The core's own commands: module and help line. Only the module of the command being run is imported."""


class _Parser(argparse.ArgumentParser):
    """Exits with the usage and one line that says what to do."""

    def error(self, message: str) -> NoReturn:
        """Print to standard error and exit with 2."""
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser; plugins are asked for commands only when the core does not know `command` itself."""
    parser = _Parser(prog="arbi", description="LLM inference and OpenAI-compatible serving; everything is a plugin.")
    parser.add_argument("--version", action="version", version=f"arbi {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (module, text) in COMMANDS.items():
        sub = subparsers.add_parser(name, help=text)
        if name == command:
            importlib.import_module(module).configure(sub)
    if command not in COMMANDS:
        from arbi_core.plugins import load_registry

        load_registry(commands_only=True).add_commands(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed for a reason that was printed, 2 wrong usage."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        args = build_parser(argv[0] if argv else None).parse_args(argv)
        code: int = args.run(args)
    except ArbiError as exc:
        print(f"arbi: {exc}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
