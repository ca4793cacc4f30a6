"""Names, settings and the calibration file."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from arbi_core.api import ConfigError, LayerSpec, ParallelSpec
from arbi_core.plugins import load_registry
from arbi_plugin_tkv import plugin
from arbi_plugin_tkv.backend import CodecBackend
from arbi_plugin_tkv.calibration.bundle import load_bundle, save_bundle
from arbi_plugin_tkv.calibration.statistics import LayerStatistics, output_moment
from arbi_plugin_tkv.config import TkvConfig, declared_bits
from tkv_pages import Layers, Request, context

LAYER = LayerSpec(0, num_heads=4, num_kv_heads=2, head_dim=16)


def test_the_plugin_offers_its_backends_and_loads_no_torch():
    offered = load_registry(extra=[plugin]).attention_backends
    assert {"paged_kv:tkv", "paged_kv:tkv-bypass", "paged_kv:tkv-k5v3"} <= set(offered)
    code = "import sys, arbi_plugin_tkv.plugin as p; p.arbi_attention_backends(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(("text", "bits"), [(None, 4), ("4", 4), ("8", 8), ("2", 2)])
def test_the_environment_declares_bits(monkeypatch, text, bits):
    monkeypatch.delenv("TKV_BITS", raising=False)
    if text is not None:
        monkeypatch.setenv("TKV_BITS", text)
    assert declared_bits(None) == bits
    assert declared_bits(TkvConfig(bits=3)) == 3


@pytest.mark.parametrize("text", ["4.5", "4.0", "1", "9", "four", ""])
def test_bits_that_cannot_be_served_are_refused(monkeypatch, text):
    monkeypatch.setenv("TKV_BITS", text)
    with pytest.raises(ConfigError, match="TKV_BITS"):
        declared_bits(None)


@pytest.mark.parametrize("bits", [1, 9])
def test_settings_out_of_range_are_refused(bits):
    with pytest.raises(ConfigError, match=r"plugins\.tkv\.bits"):
        TkvConfig(bits=bits)


def bases(heads=2, dim=16, layers=1):
    random = torch.Generator().manual_seed(0)
    made = {}
    for i in range(layers):
        stats = LayerStatistics(heads, dim, dim)
        for _ in range(3):
            make = lambda n: torch.randn(50, n, dim, generator=random)  # noqa: E731
            stats.add(make(2 * heads), make(heads) + 3, make(heads), torch.arange(50))
        weight = torch.randn(32, 2 * heads * dim, generator=random)
        made[i] = (stats.key_basis(), stats.value_basis(output_moment(weight, 2 * heads, heads)))
    return made


def test_a_calibrated_backend_equals_the_specification(tmp_path):
    path = tmp_path / "model.tkv"
    save_bundle(path, bases(), {"model": "random"})
    assert load_bundle(str(path)).about == {"model": "random"}
    backend = CodecBackend("x", (4, 4))
    layers = Layers(backend, [LAYER], 4, 8, options={"tkv": TkvConfig(calibration=str(path))})
    assert layers.ops[0]._store._layout.key.bits_a == 5
    request = Request([5, 2, 3])
    for n in (5, 1, 3, 1):
        (out,), q, _, _ = layers.step([(request, n)])
        torch.testing.assert_close(out.double(), layers.expected(LAYER, request, n, q), rtol=1e-3, atol=1e-4)


def test_ranks_take_their_own_heads(tmp_path):
    path = tmp_path / "model.tkv"
    save_bundle(path, bases(), {})
    whole, _ = load_bundle(str(path)).bases(LAYER, ParallelSpec())
    second, _ = load_bundle(str(path)).bases(LAYER, ParallelSpec(rank=1, size=2))
    assert torch.equal(second.encode, whole.encode[1:])


def test_the_environment_names_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TKV_CALIBRATION_FILE", str(tmp_path / "absent.tkv"))
    with pytest.raises(ConfigError, match=r"absent\.tkv"):
        CodecBackend("x", (4, 4)).storage(LAYER, context(4))


def _drop_schema(path):
    save_file(load_file(path), path)


def _change_a_number(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    tensors["layers.0.key.mean"] += 1
    save_file(tensors, path, metadata=header)


def _cut(path):
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("spoil", "said"), [(_drop_schema, "version"), (_change_a_number, "corrupt"), (_cut, "cannot be read")]
)
def test_spoilt_files_are_refused(tmp_path, spoil, said):
    path = tmp_path / "model.tkv"
    save_bundle(path, bases(), {})
    spoil(path)
    with pytest.raises(ConfigError, match=said):
        load_bundle(str(path))


@pytest.mark.parametrize(("made", "said"), [({"heads": 3}, "another model"), ({"dim": 24}, "another model")])
def test_files_of_other_models_are_refused(tmp_path, made, said):
    path = tmp_path / f"{json.dumps(made)}.tkv"
    save_bundle(path, bases(**made), {})
    with pytest.raises(ConfigError, match=said):
        CodecBackend("x", (4, 4)).attn_op(LAYER, context(4, {"tkv": TkvConfig(calibration=str(path))}))
    later = LayerSpec(1, num_heads=4, num_kv_heads=2, head_dim=16)
    with pytest.raises(ConfigError, match="nothing of layer 1"):
        CodecBackend("x", (4, 4)).attn_op(later, context(4, {"tkv": TkvConfig(calibration=str(path))}))


def test_nothing_is_learned_from_nothing():
    stats = LayerStatistics(2, 16, 16)
    stats.add(torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16), torch.arange(3))
    with pytest.raises(ValueError, match="nothing was learned"):
        stats.key_basis()
