"""Compress-and-store: turn, fit grids, quantise, pack and write the keys and values of a step.

Computes what `arbi_plugin_tkv.codec.sides.SideCodec` and `arbi_plugin_tkv.stores.CodecStore.write` do, one program
for 16 tokens of one head and one side.
Bytes moved: a vector in, ``vector_bytes`` out; the basis, ``dim * padded`` numbers a head, stays in the second-level
cache.
Tile: 16 tokens by all coordinates, in registers; the turn is two tensor-core products, the fit is row-wise arithmetic
over five clippings. Keys are written token by token; values are written one byte per token and coordinate, a page's
tokens side by side, so a prefill chunk fills whole sectors.
Measured fraction of the limit: not measured yet; proved in the interpreter only.
"""

# Triton reads the source of its functions: they have no annotations but constexpr, which it spells in capitals.
# ruff: noqa: ANN001, ANN202, N803, N806
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from arbi_plugin_tkv.codec.basis import Basis
from arbi_plugin_tkv.codec.grid import CLIPPING
from arbi_plugin_tkv.codec.layout import PageLayout, SideLayout
from arbi_plugin_tkv.codec.words import FRACTION_BITS, OFFSETS, SCALE_LIMIT, offset_step

__all__ = ["can_store", "store"]

LIMIT = 30000.0
TINY = 1e-20
TOKENS = 16


@triton.jit
def _codes(y, scale, HALF: tl.constexpr, TINY: tl.constexpr):
    """Nearest grid points, centred."""
    centred = tl.floor(y / (scale + TINY)[:, None]) + 0.5
    return tl.minimum(tl.maximum(centred, -HALF), HALF)


@triton.jit
def _clipped(
    y, valid, mean, span, share, N: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr, HAS: tl.constexpr,
    DROP: tl.constexpr, SCALE_LIMIT: tl.constexpr, OFFSETS: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """Codes, scale, offset and squared error for one clipping."""
    codes = tl.where(valid, _codes(y, span * share / HALF, HALF, TINY), 0.0)
    scale = tl.sum(y * codes, 1) / tl.sum(codes * codes, 1)
    bits = tl.minimum(tl.maximum(scale, 0.0), SCALE_LIMIT).to(tl.float16).to(tl.int16, bitcast=True)
    bits = (bits + (1 << DROP >> 1)) & (-1 << DROP)
    scale = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    codes = tl.where(valid, _codes(y, scale, HALF, TINY), 0.0)
    error = y - scale[:, None] * codes
    offset = mean * 0
    if HAS:
        offset = tl.floor((tl.sum(error, 1) / N + mean) / (scale * STEP + TINY) + 0.5)
        offset = tl.minimum(tl.maximum(offset, -OFFSETS), OFFSETS - 1)
        error = tl.where(valid, error + (mean - offset * (scale * STEP))[:, None], 0.0)
    return codes, scale, offset, tl.sum(error * error, 1)


@triton.jit
def _fit(
    y, valid, N: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr, HAS: tl.constexpr, DROP: tl.constexpr,
    C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, C3: tl.constexpr, C4: tl.constexpr,
    SCALE_LIMIT: tl.constexpr, OFFSETS: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """The best of five clippings: int32 codes, scale, offset."""
    HALF: tl.constexpr = (2**BITS - 1) / 2
    mean = tl.sum(y, 1) * 0
    if HAS:
        mean = tl.sum(y, 1) / N
        y = tl.where(valid, y - mean[:, None], 0.0)
    span = tl.max(tl.abs(y), 1)
    codes, scale, offset, error = _clipped(
        y, valid, mean, span, C0, N, HALF, STEP, HAS, DROP, SCALE_LIMIT, OFFSETS, TINY
    )
    for i in tl.static_range(1, 5):
        share: tl.constexpr = C1 if i == 1 else (C2 if i == 2 else (C3 if i == 3 else C4))
        other, other_scale, other_offset, other_error = _clipped(
            y, valid, mean, span, share, N, HALF, STEP, HAS, DROP, SCALE_LIMIT, OFFSETS, TINY
        )
        better = other_error < error
        codes = tl.where(better[:, None], other, codes)
        scale, offset = tl.where(better, other_scale, scale), tl.where(better, other_offset, offset)
        error = tl.minimum(error, other_error)
    return (codes + HALF).to(tl.int32), scale, offset


@triton.jit
def _write_plane(
    to, field, ok, byte_stride, SHIFT: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr, N: tl.constexpr,
    NP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One plane of ``(TOKENS, NP)`` fields to bytes that begin at `to` per token; see the codec's layout."""
    plane = (field >> SHIFT) & ((1 << BITS) - 1)
    if BITS == 8:
        pair = tl.arange(0, NP)
        mask = ok[:, None] & (pair < N)[None, :]
        tl.store(to[:, None] + (FIRST + pair)[None, :] * byte_stride, plane.to(tl.uint8), mask=mask)
    else:
        SHARE: tl.constexpr = 8 // BITS
        EACH: tl.constexpr = NP // SHARE
        byte = tl.arange(0, EACH)
        place = tl.arange(0, SHARE)
        packed = tl.sum(tl.reshape(plane, (TOKENS, SHARE, EACH)) << (place * BITS)[None, :, None], 1)
        tl.store(to[:, None] + (FIRST + byte)[None, :] * byte_stride, packed.to(tl.uint8), mask=ok[:, None])


@triton.jit
def _store(
    x, encode, mean, first, slab, slots, positions, count, token_stride, page_stride, byte_stride, slot_stride,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, A: tl.constexpr,
    B: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr,
    WORDS: tl.constexpr, DROP_A: tl.constexpr, DROP_B: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr,
    C2: tl.constexpr, C3: tl.constexpr, C4: tl.constexpr, SCALE_LIMIT: tl.constexpr, OFFSETS: tl.constexpr,
    LIMIT: tl.constexpr, TINY: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    ok = token < count
    channel, pair = tl.arange(0, DP), tl.arange(0, NP)
    inside = channel < D
    numbers = tl.load(
        x + token[:, None].to(tl.int64) * token_stride + head * D + channel[None, :],
        mask=ok[:, None] & inside[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    usual = tl.load(mean + head * D + channel, mask=inside, other=0.0)
    start = tl.load(first + head * D + channel, mask=inside, other=0.0)
    position = tl.load(positions + token, mask=ok, other=1)
    numbers -= tl.where((position == 0)[:, None], start[None, :], usual[None, :])
    numbers = tl.where(numbers == numbers, numbers, 0.0)
    numbers = tl.minimum(tl.maximum(numbers, -LIMIT), LIMIT)
    at = encode + head * D * (2 * N) + channel[:, None] * (2 * N) + pair[None, :]
    mask = inside[:, None] & (pair < N)[None, :]
    valid = (pair < N)[None, :]
    low = tl.dot(numbers, tl.load(at, mask=mask, other=0.0), input_precision="ieee")
    high = tl.dot(numbers, tl.load(at + N, mask=mask, other=0.0), input_precision="ieee")
    codes_a, scale_a, offset = _fit(
        low, valid, N, A, STEP, True, DROP_A, C0, C1, C2, C3, C4, SCALE_LIMIT, OFFSETS, TINY
    )
    codes_b, scale_b, _ = _fit(high, valid, N, B, STEP, False, DROP_B, C0, C1, C2, C3, C4, SCALE_LIMIT, OFFSETS, TINY)
    bits_a = scale_a.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    bits_b = scale_b.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    word = (bits_a >> 3) | ((offset.to(tl.int32) & 0xFFF) << 12) | (bits_b << 17)
    slot = tl.load(slots + token, mask=ok, other=0).to(tl.int64)
    block = slab + slot // PAGE * page_stride + head * BLOCK
    inner = slot % PAGE
    tl.store((block + WORDS).to(tl.pointer_type(tl.int32)) + inner, word, mask=ok)
    field = codes_a | (codes_b << A)
    to = block + CODES + inner * slot_stride
    TOTAL: tl.constexpr = A + B
    if TOTAL >= 8:
        _write_plane(to, field, ok, byte_stride, 0, 8, 0, N, NP, TOKENS)
    if TOTAL == 16:
        _write_plane(to, field, ok, byte_stride, 8, 8, N, N, NP, TOKENS)
    elif TOTAL % 8 >= 4:
        _write_plane(to, field, ok, byte_stride, TOTAL // 8 * 8, 4, N * (TOTAL // 8), N, NP, TOKENS)
    if TOTAL % 4 == 2:
        _write_plane(to, field, ok, byte_stride, TOTAL - 2, 2, N * (TOTAL - 2) // 8, N, NP, TOKENS)


def can_store(layout: SideLayout) -> bool:
    """Whether the kernel writes a side: planes narrower than a byte need a power of two of pairs."""
    total = layout.bits_a + layout.bits_b
    return total % 8 == 0 or (layout.pairs >= 16 and layout.pairs & layout.pairs - 1 == 0)


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    slab: torch.Tensor,
    layout: PageLayout,
    key: Basis,
    value: Basis,
) -> None:
    """Encode a step's keys and values into their slots.

    Args:
        k: ``(N, kv_heads, D)``; heads and channels contiguous.
        v: ``(N, kv_heads, Dv)``; heads and channels contiguous.
        slots: ``(N,)`` int64.
        positions: ``(N,)`` int64.
        slab: ``(pages, kv_heads, block_bytes)`` uint8, written in place.
        layout: of a page; both sides must be ones that `can_store` accepts.
        key: basis of keys.
        value: basis of values.

    Raises:
        ValueError: a side cannot be written by the kernel.
    """
    count = k.shape[0]
    if not count:
        return
    for x, side, basis, codes, words, byte_stride, slot_stride in (
        (k, layout.key, key, layout.key_codes, layout.key_words, 1, layout.key.code_bytes),
        (v, layout.value, value, layout.value_codes, layout.value_words, layout.page_size, 1),
    ):
        if not can_store(side):
            raise ValueError(f"{side.pairs} pairs of {side.bits_a} + {side.bits_b} bits are not written by the kernel")
        clips = {f"C{i}": share for i, share in enumerate(CLIPPING)}
        _store[(triton.cdiv(count, TOKENS), x.shape[1])](
            x, basis.encode, basis.mean, basis.first, slab, slots, positions, count, x.stride(0), slab.stride(0),
            byte_stride, slot_stride, D=side.dim, DP=max(16, triton.next_power_of_2(side.dim)),
            N=side.pairs, NP=max(16, triton.next_power_of_2(side.pairs)), A=side.bits_a, B=side.bits_b,
            STEP=offset_step(side.bits_a), PAGE=layout.page_size, BLOCK=layout.block_bytes, CODES=codes, WORDS=words,
            DROP_A=10 - FRACTION_BITS[0], DROP_B=10 - FRACTION_BITS[1], SCALE_LIMIT=SCALE_LIMIT, OFFSETS=float(OFFSETS),
            LIMIT=LIMIT, TINY=TINY, TOKENS=TOKENS, **clips,
        )  # fmt: skip
