"""``paged_kv:reference``: attention over pages in plain torch, for any device, head width and dtype.

It is the specification that every other paged backend is tested against, and the backend of the CPU. Offered under four
names that differ only in the dtype of the stored keys and values: ``reference`` (the dtype of activations),
``reference-bf16``, ``reference-fp16`` and ``reference-fp32``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from arbi_core.api import hookimpl
from arbi_core.spec import PAGED_KV, LayerSpec, StorageSpec, TensorSpec

if TYPE_CHECKING:
    import torch

    from arbi_core.backend.base import AttentionBackend, AttnOp, BackendContext, MetadataBuilder

__all__ = ["ReferenceBackend"]

arbi_api_version = 1


@frozen
class ReferenceBackend:
    """Keys in ``k`` and values in ``v``, each ``(pages, page_size, kv_heads, width)``.

    Attributes:
        name: name within the kind.
        storage_dtype: dtype of the pages; None stores activations as they are.
    """

    name: str = "reference"
    storage_dtype: str | None = None
    state_kind = PAGED_KV

    def supports(self, layer: LayerSpec, device: torch.device) -> str | None:  # noqa: ARG002  # any device will do
        """Everything that a paged layer can ask for."""
        return None

    def storage(self, layer: LayerSpec, ctx: BackendContext) -> StorageSpec:
        """One tensor for keys, one for values; none for a layer that reads another layer's."""
        if layer.kv_source_layer is not None:
            return StorageSpec()
        heads = ctx.parallel.divide(layer.num_kv_heads, "num_key_value_heads")
        dtype = self.storage_dtype or str(ctx.dtype).removeprefix("torch.")
        return StorageSpec(
            pages=(
                TensorSpec("k", (ctx.page_size, heads, layer.head_dim), dtype),
                TensorSpec("v", (ctx.page_size, heads, layer.value_dim), dtype),
            )
        )

    def metadata_builder(self, layers: Sequence[LayerSpec], ctx: BackendContext) -> MetadataBuilder:  # noqa: ARG002
        """One plan a step, shared by all layers."""
        from arbi_core.kernels.paged_attention import PagedPlanBuilder

        return PagedPlanBuilder()

    def attn_op(self, layer: LayerSpec, ctx: BackendContext, sinks: torch.Tensor | None = None) -> AttnOp:
        """The op of one layer."""
        from arbi_core.kernels.paged_attention import PagedAttention

        heads = ctx.parallel.divide(layer.num_heads, "num_attention_heads")
        kv_heads = ctx.parallel.divide(layer.num_kv_heads, "num_key_value_heads")
        return PagedAttention(layer, heads, kv_heads, sinks)


@hookimpl
def arbi_attention_backends() -> list[AttentionBackend]:
    """Offer the backend in its four storage dtypes."""
    return [
        ReferenceBackend(),
        ReferenceBackend("reference-bf16", "bfloat16"),
        ReferenceBackend("reference-fp16", "float16"),
        ReferenceBackend("reference-fp32", "float32"),
    ]
