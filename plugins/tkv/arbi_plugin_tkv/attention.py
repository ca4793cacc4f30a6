"""Attention of one layer over a store: a chunk's own tokens as they are, older ones as the store gives them back.

The rule is the same for every store, kind of layer and length of chunk, a chunk of one token included; so what a token
reads depends on how its prompt was cut into chunks, by no more than the store's own error.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F

from arbi_core.api import LayerSpec, LayerState
from arbi_plugin_tkv.plan import Plan, RowPlan

__all__ = ["Store", "StoreAttention"]

SCORES = 1 << 24
"""Most scores held at once where the softmax is written out."""


class Store(Protocol):
    """Pages of one layer."""

    def write(self, state: LayerState, plan: Plan, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store this step's ``(N, kv_heads, width)`` keys and values in their slots."""
        ...

    def read(self, state: LayerState, row: RowPlan, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions `start` to `end`: ``(kv_heads, end - start, width)`` float32."""
        ...

    def scores(self, state: LayerState, row: RowPlan, start: int, end: int, q: torch.Tensor) -> torch.Tensor:
        """Products of ``(kv_heads, group, key_dim)`` queries with stored keys: ``(kv_heads, group, end - start)``."""
        ...

    def mix(self, state: LayerState, row: RowPlan, start: int, end: int, p: torch.Tensor) -> torch.Tensor:
        """Stored values weighted by ``(kv_heads, group, end - start)``: ``(kv_heads, group, value_dim)``."""
        ...


class StoreAttention:
    """The op of one layer; see `arbi_core.api.AttnOp`.

    Args:
        layer: window, scale, soft cap, widths.
        kv_heads: key heads of this rank.
        sinks: ``(heads,)`` extra softmax logits, or None.
        store: its pages, or those of the layer that it reads.
    """

    def __init__(self, layer: LayerSpec, kv_heads: int, sinks: torch.Tensor | None, store: Store) -> None:
        self._index = layer.index
        self._source = layer.kv_source_layer
        self._scale = layer.softmax_scale
        self._window = layer.window
        self._soft_cap = layer.soft_cap
        self._sinks = None if sinks is None else sinks.float()
        self._kv_heads = kv_heads
        self._store = store

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
        plan: Plan = meta
        if k is None or v is None:
            k, v = self._borrowed(plan)
        else:
            self._store.write(state, plan, k, v)
            if self._index in plan.sources:
                plan.fresh[self._index] = (k, v)
        for row in plan.rows:
            own = slice(row.start, row.start + row.count)
            if row.count == 1:
                self._decode(state, row, q[own], k[own], v[own], out[own])
            else:
                self._chunk(state, plan, row, q[own], k[own], v[own], out[own])
        return out

    def _borrowed(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        """This step's keys and values of the layer whose cache this one reads."""
        if self._source is None or self._source not in plan.fresh:
            raise RuntimeError(f"layer {self._index} got no keys, and layer {self._source} has none in this step")
        return plan.fresh[self._source]

    def _decode(
        self,
        state: LayerState,
        row: RowPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """One query token: stored keys are never turned back, the query is turned instead."""
        queries = q[0].view(self._kv_heads, -1, q.shape[-1]).float()
        start = self._window_start(row.before)
        fresh = torch.bmm(queries, k[0].float().unsqueeze(2))
        if start < row.before:
            stored = self._store.scores(state, row, start, row.before, queries)
            scores = torch.cat((stored, fresh), dim=-1)
        else:
            scores = fresh
        p = self._softmax(scores.mul_(self._scale), 1)
        result = p[..., -1:] * v[0].float().unsqueeze(1)
        if start < row.before:
            result += self._store.mix(state, row, start, row.before, p[..., :-1])
        out[0].view(self._kv_heads, -1, out.shape[-1]).copy_(result)

    def _chunk(
        self,
        state: LayerState,
        plan: Plan,
        row: RowPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Several query tokens, a block at a time, over stored keys and the chunk's own."""
        base = self._window_start(row.before)
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        if base < row.before:
            old_keys, old_values = self._store.read(state, row, base, row.before)
            keys = torch.cat((old_keys.to(q.dtype), keys), dim=1)
            values = torch.cat((old_values.to(q.dtype), values), dim=1)
        explicit = self._soft_cap is not None or self._sinks is not None
        block = plan.masks.block
        if explicit:
            block = max(1, min(block, SCORES // (q.shape[1] * keys.shape[1])))
        for done in range(0, row.count, block):
            count = min(block, row.count - done)
            start, end = self._window_start(row.before + done), row.before + done + count
            seen_k, seen_v = keys[:, start - base : end - base], values[:, start - base : end - base]
            mask = plan.masks.mask(count, end - count - start, self._window, q) if count > 1 else None
            attend = self._explicit if explicit else self._fused
            out[done : done + count].copy_(attend(q[done : done + count], seen_k, seen_v, mask))

    def _window_start(self, position: int) -> int:
        """The first key that the query at `position` sees."""
        return 0 if self._window is None else max(0, position - self._window + 1)

    def _fused(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Torch's own attention: ``(n, H, D)`` queries, ``(kv_heads, S, D)`` keys."""
        return F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            attn_mask=mask,
            scale=self._scale,
            enable_gqa=q.shape[1] != self._kv_heads,
        )[0].transpose(0, 1)

    def _explicit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Softmax written out in float32, for soft caps and sinks; shapes as in `_fused`."""
        n, heads, _ = q.shape
        queries = q.view(n, self._kv_heads, heads // self._kv_heads, -1).float()
        scores = torch.einsum("nhgd,hsd->hgns", queries, k.float()).mul_(self._scale)
        p = self._softmax(scores, 2, mask)
        return torch.einsum("hgns,hsd->nhgd", p, v.float()).reshape(n, heads, -1)

    def _softmax(self, scores: torch.Tensor, heads_to: int, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Over the last axis of ``(kv_heads, group, ..., S)`` scaled scores, capped, masked, with sinks in the sum.

        `heads_to` is the number of axes between heads and keys plus one, the shape that sinks are brought to.
        """
        if self._soft_cap is not None:
            scores = scores.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        if mask is not None:
            scores += mask
        if self._sinks is None:
            return scores.softmax(-1)
        sink = self._sinks.view(self._kv_heads, -1, *(1,) * heads_to).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
