"""Host time of the page table at 512 running requests and 100,000 cached pages.

Usage: python benchmarks/pool_host.py

Figures are the best of a few rounds where the work can be repeated, so that a busy machine disturbs them little. The
step figures are what a scheduler asks of the table in one decode step; the last line is the pause of a full garbage
collection with the cache in memory.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable

from arbi_core.pool import PagePool, PageTable

PAGE, RUNNING, CACHED, PROMPT_PAGES, ROUNDS = 16, 512, 100_000, 50, 5


def report(label: str, seconds: float, count: int) -> None:
    """Print microseconds for each of `count` items."""
    print(f"{label:<58} {seconds / count * 1e6:9.2f} us each, {count} at once")


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def fill(table: PageTable, prompts: list[list[int]]) -> None:
    """Compute, commit and release every prompt."""
    for i, ids in enumerate(prompts):
        table.add(f"f{i}", ids)
        table.extend(f"f{i}", len(ids))
        table.release(f"f{i}", ids)


def admit(table: PageTable, running: dict[str, list[int]]) -> None:
    """Register each request, claim its prefix, make room for the rest."""
    for name, ids in running.items():
        matched = table.add(name, ids, max_match=len(ids) - 1)
        table.extend(name, len(ids) - matched)


def decode_step(table: PageTable, names: list[str]) -> None:
    """What one decode step asks: does a token fit, then make room for it."""
    for name in names:
        if table.pages_needed(name, 1) <= table.available:
            table.extend(name, 1)


def end(table: PageTable, running: dict[str, list[int]], generated: list[int]) -> None:
    """Commit and release each request."""
    for name, ids in running.items():
        table.release(name, ids + generated)


def rounds(table: PageTable, prompts: list[list[int]]) -> None:
    """Admit, decode and end the running requests a few times; print the best of each."""
    best: dict[str, float] = {}

    def keep(label: str, seconds: float) -> None:
        best[label] = min(seconds, best.get(label, seconds))

    for turn in range(ROUNDS):
        running = {f"r{i}": [*prompts[i], *range(turn * 1000, turn * 1000 + 20)] for i in range(RUNNING)}
        names, generated = list(running), list(range(64))
        keep("admit", timed(lambda: admit(table, running)))  # noqa: B023  # called at once
        for rows in (256, RUNNING):
            for _ in range(len(generated) // 2):
                keep(f"step of {rows}", timed(lambda: decode_step(table, names[:rows])))  # noqa: B023
        keep("end", timed(lambda: end(table, running, generated)))  # noqa: B023
    report(f"admit a request whose {PROMPT_PAGES}-page prompt is cached", best["admit"], RUNNING)
    for rows in (256, RUNNING):
        report(f"a decode step of {rows} rows, each row", best[f"step of {rows}"], rows)
        print(f"{f'a decode step of {rows} rows':<58} {best[f'step of {rows}'] * 1e3:9.3f} ms")
    report("end a request: commit and release", best["end"], RUNNING)


def main() -> None:
    """Fill the cache, run requests over it, evict half of it."""
    rng = random.Random(0)
    table = PageTable(PagePool(CACHED + RUNNING * 80, PAGE))
    prompts = [[rng.randrange(50_000) for _ in range(PROMPT_PAGES * PAGE)] for _ in range(CACHED // PROMPT_PAGES)]
    seconds = timed(lambda: fill(table, prompts))
    report(f"compute, commit and release {PROMPT_PAGES} pages", seconds, len(prompts))
    print(f"{table.cached_pages} cached pages, {table.available} available")
    rounds(table, prompts)
    table.add("big", range(10), cache_enabled=False)
    evicted = table.evictions
    seconds = timed(lambda: table.extend("big", (table.pool.available + CACHED // 2) * PAGE))
    report("evict and take a page", seconds, table.evictions - evicted)
    table.release("big")
    fill(table, prompts)
    prompts.clear()
    gc.collect()
    pause = min(timed(gc.collect) for _ in range(ROUNDS))
    print(f"{f'full garbage collection over {table.cached_pages} cached pages':<58} {pause * 1e3:9.1f} ms")


if __name__ == "__main__":
    main()
