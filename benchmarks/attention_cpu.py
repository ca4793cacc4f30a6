"""Time of the reference attention on the CPU: one layer's op, by rows, context and how the pages lie.

Usage: python benchmarks/attention_cpu.py [threads]

Every figure is the fastest of its repeats. The rate next to a decode step counts the keys and values that it attends
to, the one next to a chunk the products of the (query, key) pairs that are not masked; both inside the window only.
`spread` pages are in no order, so that they are gathered; consecutive ones are read where they lie.
"""

from __future__ import annotations

import random
import sys
import time

import torch

from arbi_core.kernels.paged_attention import PagedAttention, PagedPlan, RowPlan
from arbi_core.spec import LayerSpec

PAGE = 16
SHAPES = {"135M": (9, 3, 64), "8B": (32, 8, 128)}
DECODE = ((1, 128), (1, 1024), (1, 4096), (8, 128), (8, 1024), (32, 128), (32, 1024))
CHUNKS = ((512, 0), (512, 1536), (512, 7680), (2048, 0))
WINDOW = 256
VARIANTS: dict[str, dict[str, float | int]] = {
    "plain": {},
    f"window {WINDOW}": {"window": WINDOW},
    "cap": {"soft_cap": 50.0},
}


def make_plan(rows: int, queries: int, context: int, *, spread: bool) -> tuple[PagedPlan, int]:
    """A step of equal rows, each `queries` tokens long and ending at `context`; and the number of pages in use."""
    per_row = -(-context // PAGE)
    ids = list(range(1, rows * per_row + 1))
    if spread:
        random.Random(0).shuffle(ids)
    plans, slots = [], []
    for i in range(rows):
        mine = ids[i * per_row : (i + 1) * per_row]
        slots += [mine[p // PAGE] * PAGE + p % PAGE for p in range(context - queries, context)]
        first = -1 if spread else mine[0]
        plans.append(RowPlan(i * queries, queries, context, first, torch.tensor(mine, dtype=torch.int32)))
    first_slot = slots[0] if rows == 1 and not spread else -1
    return PagedPlan(torch.tensor(slots), plans, first_slot), len(ids) + 1


def measure(shape: tuple[int, int, int], rows: int, queries: int, context: int, variant: str, *, spread: bool) -> float:
    """Seconds of one call, the fastest of several."""
    heads, kv_heads, width = shape
    layer = LayerSpec(0, num_heads=heads, num_kv_heads=kv_heads, head_dim=width, **VARIANTS[variant])  # type: ignore[arg-type]
    plan, pages = make_plan(rows, queries, context, spread=spread)
    state = {name: torch.randn(pages, PAGE, kv_heads, width) for name in ("k", "v")}
    op = PagedAttention(layer, heads, kv_heads, None)
    q = torch.randn(rows * queries, heads, width)
    k, v = torch.randn(rows * queries, kv_heads, width), torch.randn(rows * queries, kv_heads, width)
    out = torch.empty_like(q)
    best, spent, count = float("inf"), 0.0, 0
    while count < 5 or (spent < 0.3 and count < 200):
        start = time.perf_counter()
        op.forward(q, k, v, state, plan, out)
        took = time.perf_counter() - start
        best, spent, count = min(best, took), spent + took, count + 1
    return best


def attended(queries: int, context: int, variant: str) -> int:
    """(Query, key) pairs that are not masked, for queries that end the context."""
    window = int(VARIANTS[variant].get("window", context))
    return sum(min(position + 1, window) for position in range(context - queries, context))


def show_decode(shape: tuple[int, int, int], rows: int, context: int, variant: str) -> None:
    """One line: both layouts of the pages."""
    _, kv_heads, width = shape
    moved = rows * attended(1, context, variant) * kv_heads * width * 2 * 4 / 1e9
    shown = []
    for label, spread in (("consecutive", False), ("spread", True)):
        took = measure(shape, rows, 1, context, variant, spread=spread)
        shown.append(f"{label} {took * 1e6:9.0f} us ({moved / took:5.1f} GB/s)")
    print(f"{variant:<10} decode {rows:>4} rows of {context:>5}: {', '.join(shown)}")


def show_chunk(shape: tuple[int, int, int], queries: int, before: int, variant: str) -> None:
    """One line: a chunk of one row."""
    heads, _, width = shape
    took = measure(shape, 1, queries, before + queries, variant, spread=False)
    flops = 4 * heads * width * attended(queries, before + queries, variant) / 1e9
    print(f"{variant:<10} chunk {queries:>5} after {before:>5}: {took * 1e3:9.2f} ms ({flops / took:5.1f} GFLOP/s)")


@torch.inference_mode()
def main() -> None:
    """Print one line per case."""
    if len(sys.argv) > 1:
        torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, float32, pages of {PAGE} tokens")
    for name, shape in SHAPES.items():
        print(f"\n{name}: {shape[0]} heads, {shape[1]} key heads, {shape[2]} wide")
        for variant in VARIANTS:
            for rows, context in DECODE:
                show_decode(shape, rows, context, variant)
            for queries, before in CHUNKS:
                show_chunk(shape, queries, before, variant)


if __name__ == "__main__":
    main()
