"""The 32-bit word that carries the scales and the offset of one vector.

========  =============================================================================================
bits      field
========  =============================================================================================
0 to 11   scale of half ``a``: float16 without its sign and its 3 lowest bits (5 exponent, 7 fraction bits)
12 to 23  offset of half ``a`` in steps of `offset_step` of its scale, two's complement
24 to 31  scale of half ``b``: float16 without its sign and its 7 lowest bits (5 exponent, 3 fraction bits)
========  =============================================================================================

Coordinates are ``scale_a * (code - (2**bits_a - 1) / 2 + offset)`` and ``scale_b * (code - (2**bits_b - 1) / 2)``.

The strongest direction of a fitted basis is the same number in every coordinate of half ``a``: the offset carries it
almost exactly, which is why the offset and its scale have more bits than the scale of half ``b``.
"""

from __future__ import annotations

import torch

__all__ = ["FRACTION_BITS", "OFFSETS", "SCALE_LIMIT", "join_word", "offset_step", "split_word"]

OFFSETS = 2048
"""Offsets are stored from minus this to one below it."""
FRACTION_BITS = (7, 3)
"""Fraction bits of the two scales."""
SCALE_LIMIT = 57344.0
"""The greatest scale: a float16 that both forms hold."""


def offset_step(bits_a: int) -> float:
    """The unit of stored offsets, in scales: 1/32, or as much more as lets an offset reach across the whole grid."""
    return float(2.0 ** max(-5, bits_a - 11))


def join_word(scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Make words.

    Args:
        scale: ``(..., 2)`` float32 that the two forms hold exactly, 0 to `SCALE_LIMIT`.
        offset: ``(...)`` float32 whole steps, ``-OFFSETS`` to ``OFFSETS - 1``.

    Returns:
        ``(...)`` int32.
    """
    bits = scale.half().view(torch.int16).to(torch.int32)
    return bits[..., 0] >> 3 | (offset.to(torch.int32) & 0xFFF) << 12 | bits[..., 1] << 17


def split_word(word: torch.Tensor, bits_a: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(scale_a, offset, scale_b)`` float32 of int32 words; the offset is in units of ``scale_a``."""
    return _float(word << 3 & 0x7FF8), (word << 8 >> 20).float() * offset_step(bits_a), _float(word >> 17 & 0x7F80)


def _float(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int16).view(torch.float16).float()
