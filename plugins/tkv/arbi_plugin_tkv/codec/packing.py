"""Codes to bytes and back, as `arbi_plugin_tkv.codec.layout` lays them out."""

from __future__ import annotations

import torch

from arbi_plugin_tkv.codec.layout import SideLayout

__all__ = ["pack", "unpack"]


def pack(codes: torch.Tensor, layout: SideLayout) -> torch.Tensor:
    """``(..., padded)`` uint8 codes, halves ``a`` and ``b`` side by side, to ``(..., code_bytes)`` uint8.

    Codes must be below ``2 ** bits_a`` and ``2 ** bits_b``.
    """
    pairs = layout.pairs
    low, high = codes[..., :pairs], codes[..., pairs:]
    if layout.bits_a + layout.bits_b == 8:
        return low | high << layout.bits_a
    field = low.to(torch.int32) | high.to(torch.int32) << layout.bits_a
    parts, shift = [], 0
    for bits, _ in layout.planes:
        plane = (field >> shift & (1 << bits) - 1).to(torch.uint8)
        each = pairs * bits // 8
        packed = plane[..., :each]
        for i in range(1, 8 // bits):
            packed = packed | plane[..., i * each : (i + 1) * each] << i * bits
        parts.append(packed)
        shift += bits
    return torch.cat(parts, dim=-1)


def unpack(data: torch.Tensor, layout: SideLayout, axis: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to the codes of both halves.

    Args:
        data: uint8, `layout.code_bytes` along `axis`.
        layout: how they lie.
        axis: where they lie; values keep tokens on the last axis.

    Returns:
        Two uint8 tensors of `data`'s shape with `layout.pairs` along `axis`.
    """
    mask = (1 << layout.bits_a) - 1
    if layout.bits_a + layout.bits_b == 8:
        return data & mask, data >> layout.bits_a
    pairs, shift = layout.pairs, 0
    total = layout.bits_a + layout.bits_b
    if total == 16:
        return data.narrow(axis, 0, pairs), data.narrow(axis, pairs, pairs)
    field: torch.Tensor | None = None
    for bits, start in layout.planes:
        each = pairs * bits // 8
        part = data.narrow(axis, start, each)
        if bits < 8:
            part = torch.cat([part >> i * bits & (1 << bits) - 1 for i in range(8 // bits)], dim=axis)
        if total > 8:
            part = part.to(torch.int32)
        field = part << shift if field is None else field | part << shift
        shift += bits
    assert field is not None  # noqa: S101  # every layout has a plane
    return (field & mask).to(torch.uint8), (field >> layout.bits_a).to(torch.uint8)
