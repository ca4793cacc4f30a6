"""The offline API takes what a benchmark written for a vLLM-shaped class passes."""

import json

from arbi_core import LLM, SamplingParams


def test_vllm_shaped_benchmark_runs_unchanged(tmp_path):
    config = dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=151936, max_position_embeddings=40960,
        rms_norm_eps=1e-6, rope_theta=1000000, tie_word_embeddings=True, hidden_act="silu", attention_bias=False,
        torch_dtype="bfloat16", bos_token_id=151643, eos_token_id=151645,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(
        str(tmp_path), load_format="dummy", skip_tokenizer_init=True, kv_cache_dtype="auto", max_model_len=4096,
        gpu_memory_utilization=0.85, enable_prefix_caching=False, seed=0,
    )  # fmt: skip
    assert llm.kv_capacity_tokens >= 4096
    lens = [5, 9, 2]
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, detokenize=False) for n in lens]
    prompts = [dict(prompt_token_ids=[1000 + i] * 40) for i in range(3)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == lens
    llm.close()
