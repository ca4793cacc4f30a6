"""``arbi openapi``: print the OpenAPI document."""

from __future__ import annotations

import argparse
import json

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = "Print the OpenAPI 3.1 document of the server as JSON."
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print it."""
    del args
    from arbi_core.server.openapi import build_openapi

    print(json.dumps(build_openapi(), indent=2))  # noqa: T201
    return 0
