"""``paged_kv:tkv-capture``: an uncompressed cache that learns from what passes through it. Torch-free at import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from arbi_core.api import PAGED_KV, LayerSpec, StorageSpec
from arbi_plugin_tkv.backend import BypassBackend

if TYPE_CHECKING:
    import torch

    from arbi_core.api import AttnOp, BackendContext, LayerState, MetadataBuilder
    from arbi_plugin_tkv.calibration.statistics import LayerStatistics

__all__ = ["CAPTURE", "CaptureBackend"]


class CaptureBackend:
    """``paged_kv:tkv-bypass`` with statistics of every layer that has a cache of its own; for calibration only.

    Attributes:
        layers: statistics by layer index, on the host; made anew whenever an engine is built.
    """

    state_kind = PAGED_KV
    name = "tkv-capture"

    def __init__(self) -> None:
        self.layers: dict[int, LayerStatistics] = {}
        self._bypass = BypassBackend(self.name)

    def clear(self) -> None:
        """Forget what was counted, such as an engine's trial runs."""
        for index, stats in self.layers.items():
            self.layers[index] = stats.emptied()

    def supports(self, layer: LayerSpec, device: torch.device) -> str | None:
        """What the codec supports: there is no use in learning for it elsewhere."""
        from arbi_plugin_tkv.backend import CodecBackend

        return CodecBackend(self.name, None).supports(layer, device)

    def storage(self, layer: LayerSpec, ctx: BackendContext) -> StorageSpec:
        """That of the bypass."""
        return self._bypass.storage(layer, ctx)

    def metadata_builder(self, layers: Sequence[LayerSpec], ctx: BackendContext) -> MetadataBuilder:
        """That of the bypass; a new engine begins."""
        self.layers = {}
        return self._bypass.metadata_builder(layers, ctx)

    def attn_op(self, layer: LayerSpec, ctx: BackendContext, sinks: torch.Tensor | None = None) -> AttnOp:
        """The bypass's op behind a counter."""
        from arbi_plugin_tkv.calibration.statistics import LayerStatistics

        if layer.kv_source_layer is None:
            kv_heads = ctx.parallel.divide(layer.num_kv_heads, "num_key_value_heads")
            self.layers[layer.index] = LayerStatistics(kv_heads, layer.head_dim, layer.value_dim)
        source = layer.index if layer.kv_source_layer is None else layer.kv_source_layer
        return _CountingOp(self, source, self._bypass.attn_op(layer, ctx, sinks))


class _CountingOp:
    """Counts, then attends."""

    def __init__(self, owner: CaptureBackend, source: int, op: AttnOp) -> None:
        self._owner = owner
        self._source = source
        self._op = op

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        state: LayerState,
        meta: Any,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """As in the protocol."""
        stats = self._owner.layers[self._source]
        if k is None or v is None:
            stats.add_readers(q, meta.positions)
        else:
            stats.add(q, k, v, meta.positions)
        return self._op.forward(q, k, v, state, meta, out)


CAPTURE = CaptureBackend()
"""The one that the plugin offers and the command reads."""
