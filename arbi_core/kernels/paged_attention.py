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
from arbi_core.kernels.masks import QUERY_BLOCK, StepMasks
from arbi_core.runner.batch import ForwardBatch
from arbi_core.spec import LayerSpec

__all__ = ["PagedAttention", "PagedPlan", "PagedPlanBuilder", "RowPlan"]

SCORES = 1 << 24
"""Most scores held at once where the softmax is written out."""


@define(eq=False)
class RowPlan:
    """One row of the step.

    Attributes:
        q_start: its first flat token.
        q_len: its tokens in this step.
        seq_len: its context length after this step.
        first_page: its first page where its pages are consecutive, else -1.
        pages: ``(n,)`` its page ids.
    """

    q_start: int
    q_len: int
    seq_len: int
    first_page: int
    pages: torch.Tensor


@define(eq=False)
class PagedPlan:
    """A step: slots to write and rows to attend.

    Attributes:
        slots: ``(N,)`` where each token is written.
        rows: one plan per row.
        first_slot: the first slot where all slots are consecutive, else -1.
        masks: of the step.
    """

    slots: torch.Tensor
    rows: list[RowPlan]
    first_slot: int
    masks: StepMasks = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.masks = StepMasks(
            max((r.q_len for r in self.rows), default=0), max((r.seq_len for r in self.rows), default=0)
        )


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
        self._sinks = None if sinks is None else sinks.float()
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
            self._chunk(plan, row, q, out)
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
        k, v = self._context(row, self._window_start(row.seq_len - 1), row.seq_len)
        if k.dtype is not q.dtype:
            k, v = k.to(q.dtype), v.to(q.dtype)
        query = q[row.q_start].view(1, self._kv_heads, self._group, -1)
        result = F.scaled_dot_product_attention(query, k.unsqueeze(0), v.unsqueeze(0), scale=self._scale)
        out[row.q_start].view(self._kv_heads, self._group, -1).copy_(result[0])

    def _chunk(self, plan: PagedPlan, row: RowPlan, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attend a row's query tokens, a block at a time, to its context; fills their part of `out`."""
        first = row.seq_len - row.q_len
        base = self._window_start(first)
        keys, values = self._context(row, base, row.seq_len)
        if keys.dtype is not q.dtype:
            keys, values = keys.to(q.dtype), values.to(q.dtype)
        explicit = self._soft_cap is not None or self._sinks is not None
        block = QUERY_BLOCK
        if explicit:
            block = max(1, min(block, SCORES // (q.shape[1] * (row.seq_len - base))))
        for done in range(0, row.q_len, block):
            count = min(block, row.q_len - done)
            start, end = self._window_start(first + done), first + done + count
            k, v = keys[:, start - base : end - base], values[:, start - base : end - base]
            at = row.q_start + done
            queries = q[at : at + count]
            # From an empty context a window that no query of the block outgrows hides nothing.
            causal = end == count and (self._window is None or count <= self._window)
            mask = None
            if count > 1 and (explicit or not causal):
                mask = plan.masks.mask(count, first + done - start, self._window, q)
            result = self._explicit(queries, k, v, mask) if explicit else self._fused(queries, k, v, mask)
            out[at : at + count].copy_(result)

    def _window_start(self, position: int) -> int:
        """The first key that the query at `position` sees."""
        return 0 if self._window is None else max(0, position - self._window + 1)

    def _fused(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Torch's own attention, causal where there is no mask: ``(n, H, D)`` and keys ``(Hkv, S, D)``."""
        return F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None and q.shape[0] > 1,
            scale=self._scale,
            enable_gqa=self._group > 1,
        )[0].transpose(0, 1)

    def _explicit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Softmax written out in float32, for soft caps and sinks; shapes as in `_fused`."""
        n, heads, _ = q.shape
        queries = q.view(n, self._kv_heads, self._group, -1).float()
        scores = torch.einsum("nhgd,hsd->hgns", queries, k.float()).mul_(self._scale)
        if self._soft_cap is not None:
            scores = scores.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        if mask is not None:
            scores += mask
        if self._sinks is not None:
            sink = self._sinks.view(self._kv_heads, self._group, 1, 1).expand(*scores.shape[:-1], 1)
            probabilities = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        else:
            probabilities = scores.softmax(-1)
        return torch.einsum("hgns,hsd->nhgd", probabilities, v.float()).reshape(n, heads, -1)
