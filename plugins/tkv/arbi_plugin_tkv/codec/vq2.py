"""Group-2 vector codebooks: one code for two neighbouring coordinates.

Like `arbi_plugin_tkv.codec.lloyd`, a yardstick for the grids that pages are stored in: it gains what a hexagonal cell
and the joint density of two coordinates give, and costs a table of ``4**bits`` entries in every kernel.
"""

from __future__ import annotations

import math

import torch

from arbi_plugin_tkv.codec.lloyd import gaussian_codebook

__all__ = ["fit_codebook", "quantize"]

BLOCK = 4096
TINY = 1e-20


def fit_codebook(samples: torch.Tensor, bits: int, rounds: int = 20) -> torch.Tensor:
    """k-means over pairs, started from the product of two Gaussian codebooks.

    Args:
        samples: ``(n, 2)`` pairs of coordinates of unit variance.
        bits: bits of one coordinate.
        rounds: of Lloyd's algorithm.

    Returns:
        ``(4**bits, 2)`` float32.
    """
    levels = gaussian_codebook(bits)
    centres = torch.cartesian_prod(levels, levels).contiguous()
    samples = samples.float()
    for _ in range(rounds):
        code = _nearest(samples, centres)
        count = torch.bincount(code, minlength=len(centres)).unsqueeze(1)
        total = torch.zeros_like(centres).index_add_(0, code, samples)
        centres = torch.where(count > 0, total / count.clamp_min(1), centres)
    return centres


def quantize(x: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """Round vectors ``(..., dim)``, `dim` even, to codebook pairs times one float16 scale each, norms corrected."""
    root = math.sqrt(x.shape[-1])
    norm = x.norm(dim=-1, keepdim=True)
    unit = x / (norm / root).clamp_min(TINY)
    levels = codebook[_nearest(unit.reshape(-1, 2), codebook)].view_as(x)
    scale = norm / levels.norm(dim=-1, keepdim=True).clamp_min(TINY)
    read: torch.Tensor = scale.half().float() * levels
    return read


def _nearest(pairs: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """Index of the nearest centre: ``(n, 2)`` to ``(n,)``."""
    bias = centres.square().sum(1) / 2
    parts = torch.split(pairs, BLOCK)
    return torch.cat([(part @ centres.T - bias).argmax(1) for part in parts])
