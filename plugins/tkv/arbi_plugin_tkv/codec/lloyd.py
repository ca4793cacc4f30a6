"""Lloyd-Max scalar codebooks: the least mean squared error of a fixed number of levels.

Not what pages are stored in (`arbi_plugin_tkv.codec.grid`), but what that is measured against.
"""

from __future__ import annotations

import functools
import math

import torch

__all__ = ["fit_codebook", "gaussian_codebook", "quantize"]

ROUNDS = 2000
TINY = 1e-20


@functools.lru_cache(maxsize=16)
def gaussian_codebook(bits: int) -> torch.Tensor:
    """Levels for a standard normal variable: ``(2**bits,)`` float32, ascending, symmetric.

    Source: Lloyd (1957/1982) and Max (1960).
    """
    levels = 2**bits
    quantiles = (torch.arange(levels, dtype=torch.float64) + 0.5) / levels
    centres = torch.erfinv(2 * quantiles - 1) * math.sqrt(2)
    for _ in range(ROUNDS):
        edges = torch.cat((torch.tensor([-math.inf]), (centres[1:] + centres[:-1]) / 2, torch.tensor([math.inf])))
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        mass = torch.special.ndtr(edges)
        moved = (density[:-1] - density[1:]) / (mass[1:] - mass[:-1])
        if torch.allclose(moved, centres, rtol=0, atol=1e-10):
            break
        centres = moved
    return ((centres - centres.flip(0)) / 2).float()


def fit_codebook(samples: torch.Tensor, bits: int, rounds: int = 50) -> torch.Tensor:
    """Levels for samples: ``(n,)`` to ``(2**bits,)`` float32, ascending; starts from the Gaussian ones.

    Raises:
        ValueError: there are no finite samples.
    """
    samples = samples.flatten().double()
    samples = samples[samples.isfinite()].sort().values
    if not samples.numel():
        raise ValueError("a codebook cannot be fitted to no samples")
    centres = gaussian_codebook(bits).double() * samples.std(unbiased=False) + samples.mean()
    total = torch.cat((torch.zeros(1, dtype=torch.float64), samples.cumsum(0)))
    for _ in range(rounds):
        cuts = torch.searchsorted(samples, (centres[1:] + centres[:-1]) / 2)
        cuts = torch.cat((torch.tensor([0]), cuts, torch.tensor([samples.numel()])))
        count = cuts[1:] - cuts[:-1]
        centres = torch.where(count > 0, (total[cuts[1:]] - total[cuts[:-1]]) / count.clamp_min(1), centres)
    return centres.float()


def quantize(x: torch.Tensor, codebook: torch.Tensor, *, norm_correction: bool = True) -> torch.Tensor:
    """Round vectors ``(..., dim)`` to codebook levels times one float16 scale each; returns what is read back.

    The scale is the root mean square of the vector; with `norm_correction` it is changed so that the vector that is
    read back has the length of the original (TurboQuant, Zandieh et al., 2025).
    """
    root = math.sqrt(x.shape[-1])
    scale = x.norm(dim=-1, keepdim=True) / root
    edges = (codebook[1:] + codebook[:-1]) / 2
    levels: torch.Tensor = codebook[torch.bucketize((x / scale.clamp_min(TINY)).contiguous(), edges)]
    if norm_correction:
        scale = scale * root / levels.norm(dim=-1, keepdim=True).clamp_min(TINY)
    read: torch.Tensor = scale.half().float() * levels
    return read
