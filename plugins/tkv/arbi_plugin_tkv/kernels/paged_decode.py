"""Split-K attention over pages for rows of few query tokens: decode (1) and verification of drafts (up to 16).

Computes, for every row, key head and share of the row's context, the softmax-weighted sum of values and the logarithm
of its weight; a second kernel merges the shares. With one share there is no second kernel.
Bytes moved: every key and value once, 4 KiB a token at 8 heads of 128 two-byte numbers (key and value). 16 x 32,768
tokens: 2.15 GB, 0.500 ms at 4.3 TB/s; 8.6 GFLOP, padded to 16 rows 34 GFLOP, 0.04 ms of tensor cores. Partial sums are
4 MB written and read, 0.4 %. 256 x 1,024: 1.07 GB, 0.250 ms; 2 shares a row, partial sums 2 x 8.4 MB, 1.6 %.
1 x 1,024: 4.2 MB, 1 us; bound by two launches and three dependent reads, about 6 us.
Tile: 64 tokens of one head by the query heads of that key head, padded to the 16 rows of a tensor-core product, so keys
and values are read once for the whole group. Two tiles are on the way at once: 64 KiB a program and, with 70 KiB of
shared memory and 72 registers, three programs a multiprocessor: six times the 33 KB that hide a microsecond of latency
at 33 GB/s a multiprocessor.
A share is a multiple of the tile; a row too short for all shares leaves programs that end at once, so that the grid
holds for every context of a captured graph. Sinks are what the first share begins with.
Expected fraction of the limit: 0.97 at 16 x 32,768, 0.90 at 256 x 1,024. Not measured yet; proved in the interpreter.
"""

# Triton reads the source of its functions: they have no annotations but constexpr, which it spells in capitals.
# ruff: noqa: ANN001, ANN202, N803, N806, SIM102
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen

from arbi_plugin_tkv.kernels.paged_splits import MAX_QUERIES, DecodePlan, next_power_of_2
from arbi_plugin_tkv.kernels.paged_tile import LOG2E, NO_WINDOW, factors, fold, load_pages, load_vectors

__all__ = ["Workspace", "decode"]

MERGE_BLOCK = 32


@frozen(eq=False)
class Workspace:
    """Memory for the shares of the largest batch; kernels of one stream may share it.

    Attributes:
        sums: float32, at least ``rows * queries * heads * splits * value_dim`` numbers.
        logs: float32, at least ``rows * queries * heads * splits`` numbers.
    """

    sums: torch.Tensor
    logs: torch.Tensor

    @classmethod
    def allocate(cls, vectors: int, value_dim: int, device: torch.device) -> Workspace:
        """Room for ``vectors = rows * queries * heads * splits`` partial sums."""
        sums = torch.empty(vectors * value_dim, dtype=torch.float32, device=device)
        return cls(sums, torch.empty(vectors, dtype=torch.float32, device=device))


@triton.jit
def _share(length, queries, window, SPLITS: tl.constexpr, MIN_SHARE: tl.constexpr, TILE: tl.constexpr):
    """First token that any query sees, where the first share begins, and tokens of a share."""
    start = tl.maximum(length - queries + 1 - window, 0)
    first = start // TILE * TILE
    share = tl.cdiv(tl.cdiv(length - first, SPLITS), TILE) * TILE
    return start, first, tl.maximum(share, MIN_SHARE)


@triton.jit
def _span(starts, row, RAGGED: tl.constexpr):
    """The first flat token of a row and how many it has."""
    if RAGGED:
        token = tl.load(starts + row)
        queries = tl.load(starts + row + 1) - token
    else:
        token = row
        queries = 1
    return token, queries


@triton.jit
def _split(
    q, k, v, table, lengths, starts, sinks, out, sums, logs,
    q_token, q_head, out_token, out_head, k_page, v_page, table_row, window, before, after,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, MIN_SHARE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    V: tl.constexpr, VP: tl.constexpr, RAGGED: tl.constexpr, SINKS: tl.constexpr, CAP: tl.constexpr,
    LOG2E: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(2)
    BLOCKS: tl.constexpr = (GROUP * QUERIES + ROWS - 1) // ROWS
    head, block = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
    length = tl.load(lengths + row)
    token, queries = _span(starts, row, RAGGED)
    start, first, share = _share(length, queries, window, SPLITS, MIN_SHARE, TILE)
    low = first + split * share
    high = tl.minimum(low + share, length)
    line = block * ROWS + tl.arange(0, ROWS)
    query_index, member = line // GROUP, line % GROUP
    real = query_index < queries
    value_channel = tl.arange(0, VP)
    out_mask = real[:, None] & (value_channel < V)[None, :]
    to = (token + query_index).to(tl.int64)[:, None] * out_token + (head * GROUP + member)[:, None] * out_head
    if (low >= high) | (block * ROWS >= queries * GROUP):
        if SPLITS == 1:
            nothing = tl.zeros([ROWS, VP], tl.float32)
            tl.store(out + to + value_channel[None, :], nothing.to(out.dtype.element_ty), mask=out_mask)
        return
    channel = tl.arange(0, DP)
    at = (token + query_index).to(tl.int64)[:, None] * q_token + (head * GROUP + member)[:, None] * q_head
    query = tl.load(q + at + channel[None, :], mask=real[:, None] & (channel < D)[None, :], other=0.0)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        if split == 0:
            top = tl.load(sinks + head * GROUP + member, mask=real, other=0.0) * LOG2E
            total = total + 1.0
    acc = tl.zeros([ROWS, VP], tl.float32)
    position = length - queries + query_index
    k += head * (PAGE * D)
    v += head * (PAGE * V)
    table += row.to(tl.int64) * table_row
    page = load_pages(table, low, high, PAGE, TILE)
    for begin in range(low, high, TILE):
        tokens = begin + tl.arange(0, TILE)
        ok = (tokens >= start) & (tokens < high)
        next_page = load_pages(table, begin + TILE, high, PAGE, TILE)
        key = load_vectors(k, page, tokens, ok, k_page, PAGE, D, DP, True)
        value = load_vectors(v, page, tokens, ok, v_page, PAGE, V, VP, True)
        if RAGGED:
            seen = ok[None, :] & (tokens[None, :] <= position[:, None])
            seen = seen & (tokens[None, :] > position[:, None] - window)
        else:
            seen = ok[None, :]
        total, top, acc = fold(query, key, value, seen, total, top, acc, before, after, CAP, True)
        page = next_page
    # A query of a verified row may see nothing of a share.
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1:
        tl.store(out + to + value_channel[None, :], acc.to(out.dtype.element_ty), mask=out_mask)
    else:
        place = ((row * HEADS + head) * SPLITS + split).to(tl.int64) * (QUERIES * GROUP) + line
        tl.store(sums + place[:, None] * V + value_channel[None, :], acc, mask=out_mask)
        tl.store(logs + place, top + tl.log2(total), mask=real)


@triton.jit
def _merge(
    sums, logs, lengths, starts, out, out_token, out_head, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    MIN_SHARE: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, query_head, query_index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    token, queries = _span(starts, row, RAGGED)
    if query_index >= queries:
        return
    _, first, share = _share(length, queries, window, SPLITS, MIN_SHARE, TILE)
    used = tl.cdiv(length - first, share)
    head, member = query_head // GROUP, query_head % GROUP
    base = (row * HEADS + head).to(tl.int64) * (SPLITS * QUERIES * GROUP) + query_index * GROUP + member
    channel = tl.arange(0, VP)
    top = -float("inf")
    total = 0.0
    acc = tl.zeros([VP], tl.float32)
    for low in range(0, used, BLOCK):
        split = low + tl.arange(0, BLOCK)
        ok = split < used
        at = base + split * (QUERIES * GROUP)
        log = tl.load(logs + at, mask=ok, other=-float("inf"))
        part = tl.load(
            sums + at[:, None] * V + channel[None, :], mask=ok[:, None] & (channel < V)[None, :], other=0.0
        )  # fmt: skip
        top_now = tl.maximum(top, tl.max(log, 0))
        # The first shares of a query may hold nothing that it sees.
        peak = tl.where(top_now == -float("inf"), 0.0, top_now)
        weight = tl.exp2(log - peak)
        fade = tl.exp2(top - peak)
        acc = acc * fade + tl.sum(part * weight[:, None], 0)
        total = total * fade + tl.sum(weight, 0)
        top = top_now
    acc = acc / tl.where(total > 0, total, 1.0)
    to = out + (token + query_index).to(tl.int64) * out_token + query_head * out_head
    tl.store(to + channel, acc.to(out.dtype.element_ty), mask=channel < V)


def decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    queries: int = 1,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Attend the newest tokens of each row to all of its tokens, which are in the pages, its newest included.

    No host synchronisation, and the launches depend on shapes and the plan alone.

    Args:
        q: ``(N, H, D)``; without `starts` row i is token i. Any strides but the last, which is 1.
        k_pages: ``(pages, kv_heads, page_size, D)``; see `arbi_plugin_tkv.kernels.paged_store`.
        v_pages: ``(pages, kv_heads, page_size, Dv)``.
        table: ``(B, W)`` int32 page ids; entries beyond a row's context are never used.
        lengths: ``(B,)`` int32 context with the newest tokens; 0 for a row that pads the batch.
        out: ``(N, H, Dv)``; rows of length 0 become zeros.
        plan: from `arbi_plugin_tkv.kernels.paged_splits.decode_plan`, of the same `queries`.
        scale: multiplies products of queries and keys; positive.
        window: sliding window, the query's own token included.
        soft_cap: caps scaled products.
        sinks: ``(H,)`` float32 extra logits.
        starts: ``(B + 1,)`` int32, where rows begin in the flat tokens, for rows of 0 to `queries` tokens.
        queries: most tokens of a row.
        workspace: memory for shares; allocated if it is None and the plan has several.

    Returns:
        `out`.
    """
    rows, heads, kv_heads = table.shape[0], q.shape[1], k_pages.shape[1]
    group, value_dim = heads // kv_heads, v_pages.shape[3]
    if starts is None and queries != 1:
        raise ValueError(f"rows of {queries} tokens need `starts`")
    if queries > MAX_QUERIES:
        raise ValueError(f"rows of {queries} tokens are the prefill kernel's; this one takes {MAX_QUERIES}")
    vectors = rows * queries * heads * plan.splits
    if plan.splits > 1 and workspace is None:
        workspace = Workspace.allocate(vectors, value_dim, q.device)
    if workspace is not None and plan.splits > 1 and (
        workspace.logs.numel() < vectors or workspace.sums.numel() < vectors * value_dim
    ):  # fmt: skip
        raise ValueError(f"workspace of {workspace.logs.numel()} vectors is too small for {vectors}")
    sums, logs = (out, out) if workspace is None else (workspace.sums, workspace.logs)
    before, after = factors(scale, soft_cap)
    shared = {
        "HEADS": kv_heads, "GROUP": group, "QUERIES": queries, "TILE": plan.tile, "SPLITS": plan.splits,
        "MIN_SHARE": plan.min_share, "V": value_dim, "VP": max(16, next_power_of_2(value_dim)),
        "RAGGED": starts is not None,
    }  # fmt: skip
    span = lengths if starts is None else starts
    wide = NO_WINDOW if window is None else window
    blocks = -(-group * queries // plan.rows)
    _split[(rows, kv_heads * blocks, plan.splits)](
        q, k_pages, v_pages, table, lengths, span, lengths if sinks is None else sinks, out, sums, logs,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), k_pages.stride(0), v_pages.stride(0), table.stride(0),
        wide, before, after, ROWS=plan.rows, PAGE=k_pages.shape[2], D=q.shape[2],
        DP=max(16, next_power_of_2(q.shape[2])), SINKS=sinks is not None, CAP=soft_cap is not None, LOG2E=LOG2E,
        num_warps=plan.warps, num_stages=plan.stages, **shared,
    )  # fmt: skip
    if plan.splits > 1:
        _merge[(rows, heads, queries)](
            sums, logs, lengths, span, out, out.stride(0), out.stride(1), wide,
            BLOCK=min(MERGE_BLOCK, next_power_of_2(plan.splits)), num_warps=4, **shared,
        )  # fmt: skip
    return out
