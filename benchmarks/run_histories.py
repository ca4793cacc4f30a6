"""Long random histories of requests over toy ranks, every invariant checked after every act.

Usage: python benchmarks/run_histories.py --steps 200000 --seed 1 [--set depth=2 ...]

A history that breaks is cut down to the fewest acts that still break it, and printed with its seed.
"""

from __future__ import annotations

import argparse
import ast
import logging
import random
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.histories import History, Setup
from support.random_acts import random_act, random_mood, random_setup

ACTS = 160
"""Acts of one history, before it runs to its end."""

Act = tuple[Any, ...]


def live(seed: int, fixed: dict[str, Any], covered: Counter[str]) -> tuple[Setup, list[Act], str | None]:
    """Make up one history while it runs; returns it, and how it broke if it did."""
    rng = random.Random(seed)
    setup, mood = random_setup(rng, **fixed), random_mood(rng)
    acts: list[Act] = []
    history = History(setup)
    try:
        for number in range(ACTS):
            acts.append(random_act(rng, history, number, mood))
            history.act(*acts[-1])
        acts.append(("idle",))
        history.act("idle")
    except Exception:  # noqa: BLE001  # whatever goes wrong is what is looked for
        return setup, acts, traceback.format_exc()
    covered.update(history.covered)
    covered[f"pool of {setup.pages} pages (steps)"] += history.covered["steps"]
    for name, there in {
        "recurrent rows": setup.rows, "savepoints": setup.savepoints, "RAM tier": setup.ram, "disk tier": setup.disk,
        "no prefix cache": not setup.cache, "tenant limits": setup.limits,
    }.items():  # fmt: skip
        covered[f"steps with {name}"] += history.covered["steps"] if there else 0
    return setup, acts, None


def breaks(setup: Setup, acts: list[Act]) -> str | None:
    """How a history breaks: the last line of the error; None if it holds."""
    history = History(setup)
    try:
        for act in acts:
            history.act(*act)
    except Exception as exc:  # noqa: BLE001  # as above
        return f"{type(exc).__name__}: {exc}".splitlines()[0]
    return None


def shortest(setup: Setup, acts: list[Act]) -> list[Act]:
    """Leave out acts, halves first, while the history still breaks in the same way."""
    reason = breaks(setup, acts)
    size = len(acts) // 2
    while size:
        at = 0
        while at < len(acts):
            fewer = acts[:at] + acts[at + size :]
            if breaks(setup, fewer) == reason:
                acts = fewer
            else:
                at += size
        size //= 2
    return acts


def table(covered: Counter[str]) -> str:
    """The counts as a Markdown table."""
    return "\n".join(["| what | times |", "|---|---|", *(f"| {k} | {covered[k]:,} |" for k in sorted(covered))])


def main() -> int:
    """Run histories until their steps add up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000, help="steps of all histories together")
    parser.add_argument("--seed", type=int, default=1, help="of the first history; the next ones count up")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="hold a size of every setup")
    options = parser.parse_args()
    fixed = {name: ast.literal_eval(value) for name, value in (entry.split("=", 1) for entry in options.set)}
    covered: Counter[str] = Counter()
    logging.getLogger("arbi.tiers").setLevel(logging.ERROR)  # failing disks are part of the plan
    start, shown, seed = time.perf_counter(), 0, options.seed
    while covered["steps"] < options.steps:
        setup, acts, error = live(seed, fixed, covered)
        if error is not None:
            print(f"seed {seed} broke after {len(acts)} acts\n{error}\n{setup}")
            for act in shortest(setup, acts):
                print(" ", act)
            return 1
        seed += 1
        covered["histories"] += 1
        if covered["steps"] // 10_000 > shown:
            shown = covered["steps"] // 10_000
            print(f"{covered['steps']:>8} steps, {covered['histories']} histories, {time.perf_counter() - start:.0f} s")
    print(f"seeds {options.seed} to {seed - 1}, {time.perf_counter() - start:.0f} s, nothing broke")
    print(table(covered))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
