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
    """A step: slots to write and rows to attend."""

    slots: torch.Tensor
    rows: list[RowPlan]
    page_size: int


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
        return PagedPlan(batch.slot_mapping, rows, batch.page_size)


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
        k_pages, v_pages = state["k"], state["v"]
        if k is not None and v is not None:
            k_pages.flatten(0, 1).index_copy_(0, plan.slots, k.to(k_pages.dtype))
            v_pages.flatten(0, 1).index_copy_(0, plan.slots, v.to(v_pages.dtype))
        for row in plan.rows:
            keys = _context(k_pages, row, plan.page_size)
            values = _context(v_pages, row, plan.page_size)
            for done in range(0, row.q_len, QUERY_BLOCK):
                count = min(QUERY_BLOCK, row.q_len - done)
                at = row.q_start + done
                self._attend(q[at : at + count], keys, values, row, done, out[at : at + count])
        return out

    def _attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        row: RowPlan,
        done: int,
        out: torch.Tensor,
    ) -> None:
        """Attend `q` ``(n, H, D)``, whose first token is the row's `done`-th, to its context; fills `out`."""
        n = q.shape[0]
        first = row.seq_len - row.q_len + done
        start = 0 if self._window is None else max(0, first - self._window + 1)
        end = first + n
        k = keys[start:end].transpose(0, 1).to(q.dtype)
        v = values[start:end].transpose(0, 1).to(q.dtype)
        mask = None if n == 1 else row.mask(first, n, start, self._window, q)
        grouped = q.view(n, self._kv_heads, self._group, q.shape[-1])
        if self._soft_cap is not None or self._sinks is not None:
            result = self._explicit(grouped, k, v, mask)
        elif n == 1:
            result = F.scaled_dot_product_attention(
                grouped[0].unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), scale=self._scale
            )
            out.view(1, self._kv_heads, self._group, -1).copy_(result)
            return
        else:
            fresh = start == 0 and first == 0 and self._window is None
            result = F.scaled_dot_product_attention(
                q.transpose(0, 1).unsqueeze(0),
                k.unsqueeze(0),
                v.unsqueeze(0),
                attn_mask=None if fresh else mask,
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


def _context(pages: torch.Tensor, row: RowPlan, page_size: int) -> torch.Tensor:
    """Keys or values of the row's context, ``(seq_len, heads, width)``; a view where its pages are consecutive."""
    if row.first_page >= 0:
        start = row.first_page * page_size
        return pages.flatten(0, 1)[start : start + row.seq_len]
    return pages.index_select(0, row.pages).flatten(0, 1)[: row.seq_len]
