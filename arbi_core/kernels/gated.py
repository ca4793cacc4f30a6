"""Gated activations: ``act(gate) * up`` over the two halves of one projection.

Moves 3 N I b bytes for N rows of I numbers of b bytes (two read, one written); bound by memory, at decode by its
launch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from arbi_core.kernels.device import uses_triton

__all__ = ["gated"]


def gated(gate_up: torch.Tensor, *, silu: bool) -> torch.Tensor:
    """``act(gate) * up``.

    Args:
        gate_up: ``(N, 2 I)``, gate first.
        silu: SiLU (Elfwing et al., 2017) if true, else GELU in its tanh form (Hendrycks and Gimpel, 2016).

    Returns:
        ``(N, I)`` of the same dtype.
    """
    if not uses_triton(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) if silu else F.gelu(gate, approximate="tanh")).mul_(up)
    from arbi_core.kernels.gpu.gated import launch

    return launch(gate_up, silu=silu)
