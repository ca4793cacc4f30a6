"""Uniform grids fitted to one vector: codes, a scale, an offset.

A uniform grid loses nothing to a Lloyd-Max one here, because its clipping and its scale are fitted to every vector, and
its codes are operands of 8-bit tensor cores as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from arbi_plugin_tkv.codec.words import FRACTION_BITS, OFFSETS, SCALE_LIMIT, offset_step

__all__ = ["CLIPPING", "GridFitter"]

CLIPPING = (1.07, 1.0, 0.93, 0.86, 0.8)
"""Shares of a half's range that are tried for its grid; above 1 because a scale may be rounded down."""
TINY = 1e-20


class GridFitter:
    """Fits the two grids of every vector of one or more sides at once.

    Args:
        bits: ``(bits_a, bits_b)`` of every side.
        device: where vectors lie.
    """

    def __init__(self, bits: Sequence[tuple[int, int]], device: torch.device) -> None:
        top = torch.tensor(bits, dtype=torch.float32, device=device).exp2() - 1
        self._half = (top / 2).view(-1, 1, 1, 2, 1)
        self._shares = torch.tensor(CLIPPING, device=device).view(-1, 1, 1, 1, 1, 1) / self._half
        steps = [offset_step(a) for a, _ in bits]
        self._step = torch.tensor(steps, device=device).view(-1, 1, 1, 1, 1)
        self._has = torch.tensor((1.0, 0.0), device=device).view(2, 1)
        drop = torch.tensor([10 - f for f in FRACTION_BITS], dtype=torch.int16, device=device)
        self._add = (1 << drop - 1).view(2, 1)
        self._mask = (-1 << drop).view(2, 1)

    def fit(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Grids for ``x ~ scale * (code - (2**bits - 1) / 2 + offset * offset_step)``; half ``b`` has no offset.

        For each clipping: codes from the clipped range, then the scale that fits those codes best (least squares: the
        error is orthogonal to what is read back, which is what the norm correction of TurboQuant, Zandieh et al.
        2025, is for), rounded as it is stored, then codes and offset again with that scale. The clipping with the
        least squared error wins.

        Args:
            x: ``(sides, N, heads, 2, width)`` float32, finite.

        Returns:
            Codes, uint8 of `x`'s shape; scales ``(sides, N, heads, 2)`` and offsets ``(sides, N, heads)``, float32 that
            `join_word` stores exactly. A half of zeros has scale 0.
        """
        half = self._half
        mean = x.mean(-1, keepdim=True) * self._has
        x = x - mean
        scale = x.abs().amax(-1, keepdim=True) * self._shares
        codes = self._codes(x, scale)
        scale = (x * codes).sum(-1, keepdim=True) / (codes * codes).sum(-1, keepdim=True)
        scale = scale.clamp_(0.0, SCALE_LIMIT).half()
        scale = (scale.view(torch.int16) + self._add & self._mask).view(torch.float16).float()
        codes = self._codes(x, scale)
        error = x - scale * codes
        step = scale * self._step
        offset = ((error.mean(-1, keepdim=True) + mean) * self._has / (step + TINY)).round_()
        offset.clamp_(-OFFSETS, OFFSETS - 1)
        error += mean - offset * step
        best = (error * error).sum(-1, keepdim=True).argmin(0, keepdim=True)
        codes = codes.gather(0, best.expand(1, *codes.shape[1:]))[0]
        scale, offset = scale.gather(0, best)[0, ..., 0], offset.gather(0, best)[0, ..., 0, 0]
        return (codes + half).to(torch.uint8), scale, offset

    def _codes(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Nearest grid points, centred: half-integers from ``-half`` to ``half``."""
        centred = (x / (scale + TINY)).floor_().add_(0.5)
        return centred.clamp_(-self._half, self._half)
