"""Root-mean-square layer norm (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from arbi_core.model.loadable import LoadableModule

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(..., size)`` to the same shape."""
        return F.rms_norm(x, self.shape, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add `x` to `residual` IN PLACE and return the norm of the sum."""
        residual.add_(x)
        return F.rms_norm(residual, self.shape, self.weight, self.eps)
