"""The paged backends that this plugin offers. Torch-free at import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from arbi_core.api import PAGED_KV, LayerSpec, StorageSpec, TensorSpec
from arbi_plugin_tkv.codec.layout import MAX_BITS, MIN_BITS, PageLayout, page_layout, side_layout
from arbi_plugin_tkv.config import TkvConfig, calibration_path, declared_bits

if TYPE_CHECKING:
    import torch

    from arbi_core.api import AttentionBackend, AttnOp, BackendContext, MetadataBuilder
    from arbi_plugin_tkv.calibration.bundle import Bundle

__all__ = ["BypassBackend", "CodecBackend", "offered"]

MAX_DIM = 1024
"""Widest head: turning a wider one would cost more than attending to it."""


@frozen
class BypassBackend:
    """``paged_kv:tkv-bypass``: nothing is compressed.

    On the CPU keys and values are kept as bfloat16, side by side in one tensor. On a CUDA device they are kept in the
    dtype of activations and attended by the kernels of `arbi_plugin_tkv.kernels.paged_op`.

    Attributes:
        name: name within the kind.
    """

    name: str = "tkv-bypass"
    state_kind = PAGED_KV

    def supports(self, layer: LayerSpec, device: torch.device) -> str | None:  # noqa: ARG002  # any device will do
        """Everything that a paged layer can ask for."""
        return None

    def storage(self, layer: LayerSpec, ctx: BackendContext) -> StorageSpec:
        """One tensor; none for a layer that reads another layer's."""
        if layer.kv_source_layer is not None:
            return StorageSpec()
        if ctx.device.type == "cuda":
            from arbi_plugin_tkv.kernels.paged_op import page_tensors

            dtype = str(ctx.dtype).removeprefix("torch.")
            return StorageSpec(pages=page_tensors(layer, _kv_heads(layer, ctx), ctx.page_size, dtype))
        width = _kv_heads(layer, ctx) * (layer.head_dim + layer.value_dim)
        return StorageSpec(pages=(TensorSpec("kv", (ctx.page_size, width), "bfloat16"),))

    def metadata_builder(self, layers: Sequence[LayerSpec], ctx: BackendContext) -> MetadataBuilder:
        """One plan a step, shared by all layers."""
        if ctx.device.type == "cuda":
            from arbi_plugin_tkv.kernels.paged_op import PagedBypassBuilder

            return PagedBypassBuilder(layers, ctx)
        from arbi_plugin_tkv.plan import PlanBuilder

        return PlanBuilder(layers)

    def attn_op(self, layer: LayerSpec, ctx: BackendContext, sinks: torch.Tensor | None = None) -> AttnOp:
        """The op of one layer."""
        kv_heads = _kv_heads(layer, ctx)
        if ctx.device.type == "cuda":
            from arbi_plugin_tkv.kernels.paged_op import PagedBypass

            return PagedBypass(layer, ctx.parallel.divide(layer.num_heads, "num_attention_heads"), kv_heads, sinks)
        from arbi_plugin_tkv.attention import StoreAttention
        from arbi_plugin_tkv.stores import BypassStore

        return StoreAttention(layer, kv_heads, sinks, BypassStore(kv_heads, layer.head_dim))


@frozen
class CodecBackend:
    """``paged_kv:tkv-k{K}v{V}``, and ``paged_kv:tkv``, whose widths the configuration declares.

    Attributes:
        name: name within the kind.
        bits: widths of keys and values; None takes what `declared_bits` says for both.
    """

    name: str
    bits: tuple[int, int] | None
    state_kind = PAGED_KV

    def supports(self, layer: LayerSpec, device: torch.device) -> str | None:  # noqa: ARG002  # any device will do
        """Any paged layer with heads of 2 to 1024 numbers."""
        for what, dim in (("keys", layer.head_dim), ("values", layer.value_dim)):
            if not 2 <= dim <= MAX_DIM:
                return f"{what} of {dim} numbers; TKV stores 2 to {MAX_DIM}"
        return None

    def storage(self, layer: LayerSpec, ctx: BackendContext) -> StorageSpec:
        """One tensor of bytes; none for a layer that reads another layer's."""
        if layer.kv_source_layer is not None:
            return StorageSpec()
        block = self.layout(layer, ctx, _bundle(ctx)).block_bytes
        return StorageSpec(pages=(TensorSpec("tkv", (_kv_heads(layer, ctx), block), "uint8"),))

    def metadata_builder(self, layers: Sequence[LayerSpec], ctx: BackendContext) -> MetadataBuilder:  # noqa: ARG002
        """One plan a step, shared by all layers."""
        from arbi_plugin_tkv.plan import PlanBuilder

        return PlanBuilder(layers)

    def attn_op(self, layer: LayerSpec, ctx: BackendContext, sinks: torch.Tensor | None = None) -> AttnOp:
        """The op of one layer."""
        from arbi_plugin_tkv.attention import StoreAttention
        from arbi_plugin_tkv.codec.basis import default_key_basis, default_value_basis
        from arbi_plugin_tkv.stores import CodecStore

        kv_heads = _kv_heads(layer, ctx)
        bundle = _bundle(ctx)
        if bundle is None:
            key, value = default_key_basis(kv_heads, layer.head_dim), default_value_basis(kv_heads, layer.value_dim)
        else:
            key, value = bundle.bases(layer, ctx.parallel)
        store = CodecStore(self.layout(layer, ctx, bundle), key.to(ctx.device), value.to(ctx.device))
        return StoreAttention(layer, kv_heads, sinks, store)

    def layout(self, layer: LayerSpec, ctx: BackendContext, bundle: Bundle | None) -> PageLayout:
        """How a page of the layer lies."""
        k_bits, v_bits = self.bits or (declared_bits(_config(ctx)),) * 2
        skew = 0 if bundle is None else key_skew(k_bits)
        return page_layout(
            ctx.page_size, side_layout(layer.head_dim, k_bits, skew), side_layout(layer.value_dim, v_bits)
        )


def key_skew(bits: int) -> int:
    """How many bits the strong half of a key in a fitted basis has more than the mean."""
    return 1 if bits < MAX_BITS else 0


def offered() -> list[AttentionBackend]:
    """``tkv``, ``tkv-bypass`` and every pair of widths."""
    widths = range(MIN_BITS, MAX_BITS + 1)
    pairs = [CodecBackend(f"tkv-k{k}v{v}", (k, v)) for k in widths for v in widths]
    return [BypassBackend(), CodecBackend("tkv", None), *pairs]


def _kv_heads(layer: LayerSpec, ctx: BackendContext) -> int:
    return ctx.parallel.divide(layer.num_kv_heads, "num_key_value_heads")


def _config(ctx: BackendContext) -> TkvConfig | None:
    section = ctx.options.get("tkv")
    return section if isinstance(section, TkvConfig) else None


def _bundle(ctx: BackendContext) -> Bundle | None:
    path = calibration_path(_config(ctx))
    if path is None:
        return None
    from arbi_plugin_tkv.calibration.bundle import load_bundle

    return load_bundle(path)
