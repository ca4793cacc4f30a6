"""Config parsing of the dense decoder family. Torch-free; `RopeSpec` is imported when a config is parsed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from arbi_core.errors import UnsupportedModelError
from arbi_core.model.hf_config import HFConfig, token_ids
from arbi_core.spec import LayerSpec, ModelDims, ModelSpec

if TYPE_CHECKING:
    from arbi_core.model.rope import RopeSpec

__all__ = ["parse_dense"]

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}


def parse_dense(architecture: str, raw: Mapping[str, Any]) -> ModelSpec:
    """Read a config of one of the family's architectures.

    Raises:
        UnsupportedModelError: a knob is missing, unknown or has a value that cannot be served exactly.
    """
    from arbi_core.model.decoder import DecoderSpec

    c = HFConfig(raw)
    layers = c.get("num_hidden_layers", int)
    heads = c.get("num_attention_heads", int)
    kv_heads = c.get("num_key_value_heads", int, heads)
    hidden = c.get("hidden_size", int)
    head_dim = _head_dim(c, architecture, hidden, heads)
    if kv_heads <= 0 or heads % kv_heads:
        raise UnsupportedModelError(f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads")
    max_positions = c.get("max_position_embeddings", int)
    windows = _windows(c, architecture, layers)
    qkv_bias, output_bias = _attention_bias(c, architecture)
    spec = DecoderSpec(
        intermediate_size=c.get("intermediate_size", int),
        norm_eps=c.get("rms_norm_eps", float, 1e-6),
        activation=c.choose("hidden_act", ACTIVATIONS, "silu"),
        rope=parse_rope(c, raw, max_positions),
        rope_layers=_rope_layers(c, architecture, layers),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=c.get("mlp_bias", bool, False)
        if architecture in {"LlamaForCausalLM", "SmolLM3ForCausalLM"}
        else False,
        qk_norm=architecture == "Qwen3ForCausalLM",
        tied=c.get("tie_word_embeddings", bool, architecture == "SmolLM3ForCausalLM"),
    )
    vocab = c.get("vocab_size", int)
    c.finish()
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise UnsupportedModelError(f"config.json: dtype = {dtype!r} is not supported (supported: {', '.join(DTYPES)})")
    bos = raw.get("bos_token_id")
    return ModelSpec(
        architecture=architecture,
        dims=ModelDims(layers, hidden, vocab, max_positions),
        layers=tuple(
            LayerSpec(index=i, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, window=windows[i])
            for i in range(layers)
        ),
        dtype=DTYPES[dtype],
        eos_token_ids=token_ids(raw.get("eos_token_id")),
        bos_token_id=bos if isinstance(bos, int) else None,
        config=spec,
    )


def _head_dim(c: HFConfig, architecture: str, hidden: int, heads: int) -> int:
    declared = c.find("head_dim", int)
    if declared is None and hidden % heads:
        raise UnsupportedModelError(f"config.json: hidden_size {hidden} does not divide over {heads} heads")
    if declared is None:
        return 128 if architecture == "Qwen3ForCausalLM" else hidden // heads
    return declared


def _attention_bias(c: HFConfig, architecture: str) -> tuple[bool, bool]:
    """Bias of (q, k, v) and of the output projection."""
    if architecture == "Qwen2ForCausalLM":
        return True, False
    if architecture == "MistralForCausalLM":
        return False, False
    bias = c.get("attention_bias", bool, False)
    return bias, bias


def _windows(c: HFConfig, architecture: str, layers: int) -> tuple[int | None, ...]:
    """Sliding window of every layer."""
    if architecture == "LlamaForCausalLM":
        return (None,) * layers
    window = c.find("sliding_window", int)
    if architecture == "MistralForCausalLM":
        return (window,) * layers
    if not c.get("use_sliding_window", bool, False):
        c.skip("layer_types")
        return (None,) * layers
    types = c.find("layer_types", list)
    if types is None:
        if architecture == "SmolLM3ForCausalLM":
            rope = _rope_layers(c, architecture, layers)
            types = ["full_attention" if r else "sliding_attention" for r in rope]
        else:
            first = c.get("max_window_layers", int, 28)
            types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return tuple(window if _is_sliding(t) else None for t in _per_layer("layer_types", types, layers))


def _is_sliding(layer_type: object) -> bool:
    if layer_type not in {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(
            f"config.json: layer_types has {layer_type!r} (supported: 'full_attention', 'sliding_attention')"
        )
    return layer_type == "sliding_attention"


def _rope_layers(c: HFConfig, architecture: str, layers: int) -> tuple[bool, ...]:
    """Per layer, whether queries and keys are rotated (SmolLM3 leaves every fourth layer unrotated)."""
    if architecture != "SmolLM3ForCausalLM":
        return (True,) * layers
    interval = c.get("no_rope_layer_interval", int, 4)
    declared = c.find("no_rope_layers", list)
    if declared is None:
        return tuple((i + 1) % interval != 0 for i in range(layers))
    return tuple(bool(x) for x in _per_layer("no_rope_layers", declared, layers))


def _per_layer(key: str, values: list[Any], layers: int) -> list[Any]:
    if len(values) < layers:
        raise UnsupportedModelError(f"config.json: {key} has {len(values)} entries for {layers} layers")
    return values[:layers]


def parse_rope(c: HFConfig, raw: Mapping[str, Any], max_positions: int) -> RopeSpec:
    """Read rotary parameters in the old (``rope_theta``, ``rope_scaling``) or new (``rope_parameters``) spelling."""
    from arbi_core.model.rope import RopeSpec

    theta = c.get("rope_theta", float, 10000.0)
    c.skip("rope_scaling", "rope_parameters")
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling")
    if scaling is None:
        return RopeSpec(theta=theta)
    if not isinstance(scaling, Mapping):
        raise UnsupportedModelError(f"config.json: rope parameters must be a table, not {scaling!r}")
    r = HFConfig(scaling, "config.json: rope parameters")
    kinds = {k: k for k in ("default", "linear", "llama3", "yarn")}
    kind = r.choose("rope_type" if "rope_type" in scaling else "type", kinds, "default")
    r.skip("type", "rope_type")
    theta = r.get("rope_theta", float, theta)
    if r.get("partial_rotary_factor", float, 1.0) != 1.0:
        raise UnsupportedModelError("config.json: partial_rotary_factor other than 1 is not supported by this family")
    spec = _scaled_rope(r, kind, theta, max_positions)
    r.finish()
    return spec


def _scaled_rope(r: HFConfig, kind: str, theta: float, max_positions: int) -> RopeSpec:
    from arbi_core.model.rope import RopeSpec

    if kind == "default":
        r.skip("factor", "original_max_position_embeddings")
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=r.get("factor", float))
    original = r.get("original_max_position_embeddings", int, max_positions)
    if kind == "llama3":
        return RopeSpec(
            theta=theta,
            kind=kind,
            factor=r.get("factor", float),
            original_max_position=original,
            low_freq_factor=r.get("low_freq_factor", float),
            high_freq_factor=r.get("high_freq_factor", float),
        )
    factor = r.get("factor", float, max_positions / original)
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=original,
        beta_fast=r.get("beta_fast", float, 32.0),
        beta_slow=r.get("beta_slow", float, 1.0),
        attention_factor=_yarn_attention_factor(r, factor),
        truncate=r.get("truncate", bool, True),
    )


def _yarn_attention_factor(r: HFConfig, factor: float) -> float:
    """Explicit factor, or the ratio that DeepSeek-style ``mscale`` pairs define; 0 leaves the paper's default."""
    import math

    explicit = r.find("attention_factor", float)
    mscale, all_dim = r.get("mscale", float, 0.0), r.get("mscale_all_dim", float, 0.0)
    if explicit is not None:
        return explicit
    if not (mscale and all_dim) or factor <= 1:
        return 0.0
    return (0.1 * mscale * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1)
