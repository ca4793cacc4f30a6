"""The codec as loops over single numbers: the specification that `sides`, the stores and kernels are tested against.

Written for reading, not for speed: one vector of one head at a time, Python integers and floats (float64), bytes
addressed one by one. It shares nothing with the fast code but the layout and the basis.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch

from arbi_plugin_tkv.codec.basis import Basis
from arbi_plugin_tkv.codec.layout import PageLayout, SideLayout

__all__ = ["attend", "read_code", "read_page", "read_vector", "read_word", "turn_back", "write_code"]


def write_code(block: bytearray, places: Sequence[int], layout: SideLayout, pair: int, a: int, b: int) -> None:
    """Put the codes of one pair into a vector's bytes; ``places[i]`` is where its byte `i` lies in `block`."""
    field = a | b << layout.bits_a
    for bits, first in layout.planes:
        each = layout.pairs * bits // 8
        part, field = field & (1 << bits) - 1, field >> bits
        block[places[first + pair % each]] |= part << bits * (pair // each)


def read_code(block: bytes, places: Sequence[int], layout: SideLayout, pair: int) -> tuple[int, int]:
    """Codes of both halves of one pair."""
    field = shift = 0
    for bits, first in layout.planes:
        each = layout.pairs * bits // 8
        part = block[places[first + pair % each]] >> bits * (pair // each) & (1 << bits) - 1
        field |= part << shift
        shift += bits
    return field & (1 << layout.bits_a) - 1, field >> layout.bits_a


def read_word(block: bytes, at: int, bits_a: int) -> tuple[float, float, float]:
    """``(scale_a, offset, scale_b)`` of the little-endian word at a byte; the offset in units of ``scale_a``."""
    (word,) = struct.unpack_from("<I", block, at)
    steps = word >> 12 & 0xFFF
    if steps >= 2048:
        steps -= 4096
    unit = 1 / 32 if bits_a <= 6 else 2.0 ** (bits_a - 11)
    return _half((word & 0xFFF) << 3), steps * unit, _half((word >> 24) << 7)


def read_vector(block: bytes, places: Sequence[int], word_at: int, layout: SideLayout) -> list[float]:
    """The coordinates of one vector."""
    scale_a, offset, scale_b = read_word(block, word_at, layout.bits_a)
    low, high = [], []
    for pair in range(layout.pairs):
        a, b = read_code(block, places, layout, pair)
        low.append(scale_a * (a - (2**layout.bits_a - 1) / 2 + offset))
        high.append(scale_b * (b - (2**layout.bits_b - 1) / 2))
    return low + high


def read_page(block: bytes, layout: PageLayout, token: int) -> tuple[list[float], list[float]]:
    """Coordinates of the key and of the value of one token in one head's block."""
    key, value, size = layout.key, layout.value, layout.page_size
    key_places = [layout.key_codes + token * key.code_bytes + i for i in range(key.code_bytes)]
    value_places = [layout.value_codes + i * size + token for i in range(value.code_bytes)]
    return (
        read_vector(block, key_places, layout.key_words + 4 * token, key),
        read_vector(block, value_places, layout.value_words + 4 * token, value),
    )


def turn_back(y: Sequence[float], basis: Basis, head: int, position: int) -> torch.Tensor:
    """A vector from its coordinates: ``(dim,)`` float64."""
    shift = basis.first if position == 0 else basis.mean
    return torch.tensor(y, dtype=torch.float64) @ basis.decode[head].double() + shift[head].double()


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last token: ``(H, D)`` queries over ``(S, Hkv, D)`` keys; ``(H, Dv)`` float64.

    Keys and values are whatever the reader sees: decoded ones, or raw ones of its own chunk.
    """
    heads, group = q.shape[0], q.shape[0] // keys.shape[1]
    out = torch.zeros(heads, values.shape[-1], dtype=torch.float64)
    first = 0 if window is None else max(0, keys.shape[0] - window)
    for h in range(heads):
        logits = []
        for t in range(first, keys.shape[0]):
            logit = float(q[h].double() @ keys[t, h // group].double()) * scale
            logits.append(logit if soft_cap is None else soft_cap * math.tanh(logit / soft_cap))
        top = max(logits if sinks is None else [*logits, float(sinks[h])])
        weights = [math.exp(x - top) for x in logits]
        total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[h]) - top))
        for t, weight in enumerate(weights, first):
            out[h] += weight / total * values[t, h // group].double()
    return out


def _half(bits: int) -> float:
    (number,) = struct.unpack("<e", struct.pack("<H", bits))
    return float(number)
