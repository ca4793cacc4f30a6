"""``arbi plugins``: what is installed, what each plugin offers, and why something is not active."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = "Show installed plugins."
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--plugins", metavar="NAME[,NAME]", help="load only these beside the core's own")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print; exit code 1 if a plugin is broken."""
    import logging

    import attrs

    from arbi_core.config.load import resolve_section
    from arbi_core.plugins import PluginStatus, load_registry

    logging.getLogger("arbi.plugins").setLevel(logging.CRITICAL)
    flags = {} if args.plugins is None else {"plugins_policy.only": args.plugins}
    report = load_registry(resolve_section("plugins_policy", flags)).report
    if args.json:
        print(json.dumps([attrs.asdict(p) for p in report], indent=2))  # noqa: T201
    else:
        _table(report)
    return int(any(p.status is PluginStatus.BROKEN for p in report))


def _table(report: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_lines=True)
    for column in ("plugin", "distribution", "status", "offers"):
        table.add_column(column, overflow="fold")
    colours = {"active": "green", "broken": "red", "disabled": "dim"}
    for p in report:
        offers = p.reason if p.reason else _by_kind(p.offers) or "commands or notifications"
        table.add_row(p.name, f"{p.distribution} {p.version}", f"[{colours[p.status]}]{p.status}[/]", offers)
    Console().print(table)


def _by_kind(offers: Sequence[str]) -> str:
    """One line a kind: a plugin may offer dozens of names."""
    kinds: dict[str, list[str]] = {}
    for offer in offers:
        kind, _, name = offer.rpartition(" ")
        kinds.setdefault(kind, []).append(name)
    return "\n".join(f"{kind} {', '.join(names)}" for kind, names in kinds.items())
