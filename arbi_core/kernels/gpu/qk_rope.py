"""Triton form of `arbi_core.kernels.qk_rope`: a program takes one token and a few heads."""

# Triton reads the source of its functions: they have no annotations but constexpr, which it spells in capitals.
# ruff: noqa: ANN001, ANN202, N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from arbi_core.kernels.qk_rope import HeadNorms, Rotation

__all__ = ["launch"]

HEADS_PER_PROGRAM = 8


@triton.jit
def _qk_rope(
    x_ptr,
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    token_stride,
    q_heads,
    k_heads,
    eps,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    cols = tl.arange(0, BLOCK_D)
    is_q = heads < q_heads
    there = (heads < q_heads + k_heads)[:, None]
    inside = there & (cols < DIM)[None, :]
    source = x_ptr + token * token_stride + heads[:, None] * DIM
    x = tl.load(source + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    rotates = cols < ROTARY
    # The other number of the pair; a column beyond the rotated part is its own.
    pair = tl.where(rotates, tl.where(cols < ROTARY // 2, cols + ROTARY // 2, cols - ROTARY // 2), cols)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / DIM + eps)
        q_weight = tl.load(q_weight_ptr + cols, mask=cols < DIM, other=0.0).to(tl.float32)
        k_weight = tl.load(k_weight_ptr + cols, mask=cols < DIM, other=0.0).to(tl.float32)
        x = x * scale[:, None] * tl.where(is_q[:, None], q_weight[None, :], k_weight[None, :])
    if ROTATE:
        other = tl.load(source + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        if NORM:
            q_other = tl.load(q_weight_ptr + pair, mask=cols < DIM, other=0.0).to(tl.float32)
            k_other = tl.load(k_weight_ptr + pair, mask=cols < DIM, other=0.0).to(tl.float32)
            other = other * scale[:, None] * tl.where(is_q[:, None], q_other[None, :], k_other[None, :])
        row = token * ROTARY
        cos = tl.load(cos_ptr + row + cols, mask=rotates, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + row + cols, mask=rotates, other=0.0).to(tl.float32)
        x = x * cos[None, :] + other * sin[None, :]
    q_rows = q_ptr + (token * q_heads + heads[:, None]) * DIM + cols[None, :]
    k_rows = k_ptr + (token * k_heads + heads[:, None] - q_heads) * DIM + cols[None, :]
    tl.store(q_rows, x.to(q_ptr.dtype.element_ty), mask=inside & is_q[:, None])
    tl.store(k_rows, x.to(k_ptr.dtype.element_ty), mask=inside & (heads >= q_heads)[:, None])


def launch(
    qk: torch.Tensor, heads: int, norms: HeadNorms | None, rope: Rotation | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `arbi_core.kernels.qk_rope.qk_rope`."""
    tokens, both, dim = qk.shape
    if qk.stride(-1) != 1 or qk.stride(1) != dim:
        qk = qk.contiguous()
    q = qk.new_empty((tokens, heads, dim))
    k = qk.new_empty((tokens, both - heads, dim))
    if tokens:
        none = qk
        _qk_rope[(tokens, triton.cdiv(both, HEADS_PER_PROGRAM))](
            qk,
            q,
            k,
            none if norms is None else norms.q.weight,
            none if norms is None else norms.k.weight,
            none if rope is None else rope[0],
            none if rope is None else rope[1],
            qk.stride(0),
            heads,
            both - heads,
            0.0 if norms is None else norms.q.eps,
            dim,
            0 if rope is None else rope[0].shape[-1],
            norms is not None,
            rope is not None,
            HEADS_PER_PROGRAM,
            triton.next_power_of_2(dim),
            num_warps=4,
        )
    return q, k
