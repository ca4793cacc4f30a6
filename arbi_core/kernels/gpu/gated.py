"""Triton form of `arbi_core.kernels.gated`."""

# Triton reads the source of its functions: they have no annotations but constexpr, which it spells in capitals.
# ruff: noqa: ANN001, ANN202, N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["launch"]

BLOCK = 1024


@triton.jit
def _gated(x_ptr, y_ptr, width, SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    gate = tl.load(x_ptr + row * 2 * width + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + (row * 2 + 1) * width + cols, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        gate = gate / (1.0 + tl.exp(-gate))
    else:
        # tanh(u) = 1 - 2 / (exp(2 u) + 1), which cannot overflow into NaN
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = 0.5 * gate * (2.0 - 2.0 / (tl.exp(2.0 * u) + 1.0))
    tl.store(y_ptr + row * width + cols, (gate * up).to(y_ptr.dtype.element_ty), mask=inside)


def launch(gate_up: torch.Tensor, *, silu: bool) -> torch.Tensor:
    """``(N, 2 I)`` to ``(N, I)``."""
    gate_up = gate_up.contiguous()
    rows, both = gate_up.shape
    y = gate_up.new_empty((rows, both // 2))
    if rows:
        _gated[(rows, triton.cdiv(both // 2, BLOCK))](gate_up, y, both // 2, silu, BLOCK, num_warps=4)
    return y
