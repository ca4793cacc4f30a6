"""Vectors to codes and words, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen

from arbi_plugin_tkv.codec.basis import Basis
from arbi_plugin_tkv.codec.grid import GridFitter
from arbi_plugin_tkv.codec.layout import SideLayout
from arbi_plugin_tkv.codec.packing import pack, unpack
from arbi_plugin_tkv.codec.words import join_word, split_word

__all__ = ["Side", "SideCodec", "decode"]

LIMIT = 30000.0
"""Greatest number encoded."""


@frozen(eq=False)
class Side:
    """How one side (keys or values) of one layer is stored.

    Attributes:
        layout: bits and bytes.
        basis: coordinates.
    """

    layout: SideLayout
    basis: Basis


class SideCodec:
    """Encodes sides of one width together, because a decode step on a CPU is ruled by the number of operations.

    Args:
        sides: all of the same number of heads and the same width.
        device: where vectors lie.
    """

    def __init__(self, sides: Sequence[Side], device: torch.device) -> None:
        self._sides = tuple(sides)
        self._fitter = GridFitter([(s.layout.bits_a, s.layout.bits_b) for s in sides], device)
        self._encode = torch.cat([s.basis.encode for s in sides]).to(device)
        self._mean = torch.stack([s.basis.mean for s in sides]).unsqueeze(1).to(device)
        self._first = torch.stack([s.basis.first for s in sides]).unsqueeze(1).to(device)
        self._shifts = bool(self._mean.any() or self._first.any())

    def encode(
        self, vectors: Sequence[torch.Tensor], positions: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Encode one tensor per side. NaN is taken for 0 and infinity for a great number; only their vector suffers.

        Args:
            vectors: ``(N, kv_heads, dim)`` each.
            positions: ``(N,)`` positions in their sequences.

        Returns:
            Per side, codes ``(N, kv_heads, code_bytes)`` uint8 and words ``(N, kv_heads)`` int32.
        """
        x = torch.stack([v.float() for v in vectors])
        if self._shifts:
            x -= torch.where((positions == 0)[:, None, None], self._first, self._mean)
        sides, count, heads, dim = x.shape
        x = x.clamp_(-LIMIT, LIMIT).nan_to_num_(0.0)
        y = torch.bmm(x.transpose(1, 2).reshape(sides * heads, count, dim), self._encode)
        y = y.view(sides, heads, count, 2, -1).transpose(1, 2)
        codes, scale, offset = self._fitter.fit(y)
        words = join_word(scale, offset)
        codes = codes.flatten(-2)
        return [(pack(codes[i], s.layout), words[i]) for i, s in enumerate(self._sides)]


def decode(data: torch.Tensor, words: torch.Tensor, layout: SideLayout) -> torch.Tensor:
    """Codes ``(..., code_bytes)`` and words ``(...)`` to coordinates ``(..., padded)`` float32."""
    a, b = unpack(data, layout)
    scale_a, offset, scale_b = (f.unsqueeze(-1) for f in split_word(words, layout.bits_a))
    half_a, half_b = (2**layout.bits_a - 1) / 2, (2**layout.bits_b - 1) / 2
    return torch.cat(((a.float() - half_a + offset) * scale_a, (b.float() - half_b) * scale_b), dim=-1)
