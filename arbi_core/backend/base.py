"""The protocols that an attention backend implements, and what the core hands to it.

One backend = one object offered by the hook ``arbi_attention_backends``. At boot it is asked for storage, one metadata
builder per state kind and one `AttnOp` per layer; after that only `MetadataBuilder.build` (once a step) and
`AttnOp.forward` (once a layer) run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import frozen

if TYPE_CHECKING:
    import torch

    from arbi_core.runner.batch import ForwardBatch
    from arbi_core.spec import LayerSpec, ParallelSpec, StateKind, StorageSpec

__all__ = ["AttentionBackend", "AttnOp", "BackendContext", "LayerState", "MetadataBuilder"]

LayerState = Mapping[str, "torch.Tensor"]
"""Tensors of one layer by `TensorSpec.name`: ``(num_pages, *page_shape)`` or ``(num_rows, *row_shape)``."""


@frozen
class BackendContext:
    """What is fixed for the life of an engine.

    Attributes:
        device: torch device of the weights and the pools.
        dtype: dtype of activations (q, k, v and the output).
        page_size: tokens per page.
        max_num_seqs: most requests in one step.
        max_num_tokens: most tokens in one step.
        max_model_len: longest context in tokens.
        parallel: this rank's slice; head counts in a `LayerSpec` are global and must be divided by ``parallel.size``.
        options: resolved plugin configuration sections by name.
    """

    device: torch.device
    dtype: torch.dtype
    page_size: int
    max_num_seqs: int
    max_num_tokens: int
    max_model_len: int
    parallel: ParallelSpec
    options: Mapping[str, Any] = {}


class MetadataBuilder(Protocol):
    """Turns one step's batch into what this kind's ops need (index tensors, split plans).

    A builder with an attribute ``capturable = True`` promises that in decode steps (``batch.is_decode``) it and the ops
    of its kind read nothing but device tensors, launch the same kernels for the same number of rows whatever those
    tensors hold, and never wait for the device: such steps are recorded as CUDA graphs.
    """

    def build(self, batch: ForwardBatch) -> Any:
        """Return the step's metadata. Must not synchronise with the device."""
        ...


class AttnOp(Protocol):
    """Attention of one layer."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        state: LayerState,
        meta: Any,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Write this step's keys and values into `state`, then attend.

        Args:
            q: ``(N, H, D)`` queries of all tokens of the step, rotary embedding applied.
            k: ``(N, Hkv, D)`` keys; None when the layer reads another layer's cache.
            v: ``(N, Hkv, Dv)`` values; None with `k`.
            state: the layer's tensors (those of `LayerSpec.kv_source_layer` if it has one).
            meta: what the builder returned for this step.
            out: ``(N, H, Dv)`` to be filled.

        Returns:
            `out`.
        """
        ...


@runtime_checkable
class AttentionBackend(Protocol):
    """A way to store and read the state of one kind of layer."""

    @property
    def name(self) -> str:
        """Name within the kind; the full key is ``state_kind:name``."""
        ...

    @property
    def state_kind(self) -> StateKind:
        """The kind of layer it serves."""
        ...

    def supports(self, layer: LayerSpec, device: torch.device) -> str | None:
        """Return None if the layer can be served on the device, else the reason why not."""
        ...

    def storage(self, layer: LayerSpec, ctx: BackendContext) -> StorageSpec:
        """Tensors that the layer needs per page and per row, on this rank."""
        ...

    def metadata_builder(self, layers: Sequence[LayerSpec], ctx: BackendContext) -> MetadataBuilder:
        """Make the builder that serves all layers of this kind."""
        ...

    def attn_op(self, layer: LayerSpec, ctx: BackendContext, sinks: torch.Tensor | None = None) -> AttnOp:
        """Make the layer's op. `sinks` is ``(H,)`` float32 (this rank's heads) where ``layer.sinks``."""
        ...
