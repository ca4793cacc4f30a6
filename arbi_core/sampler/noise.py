"""Counter-based randomness: a draw depends on (base seed, position) and on nothing else.

So the same request draws the same tokens whatever shares its batch, and every rank draws the same. The generator is the
SplitMix64 finaliser (Steele, Lea and Flood, 2014); a token is drawn by inverting the cumulative distribution.
"""

from __future__ import annotations

import torch

__all__ = ["draw", "row_bits", "row_uniform"]

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB


def row_bits(base: int, position: int) -> int:
    """64 random bits for one draw of a request: a scramble of its base seed and its number of drawn tokens."""
    z = (_scramble(base & MASK) + (position + 1) * GOLDEN) & MASK
    return _scramble(z)


def row_uniform(base: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    return (row_bits(base, position) >> 11) * 2.0**-53


def draw(log_weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw one index per row.

    Args:
        log_weights: ``(R, C)`` float32 unnormalised log-probabilities, at most 0 with the best at 0; -inf never drawn.
        uniforms: ``(R,)`` float64 in [0, 1).

    Returns:
        ``(R,)`` int64 column indices. The sum runs in float64, so that no likely token is favoured by rounding.
    """
    cumulative = log_weights.exp().cumsum(-1, dtype=torch.float64)
    target = uniforms.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_(max=log_weights.shape[-1] - 1)


def _scramble(z: int) -> int:
    z = ((z ^ (z >> 30)) * MIX1) & MASK
    z = ((z ^ (z >> 27)) * MIX2) & MASK
    return z ^ (z >> 31)
