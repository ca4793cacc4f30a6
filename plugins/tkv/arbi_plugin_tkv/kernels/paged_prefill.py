"""Causal flash attention over pages for chunks of many query tokens, whose keys and values are stored already.

Computes, a tile of query tokens of one row and the query heads of one key head at a time, the softmax-weighted sum of
the values of everything before them.
Operations: ``4 * D`` a query head, query and visible key. 8,192 tokens from an empty context, 32 heads of 128: 0.55
TFLOP, 0.9 ms at 600 TFLOP/s; the last 8,192 of 32,768: 3.85 TFLOP, 6.4 ms. Bytes: a tile of 128 query rows reads its
context once, 512 bytes a token and key head: 128 operations a byte, 4.7 TB/s from the second-level cache at 600
TFLOP/s; from memory the context is read about once for each 132 tiles, 1 % of that.
Tile: 128 rows (32 tokens of 4 heads at a group of 4: the same traffic as 128 tokens of one head, a quarter of the waste
on the diagonal, and chunks of few tokens still fill it) by 64 keys, 8 warps, 3 stages: 128 KiB of shared memory
and 184 registers. Small pages are gathered, several to a tile. Tiles before the diagonal need no mask; those on it
and, with a window, all are masked.
Order: the longest tiles are launched first, so that the device does not end on one of them.
Expected fraction of the limit: 0.55 of 790 TFLOP/s. Not measured yet; proved in the interpreter only.
"""

# Triton reads the source of its functions: they have no annotations but constexpr, which it spells in capitals.
# ruff: noqa: ANN001, ANN202, N803, N806
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from arbi_plugin_tkv.kernels.paged_splits import PrefillTile, next_power_of_2
from arbi_plugin_tkv.kernels.paged_tile import LOG2E, NO_WINDOW, factors, fold, load_pages, load_vectors

__all__ = ["prefill", "query_tiles"]


def query_tiles(starts: np.ndarray, lengths: np.ndarray, tokens: int) -> np.ndarray:
    """Cut the query tokens of each row into tiles, those with the longest contexts first.

    Args:
        starts: ``(B + 1,)`` where rows begin in the flat tokens.
        lengths: ``(B,)`` contexts, the query tokens included.
        tokens: query tokens of a tile.

    Returns:
        ``(tiles, 2)`` int32: row, and its first query token counted from the row's own first.
    """
    counts = np.diff(starts).astype(np.int64)
    each = -(-counts // tokens)
    rows = np.repeat(np.arange(len(counts)), each)
    first = (np.arange(len(rows)) - np.repeat(each.cumsum() - each, each)) * tokens
    order = np.argsort(-(np.asarray(lengths, dtype=np.int64) - counts)[rows] - first, kind="stable")
    return np.stack((rows, first), axis=1)[order].astype(np.int32)


@triton.jit
def _chunk(
    q, k, v, table, lengths, starts, tiles, sinks, out,
    q_token, q_head, out_token, out_head, k_page, v_page, table_row, window, before, after,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    V: tl.constexpr, VP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, CAP: tl.constexpr,
    LOG2E: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.load(tiles + 2 * tl.program_id(0))
    first_query = tl.load(tiles + 2 * tl.program_id(0) + 1)
    token = tl.load(starts + row)
    queries = tl.load(starts + row + 1) - token
    length = tl.load(lengths + row)
    TOKENS: tl.constexpr = ROWS // GROUP
    line = tl.arange(0, ROWS)
    query_index, member = first_query + line // GROUP, line % GROUP
    real = (line < TOKENS * GROUP) & (query_index < queries)
    channel, value_channel = tl.arange(0, DP), tl.arange(0, VP)
    at = (token + query_index).to(tl.int64)[:, None] * q_token + (head * GROUP + member)[:, None] * q_head
    query = tl.load(q + at + channel[None, :], mask=real[:, None] & (channel < D)[None, :], other=0.0)
    if SINKS:
        top = tl.load(sinks + head * GROUP + member) * LOG2E
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        top = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VP], tl.float32)
    position = length - queries + query_index
    lowest = length - queries + first_query
    end = tl.minimum(lowest + TOKENS, length)
    k += head * (PAGE * D)
    v += head * (PAGE * V)
    table += row.to(tl.int64) * table_row
    start = 0
    masked_from = (lowest + 1) // TILE * TILE
    if WINDOW:
        start = tl.maximum(lowest - window + 1, 0)
        masked_from = start // TILE * TILE
    page = load_pages(table, masked_from if WINDOW else 0, end, PAGE, TILE)
    if not WINDOW:
        for begin in range(0, masked_from, TILE):
            tokens = begin + tl.arange(0, TILE)
            ok = tokens < end
            next_page = load_pages(table, begin + TILE, end, PAGE, TILE)
            key = load_vectors(k, page, tokens, ok, k_page, PAGE, D, DP, False)
            value = load_vectors(v, page, tokens, ok, v_page, PAGE, V, VP, False)
            total, top, acc = fold(query, key, value, ok[None, :], total, top, acc, before, after, CAP, False)
            page = next_page
    for begin in range(masked_from, end, TILE):
        tokens = begin + tl.arange(0, TILE)
        ok = (tokens >= start) & (tokens < end)
        next_page = load_pages(table, begin + TILE, end, PAGE, TILE)
        key = load_vectors(k, page, tokens, ok, k_page, PAGE, D, DP, True)
        value = load_vectors(v, page, tokens, ok, v_page, PAGE, V, VP, True)
        seen = ok[None, :] & (tokens[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (tokens[None, :] > position[:, None] - window)
        total, top, acc = fold(query, key, value, seen, total, top, acc, before, after, CAP, True)
        page = next_page
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    to = (token + query_index).to(tl.int64)[:, None] * out_token + (head * GROUP + member)[:, None] * out_head
    mask = real[:, None] & (value_channel < V)[None, :]
    tl.store(out + to + value_channel[None, :], acc.to(out.dtype.element_ty), mask=mask)


def prefill(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    tile: PrefillTile,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend chunks to all that is before them, themselves included; their own keys are in the pages.

    Args:
        q: ``(N, H, D)``, any strides but the last, which is 1.
        k_pages: ``(pages, kv_heads, page_size, D)``; see `arbi_plugin_tkv.kernels.paged_store`.
        v_pages: ``(pages, kv_heads, page_size, Dv)``.
        table: ``(B, W)`` int32 page ids; entries beyond a row's context are never used.
        lengths: ``(B,)`` int32 context with the chunk.
        starts: ``(B + 1,)`` int32, where rows begin in the flat tokens.
        tiles: `query_tiles` of ``tile.rows // group`` tokens, on the device.
        out: ``(N, H, Dv)``.
        tile: from `arbi_plugin_tkv.kernels.paged_splits.prefill_tile`.
        scale: multiplies products of queries and keys; positive.
        window: sliding window, the query's own token included.
        soft_cap: caps scaled products.
        sinks: ``(H,)`` float32 extra logits.

    Returns:
        `out`.
    """
    kv_heads, value_dim = k_pages.shape[1], v_pages.shape[3]
    before, after = factors(scale, soft_cap)
    _chunk[(tiles.shape[0], kv_heads)](
        q, k_pages, v_pages, table, lengths, starts, tiles, lengths if sinks is None else sinks, out,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), k_pages.stride(0), v_pages.stride(0), table.stride(0),
        NO_WINDOW if window is None else window, before, after,
        GROUP=q.shape[1] // kv_heads, ROWS=tile.rows, PAGE=k_pages.shape[2], TILE=tile.tile, D=q.shape[2],
        DP=max(16, next_power_of_2(q.shape[2])), V=value_dim, VP=max(16, next_power_of_2(value_dim)),
        WINDOW=window is not None, SINKS=sinks is not None, CAP=soft_cap is not None, LOG2E=LOG2E,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
