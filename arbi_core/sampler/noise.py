"""Counter-based randomness: a draw depends on (row seed, vocabulary index) and on nothing else.

So the same request draws the same tokens whatever shares its batch, on any device and on every rank. The generator is
the SplitMix64 finaliser (Steele, Lea and Flood, 2014) over ``seed + index * golden ratio``; tokens are drawn by the
Gumbel-max trick (Gumbel, 1954).
"""

from __future__ import annotations

import torch

__all__ = ["derive_row_seed", "gumbel"]

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB


def derive_row_seed(base: int, position: int) -> int:
    """Seed of one draw of a request: a signed 64-bit scramble of its base seed and its number of drawn tokens."""
    z = ((base & MASK) + (position + 1) * GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * MIX1) & MASK
    z = ((z ^ (z >> 27)) * MIX2) & MASK
    return _signed(z ^ (z >> 31))


def gumbel(seeds: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise.

    Args:
        seeds: ``(R,)`` int64, one per row.
        index: ``(V,)`` or ``(R, C)`` int64 vocabulary indices.

    Returns:
        ``(R, V)`` or ``(R, C)`` float32. The upper tail, which decides rare draws, keeps full relative precision.
    """
    z = seeds.unsqueeze(-1) + index * _signed(GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(MIX1)
    z = (z ^ _shift(z, 27)) * _signed(MIX2)
    bits = _shift(z ^ _shift(z, 31), 11)
    v = ((bits.to(torch.float32) + 0.5) * 2.0**-53).clamp_(max=1.0 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
