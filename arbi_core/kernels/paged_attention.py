"""Paged attention in plain torch: write this step's keys and values into their slots, then attend row by row.

A row whose pages are consecutive is read as a view; otherwise its pages are gathered, a page at a time. A decode row
treats the query heads of one key head as the queries of one product, so it needs neither mask nor repeated keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attrs import define, field

from arbi_core.backend.base import LayerState
from arbi_core.runner.batch import ForwardBatch
from arbi_core.spec import LayerSpec

__all__ = ["PagedAttention", "PagedPlan", "PagedPlanBuilder", "RowPlan"]

QUERY_BLOCK = 512
"""Query tokens attended at once: bounds the size of masks and of explicit score matrices."""


@define(eq=False)
class RowPlan:
    """One row of the step.

    Attributes:
        q_start: its first flat token.
        q_len: its tokens in this step.
        seq_len: its context length after this step.
        first_page: its first page where its pages are consecutive, else -1.
        pages: ``(n,)`` its page ids.
        masks: additive masks by (first query, queries, first key, window), shared by all layers.
    """

    q_start: int
    q_len: int
    seq_len: int
    first_page: int
    pages: torch.Tensor
    masks: dict[tuple[int, int, int, int | None], torch.Tensor] = field(factory=dict)

    def mask(self, first: int, count: int, key_start: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """``(count, keys)`` additive mask of the queries from position `first`, keys from `key_start`."""
        key = (first, count, key_start, window)
        mask = self.masks.get(key)
        if mask is None:
            q = torch.arange(first, first + count, device=like.device).unsqueeze(1)
            k = torch.arange(key_start, first + count, device=like.device).unsqueeze(0)
            hidden = k > q
            if window is not None:
                hidden |= k <= q - window
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
            self.masks[key] = mask
        return mask


@define(eq=False)
class PagedPlan:
    """A step: slots to write and rows to attend. `first_slot` is set (not -1) where the slots are consecutive."""

    slots: torch.Tensor
    rows: list[RowPlan]
    first_slot: int


class PagedPlanBuilder:
    """Makes the plan from the batch's host twins; no device reads."""

    def build(self, batch: ForwardBatch) -> PagedPlan:
        """One `RowPlan` per row."""
        rows = []
        for i in range(batch.num_rows):
            start, end = int(batch.cu_seqlens_q_host[i]), int(batch.cu_seqlens_q_host[i + 1])
            seq_len = int(batch.seq_lens_host[i])
            count = -(-seq_len // batch.page_size)
            ids = batch.block_table_host[i, :count]
            first = int(ids[0])
            consecutive = bool((ids == np.arange(first, first + count)).all())
            rows.append(
                RowPlan(start, end - start, seq_len, first if consecutive else -1, batch.block_table[i, :count])
            )
        first_slot = -1
        if len(rows) == 1 and rows[0].first_page >= 0:
            first_slot = rows[0].first_page * batch.page_size + rows[0].seq_len - rows[0].q_len
        return PagedPlan(batch.slot_mapping, rows, first_slot)


class PagedAttention:
    """The op of one layer; see `arbi_core.backend.base.AttnOp`.

    Args:
        layer: window, scale, soft cap, widths.
        heads: query heads of this rank.
        kv_heads: key heads of this rank.
        sinks: ``(heads,)`` extra softmax logits, or None.
    """

    def __init__(self, layer: LayerSpec, heads: int, kv_heads: int, sinks: torch.Tensor | None) -> None:
        self._scale = layer.softmax_scale
        self._window = layer.window
        self._soft_cap = layer.soft_cap
        self._sinks = sinks
        self._kv_heads = kv_heads
        self._group = heads // kv_heads
        self._pages: torch.Tensor | None = None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        state: LayerState,
        meta: Any,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Write, then attend; shapes as in the protocol."""
        plan: PagedPlan = meta
        if state["k"] is not self._pages:
            self._bind(state)
        if k is not None and v is not None:
            self._write(plan, k, v)
        for row in plan.rows:
            if row.q_len == 1 and self._soft_cap is None and self._sinks is None:
                self._decode(q, row, out)
                continue
            keys, values = self._context(row, 0, row.seq_len)
            for done in range(0, row.q_len, QUERY_BLOCK):
                count = min(QUERY_BLOCK, row.q_len - done)
                at = row.q_start + done
                self._attend(q[at : at + count], keys, values, row, done, out[at : at + count])
        return out

    def _bind(self, state: LayerState) -> None:
        """Views of the layer's tensors that never change: by slot for writing, by head for reading."""
        self._pages = state["k"]
        self._k_pages, self._v_pages = state["k"], state["v"]
        self._k_slots, self._v_slots = state["k"].flatten(0, 1), state["v"].flatten(0, 1)
        self._k_heads, self._v_heads = self._k_slots.transpose(0, 1), self._v_slots.transpose(0, 1)
        self._dtype = state["k"].dtype

    def _write(self, plan: PagedPlan, k: torch.Tensor, v: torch.Tensor) -> None:
        if k.dtype is not self._dtype:
            k, v = k.to(self._dtype), v.to(self._dtype)
        if plan.first_slot >= 0:
            self._k_slots.narrow(0, plan.first_slot, k.shape[0]).copy_(k)
            self._v_slots.narrow(0, plan.first_slot, k.shape[0]).copy_(v)
        else:
            self._k_slots.index_copy_(0, plan.slots, k)
            self._v_slots.index_copy_(0, plan.slots, v)

    def _context(self, row: RowPlan, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions `start` to `end`, ``(heads, end - start, width)``; views where they can be."""
        size = self._k_pages.shape[1]
        if row.first_page >= 0:
            at, count = row.first_page * size + start, end - start
            return self._k_heads.narrow(1, at, count), self._v_heads.narrow(1, at, count)
        first = start // size
        pages = row.pages[first : -(-end // size)]
        k = self._k_pages.index_select(0, pages).flatten(0, 1).transpose(0, 1)
        v = self._v_pages.index_select(0, pages).flatten(0, 1).transpose(0, 1)
        return k[:, start - first * size : end - first * size], v[:, start - first * size : end - first * size]

    def _decode(self, q: torch.Tensor, row: RowPlan, out: torch.Tensor) -> None:
        """One query token: the heads of a group are the queries of one unmasked product."""
        start = 0 if self._window is None else max(0, row.seq_len - self._window)
        k, v = self._context(row, start, row.seq_len)
        if k.dtype is not q.dtype:
            k, v = k.to(q.dtype), v.to(q.dtype)
        query = q[row.q_start].view(1, self._kv_heads, self._group, -1)
        result = F.scaled_dot_product_attention(query, k.unsqueeze(0), v.unsqueeze(0), scale=self._scale)
        out[row.q_start].view(self._kv_heads, self._group, -1).copy_(result[0])

    def _attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, row: RowPlan, done: int, out: torch.Tensor
    ) -> None:
        """Attend `q` ``(n, H, D)``, whose first token is the row's `done`-th, to its context; fills `out`."""
        n = q.shape[0]
        first = row.seq_len - row.q_len + done
        start = 0 if self._window is None else max(0, first - self._window + 1)
        k = keys[:, start : first + n].to(q.dtype)
        v = values[:, start : first + n].to(q.dtype)
        if self._soft_cap is not None or self._sinks is not None:
            mask = row.mask(first, n, start, self._window, q) if n > 1 else None
            grouped = q.view(n, self._kv_heads, self._group, q.shape[-1])
            result = self._explicit(grouped, k, v, mask)
        else:
            fresh = start == 0 and first == 0 and (self._window is None or n <= self._window)
            result = F.scaled_dot_product_attention(
                q.transpose(0, 1).unsqueeze(0),
                k.unsqueeze(0),
                v.unsqueeze(0),
                attn_mask=None if fresh else row.mask(first, n, start, self._window, q),
                is_causal=fresh,
                scale=self._scale,
                enable_gqa=self._group > 1,
            )[0].transpose(0, 1)
        out.copy_(result.reshape(out.shape))

    def _explicit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Softmax written out in float32, for soft caps and sinks: ``(n, Hkv, G, D) -> (n, Hkv, G, Dv)``."""
        scores = torch.einsum("nhgd,hsd->hgns", q.float(), k.float()) * self._scale
        if self._soft_cap is not None:
            scores = self._soft_cap * torch.tanh(scores / self._soft_cap)
        if mask is not None:
            scores = scores + mask
        if self._sinks is not None:
            sink = self._sinks.float().view(self._kv_heads, self._group, 1, 1).expand(*scores.shape[:-1], 1)
            probabilities = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        else:
            probabilities = scores.softmax(-1)
        return torch.einsum("hgns,hsd->nhgd", probabilities, v.float()).to(q.dtype)
