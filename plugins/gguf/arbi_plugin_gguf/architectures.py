"""GGUF architectures in Hugging Face terms: config keys and tensor names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from arbi_core.api import CheckpointError, UnsupportedModelError
from arbi_plugin_gguf.header import GGUFFile

__all__ = ["generation_config", "hf_config", "hf_name", "interleaved_heads"]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
KNOWN_KEYS = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "vocab_size", "attention.sliding_window",
})  # fmt: skip


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """Translate the metadata into a Hugging Face config.

    Raises:
        UnsupportedModelError: an architecture or a key that cannot be served exactly.
    """
    meta = file.metadata
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} has the GGUF architecture {arch!r} (served from GGUF: {', '.join(ARCHITECTURES)})"
        )
    own = {k.removeprefix(f"{arch}."): v for k, v in meta.items() if k.startswith(f"{arch}.")}
    unknown = sorted(set(own) - KNOWN_KEYS)
    if unknown:
        listed = ", ".join(f"{arch}.{k} = {own[k]!r}" for k in unknown)
        raise UnsupportedModelError(f"{file.path} has settings that could not be served exactly: {listed}")
    heads = _need(file, own, arch, "attention.head_count")
    hidden = _need(file, own, arch, "embedding_length")
    head_dim = own.get("attention.key_length", hidden // heads)
    _check_widths(file, own, arch, head_dim)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "hidden_size": hidden,
        "num_hidden_layers": _need(file, own, arch, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": _need(file, own, arch, "feed_forward_length"),
        "max_position_embeddings": _need(file, own, arch, "context_length"),
        "rms_norm_eps": _need(file, own, arch, "attention.layer_norm_rms_epsilon"),
        "rope_theta": own.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, own),
        "vocab_size": _vocab(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
        "dtype": "float32",
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
    }
    if arch == "llama" and "blk.0.attn_q.bias" in file.tensors:
        config["attention_bias"] = True
    return config


def generation_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    """End tokens: end of sequence and end of turn, where the file names them."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [meta[f"tokenizer.ggml.{k}"] for k in keys if f"tokenizer.ggml.{k}" in meta]
    return {"eos_token_id": sorted(set(ids))} if ids else {}


def hf_name(name: str) -> str | None:
    """Hugging Face name of a tensor, or None where there is none."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)", name)
    if match is None or match[2] not in LAYER_NAMES:
        return None
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"


def interleaved_heads(name: str, arch: str, config: Mapping[str, Any]) -> int | None:
    """Heads whose rows the converter reordered: llama and smollm3 store q and k for pairwise rotation."""
    if arch not in {"llama", "smollm3"}:
        return None
    if ".attn_q." in name:
        return int(config["num_attention_heads"])
    if ".attn_k." in name:
        return int(config["num_key_value_heads"])
    return None


def _need(file: GGUFFile, own: Mapping[str, Any], arch: str, key: str) -> Any:
    if key not in own:
        raise CheckpointError(f"{file.path} lacks the metadata key {arch}.{key}")
    return own[key]


def _vocab(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} lacks the tensor token_embd.weight")
    return embedding.shape[0]


def _check_widths(file: GGUFFile, own: Mapping[str, Any], arch: str, head_dim: int) -> None:
    for key, expected in (
        ("rope.dimension_count", head_dim),
        ("attention.value_length", head_dim),
    ):
        if own.get(key, expected) != expected:
            raise UnsupportedModelError(
                f"{file.path}: {arch}.{key} = {own[key]} differs from the head width {head_dim}"
            )
    if own.get("attention.sliding_window"):
        raise UnsupportedModelError(f"{file.path}: {arch}.attention.sliding_window is not served from GGUF")
    if "rope_freqs.weight" in file.tensors:
        raise UnsupportedModelError(
            f"{file.path} has per-frequency rotary factors (rope_freqs.weight), which are not served from GGUF; use "
            "the safetensors checkpoint"
        )


def _rope_scaling(file: GGUFFile, own: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = own.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in {"linear", "yarn"}:
        raise UnsupportedModelError(f"{file.path}: rope.scaling.type = {kind!r} (supported: none, linear, yarn)")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": own["rope.scaling.factor"]}
    if kind == "yarn":
        for key, name in (
            ("rope.scaling.original_context_length", "original_max_position_embeddings"),
            ("rope.scaling.attn_factor", "attention_factor"),
            ("rope.scaling.yarn_beta_fast", "beta_fast"),
            ("rope.scaling.yarn_beta_slow", "beta_slow"),
        ):
            if key in own:
                scaling[name] = own[key]
    return scaling
