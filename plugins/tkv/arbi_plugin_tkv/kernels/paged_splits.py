"""Launch shapes of the paged kernels: pure functions of what is fixed for a graph, never of what a step holds."""

from __future__ import annotations

import functools

from attrs import frozen

__all__ = [
    "MAX_QUERIES",
    "DecodePlan",
    "PrefillTile",
    "bucket",
    "decode_plan",
    "next_power_of_2",
    "prefill_tile",
    "query_block",
]

WAVES = 16
"""Programs per multiprocessor that a decode step aims at: enough to even out what the last of them leave idle."""
LONGEST_SHARE = 8192
"""Tokens of the longest context that one program may have to read: bounds how long a batch waits for one long row."""
MAX_QUERIES = 16
"""Most tokens of a row that the decode kernel attends."""
MAX_SPLITS = 64
"""Most shares of a row: one stream still fills the device, and merging them stays short."""
MIN_ROWS = 16
"""Rows of the smallest matrix that tensor cores multiply."""
MAX_ROWS = 128
MAX_ROWS_FLOAT32 = 32
"""Without tensor cores, more would not fit registers."""


@frozen
class DecodePlan:
    """How the context of a row is shared out.

    Attributes:
        splits: most shares of a row; the third dimension of the launch grid.
        min_share: fewest tokens of a share but the last; a short row has fewer shares than `splits`.
        tile: tokens read at once; shares are multiples of it.
        rows: rows of the query tile: a token's or several tokens' query heads of one key head.
        warps: per program.
        stages: tiles on the way at once.
    """

    splits: int
    min_share: int
    tile: int
    rows: int
    warps: int
    stages: int


@frozen
class PrefillTile:
    """The tile of the prefill kernel.

    Attributes:
        rows: query tokens times query heads of one key head.
        tile: key tokens.
        warps: per program.
        stages: key tiles on the way at once.
    """

    rows: int
    tile: int
    warps: int
    stages: int


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def bucket(rows: int) -> int:
    """Rows that a batch counts as, so that a padded batch is shared out like the batch that it pads."""
    return next_power_of_2(max(1, rows))


def query_block(group: int, queries: int, itemsize: int = 2) -> int:
    """Rows of the decode kernel's query tile."""
    return min(MAX_ROWS if itemsize == 2 else MAX_ROWS_FLOAT32, max(MIN_ROWS, next_power_of_2(group * queries)))


@functools.cache
def decode_plan(
    rows: int, kv_heads: int, group: int, dim: int, itemsize: int, bound: int, sms: int, queries: int = 1, room: int = 0
) -> DecodePlan:
    """How a batch of `rows` rows is shared out.

    Args:
        rows: rows of the batch or its bucket.
        kv_heads: key heads.
        group: query heads of a key head.
        dim: the wider of a key and a value.
        itemsize: bytes of a stored number.
        bound: tokens of the longest context that a row may ever have, or of the window if that is shorter.
        sms: multiprocessors.
        queries: most query tokens of a row.
        room: query heads times query tokens times splits that partial sums have room for; 0 means any number.
    """
    rows = bucket(rows)
    padded = next_power_of_2(dim)
    tile = 64 if itemsize == 2 else 32
    block = query_block(group, queries, itemsize)
    programs = rows * kv_heads * -(-group * queries // block)
    even = next_power_of_2(WAVES * sms // programs)
    long = next_power_of_2(-(-bound // LONGEST_SHARE))
    # The fuller the device, the longer must a share be to be worth its partial sums.
    min_share = tile * (1 if programs < sms else 2 if programs < 4 * sms else 8)
    most = next_power_of_2(-(-bound // min_share))
    splits = min(max(even, long), most, MAX_SPLITS)
    if room:
        splits = min(splits, max(1, room // (rows * queries * kv_heads * group)))
    stages = 1 if itemsize == 4 else 3 if padded <= 128 else 2
    return DecodePlan(splits, min_share, tile, block, 8 if block == MAX_ROWS else 4, stages)


@functools.cache
def prefill_tile(dim: int, group: int, itemsize: int) -> PrefillTile:
    """The tile for heads of `dim` numbers, the wider of key and value: what shared memory and registers hold."""
    padded = next_power_of_2(dim)
    if itemsize == 4:
        return PrefillTile(max(MIN_ROWS, next_power_of_2(group)), 32, 4, 1)
    if padded <= 256:
        return PrefillTile(max(MAX_ROWS, next_power_of_2(group)), 64, 8, 3 if padded <= 128 else 2)
    return PrefillTile(max(64, next_power_of_2(group)), 32, 8, 2)
