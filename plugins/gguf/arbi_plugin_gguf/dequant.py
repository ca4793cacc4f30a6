"""Turns packed GGUF blocks into float32.

Q4_0, Q4_1 and Q8_0, which carry the bulk of small models, are unpacked by torch; the other types by the `gguf` package.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

__all__ = ["SUPPORTED", "as_blocks", "dequantize", "q4_codes", "q8_codes", "unpack_q4"]

SUPPORTED = frozenset({
    Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K,
    Kind.Q6_K,
})  # fmt: skip


def dequantize(raw: np.ndarray, kind: Kind) -> torch.Tensor:
    """Dequantise rows.

    Args:
        raw: ``(rows, row_bytes)`` uint8.
        kind: their type; one of `SUPPORTED`.

    Returns:
        ``(rows, columns)``: float32, or the stored dtype for F32, F16 and BF16.
    """
    if kind in {Kind.F32, Kind.F16, Kind.BF16}:
        dtype = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}[kind]
        return _tensor(raw).view(dtype).clone()
    if kind in {Kind.Q4_0, Kind.Q4_1}:
        codes, scale, zero = q4_codes(raw, kind)
        return torch.addcmul(zero.unsqueeze(-1), codes.float(), scale.unsqueeze(-1)).flatten(1)
    if kind is Kind.Q8_0:
        codes, scale = q8_codes(raw)
        return (codes.float() * scale.unsqueeze(-1)).flatten(1)
    return torch.from_numpy(np.ascontiguousarray(quants.dequantize(raw, kind)))


def _tensor(raw: np.ndarray) -> torch.Tensor:
    """View bytes as a tensor. They may be a read-only map; nobody writes to them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.ascontiguousarray(raw))


def as_blocks(raw: np.ndarray, kind: Kind) -> torch.Tensor:
    """View ``(rows, row_bytes)`` as ``(rows, blocks, block_bytes)``; no copy where the rows are contiguous."""
    return _tensor(raw).view(raw.shape[0], -1, GGML_QUANT_SIZES[kind][1])


def unpack_q4(raw: torch.Tensor, kind: Kind, out: torch.Tensor) -> None:
    """Dequantise Q4_0 or Q4_1 rows into a float32 buffer, in few passes: the wide products do this every time.

    Args:
        raw: ``(rows, blocks, block_bytes)`` uint8.
        kind: Q4_0 or Q4_1.
        out: ``(rows, blocks * 32)`` float32, overwritten.
    """
    rows, blocks, size = raw.shape
    header = size - 16
    halves = raw[..., :header].contiguous().view(torch.float16).float()
    scale = halves[..., 0].unsqueeze(-1)
    zero = -8.0 * scale if kind is Kind.Q4_0 else halves[..., 1].unsqueeze(-1)
    packed = raw[..., header:]
    view = out.view(rows, blocks, 2, 16)
    view[:, :, 0].copy_(packed & 15)
    view[:, :, 1].copy_(packed >> 4)
    flat = out.view(rows, blocks, 32)
    torch.addcmul(zero, flat, scale, out=flat)


def q4_codes(raw: np.ndarray, kind: Kind) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unpack Q4_0 or Q4_1 rows: ``value = code * scale + zero``.

    Returns:
        Codes ``(rows, blocks, 32)`` uint8 in 0..15, scale and zero ``(rows, blocks)`` float32.
    """
    size = 18 if kind is Kind.Q4_0 else 20
    blocks = _tensor(raw).view(raw.shape[0], -1, size)
    halves = blocks[..., : size - 16].contiguous().view(torch.float16).float()
    scale = halves[..., 0]
    zero = -8.0 * scale if kind is Kind.Q4_0 else halves[..., 1]
    packed = blocks[..., size - 16 :]
    codes = torch.cat((packed & 15, packed >> 4), dim=-1)
    return codes, scale, zero


def q8_codes(raw: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack Q8_0 rows: codes ``(rows, blocks, 32)`` int8 and scale ``(rows, blocks)`` float32."""
    blocks = _tensor(raw).view(raw.shape[0], -1, 34)
    scale = blocks[..., :2].contiguous().view(torch.float16).float().squeeze(-1)
    return blocks[..., 2:].contiguous().view(torch.int8), scale
