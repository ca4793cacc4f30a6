"""Pages of one layer: codes (``tkv-k{K}v{V}``) or numbers as they are (``tkv-bypass``)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from arbi_core.api import LayerState
from arbi_plugin_tkv.codec.basis import Basis
from arbi_plugin_tkv.codec.layout import PageLayout, SideLayout
from arbi_plugin_tkv.codec.packing import unpack
from arbi_plugin_tkv.codec.sides import Side, SideCodec, decode
from arbi_plugin_tkv.codec.words import split_word
from arbi_plugin_tkv.plan import Plan, RowPlan

__all__ = ["BypassStore", "CodecStore"]

BLOCK_NUMBERS = 1 << 20
"""Stored numbers of one side that are expanded at once."""


def select_pages(slab: torch.Tensor, row: RowPlan, first: int, last: int) -> torch.Tensor:
    """Pages `first` to `last` of a row out of ``(pages, ...)``: a view where they are consecutive."""
    if row.first_page >= 0:
        return slab.narrow(0, row.first_page + first, last - first)
    return slab.index_select(0, row.pages[first:last])


class BypassStore:
    """Keys and values side by side in one tensor ``kv``: ``(pages, page_size, kv_heads * (key_dim + value_dim))``.

    Args:
        kv_heads: heads of this rank.
        key_dim: width of a key.
    """

    def __init__(self, kv_heads: int, key_dim: int) -> None:
        self._heads = kv_heads
        self._key_width = kv_heads * key_dim

    def write(self, state: LayerState, plan: Plan, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy to the slots."""
        slab = state["kv"]
        slab.flatten(0, 1).index_copy_(0, plan.slots, torch.cat((k.flatten(1), v.flatten(1)), dim=1).to(slab.dtype))

    def read(self, state: LayerState, row: RowPlan, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views where pages are consecutive."""
        slab = state["kv"]
        size = slab.shape[1]
        first, last = start // size, -(-end // size)
        tokens = select_pages(slab, row, first, last).flatten(0, 1)[start - first * size : end - first * size]
        count = end - start
        keys, values = tokens[:, : self._key_width], tokens[:, self._key_width :]
        return (
            keys.view(count, self._heads, -1).transpose(0, 1).float(),
            values.view(count, self._heads, -1).transpose(0, 1).float(),
        )

    def scores(self, state: LayerState, row: RowPlan, start: int, end: int, q: torch.Tensor) -> torch.Tensor:
        """Queries times keys."""
        return torch.bmm(q, self.read(state, row, start, end)[0].transpose(1, 2))

    def mix(self, state: LayerState, row: RowPlan, start: int, end: int, p: torch.Tensor) -> torch.Tensor:
        """Weights times values."""
        return torch.bmm(p, self.read(state, row, start, end)[1])


class CodecStore:
    """Codes in one tensor ``tkv``: ``(pages, kv_heads, block_bytes)`` uint8, as `page_layout` lays them out.

    Args:
        layout: of a page.
        key: basis of keys, on the device.
        value: basis of values, on the device; its means are zero.
    """

    def __init__(self, layout: PageLayout, key: Basis, value: Basis) -> None:
        if value.mean.any() or value.first.any():
            raise ValueError("values are stored without a mean: softmax does not forgive it as it does for keys")
        self._layout = layout
        self._key, self._value = key, value
        sides = (Side(layout.key, key), Side(layout.value, value))
        groups = [sides] if layout.key.dim == layout.value.dim else [(s,) for s in sides]
        self._codecs = [SideCodec(group, key.encode.device) for group in groups]
        self._query = key.decode.transpose(1, 2).contiguous()
        self._mean = key.mean.unsqueeze(2)
        self._first = (key.first - key.mean).unsqueeze(2)
        self._has_mean, self._has_first = bool(key.mean.any()), bool(self._first.any())
        self._slab: torch.Tensor | None = None

    def _bind(self, state: LayerState) -> None:
        """Views of the parts of all pages."""
        slab = state["tkv"]
        if slab is self._slab:
            return
        self._slab = slab
        at, size = self._layout, self._layout.page_size
        pages, heads = slab.shape[:2]
        self._key_codes = slab[..., : at.value_codes].view(pages, heads, size, -1)
        codes = slab[..., at.value_codes : at.value_codes + size * at.value.code_bytes]
        self._value_codes = codes.view(pages, heads, -1, size)
        words = slab.view(torch.int32)
        self._key_words = words[..., at.key_words // 4 : at.value_words // 4]
        self._value_words = words[..., at.value_words // 4 :]

    def write(self, state: LayerState, plan: Plan, k: torch.Tensor, v: torch.Tensor) -> None:
        """Encode and scatter."""
        self._bind(state)
        if len(self._codecs) == 1:
            key, value = self._codecs[0].encode((k, v), plan.positions)
        else:
            (key,), (value,) = (c.encode((x,), plan.positions) for c, x in zip(self._codecs, (k, v), strict=True))
        page = plan.slots // self._layout.page_size
        offset = plan.slots - page * self._layout.page_size
        self._key_codes.transpose(1, 2)[page, offset] = key[0]
        self._value_codes.permute(0, 3, 1, 2)[page, offset] = value[0]
        self._key_words.transpose(1, 2)[page, offset] = key[1]
        self._value_words.transpose(1, 2)[page, offset] = value[1]

    def read(self, state: LayerState, row: RowPlan, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode and turn back."""
        self._bind(state)
        size, at = self._layout.page_size, self._layout
        first, last = start // size, -(-end // size)
        part = slice(start - first * size, end - first * size)
        codes, words = (select_pages(t, row, first, last).transpose(0, 1) for t in (self._key_codes, self._key_words))
        keys = torch.bmm(decode(codes.flatten(1, 2)[:, part], words.flatten(1)[:, part], at.key), self._key.decode)
        keys += self._mean.transpose(1, 2)
        if start == 0:
            keys[:, :1] += self._first.transpose(1, 2)
        codes = select_pages(self._value_codes, row, first, last).permute(1, 0, 3, 2).flatten(1, 2)
        words = select_pages(self._value_words, row, first, last).transpose(0, 1).flatten(1)
        values = torch.bmm(decode(codes[:, part], words[:, part], at.value), self._value.decode)
        return keys, values

    def scores(self, state: LayerState, row: RowPlan, start: int, end: int, q: torch.Tensor) -> torch.Tensor:
        """Turn the queries, multiply them with codes, apply scales and offsets to the products."""
        self._bind(state)
        side, size = self._layout.key, self._layout.page_size
        turned = torch.bmm(q, self._query)
        query_a, query_b = turned[..., : side.pairs].contiguous(), turned[..., side.pairs :].contiguous()
        sum_a, sum_b = query_a.sum(-1, keepdim=True), query_b.sum(-1, keepdim=True)
        parts = []
        for first, last in self._blocks(start, end, side):
            codes = select_pages(self._key_codes, row, first, last).transpose(0, 1).flatten(1, 2)
            words = select_pages(self._key_words, row, first, last).transpose(0, 1).flatten(1).unsqueeze(1)
            a, b = unpack(codes, side)
            scale_a, offset, scale_b = split_word(words, side.bits_a)
            score_a = torch.baddbmm(sum_a * (offset - _middle(side.bits_a)), query_a, a.float().transpose(1, 2))
            score_b = torch.bmm(query_b, b.float().transpose(1, 2)) - sum_b * _middle(side.bits_b)
            part = score_a.mul_(scale_a).addcmul_(score_b, scale_b)
            parts.append(part[..., max(0, start - first * size) : end - first * size])
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if self._has_mean:
            scores += torch.bmm(q, self._mean)
        if self._has_first and start == 0:
            scores[..., :1] += torch.bmm(q, self._first)
        return scores

    def mix(self, state: LayerState, row: RowPlan, start: int, end: int, p: torch.Tensor) -> torch.Tensor:
        """Multiply weights by scales, then codes by weights, then turn the sum back."""
        self._bind(state)
        side, size = self._layout.value, self._layout.page_size
        total: torch.Tensor | None = None
        for first, last in self._blocks(start, end, side):
            low, high = max(start, first * size), min(end, last * size)
            # Slots outside the row's own tokens are cut off before anything is made of what they hold.
            part = slice(low - first * size, high - first * size)
            codes = select_pages(self._value_codes, row, first, last).permute(1, 2, 0, 3).flatten(2)[..., part]
            words = select_pages(self._value_words, row, first, last).transpose(0, 1).flatten(1)[:, None, part]
            a, b = unpack(codes, side, axis=-2)
            scale_a, offset, scale_b = split_word(words, side.bits_a)
            seen = p[..., low - start : high - start]
            weighed_a, weighed_b = seen * scale_a, seen * scale_b
            sum_a = (weighed_a * (offset - _middle(side.bits_a))).sum(-1, keepdim=True)
            sum_b = weighed_b.sum(-1, keepdim=True) * -_middle(side.bits_b)
            mixed_a = torch.baddbmm(sum_a, weighed_a, a.float().transpose(1, 2))
            mixed_b = torch.baddbmm(sum_b, weighed_b, b.float().transpose(1, 2))
            mixed = torch.cat((mixed_a, mixed_b), dim=-1)
            total = mixed if total is None else total.add_(mixed)
        assert total is not None  # noqa: S101  # start < end
        return torch.bmm(total, self._value.decode)

    def _blocks(self, start: int, end: int, side: SideLayout) -> Iterator[tuple[int, int]]:
        """Ranges of pages that hold `start` to `end`, each of a bounded number of stored numbers."""
        size = self._layout.page_size
        first, last = start // size, -(-end // size)
        step = max(1, BLOCK_NUMBERS // (self._key.encode.shape[0] * side.padded * size))
        for page in range(first, last, step):
            yield page, min(page + step, last)


def _middle(bits: int) -> float:
    return ((1 << bits) - 1) / 2
