"""The decoder skeleton: pre-norm attention and gated MLP blocks over flat tokens.

Covers every model whose layers differ only in numbers and switches (`DecoderSpec`); a family with layers of another
form writes its own blocks from the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import nn

from arbi_core.kernels.device import uses_triton
from arbi_core.kernels.gated import gated
from arbi_core.kernels.qk_rope import HeadNorms, qk_rope
from arbi_core.model.embedding import VocabParallelEmbedding
from arbi_core.model.linear import MergedColumnParallelLinear, ParallelLMHead, RowParallelLinear
from arbi_core.model.norm import RMSNorm
from arbi_core.model.rope import RopeSpec, RotaryEmbedding

if TYPE_CHECKING:
    from arbi_core.model.base import BuildContext, LayerCall
    from arbi_core.runner.batch import ForwardBatch
    from arbi_core.spec import LayerSpec, ModelSpec

__all__ = ["Decoder", "DecoderLayer", "DecoderSpec", "GatedMLP", "SelfAttention"]


@frozen(kw_only=True)
class DecoderSpec:
    """What the skeleton needs beside `ModelSpec`.

    Attributes:
        intermediate_size: width of the MLP.
        activation: ``silu`` or ``gelu_tanh``.
        norm_eps: epsilon of every RMS norm.
        rope: rotary frequencies.
        rope_layers: per layer, whether queries and keys are rotated.
        qkv_bias: bias on q, k and v.
        output_bias: bias on the attention output.
        mlp_bias: bias on gate, up and down.
        qk_norm: RMS norm over each query and key head before rotation.
        tied: the head shares the embedding's weight.
    """

    intermediate_size: int
    norm_eps: float
    rope: RopeSpec
    rope_layers: tuple[bool, ...]
    activation: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``."""

    def __init__(self, hidden: int, spec: DecoderSpec, ctx: BuildContext) -> None:
        super().__init__()
        self.gate_up = MergedColumnParallelLinear(
            hidden,
            {"gate": spec.intermediate_size, "up": spec.intermediate_size},
            bias=spec.mlp_bias,
            group=ctx.group,
            dtype=ctx.dtype,
        )
        self.down = RowParallelLinear(
            spec.intermediate_size, hidden, bias=spec.mlp_bias, group=ctx.group, dtype=ctx.dtype
        )
        self._silu = spec.activation == "silu"
        # Bound once: looking a submodule up and calling it through hooks costs more than a small product.
        self._gate_up, self._down = self.gate_up.forward, self.down.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, hidden)`` to the same shape."""
        return self._down(gated(self._gate_up(x), silu=self._silu))


class SelfAttention(nn.Module):
    """Grouped-query attention: projections, optional head norms, rotation; the rest is the backend's."""

    def __init__(self, layer: LayerSpec, hidden: int, spec: DecoderSpec, ctx: BuildContext) -> None:
        super().__init__()
        parallel = ctx.group.spec
        self.heads = parallel.divide(layer.num_heads, "num_attention_heads")
        self.kv_heads = parallel.divide(layer.num_kv_heads, "num_key_value_heads")
        self.head_dim = layer.head_dim
        self.rotates = spec.rope_layers[layer.index]
        self.qkv = MergedColumnParallelLinear(
            hidden,
            {
                "q": layer.num_heads * layer.head_dim,
                "k": layer.num_kv_heads * layer.head_dim,
                "v": layer.num_kv_heads * layer.head_dim,
            },
            bias=spec.qkv_bias,
            group=ctx.group,
            dtype=ctx.dtype,
        )
        self.output = RowParallelLinear(
            layer.num_heads * layer.head_dim, hidden, bias=spec.output_bias, group=ctx.group, dtype=ctx.dtype
        )
        self.q_norm = RMSNorm(layer.head_dim, spec.norm_eps, dtype=ctx.dtype) if spec.qk_norm else None
        self.k_norm = RMSNorm(layer.head_dim, spec.norm_eps, dtype=ctx.dtype) if spec.qk_norm else None
        self._qkv, self._output = self.qkv.forward, self.output.forward
        self._norms = None if self.q_norm is None or self.k_norm is None else HeadNorms(self.q_norm, self.k_norm)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: LayerCall) -> torch.Tensor:
        """``(N, hidden)`` to the same shape; `cos` and `sin` as from `RotaryEmbedding.at`."""
        heads, kv_heads, tokens = self.heads, self.kv_heads, x.shape[0]
        both, v = torch.split_with_sizes(self._qkv(x).view(tokens, -1, self.head_dim), (heads + kv_heads, kv_heads), 1)
        q, k = qk_rope(both, heads, self._norms, (cos, sin) if self.rotates else None)
        return self._output(attend(q, k, v).view(tokens, -1))


class DecoderLayer(nn.Module):
    """``h += attention(norm(h)); h += mlp(norm(h))``, with each addition fused into the norm that follows it."""

    def __init__(self, layer: LayerSpec, hidden: int, spec: DecoderSpec, ctx: BuildContext) -> None:
        super().__init__()
        self.input_norm = RMSNorm(hidden, spec.norm_eps, dtype=ctx.dtype)
        self.attn = SelfAttention(layer, hidden, spec, ctx)
        self.mlp_norm = RMSNorm(hidden, spec.norm_eps, dtype=ctx.dtype)
        self.mlp = GatedMLP(hidden, spec, ctx)
        self.parts = (self.input_norm, self.attn.forward, self.mlp_norm, self.mlp.forward)


class Decoder(nn.Module):
    """Embedding, layers, final norm and head. Implements `arbi_core.model.base.Model`."""

    def __init__(self, model: ModelSpec, spec: DecoderSpec, ctx: BuildContext) -> None:
        super().__init__()
        dims = model.dims
        self.embed = VocabParallelEmbedding(dims.vocab_size, dims.hidden_size, group=ctx.group, dtype=ctx.dtype)
        blocks = [DecoderLayer(layer, dims.hidden_size, spec, ctx) for layer in model.layers]
        self.layers = nn.ModuleList(blocks)
        self._parts = [b.parts for b in blocks]
        self.norm = RMSNorm(dims.hidden_size, spec.norm_eps, dtype=ctx.dtype)
        self.lm_head = ParallelLMHead(
            dims.hidden_size,
            dims.vocab_size,
            tied=self.embed if spec.tied else None,
            group=ctx.group,
            dtype=ctx.dtype,
        )
        self._rope_args = (model.layers[0].head_dim, ctx.max_model_len, spec.rope)
        self._rope: RotaryEmbedding | None = None
        for name, module in self.named_modules():
            if hasattr(module, "adapter_key"):
                module.adapter_key = name

    def forward(self, batch: ForwardBatch, layers: Sequence[LayerCall]) -> torch.Tensor:
        """See `arbi_core.model.base.Model`."""
        residual = self.embed(batch.input_ids)
        if self._rope is None:
            self._rope = RotaryEmbedding(*self._rope_args, device=residual.device)
        # Kernels compute in float32 and take the exact table; plain torch would pay for the wider product.
        dtype = torch.float32 if uses_triton(residual) else residual.dtype
        cos, sin = self._rope.at(batch.positions, dtype)
        delta: torch.Tensor | None = None
        for (input_norm, attention, mlp_norm, mlp), attend in zip(self._parts, layers, strict=True):
            x = input_norm.forward(residual) if delta is None else input_norm.add(delta, residual)
            x = mlp_norm.add(attention(x, cos, sin, attend), residual)
            delta = mlp(x)
        hidden: torch.Tensor = self.norm(residual) if delta is None else self.norm.add(delta, residual)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `arbi_core.model.base.Model`."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def attention_sinks(self, layer: int) -> torch.Tensor | None:  # noqa: ARG002  # the protocol's signature
        """These models have none."""
        return None
