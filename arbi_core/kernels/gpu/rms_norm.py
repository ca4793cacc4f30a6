"""Triton form of `arbi_core.kernels.rms_norm`: one program a row, the row in registers."""

# Triton reads the source of its functions: they have no annotations but constexpr, which it spells in capitals.
# ruff: noqa: ANN001, ANN202, N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["launch"]


@triton.jit
def _rms_norm(x_ptr, residual_ptr, weight_ptr, y_ptr, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    x = tl.load(x_ptr + row + cols, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row + cols, mask=inside, other=0.0).to(tl.float32)
        # The sum is rounded before the norm, as the stored residual is.
        x = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row + cols, x, mask=inside)
        x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row + cols, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=inside)


def launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm of ``(..., D)``, after adding it to `residual` in place if there is one."""
    x = x.contiguous()
    y = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    if rows:
        block = triton.next_power_of_2(width)
        warps = min(16, max(1, block // 512))
        _rms_norm[(rows,)](
            x, x if residual is None else residual, weight, y, width, eps, residual is not None, block, num_warps=warps
        )
    return y
