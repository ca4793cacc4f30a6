"""Run a vLLM-shaped offline benchmark script on a shape small enough for a CPU.

Usage: python benchmarks/offline_small.py PATH/TO/bench_offline.py [its options]

The script stays as it is; this one only adds the model shape ``tiny`` to its table and runs it with that shape.
"""

from __future__ import annotations

import importlib.util
import sys

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 102400,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def main() -> None:
    """Load the script, add the shape, run."""
    script, *options = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("bench_offline", script)
    if spec is None or spec.loader is None:
        sys.exit(f"{script} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.CONFIGS["tiny"] = TINY
    sys.argv = [script, "--engine", "arbi", "--model-config", "tiny", *options]
    module.main()


if __name__ == "__main__":
    main()
