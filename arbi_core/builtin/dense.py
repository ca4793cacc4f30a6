"""The dense decoder family: Llama, Mistral, Qwen2, Qwen3 and SmolLM3, one skeleton with declared knobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from arbi_core.api import hookimpl
from arbi_core.builtin.dense_config import parse_dense
from arbi_core.spec import ModelSpec, WeightMap, WeightShardSpec

if TYPE_CHECKING:
    from torch import nn

    from arbi_core.model.base import BuildContext, ModelFamily

__all__ = ["DenseFamily"]

arbi_api_version = 1


class DenseFamily:
    """See `arbi_core.model.base.ModelFamily`."""

    architectures = (
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "SmolLM3ForCausalLM",
    )

    def parse_config(self, hf: Mapping[str, Any]) -> ModelSpec:
        """Read the config of any of `architectures`."""
        return parse_dense(hf["architectures"][0], hf)

    def build(self, spec: ModelSpec, ctx: BuildContext) -> nn.Module:
        """Make the decoder on the meta device."""
        from arbi_core.model.decoder import Decoder

        return Decoder(spec, spec.config, ctx)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        """Hugging Face names of every parameter and the dimension that ranks cut it along."""
        config = spec.config
        entries = [WeightShardSpec("embed.weight", "model.embed_tokens.weight", 0)]
        for i in range(spec.dims.num_layers):
            entries += _layer_entries(i, config)
        entries.append(WeightShardSpec("norm.weight", "model.norm.weight"))
        head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
        entries.append(WeightShardSpec("lm_head.weight", head, 0))
        ignored = [r".*\.rotary_emb\.inv_freq"]
        if config.tied:
            ignored.append(r"lm_head\.weight")
        return WeightMap(tuple(entries), tuple(ignored))


def _layer_entries(i: int, config: Any) -> list[WeightShardSpec]:
    here, there = f"layers.{i}", f"model.layers.{i}"
    entries = [
        WeightShardSpec(f"{here}.input_norm.weight", f"{there}.input_layernorm.weight"),
        WeightShardSpec(f"{here}.mlp_norm.weight", f"{there}.post_attention_layernorm.weight"),
    ]
    for leaf, has_qkv, has_out, has_mlp in (
        ("weight", True, True, True),
        ("bias", config.qkv_bias, config.output_bias, config.mlp_bias),
    ):
        row_dim = 1 if leaf == "weight" else None
        if has_qkv:
            entries += [
                WeightShardSpec(f"{here}.attn.qkv.{leaf}", f"{there}.self_attn.{p}_proj.{leaf}", 0, p) for p in "qkv"
            ]
        if has_out:
            entries.append(WeightShardSpec(f"{here}.attn.output.{leaf}", f"{there}.self_attn.o_proj.{leaf}", row_dim))
        if has_mlp:
            entries += [
                WeightShardSpec(f"{here}.mlp.gate_up.{leaf}", f"{there}.mlp.{p}_proj.{leaf}", 0, p)
                for p in ("gate", "up")
            ]
            entries.append(WeightShardSpec(f"{here}.mlp.down.{leaf}", f"{there}.mlp.down_proj.{leaf}", row_dim))
    if config.qk_norm:
        entries += [WeightShardSpec(f"{here}.attn.{p}_norm.weight", f"{there}.self_attn.{p}_norm.weight") for p in "qk"]
    return entries


@hookimpl
def arbi_model_families() -> list[ModelFamily]:
    """Offer the family."""
    return [DenseFamily()]
