"""The modules, from arbi's building blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from arbi_core.api import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLMHead,
    RMSNorm,
    RopeSpec,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    rotate,
)

if TYPE_CHECKING:
    from arbi_core.api import BuildContext, ForwardBatch, LayerCall, LayerSpec, ModelSpec

__all__ = ["ExampleLayer", "ExampleModel"]


class ExampleLayer(nn.Module):
    """``h += attention(norm(h)) + mlp(norm(h))``: both branches read the same norm."""

    def __init__(self, layer: LayerSpec, spec: ModelSpec, ctx: BuildContext) -> None:
        super().__init__()
        hidden, width = spec.dims.hidden_size, layer.head_dim
        common = {"bias": False, "group": ctx.group, "dtype": ctx.dtype}
        self.heads = ctx.group.spec.divide(layer.num_heads, "num_attention_heads")
        self.kv_heads = ctx.group.spec.divide(layer.num_kv_heads, "num_key_value_heads")
        self.width = width
        self.norm = RMSNorm(hidden, spec.config.norm_eps, dtype=ctx.dtype)
        rows = {"q": layer.num_heads * width, "k": layer.num_kv_heads * width, "v": layer.num_kv_heads * width}
        self.qkv = MergedColumnParallelLinear(hidden, rows, **common)
        self.output = RowParallelLinear(layer.num_heads * width, hidden, **common)
        self.up = ColumnParallelLinear(hidden, spec.config.intermediate_size, **common)
        self.down = RowParallelLinear(spec.config.intermediate_size, hidden, **common)

    def forward(self, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: LayerCall) -> torch.Tensor:
        """``(N, hidden)`` to the same shape."""
        x = self.norm(h)
        q, k, v = self.qkv(x).view(len(x), -1, self.width).split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        attended = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        mixed: torch.Tensor = self.output(attended.reshape(len(x), -1)) + self.down(self.up(x).relu().square())
        return h + mixed


class ExampleModel(nn.Module):
    """See `arbi_core.model.base.Model`."""

    def __init__(self, spec: ModelSpec, ctx: BuildContext) -> None:
        super().__init__()
        dims = spec.dims
        self.embed = VocabParallelEmbedding(dims.vocab_size, dims.hidden_size, group=ctx.group, dtype=ctx.dtype)
        self.layers = nn.ModuleList(ExampleLayer(layer, spec, ctx) for layer in spec.layers)
        self.norm = RMSNorm(dims.hidden_size, spec.config.norm_eps, dtype=ctx.dtype)
        self.lm_head = ParallelLMHead(dims.hidden_size, dims.vocab_size, tied=None, group=ctx.group, dtype=ctx.dtype)
        self._table = (spec.layers[0].head_dim, ctx.max_model_len, RopeSpec(theta=spec.config.rope_theta))
        self._rope: RotaryEmbedding | None = None

    def forward(self, batch: ForwardBatch, layers: Sequence[LayerCall]) -> torch.Tensor:
        """All tokens of the step, through all layers."""
        h = self.embed(batch.input_ids)
        if self._rope is None:
            self._rope = RotaryEmbedding(*self._table, device=h.device)
        cos, sin = self._rope.at(batch.positions, h.dtype)
        for layer, attend in zip(self.layers, layers, strict=True):
            h = layer(h, cos, sin, attend)
        hidden: torch.Tensor = self.norm(h)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(R, hidden)`` to ``(R, vocab)`` float32."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def attention_sinks(self, layer: int) -> torch.Tensor | None:
        """None."""
        del layer
        return None
