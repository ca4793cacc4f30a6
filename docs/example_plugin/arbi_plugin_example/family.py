"""The model family: a decoder whose MLP is a squared ReLU and whose attention has one head norm less than usual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from arbi_core.api import HFConfig, LayerSpec, ModelDims, ModelSpec, WeightMap, WeightShardSpec

if TYPE_CHECKING:
    from torch import nn

    from arbi_core.api import BuildContext

__all__ = ["ExampleConfigSpec", "ExampleFamily"]

NAMES = {
    "embed.weight": ("embed.weight", 0),
    "norm.weight": ("norm.weight", None),
    "lm_head.weight": ("lm_head.weight", 0),
}
LAYER_NAMES = {
    "norm.weight": ("norm.weight", None),
    "up.weight": ("mlp.up.weight", 0),
    "down.weight": ("mlp.down.weight", 1),
    "output.weight": ("attention.output.weight", 1),
}


@frozen
class ExampleConfigSpec:
    """What `build` needs beside the layers."""

    intermediate_size: int
    norm_eps: float
    rope_theta: float


class ExampleFamily:
    """See `arbi_core.model.base.ModelFamily`."""

    architectures = ("ExampleForCausalLM",)

    def parse_config(self, hf: Mapping[str, Any]) -> ModelSpec:
        """Read every key with its type; `HFConfig.finish` refuses whatever was not read."""
        c = HFConfig(hf)
        layers, heads = c.get("num_hidden_layers", int), c.get("num_attention_heads", int)
        hidden = c.get("hidden_size", int)
        kv_heads = c.get("num_key_value_heads", int, heads)
        spec = ModelSpec(
            architecture="ExampleForCausalLM",
            dims=ModelDims(layers, hidden, c.get("vocab_size", int), c.get("max_position_embeddings", int)),
            layers=tuple(
                LayerSpec(index=i, num_heads=heads, num_kv_heads=kv_heads, head_dim=hidden // heads)
                for i in range(layers)
            ),
            dtype="float32",
            eos_token_ids=(c.get("eos_token_id", int),) if "eos_token_id" in hf else (),
            config=ExampleConfigSpec(
                intermediate_size=c.get("intermediate_size", int),
                norm_eps=c.get("rms_norm_eps", float, 1e-6),
                rope_theta=c.get("rope_theta", float, 10000.0),
            ),
        )
        c.finish()
        return spec

    def build(self, spec: ModelSpec, ctx: BuildContext) -> nn.Module:
        """Make the modules."""
        from arbi_plugin_example.model import ExampleModel

        return ExampleModel(spec, ctx)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        """Name every parameter's tensor and the dimension that ranks cut it along."""
        entries = [WeightShardSpec(param, source, dim) for param, (source, dim) in NAMES.items()]
        for i in range(spec.dims.num_layers):
            entries += [
                WeightShardSpec(f"layers.{i}.{param}", f"layers.{i}.{source}", dim)
                for param, (source, dim) in LAYER_NAMES.items()
            ]
            entries += [
                WeightShardSpec(f"layers.{i}.qkv.weight", f"layers.{i}.attention.{p}.weight", 0, p) for p in "qkv"
            ]
        return WeightMap(tuple(entries))
