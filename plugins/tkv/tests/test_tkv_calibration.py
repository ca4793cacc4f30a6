"""Learning from a running engine, and the command that does it."""

import importlib.metadata

import pytest
import torch

from arbi_core.api import ConfigError, LayerSpec
from arbi_plugin_tkv.backend import BypassBackend
from arbi_plugin_tkv.calibration.bundle import load_bundle
from arbi_plugin_tkv.calibration.capture import CaptureBackend
from arbi_plugin_tkv.calibration.command import calibrate
from arbi_plugin_tkv.calibration.statistics import LayerStatistics
from tkv_pages import Layers, Request

INSTALLED = any(e.name == "tkv" for e in importlib.metadata.entry_points(group="arbi"))


def layer(index=0, **options):
    return LayerSpec(**({"index": index, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16} | options))


def test_capture_attends_like_the_bypass_and_counts_every_token():
    capture = CaptureBackend()
    specs = [layer(0), layer(1, kv_source_layer=0)]
    theirs, ours = (Layers(b, specs, 4, 12) for b in (BypassBackend(), capture))
    one, two = ([Request([1, 2, 3]), Request([4, 5])] for _ in range(2))
    for counts in ((7, 2), (1, 3)):
        left = theirs.step(list(zip(one, counts, strict=True)))[0]
        right = ours.step(list(zip(two, counts, strict=True)))[0]
        for a, b in zip(left, right, strict=True):
            assert torch.equal(a, b)
    assert list(capture.layers) == [0]
    stats = capture.layers[0]
    assert stats.firsts == 2
    assert stats.tokens == (7 - 4) + 1 + 1
    assert stats._queries == 2 * 2 * stats.tokens, "queries of the layer that reads the cache count too"
    capture.clear()
    assert capture.layers[0].tokens == 0


def test_statistics_do_not_depend_on_how_tokens_were_batched():
    q, k, v = torch.randn(30, 4, 16), torch.randn(30, 2, 16), torch.randn(30, 2, 16)
    positions = torch.arange(30) % 15
    whole, parts = LayerStatistics(2, 16, 16), LayerStatistics(2, 16, 16)
    whole.add(q, k, v, positions)
    for at in range(0, 30, 7):
        own = slice(at, at + 7)
        parts.add(q[own], k[own], v[own], positions[own])
    for a, b in ((whole.key_basis(), parts.key_basis()), (whole.value_basis(), parts.value_basis())):
        torch.testing.assert_close(a.encode @ a.encode.transpose(1, 2), b.encode @ b.encode.transpose(1, 2))
        torch.testing.assert_close(a.first, b.first)
        torch.testing.assert_close(a.mean, b.mean)


def test_a_corpus_that_cannot_be_read_is_refused_before_a_model_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        calibrate("no such model", tmp_path / "absent.txt", tmp_path / "out")


@pytest.mark.oracle
@pytest.mark.skipif(not INSTALLED, reason="arbi-plugin-tkv is not installed")
def test_the_demo_model_learns_and_serves(tmp_path):
    from arbi_core import LLM, SamplingParams

    corpus, out = tmp_path / "corpus.txt", tmp_path / "demo.tkv"
    corpus.write_text("The boats lay in a long row along the quay, their nets drying in the sun. " * 40)
    assert calibrate("demo", corpus, out, cpu_kv_gib=0.25) > 500
    bundle = load_bundle(str(out))
    assert bundle.about["architecture"] == "LlamaForCausalLM"
    assert len(bundle.tensors) == 30 * 8
    with LLM("demo", kv_cache_dtype="tkv", plugins={"tkv": {"calibration": str(out)}}, cpu_kv_gib=0.25) as llm:
        (answer,) = llm.generate(
            "The capital of France is", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False
        )
    assert "Paris" in answer.outputs[0].text
