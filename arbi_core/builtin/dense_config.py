"""Config parsing of the dense decoder family. Torch-free; the spec classes are imported when a config is parsed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from arbi_core.builtin.rope_config import parse_rope
from arbi_core.errors import UnsupportedModelError
from arbi_core.model.hf_config import HFConfig, token_ids
from arbi_core.spec import LayerSpec, ModelDims, ModelSpec

if TYPE_CHECKING:
    from arbi_core.model.decoder import DecoderSpec

__all__ = ["parse_dense"]

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}
LAYER_TYPES = {"full_attention": False, "sliding_attention": True}


@frozen(kw_only=True)
class _Traits:
    """What an architecture fixes, and what it takes a config to mean that lacks a key (as transformers does).

    Attributes:
        kv_heads: key heads where the key is absent; None for as many as query heads.
        head_dim: head width where the key is absent; None for hidden size over heads.
        theta: rotary base where none is given.
        tied: whether the head is tied where the key is absent.
        windows: ``none``, ``all`` layers, or ``declared`` per layer.
        window: sliding window where the key is absent.
        bias: attention bias: ``none``, on ``qkv`` only, or ``declared`` by ``attention_bias``.
        mlp_bias: whether ``mlp_bias`` is a key of this architecture.
        qk_norm: whether query and key heads are normalised.
        nope: whether some layers go without rotation.
    """

    kv_heads: int | None
    head_dim: int | None = None
    theta: float = 10000.0
    tied: bool = False
    windows: str = "none"
    window: int | None = None
    bias: str = "declared"
    mlp_bias: bool = False
    qk_norm: bool = False
    nope: bool = False


TRAITS = {
    "LlamaForCausalLM": _Traits(kv_heads=None, mlp_bias=True),
    "MistralForCausalLM": _Traits(kv_heads=8, windows="all", window=4096, bias="none"),
    "Qwen2ForCausalLM": _Traits(kv_heads=32, windows="declared", window=4096, bias="qkv"),
    "Qwen3ForCausalLM": _Traits(kv_heads=32, head_dim=128, windows="declared", window=4096, qk_norm=True),
    "SmolLM3ForCausalLM": _Traits(kv_heads=4, theta=2000000.0, tied=True, windows="declared", mlp_bias=True, nope=True),
}


def parse_dense(architecture: str, raw: Mapping[str, Any]) -> ModelSpec:
    """Read a config of one of the family's architectures.

    Raises:
        UnsupportedModelError: a knob is missing, unknown or has a value that cannot be served exactly.
    """
    traits = TRAITS[architecture]
    c = HFConfig(raw)
    dims = ModelDims(
        num_layers=c.positive("num_hidden_layers", int),
        hidden_size=c.positive("hidden_size", int),
        vocab_size=c.positive("vocab_size", int),
        max_position_embeddings=c.positive("max_position_embeddings", int),
    )
    heads = c.positive("num_attention_heads", int)
    kv_heads = _kv_heads(c, raw, traits, heads)
    head_dim = _head_dim(c, traits, dims.hidden_size, heads)
    rope_layers = _rope_layers(c, traits, dims.num_layers)
    windows = _windows(c, raw, traits, rope_layers)
    spec = _decoder_spec(c, raw, traits, rope_layers, dims.max_position_embeddings)
    dtype = c.choose("dtype" if raw.get("dtype") is not None else "torch_dtype", DTYPES, "float32")
    c.choose("rope_interleaved", {False: False}, False)  # the only value that rotates as we do
    c.finish()
    bos = token_ids(raw.get("bos_token_id"), "bos_token_id")
    return ModelSpec(
        architecture=architecture,
        dims=dims,
        layers=tuple(
            LayerSpec(index=i, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, window=window)
            for i, window in enumerate(windows)
        ),
        dtype=dtype,
        eos_token_ids=token_ids(raw.get("eos_token_id")),
        bos_token_id=bos[0] if bos else None,
        config=spec,
    )


def _decoder_spec(
    c: HFConfig, raw: Mapping[str, Any], traits: _Traits, rope_layers: tuple[bool, ...], max_positions: int
) -> DecoderSpec:
    from arbi_core.model.decoder import DecoderSpec

    qkv_bias = output_bias = False
    if traits.bias == "declared":
        qkv_bias = output_bias = c.get("attention_bias", bool, False)
    elif traits.bias == "qkv":
        qkv_bias = True
    return DecoderSpec(
        intermediate_size=c.positive("intermediate_size", int),
        norm_eps=c.positive("rms_norm_eps", float, 1e-6),
        activation=c.choose("hidden_act", ACTIVATIONS, "silu"),
        rope=parse_rope(c, raw, max_positions, traits.theta),
        rope_layers=rope_layers,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=c.get("mlp_bias", bool, False) if traits.mlp_bias else False,
        qk_norm=traits.qk_norm,
        tied=c.get("tie_word_embeddings", bool, traits.tied),
    )


def _kv_heads(c: HFConfig, raw: Mapping[str, Any], traits: _Traits, heads: int) -> int:
    """An absent key means the architecture's default, null means as many as query heads."""
    absent = heads if traits.kv_heads is None or "num_key_value_heads" in raw else traits.kv_heads
    kv_heads = c.positive("num_key_value_heads", int, absent)
    if heads % kv_heads:
        raise UnsupportedModelError(f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads")
    return kv_heads


def _head_dim(c: HFConfig, traits: _Traits, hidden: int, heads: int) -> int:
    declared = c.find("head_dim", int)
    width = traits.head_dim if declared is None else declared
    if width is None:
        if hidden % heads:
            raise UnsupportedModelError(f"config.json: hidden_size {hidden} does not divide over {heads} heads")
        width = hidden // heads
    if width <= 0 or width % 2:
        raise UnsupportedModelError(f"config.json: head_dim = {width} must be even and positive to be rotated in pairs")
    return width


def _windows(
    c: HFConfig, raw: Mapping[str, Any], traits: _Traits, rope_layers: tuple[bool, ...]
) -> tuple[int | None, ...]:
    """Sliding window of every layer; an absent ``sliding_window`` is the architecture's default, null is none."""
    layers = len(rope_layers)
    if traits.windows == "none":
        return (None,) * layers
    window = c.find("sliding_window", int) if "sliding_window" in raw else traits.window
    if window is not None and window <= 0:
        raise UnsupportedModelError(f"config.json: sliding_window = {window} must be positive (null turns it off)")
    if traits.windows == "all":
        return (window,) * layers
    if not c.get("use_sliding_window", bool, False):
        window = None
    first = c.get("max_window_layers", int, 28)
    declared = c.find("layer_types", list)
    if declared is None:
        slides = [not r for r in rope_layers] if traits.nope else [i >= first for i in range(layers)]
    else:
        slides = [_is_sliding(t) for t in _per_layer("layer_types", declared, layers)]
        if window is None and any(slides):
            raise UnsupportedModelError(
                "config.json: layer_types has 'sliding_attention', but no window is in use (use_sliding_window = "
                f"{raw.get('use_sliding_window')!r}, sliding_window = {raw.get('sliding_window')!r})"
            )
    return tuple(window if slide else None for slide in slides)


def _is_sliding(layer_type: object) -> bool:
    if not isinstance(layer_type, str) or layer_type not in LAYER_TYPES:
        listed = ", ".join(map(repr, LAYER_TYPES))
        raise UnsupportedModelError(f"config.json: layer_types has {layer_type!r} (supported: {listed})")
    return LAYER_TYPES[layer_type]


def _rope_layers(c: HFConfig, traits: _Traits, layers: int) -> tuple[bool, ...]:
    """Per layer, whether queries and keys are rotated (SmolLM3 leaves every fourth layer unrotated)."""
    if not traits.nope:
        return (True,) * layers
    interval = c.positive("no_rope_layer_interval", int, 4)
    declared = c.find("no_rope_layers", list)
    if declared is None:
        return tuple((i + 1) % interval != 0 for i in range(layers))
    flags = _per_layer("no_rope_layers", declared, layers)
    for flag in flags:
        if flag not in (0, 1):
            raise UnsupportedModelError(f"config.json: no_rope_layers has {flag!r} (1 rotates the layer, 0 does not)")
    return tuple(bool(flag) for flag in flags)


def _per_layer(key: str, values: list[Any], layers: int) -> list[Any]:
    if len(values) < layers:
        raise UnsupportedModelError(f"config.json: {key} has {len(values)} entries for {layers} layers")
    return values[:layers]
