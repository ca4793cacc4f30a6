"""Torch's own varlen flash attention for chunks that begin their sequences: their keys need not be read from pages.

It is FlashAttention-2, about 350 to 400 TFLOP/s on this kind of chip, and reads keys and values as the layer made them.
"""

from __future__ import annotations

import torch

__all__ = ["attend_fresh", "can_attend_fresh"]

WIDEST = 256


def can_attend_fresh(
    device: torch.device, dtype: torch.dtype, dim: int, value_dim: int, *, soft_cap: float | None, sinks: bool
) -> bool:
    """Whether torch has the kernel and it can do such a layer."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and dim == value_dim
        and dim % 8 == 0
        and dim <= WIDEST
        and soft_cap is None
        and not sinks
        and hasattr(torch.ops.aten, "_flash_attention_forward")
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def attend_fresh(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend each row's tokens to the row's own tokens before them.

    Args:
        q: ``(N, H, D)``.
        k: ``(N, kv_heads, D)`` of the same tokens.
        v: ``(N, kv_heads, D)``.
        starts: ``(B + 1,)`` int32 on the device, where rows begin, from 0.
        longest: tokens of the longest row.
        out: ``(N, H, D)``.
        scale: multiplies products of queries and keys.
        window: sliding window, the query's own token included.

    Returns:
        `out`.
    """
    left = None if window is None else window - 1
    right = None if window is None else 0
    result = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, 0.0, True, False,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out.copy_(result[0])
