"""The example's own tests: its backend equals the reference, its family refuses what it does not know."""

import json

import pytest

from arbi_core import LLM, SamplingParams
from arbi_core.errors import BackendError, UnsupportedModelError
from arbi_core.plugins import load_registry
from arbi_plugin_example import plugin

CONFIG = {
    "architectures": ["ExampleForCausalLM"], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def generate(path, backend):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (1, 20, 45)]
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "num_pages": 40, "max_num_batched_tokens": 16}
    with LLM(str(path), backends=(f"paged_kv:{backend}",), max_num_seqs=8, **options) as llm:
        assert llm.info.kv_backend == {"paged_kv": backend}
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


def test_backend_equals_the_reference(model):
    assert generate(model, "example") == generate(model, "reference")


def test_unknown_settings_are_refused_by_name(model):
    (model / "config.json").write_text(json.dumps({**CONFIG, "wings": 2}))
    with pytest.raises(UnsupportedModelError, match="wings = 2"):
        generate(model, "reference")


def test_backend_refuses_layers_that_it_cannot_serve(model):
    config = {**CONFIG, "architectures": ["MistralForCausalLM"], "sliding_window": 8}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(BackendError, match="plain causal attention only"):
        generate(model, "example")


def test_requests_are_counted(model):
    before = plugin.finished_requests
    generate(model, "reference")
    assert plugin.finished_requests == before + 3
    assert any(p.name == "example" and p.status == "active" for p in load_registry().report)
