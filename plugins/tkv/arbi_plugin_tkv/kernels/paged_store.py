"""Write keys and values of a step to their pages.

Layout: keys ``(pages, kv_heads, page_size, key_dim)``, values ``(pages, kv_heads, page_size, value_dim)``. A page of
one head is one piece of memory (16 KiB at 64 tokens of 128 two-byte numbers), read by one program in whole lines;
tokens of a head follow each other, so a tile of several small pages is made of pieces of ``page_size * dim`` numbers.
Values are token-major too: a 16-bit operand may lie either way for tensor cores, so turning it would only cost stores.
Bytes moved: every number is read once and written once: 4 KiB + 4 KiB a token at 8 heads of 128 two-byte numbers; 256
tokens 2 MiB, 0.5 us at 4.3 TB/s, under the cost of a launch; 8,192 tokens 64 MiB, 16 us. No arithmetic.
Tile: 16 vectors (token and head) a program, so that a decode step of 256 rows fills the device.
Expected fraction of the limit: 0.8 for chunks; a decode step is bound by the launch.
"""

# Triton reads the source of its functions: they have no annotations but constexpr, which it spells in capitals.
# ruff: noqa: ANN001, ANN202, N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from arbi_plugin_tkv.kernels.paged_splits import next_power_of_2

__all__ = ["store"]

VECTORS = 16


@triton.jit
def _copy(x, pages, slot, vector, ok, token_stride, head_stride, page_stride, HEADS: tl.constexpr, PAGE: tl.constexpr,
          D: tl.constexpr, DP: tl.constexpr):  # fmt: skip
    channel = tl.arange(0, DP)
    head = vector % HEADS
    mask = ok[:, None] & (channel < D)[None, :]
    source = (vector // HEADS).to(tl.int64) * token_stride + head * head_stride
    target = slot // PAGE * page_stride + (head * PAGE + slot % PAGE) * D
    numbers = tl.load(x + source[:, None] + channel[None, :], mask=mask)
    tl.store(pages + target[:, None] + channel[None, :], numbers.to(pages.dtype.element_ty), mask=mask)


@triton.jit
def _store(
    k, v, k_pages, v_pages, slots, count, k_token, k_head, v_token, v_head, k_page, v_page,
    HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    VECTORS: tl.constexpr,
):  # fmt: skip
    vector = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    ok = vector < count * HEADS
    slot = tl.load(slots + vector // HEADS, mask=ok, other=0).to(tl.int64)
    _copy(k, k_pages, slot, vector, ok, k_token, k_head, k_page, HEADS, PAGE, D, DP)
    _copy(v, v_pages, slot, vector, ok, v_token, v_head, v_page, HEADS, PAGE, V, VP)


def store(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
    """Write a step's keys and values.

    Rows that pad a batch write to slots of the null page 0; which of them wins is not defined.

    Args:
        k: ``(N, kv_heads, D)``, any strides but the last, which is 1.
        v: ``(N, kv_heads, Dv)``, likewise.
        slots: ``(N,)`` int64, ``page * page_size + offset``.
        k_pages: ``(pages, kv_heads, page_size, D)``, each page contiguous.
        v_pages: ``(pages, kv_heads, page_size, Dv)``, each page contiguous.
    """
    count, heads, dim = k.shape
    value_dim = v.shape[-1]
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError(f"keys and values must have contiguous vectors, not strides {k.stride()} and {v.stride()}")
    if not count:
        return
    _store[(triton.cdiv(count * heads, VECTORS),)](
        k, v, k_pages, v_pages, slots, count, k.stride(0), k.stride(1), v.stride(0), v.stride(1), k_pages.stride(0),
        v_pages.stride(0), HEADS=heads, PAGE=k_pages.shape[2], D=dim, DP=next_power_of_2(dim), V=value_dim,
        VP=next_power_of_2(value_dim), VECTORS=VECTORS, num_warps=4,
    )  # fmt: skip
