"""The attention backend ``paged_kv:example``: keys and values side by side in ONE tensor, attended by plain softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from arbi_core.api import PAGED_KV, LayerSpec, StorageSpec, TensorSpec

if TYPE_CHECKING:
    import torch

    from arbi_core.api import AttnOp, BackendContext, ForwardBatch, LayerState, MetadataBuilder

__all__ = ["FusedBackend"]


class FusedBackend:
    """See `arbi_core.backend.base.AttentionBackend`."""

    name = "example"
    state_kind = PAGED_KV

    def supports(self, layer: LayerSpec, device: torch.device) -> str | None:
        """Plain causal layers only; say so instead of computing something else."""
        del device
        if layer.window is not None or layer.sinks or layer.soft_cap is not None or layer.kv_source_layer is not None:
            return "the example backend serves plain causal attention only"
        if layer.value_dim != layer.head_dim:
            return f"keys are {layer.head_dim} wide and values {layer.value_dim}; they share a tensor here"
        return None

    def storage(self, layer: LayerSpec, ctx: BackendContext) -> StorageSpec:
        """One tensor: keys in the first half of the heads axis, values in the second."""
        heads = ctx.parallel.divide(layer.num_kv_heads, "num_key_value_heads")
        dtype = str(ctx.dtype).removeprefix("torch.")
        return StorageSpec(pages=(TensorSpec("kv", (ctx.page_size, 2 * heads, layer.head_dim), dtype),))

    def metadata_builder(self, layers: Sequence[LayerSpec], ctx: BackendContext) -> MetadataBuilder:
        """The batch itself is all that the op needs."""
        del layers, ctx
        return _BatchAsMetadata()

    def attn_op(self, layer: LayerSpec, ctx: BackendContext, sinks: torch.Tensor | None = None) -> AttnOp:
        """The op of one layer."""
        del sinks
        return _FusedAttention(layer, ctx.parallel.divide(layer.num_kv_heads, "num_key_value_heads"))


class _BatchAsMetadata:
    def build(self, batch: ForwardBatch) -> ForwardBatch:
        """Pass the batch on."""
        return batch


class _FusedAttention:
    def __init__(self, layer: LayerSpec, kv_heads: int) -> None:
        self._scale = layer.softmax_scale
        self._kv_heads = kv_heads

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        state: LayerState,
        meta: Any,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Write, then attend row by row."""
        import torch

        assert k is not None and v is not None  # noqa: S101, PT018  # `supports` refuses layers without their own
        batch: ForwardBatch = meta
        slots = state["kv"].flatten(0, 1)
        slots.index_copy_(0, batch.slot_mapping, torch.cat((k, v), dim=1))
        for i in range(batch.num_rows):
            first, last = int(batch.cu_seqlens_q_host[i]), int(batch.cu_seqlens_q_host[i + 1])
            length = int(batch.seq_lens_host[i])
            pages = batch.block_table[i, : -(-length // batch.page_size)]
            keys, values = state["kv"][pages].flatten(0, 1)[:length].chunk(2, dim=1)
            out[first:last] = self._attend(q[first:last], keys, values)
        return out

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """``(n, H, D)`` queries at the end of ``(S, Hkv, D)`` keys: causal softmax in float32."""
        import torch

        n, length = q.shape[0], keys.shape[0]
        group = q.shape[1] // self._kv_heads
        scores = torch.einsum("nhd,shd->hns", q, keys.repeat_interleave(group, dim=1)).float() * self._scale
        future = torch.ones(n, length, dtype=torch.bool, device=q.device).triu(length - n + 1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1).to(q.dtype)
        return torch.einsum("hns,shd->nhd", weights, values.repeat_interleave(group, dim=1))
