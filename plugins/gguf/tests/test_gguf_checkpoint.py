"""GGUF files written by the gguf package and read back."""

import gguf
import numpy as np
import pytest
import torch

from arbi_core import LLM, SamplingParams
from arbi_core.errors import CheckpointError, UnsupportedModelError
from arbi_plugin_gguf.checkpoint import GGUFFormat
from arbi_plugin_gguf.dequant import as_blocks, dequantize, unpack_q4
from gguf_files import HIDDEN, KINDS, VOCAB, packed, write_model


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_dequantises_as_the_gguf_package_does(kind):
    raw, qtype = packed(np.random.default_rng(1), kind, 6, 512)
    raw = raw if raw.dtype == np.uint8 else raw.view(np.uint8)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, qtype))
    assert torch.equal(dequantize(raw, qtype).float(), expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_fast_unpacking_equals_the_plain_one(kind):
    raw, qtype = packed(np.random.default_rng(2), kind, 6, 512)
    out = torch.empty(6, 512)
    unpack_q4(as_blocks(raw, qtype), qtype, out)
    torch.testing.assert_close(out, dequantize(raw, qtype), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_come_back_under_their_names_and_in_their_order(tmp_path, kind):
    dense = write_model(tmp_path / "m.gguf", kind)
    checkpoint = GGUFFormat().open(tmp_path / "m.gguf")
    tensors = checkpoint.tensors()
    assert set(tensors) == set(dense)
    for name, expected in dense.items():
        source = tensors[name]
        assert source.shape == expected.shape
        expected = torch.from_numpy(np.ascontiguousarray(expected))
        assert torch.equal(source.load().float(), expected), name
        if expected.ndim == 2:
            assert torch.equal(source.load(0, 3, 5).float(), expected[3:8])
            assert torch.equal(source.load(1, 32, 64).float(), expected[:, 32:96])
    checkpoint.close()


def test_config_speaks_hugging_face(tmp_path):
    write_model(tmp_path / "m.gguf")
    config = GGUFFormat().open(tmp_path / "m.gguf").config()
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["vocab_size"], config["head_dim"]) == (HIDDEN, VOCAB, 64)
    assert config["tie_word_embeddings"] is True
    assert config["rms_norm_eps"] == pytest.approx(1e-5)


def generate(path, **options):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5, 6, 7, 8]}, {"prompt_token_ids": list(range(3, 90))}]
    with LLM(str(path), skip_tokenizer_init=True, num_pages=64, **options) as llm:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


def test_model_from_gguf_equals_the_same_weights_from_safetensors(tmp_path):
    import json

    from safetensors.torch import save_file

    dense = write_model(tmp_path / "m.gguf", "F32")
    twin = tmp_path / "twin"
    twin.mkdir()
    config = dict(GGUFFormat().open(tmp_path / "m.gguf").config())
    (twin / "config.json").write_text(json.dumps(config))
    save_file({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in dense.items()}, twin / "model.safetensors")
    assert generate(tmp_path / "m.gguf") == generate(twin)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_packed_and_unpacked_models_agree(tmp_path, kind):
    """Packing rounds scales to bfloat16: logits stay close, and `packed = off` is exact."""
    write_model(tmp_path / "m.gguf", kind)
    logits = {}
    for mode in ("auto", "off"):
        with LLM(
            str(tmp_path / "m.gguf"), skip_tokenizer_init=True, num_pages=64, plugins={"gguf": {"packed": mode}}
        ) as llm:
            runner = llm._built.core._executor
            method = type(runner.model.layers[0].mlp.down.method).__name__
            assert (method == "DenseMethod") == (mode == "off")
            seen = []
            compute = runner.model.compute_logits
            runner.model.compute_logits = lambda h, seen=seen, compute=compute: seen.append(compute(h)) or seen[-1]
            params = SamplingParams(temperature=0, max_tokens=1)
            llm.generate([{"prompt_token_ids": list(range(3, 3 + n))} for n in (5, 100)], params, use_tqdm=False)
            logits[mode] = torch.cat(seen)
    error = (logits["auto"] - logits["off"]).pow(2).mean().sqrt() / logits["off"].std()
    assert error < 0.02


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "smollm3"])
def test_other_architectures_are_named(tmp_path, arch):
    write_model(tmp_path / "m.gguf", arch=arch)
    checkpoint = GGUFFormat().open(tmp_path / "m.gguf")
    assert checkpoint.config()["architectures"][0].lower().startswith(arch)
    assert len(checkpoint.tensors()) == 20


def test_what_cannot_be_served_exactly_is_refused_by_name(tmp_path):
    path = tmp_path / "m.gguf"
    write_model(path, arch="mamba")
    with pytest.raises(UnsupportedModelError, match=r"architecture 'mamba' \(served from GGUF: llama, qwen2"):
        GGUFFormat().open(path).config()
    write_model(path, metadata={"llama.expert_count": 8})
    with pytest.raises(UnsupportedModelError, match="llama.expert_count = 8"):
        GGUFFormat().open(path).config()
    write_model(path, metadata={"llama.rope.scaling.type": "longrope"})
    with pytest.raises(UnsupportedModelError, match="rope.scaling.type = 'longrope'"):
        GGUFFormat().open(path).config()
    write_model(path, extra=["rope_freqs.weight"])
    with pytest.raises(UnsupportedModelError, match="rope_freqs.weight"):
        GGUFFormat().open(path).config()
    write_model(path, extra=["blk.0.mystery.weight"])
    with pytest.raises(CheckpointError, match=r"blk.0.mystery.weight has no place"):
        GGUFFormat().open(path).tensors()


def test_type_that_is_not_read_is_refused_with_the_tensor(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for add, value in (
        (writer.add_block_count, 1), (writer.add_context_length, 8), (writer.add_embedding_length, 256),
        (writer.add_feed_forward_length, 256), (writer.add_head_count, 1), (writer.add_layer_norm_rms_eps, 1e-5),
    ):  # fmt: skip
        add(value)
    raw = np.zeros((2, 84), dtype=np.uint8)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="token_embd.weight has type Q2_K"):
        GGUFFormat().open(tmp_path / "m.gguf").tensors()


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "m.gguf"
    write_model(path)
    raw = path.read_bytes()
    for damaged, says in (
        (b"", "has 0 bytes"),
        (b"JUNK" + raw[4:], "begins with b'JUNK'"),
        (raw[:4] + b"\x09" + raw[5:], "version 9"),
        (raw[:200], "truncated inside its header"),
        (raw[:-500], "is truncated: tensor .* ends at byte"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=says):
            GGUFFormat().open(path)


def test_missing_tensor_is_named_by_the_loader(tmp_path):
    write_model(tmp_path / "m.gguf", skip=["blk.1.ffn_up.weight"])
    with pytest.raises(CheckpointError, match=r"missing: model.layers.1.mlp.up_proj.weight"):
        generate(tmp_path / "m.gguf")


def test_format_is_detected_by_name_or_magic(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"GGUF....")
    (tmp_path / "c").write_bytes(b"other")
    detect = GGUFFormat().detect
    assert [detect(tmp_path / n) for n in ("a.gguf", "b", "c", "none")] == [True, True, False, False]
