"""From the fused projection to queries and keys: head norms and rotary embedding in one pass.

Moves 2 N (H + Hkv) D b bytes for N tokens (read once, written once) and the tokens' cosines and sines; about 12
operations a number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from arbi_core.kernels.device import uses_triton

if TYPE_CHECKING:
    from arbi_core.model.norm import RMSNorm

__all__ = ["HeadNorms", "Rotation", "qk_rope"]


@frozen(eq=False)
class HeadNorms:
    """RMS norms over each query and each key head.

    Attributes:
        q: of queries.
        k: of keys; the same epsilon.
    """

    q: RMSNorm
    k: RMSNorm


Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cos and signed sin of a step's tokens, each ``(N, 1, dim)``: `arbi_core.model.rope.RotaryEmbedding.at`."""


def qk_rope(
    qk: torch.Tensor, heads: int, norms: HeadNorms | None, rope: Rotation | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise and rotate queries and keys.

    Args:
        qk: ``(N, H + Hkv, D)``, queries first; may be a view of a wider projection.
        heads: H.
        norms: the head norms, or None.
        rope: rotations (GPT-NeoX pairs, Su et al., 2021), or None; numbers past the table's width pass through.

    Returns:
        Queries ``(N, H, D)`` and keys ``(N, Hkv, D)`` of the same dtype.
    """
    if norms is None and rope is None:
        return qk[:, :heads], qk[:, heads:]
    if uses_triton(qk):
        from arbi_core.kernels.gpu.qk_rope import launch

        return launch(qk, heads, norms, rope)
    from arbi_core.model.rope import rotate

    if norms is not None:
        q, k = norms.q.forward(qk[:, :heads]), norms.k.forward(qk[:, heads:])
        qk = torch.cat((q, k), dim=1)
    if rope is not None:
        qk = rotate(qk, *rope)
    return qk[:, :heads], qk[:, heads:]
