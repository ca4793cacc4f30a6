"""Binds every layer of a model to its op, its state tensors and the metadata of the running step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from arbi_core.errors import BackendError, OutOfMemoryError
from arbi_core.spec import NONE, LayerSpec, StateKind, StorageSpec, TensorSpec

if TYPE_CHECKING:
    from arbi_core.backend.base import AttentionBackend, AttnOp, BackendContext, LayerState, MetadataBuilder
    from arbi_core.model.base import Model
    from arbi_core.runner.batch import ForwardBatch

__all__ = ["BoundLayer", "LayerBinding"]


class _NoOp:
    """Stands for the op of a layer that cannot attend, and says why when it is asked to."""

    def __init__(self, why: str) -> None:
        self._why = why

    def forward(self, *_: object) -> torch.Tensor:
        """Refuse."""
        raise RuntimeError(self._why)


STATELESS = _NoOp("a layer without state was asked to attend")
UNALLOCATED = _NoOp("a layer was asked to attend while no state is allocated")


class BoundLayer:
    """What a model calls for one layer; see `arbi_core.model.base.LayerCall`.

    Layers of other kinds pass whatever arguments their op takes.
    """

    def __init__(self, kind: StateKind, metas: Mapping[StateKind, Any], value_dim: int) -> None:
        self._op: AttnOp = UNALLOCATED
        self._kind = kind
        self._metas = metas
        self._value_dim = value_dim
        self.state: LayerState = {}

    def bind(self, op: AttnOp, state: LayerState) -> None:
        """Attend by `op` over `state` from now on."""
        self._op, self.state = op, state

    def __call__(self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        """Attend; returns ``(N, H, Dv)``."""
        out = q.new_empty((q.shape[0], q.shape[1], self._value_dim))
        return self._op.forward(q, k, v, self.state, self._metas[self._kind], out)


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
        self._model = model
        self._backends = backends
        self._ctx = ctx
        self._metas: dict[StateKind, Any] = {NONE: None}
        self._builders: dict[StateKind, MetadataBuilder] = {
            kind: backend.metadata_builder([la for la in layers if la.state_kind == kind], ctx)
            for kind, backend in backends.items()
        }
        for layer in layers:
            _check_source(layer, layers)
        self._storage = [
            StorageSpec() if la.state_kind == NONE else backends[la.state_kind].storage(la, ctx) for la in layers
        ]
        self.calls = [BoundLayer(la.state_kind, self._metas, la.value_dim) for la in layers]
        self.page_bytes = sum(s.page_bytes for s in self._storage)
        self.row_bytes = sum(s.row_bytes for s in self._storage)
        self._states: list[dict[str, torch.Tensor]] = []

    @property
    def needs_rows(self) -> bool:
        """Whether any layer keeps state per request."""
        return any(s.rows for s in self._storage)

    @property
    def capturable(self) -> bool:
        """Whether decode steps may be recorded as CUDA graphs."""
        return all(getattr(b, "capturable", False) for b in self._builders.values())

    @property
    def fold_grid(self) -> int:
        """Tokens on whose multiples a prefill may be cut without changing a bit of any recurrent state."""
        return math.lcm(*(s.fold_grid for s in self._storage)) if self._storage else 1

    def allocate(self, num_pages: int, num_rows: int) -> None:
        """Make the state tensors, zeroed; page 0 and row 0 are the null page and the zero sentinel."""
        try:
            self._states = [
                {t.name: self._tensor(num_pages, t) for t in s.pages}
                | {t.name: self._tensor(num_rows, t) for t in s.rows}
                for s in self._storage
            ]
        except (MemoryError, torch.OutOfMemoryError, ValueError) as exc:
            self._states = []
            need = (num_pages * self.page_bytes + num_rows * self.row_bytes) / 2**30
            raise OutOfMemoryError(
                f"{num_pages} pages of {self.page_bytes} bytes and {num_rows} rows of {self.row_bytes} take "
                f"{need:.2f} GiB, which {self._ctx.device} does not have; lower --num-pages or --max-num-seqs"
            ) from exc
        for layer, call in zip(self._layers, self.calls, strict=True):
            source = layer.index if layer.kv_source_layer is None else layer.kv_source_layer
            call.bind(self._op(layer), self._states[source])

    def zero_rows(self, rows: Sequence[int]) -> None:
        """Clear the row state of newly admitted requests."""
        index = torch.tensor(rows, dtype=torch.int64, device=self._ctx.device)
        for spec, state in zip(self._storage, self._states, strict=True):
            for t in spec.rows:
                state[t.name].index_fill_(0, index, 0)

    def save_pages(self, pages: Sequence[int]) -> torch.Tensor:
        """Bytes of pages over all layers: ``(n, page_bytes)`` uint8 on the device."""
        return self._save(pages, [t for s, st in self._parts() for t in (st[p.name] for p in s.pages)])

    def load_pages(self, pages: Sequence[int], data: torch.Tensor) -> None:
        """Write what `save_pages` gave; `data` may lie on the host. No page may occur twice."""
        self._load(pages, data, [t for s, st in self._parts() for t in (st[p.name] for p in s.pages)])

    def save_rows(self, rows: Sequence[int]) -> torch.Tensor:
        """Bytes of recurrent rows over all layers: ``(n, row_bytes)`` uint8 on the device."""
        return self._save(rows, [t for s, st in self._parts() for t in (st[r.name] for r in s.rows)])

    def load_rows(self, rows: Sequence[int], data: torch.Tensor) -> None:
        """Write what `save_rows` gave; `data` may lie on the host. No row may occur twice."""
        self._load(rows, data, [t for s, st in self._parts() for t in (st[r.name] for r in s.rows)])

    def _parts(self) -> Iterator[tuple[StorageSpec, dict[str, torch.Tensor]]]:
        return zip(self._storage, self._states, strict=True)

    def _save(self, where: Sequence[int], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        index = torch.tensor(where, dtype=torch.int64, device=self._ctx.device)
        return torch.cat([t.index_select(0, index).reshape(len(where), -1).view(torch.uint8) for t in tensors], dim=1)

    def _load(self, where: Sequence[int], data: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        index = torch.tensor(where, dtype=torch.int64, device=self._ctx.device)
        data, at = data.to(self._ctx.device), 0
        for t in tensors:
            width = t[0].numel() * t.element_size()
            part = data[:, at : at + width].contiguous().view(t.dtype).view(len(where), *t.shape[1:])
            t.index_copy_(0, index, part)
            at += width

    def begin_step(self, batch: ForwardBatch) -> None:
        """Build the metadata of every kind for the step that follows."""
        for kind, builder in self._builders.items():
            self._metas[kind] = builder.build(batch)

    def release(self) -> None:
        """Drop the state tensors, and with them the ops, which may hold views of them."""
        self._states = []
        for call in self.calls:
            call.bind(UNALLOCATED, {})

    def _op(self, layer: LayerSpec) -> AttnOp:
        if layer.state_kind == NONE:
            return STATELESS
        sinks = None
        if layer.sinks:
            sinks = self._model.attention_sinks(layer.index)
            heads = self._ctx.parallel.divide(layer.num_heads, "num_attention_heads")
            if sinks is None or sinks.shape != (heads,):
                got = "none" if sinks is None else f"a tensor of shape {tuple(sinks.shape)}"
                raise BackendError(
                    f"layer {layer.index} declares attention sinks for {heads} heads; its model has {got}"
                )
            sinks = sinks.float()
        return self._backends[layer.state_kind].attn_op(layer, self._ctx, sinks)

    def _tensor(self, count: int, spec: TensorSpec) -> torch.Tensor:
        shape, dtype = (count, *spec.shape), getattr(torch, spec.dtype)
        if self._ctx.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self._ctx.device)
        # Fresh anonymous memory is zero already and costs nothing until it is touched; torch.zeros would touch it all.
        return torch.from_numpy(np.zeros(count * spec.nbytes, dtype=np.uint8)).view(dtype).view(shape)


def _check_source(layer: LayerSpec, layers: Sequence[LayerSpec]) -> None:
    """A shared cache must have been written, by a layer of the same form, before it is read."""
    if layer.kv_source_layer is None:
        return
    where = f"layer {layer.index} reads the keys and values of layer {layer.kv_source_layer}"
    if not 0 <= layer.kv_source_layer < layer.index:
        raise BackendError(f"{where}, which does not run before it")
    source = layers[layer.kv_source_layer]
    if source.kv_source_layer is not None:
        raise BackendError(f"{where}, which itself reads those of layer {source.kv_source_layer}; name that one")
    for name in ("state_kind", "num_kv_heads", "head_dim", "value_dim"):
        mine, theirs = getattr(layer, name), getattr(source, name)
        if mine != theirs:
            raise BackendError(f"{where}, but {name} is {mine!r} here and {theirs!r} there")
