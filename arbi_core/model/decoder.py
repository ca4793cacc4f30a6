"""The decoder skeleton: pre-norm attention and gated MLP blocks over flat tokens.

Covers every model whose layers differ only in numbers and switches (`DecoderSpec`); a family with layers of another
form writes its own blocks from the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import nn

from arbi_core.model.embedding import VocabParallelEmbedding
from arbi_core.model.linear import MergedColumnParallelLinear, ParallelLMHead, RowParallelLinear
from arbi_core.model.norm import RMSNorm
from arbi_core.model.rope import RopeSpec, RotaryEmbedding, rotate

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, hidden)`` to the same shape."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        activated = F.silu(gate) if self._silu else F.gelu(gate, approximate="tanh")
        down: torch.Tensor = self.down(activated.mul_(up))
        return down


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

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: LayerCall) -> torch.Tensor:
        """``(N, hidden)`` to the same shape; `cos` and `sin` as from `RotaryEmbedding.at`."""
        qkv = self.qkv(x).view(x.shape[0], self.heads + 2 * self.kv_heads, self.head_dim)
        both, v = qkv[:, : self.heads + self.kv_heads], qkv[:, self.heads + self.kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            both = torch.cat((self.q_norm(both[:, : self.heads]), self.k_norm(both[:, self.heads :])), dim=1)
        if self.rotates:
            both = rotate(both, cos, sin)
        out = attend(both[:, : self.heads], both[:, self.heads :], v)
        projected: torch.Tensor = self.output(out.view(x.shape[0], self.heads * self.head_dim))
        return projected


class DecoderLayer(nn.Module):
    """``h += attention(norm(h)); h += mlp(norm(h))``, with each addition fused into the norm that follows it."""

    def __init__(self, layer: LayerSpec, hidden: int, spec: DecoderSpec, ctx: BuildContext) -> None:
        super().__init__()
        self.input_norm = RMSNorm(hidden, spec.norm_eps, dtype=ctx.dtype)
        self.attn = SelfAttention(layer, hidden, spec, ctx)
        self.mlp_norm = RMSNorm(hidden, spec.norm_eps, dtype=ctx.dtype)
        self.mlp = GatedMLP(hidden, spec, ctx)


class Decoder(nn.Module):
    """Embedding, layers, final norm and head. Implements `arbi_core.model.base.Model`."""

    def __init__(self, model: ModelSpec, spec: DecoderSpec, ctx: BuildContext) -> None:
        super().__init__()
        dims = model.dims
        self.embed = VocabParallelEmbedding(dims.vocab_size, dims.hidden_size, group=ctx.group, dtype=ctx.dtype)
        self.layers = nn.ModuleList(DecoderLayer(layer, dims.hidden_size, spec, ctx) for layer in model.layers)
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
        cos, sin = self._rope.at(batch.positions, residual.dtype)
        delta: torch.Tensor | None = None
        for block, attend in zip(self.layers, layers, strict=True):
            assert isinstance(block, DecoderLayer)  # noqa: S101  # ModuleList forgets the type of its items
            x = block.input_norm(residual) if delta is None else block.input_norm.add(delta, residual)
            x = block.mlp_norm.add(block.attn(x, cos, sin, attend), residual)
            delta = block.mlp(x)
        hidden: torch.Tensor = self.norm(residual) if delta is None else self.norm.add(delta, residual)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `arbi_core.model.base.Model`."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def attention_sinks(self, layer: int) -> torch.Tensor | None:  # noqa: ARG002  # the protocol's signature
        """These models have none."""
        return None
