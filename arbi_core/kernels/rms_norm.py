"""RMS norm (Zhang and Sennrich, 2019), alone and with the residual addition before it.

Moves, for N rows of D numbers of b bytes: the norm 2 N D b, with the addition 4 N D b (two read, two written); about 4
operations a number. It is bound by memory, and at decode sizes by its launch: 8 rows of 4096 in bf16 are 0.3 MB.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from arbi_core.kernels.device import uses_triton

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``.

    Args:
        x: ``(..., D)``, any floating dtype; computed in float32.
        weight: ``(D,)``.
        eps: added to the mean square.

    Returns:
        The same shape and dtype.
    """
    if not uses_triton(x):
        return F.rms_norm(x, weight.shape, weight, eps)
    from arbi_core.kernels.gpu.rms_norm import launch

    return launch(x, None, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `x` to `residual` IN PLACE and return the norm of the sum; arguments as `rms_norm`, both of one shape."""
    if not uses_triton(x):
        return F.rms_norm(residual.add_(x), weight.shape, weight, eps)
    from arbi_core.kernels.gpu.rms_norm import launch

    return launch(x, residual, weight, eps)
