"""Root-mean-square layer norm (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from arbi_core.kernels.rms_norm import add_rms_norm, rms_norm
from arbi_core.model.loadable import LoadableModule

if TYPE_CHECKING:
    from arbi_core.loader.base import WeightPiece

__all__ = ["RMSNorm"]


class RMSNorm(LoadableModule):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32.

    Args:
        size: width of the last dimension.
        eps: added to the mean square.
        dtype: dtype of the (meta) weight.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.shape = (size,)
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device="meta"), requires_grad=False)
        self._scaled: torch.Tensor | None = None

    def load_pieces(self, leaf: str, pieces: Sequence[WeightPiece], device: torch.device, dtype: torch.dtype) -> None:
        """See `LoadableModule`; on the CPU in float32 a weight for the short form is kept too."""
        super().load_pieces(leaf, pieces, device, dtype)
        self._scaled = None
        if device.type == "cpu" and dtype is torch.float32:
            root = math.sqrt(self.shape[0])
            self._scaled = self.weight.detach() * root
            self._floor = torch.tensor(root * math.sqrt(self.eps))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(..., size)`` to the same shape."""
        if self._scaled is None:
            return rms_norm(x, self.weight, self.eps)
        # hypot(|x|, sqrt(n eps)) is sqrt(n) times the root of the mean square plus eps: four small operations where
        # the composite has eight, which is what one decode row costs.
        length = torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), self._floor)
        return torch.div(x, length).mul_(self._scaled)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add `x` to `residual` IN PLACE and return the norm of the sum."""
        if self._scaled is None:
            return add_rms_norm(x, residual, self.weight, self.eps)
        return self.forward(residual.add_(x))
