"""Device functions that kernels share: codes out of planes, scales out of words."""

# Triton reads the source of its functions: they have no annotations but constexpr, which it spells in capitals.
# ruff: noqa: ANN001, ANN201, ANN202, N803, N806
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_codes", "scale_a", "scale_b", "steps_a"]


@triton.jit
def load_plane(
    base, pair, token, valid, byte_stride, token_stride, N: tl.constexpr, FIRST: tl.constexpr, BITS: tl.constexpr
):
    """Fields of one plane, int32: `base` is the first code byte, `pair` and `token` broadcast to the tile."""
    each: tl.constexpr = N * BITS // 8
    byte = tl.load(base + (FIRST + pair % each) * byte_stride + token * token_stride, mask=valid, other=0)
    return (byte.to(tl.int32) >> (BITS * (pair // each))) & ((1 << BITS) - 1)


@triton.jit
def load_codes(base, pair, token, valid, byte_stride, token_stride, N: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Codes of both halves of a tile, int32; see the table of planes in `arbi_plugin_tkv.codec.layout`."""
    TOTAL: tl.constexpr = A + B
    field = (pair + token) * 0
    if TOTAL >= 8:
        field += load_plane(base, pair, token, valid, byte_stride, token_stride, N, 0, 8)
    if TOTAL == 16:
        field += load_plane(base, pair, token, valid, byte_stride, token_stride, N, N, 8) << 8
    elif TOTAL % 8 >= 4:
        field += load_plane(base, pair, token, valid, byte_stride, token_stride, N, N * (TOTAL // 8), 4) << (
            TOTAL // 8 * 8
        )
    if TOTAL % 4 == 2:
        field += load_plane(base, pair, token, valid, byte_stride, token_stride, N, N * (TOTAL - 2) // 8, 2) << (
            TOTAL - 2
        )
    return field & ((1 << A) - 1), field >> A


@triton.jit
def scale_a(word):
    """Scale of half ``a`` of int32 words, float32."""
    return ((word << 3) & 0x7FF8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def steps_a(word):
    """Offset of half ``a`` in steps, float32."""
    return ((word << 8) >> 20).to(tl.float32)


@triton.jit
def scale_b(word):
    """Scale of half ``b``, float32."""
    return ((word >> 17) & 0x7F80).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
