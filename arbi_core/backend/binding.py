"""Binds every layer of a model to its op, its state tensors and the metadata of the running step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from arbi_core.spec import NONE, LayerSpec, StateKind, StorageSpec, TensorSpec

if TYPE_CHECKING:
    from arbi_core.backend.base import AttentionBackend, AttnOp, BackendContext, LayerState, MetadataBuilder
    from arbi_core.model.base import Model
    from arbi_core.runner.batch import ForwardBatch

__all__ = ["BoundLayer", "LayerBinding"]


class BoundLayer:
    """What a model calls for one layer; see `arbi_core.model.base.LayerCall`.

    Layers of other kinds pass whatever arguments their op takes.
    """

    def __init__(self, op: AttnOp, kind: StateKind, metas: Mapping[StateKind, Any], value_dim: int) -> None:
        self._op = op
        self._kind = kind
        self._metas = metas
        self._value_dim = value_dim
        self.state: LayerState = {}

    def __call__(self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        """Attend; returns ``(N, H, Dv)``."""
        out = q.new_empty((q.shape[0], q.shape[1], self._value_dim))
        return self._op.forward(q, k, v, self.state, self._metas[self._kind], out)


class _Stateless:
    """Stands for the op of a layer that keeps no state; a model never calls it."""

    def forward(self, *_: object) -> torch.Tensor:
        """Refuse."""
        raise RuntimeError("a layer without state was asked to attend")


class LayerBinding:
    """All layers of a model, bound.

    Args:
        layers: the model's layers.
        model: the loaded model (asked for attention sinks).
        backends: the backend of every kind.
        ctx: sizes and device.

    Attributes:
        calls: one callable per layer, in order.
        page_bytes: bytes that one page costs over all layers.
        row_bytes: bytes that one running request's row costs over all layers.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        model: Model,
        backends: Mapping[StateKind, AttentionBackend],
        ctx: BackendContext,
    ) -> None:
        self._layers = layers
        self._ctx = ctx
        self._metas: dict[StateKind, Any] = {}
        self._builders: dict[StateKind, MetadataBuilder] = {
            kind: backend.metadata_builder([la for la in layers if la.state_kind == kind], ctx)
            for kind, backend in backends.items()
        }
        self._storage: list[StorageSpec] = []
        self.calls: list[BoundLayer] = []
        for layer in layers:
            if layer.state_kind == NONE:
                self._storage.append(StorageSpec())
                self.calls.append(BoundLayer(_Stateless(), NONE, {NONE: None}, 0))
                continue
            backend = backends[layer.state_kind]
            self._storage.append(backend.storage(layer, ctx))
            op = backend.attn_op(layer, ctx, model.attention_sinks(layer.index) if layer.sinks else None)
            self.calls.append(BoundLayer(op, layer.state_kind, self._metas, layer.value_dim))
        self.page_bytes = sum(s.page_bytes for s in self._storage)
        self.row_bytes = sum(s.row_bytes for s in self._storage)
        self._states: list[dict[str, torch.Tensor]] = []

    @property
    def needs_rows(self) -> bool:
        """Whether any layer keeps state per request."""
        return any(s.rows for s in self._storage)

    def allocate(self, num_pages: int, num_rows: int) -> None:
        """Make the state tensors, zeroed; page 0 and row 0 are the null page and the zero sentinel."""
        self._states = [
            {t.name: self._tensor(num_pages, t) for t in s.pages} | {t.name: self._tensor(num_rows, t) for t in s.rows}
            for s in self._storage
        ]
        for layer, call in zip(self._layers, self.calls, strict=True):
            source = layer.index if layer.kv_source_layer is None else layer.kv_source_layer
            call.state = self._states[source]

    def zero_rows(self, rows: Sequence[int]) -> None:
        """Clear the row state of newly admitted requests."""
        index = torch.tensor(rows, dtype=torch.int64, device=self._ctx.device)
        for spec, state in zip(self._storage, self._states, strict=True):
            for t in spec.rows:
                state[t.name].index_fill_(0, index, 0)

    def begin_step(self, batch: ForwardBatch) -> None:
        """Build the metadata of every kind for the step that follows."""
        for kind, builder in self._builders.items():
            self._metas[kind] = builder.build(batch)

    def release(self) -> None:
        """Drop the state tensors."""
        self._states = []
        for call in self.calls:
            call.state = {}

    def _tensor(self, count: int, spec: TensorSpec) -> torch.Tensor:
        shape, dtype = (count, *spec.shape), getattr(torch, spec.dtype)
        if self._ctx.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self._ctx.device)
        # Fresh anonymous memory is zero already and costs nothing until it is touched; torch.zeros would touch it all.
        return torch.from_numpy(np.zeros(count * spec.nbytes, dtype=np.uint8)).view(dtype).view(shape)
