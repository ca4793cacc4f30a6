"""Host time of the page table at 512 running requests and 100,000 cached pages.

Usage: python benchmarks/pool_host.py
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from arbi_core.pool import PagePool, PageTable

PAGE, RUNNING, CACHED = 16, 512, 100_000


def timed(label: str, count: int, work: Callable[[], None]) -> None:
    """Run once and print microseconds per item."""
    start = time.perf_counter()
    work()
    print(f"{label:<44} {(time.perf_counter() - start) / count * 1e6:8.2f} us each, {count} times")


def main() -> None:
    """Fill the cache, start the requests, run decode steps, end the requests."""
    rng = random.Random(0)
    table = PageTable(PagePool(CACHED + RUNNING * 80, PAGE))
    prompt_pages = 50
    prompts = [[rng.randrange(50_000) for _ in range(prompt_pages * PAGE)] for _ in range(CACHED // prompt_pages)]

    def fill() -> None:
        for i, ids in enumerate(prompts):
            table.add(f"f{i}", ids)
            table.extend(f"f{i}", len(ids))
            table.release(f"f{i}", ids)

    timed("compute, commit and release an 800-token prompt", len(prompts), fill)
    running = {f"r{i}": [*prompts[i % len(prompts)], *range(20)] for i in range(RUNNING)}

    def admit() -> None:
        for name, ids in running.items():
            matched = table.add(name, ids, max_match=len(ids) - 1)
            table.extend(name, len(ids) - matched)

    timed("admit a request with an 800-token hit", RUNNING, admit)
    print(f"{table.cached_pages} cached pages nobody references, {table.available} available")
    steps = 64

    def decode() -> None:
        for _ in range(steps):
            for name in running:
                table.pages_needed(name, 1)
                table.extend(name, 1)

    timed("one decode row: pages_needed and extend", steps * RUNNING, decode)

    def end() -> None:
        for name, ids in running.items():
            table.release(name, [*ids, *range(steps)])

    timed("end a request: commit and release", RUNNING, end)

    def evict() -> None:
        table.add("big", range(10), cache_enabled=False)
        table.extend("big", 50_000 * PAGE)
        table.release("big")

    timed("evict a page", 50_000, evict)


if __name__ == "__main__":
    main()
