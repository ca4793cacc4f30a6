"""Tiny random checkpoints of every built-in architecture, made by transformers."""

import json
from pathlib import Path

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
TINY = {
    "llama": ("Llama", {}),
    "llama/bias-mqa": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama/tied-head-dim": ("Llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama/linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama/llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama/yarn": ("Llama", {"rope_parameters": YARN}),
    "llama/gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "mistral/no-window": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen2/window": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 2,
            "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3/tied-yarn": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": YARN}),
    "smollm3": ("SmolLM3", {}),
    "smollm3/window": ("SmolLM3", {"use_sliding_window": True, "sliding_window": 20}),
}


def make_checkpoint(variant: str, path: Path) -> Path:
    """Save a seeded random checkpoint in float32; the weights are spread wider than usual so that logits differ."""
    import torch
    import transformers

    family, overrides = TINY[variant]
    torch.manual_seed(sum(map(ord, variant)))
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **overrides})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    return path


def reference_model(path: Path):
    """The same checkpoint in transformers."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
