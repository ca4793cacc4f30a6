"""Kernels against the ops, which are tested against the specification; under Triton's interpreter without a GPU."""

import pytest
import torch

from arbi_core.api import LayerSpec
from arbi_plugin_tkv.backend import CodecBackend
from arbi_plugin_tkv.config import TkvConfig
from tkv_pages import Layers, Request, make_batch

pytest.importorskip("triton")
import tkv_interpreter  # noqa: F401
from arbi_plugin_tkv.kernels.decode import decode
from arbi_plugin_tkv.kernels.store import can_store, store


def fill(layers, request, count):
    """Store `count` tokens without attending."""
    if not count:
        return
    batch = make_batch([(request, count)], layers.page_size)
    _, k, v = layers.draw(batch)
    layers.ops[0]._store.write(layers.states[0], layers.builder.build(batch), k + 1, v)
    request.computed += count


def compare(layer, bits, page_size=16, lengths=(37, 0, 16), splits=3, options=None):
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 0.3])[: layer.num_heads]
    layers = Layers(CodecBackend("x", bits), [layer], page_size, 20, sinks=sinks, options=options)
    requests = [Request(pages) for pages in ([3, 9, 4, 7], [1, 2], [8, 6])]
    for request, length in zip(requests, lengths, strict=True):
        fill(layers, request, length)
    batch = make_batch([(r, 1) for r in requests], page_size)
    q, k, v = layers.draw(batch)
    expected = torch.empty(3, layer.num_heads, layer.value_dim)
    layers.ops[0].forward(q, k, v, layers.states[0], layers.builder.build(batch), expected)
    store = layers.ops[0]._store
    got = decode(
        q, k, v, layers.states[0]["tkv"], batch.block_table, torch.tensor(lengths, dtype=torch.int32), store._layout,
        store._key, store._value, scale=layer.softmax_scale, window=layer.window, soft_cap=layer.soft_cap,
        sinks=sinks if layer.sinks else None, splits=splits,
    )  # fmt: skip
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def spec(**options):
    return LayerSpec(**({"index": 0, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32} | options))


@pytest.mark.parametrize("bits", [(4, 4), (2, 3), (5, 6), (7, 8)])
def test_decode_at_every_kind_of_plane(bits):
    compare(spec(), bits)


@pytest.mark.parametrize(
    "options",
    [{"window": 9}, {"sinks": True}, {"soft_cap": 2.0}, {"window": 20, "sinks": True, "soft_cap": 4.0, "scale": 0.3}],
)
def test_decode_of_every_kind_of_layer(options):
    compare(spec(**options), (4, 4))


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(40, 24), (64, 64)])
def test_decode_of_any_head_width(head_dim, v_head_dim):
    compare(spec(head_dim=head_dim, v_head_dim=v_head_dim), (4, 4))


@pytest.mark.parametrize("splits", [1, 7])
def test_decode_with_more_or_fewer_splits_than_pages(splits):
    compare(spec(), (4, 4), splits=splits)


def test_decode_in_fitted_coordinates(tmp_path):
    from arbi_plugin_tkv.calibration.bundle import save_bundle
    from test_tkv_settings import bases

    path = tmp_path / "model.tkv"
    save_bundle(path, bases(dim=32), {})
    compare(spec(), (4, 4), options={"tkv": TkvConfig(calibration=str(path))})


@pytest.mark.parametrize("bits", [(4, 4), (2, 3), (5, 6), (7, 8)])
@pytest.mark.parametrize("count", [1, 19])
def test_store_writes_what_the_codec_writes(bits, count):
    layer = spec()
    layers = Layers(CodecBackend("x", bits), [layer], 16, 8)
    request = Request([5, 2, 7])
    request.computed = 0 if count > 1 else 17
    batch = make_batch([(request, count)], 16)
    _, k, v = layers.draw(batch)
    kept, op_store = layers.states[0]["tkv"].clone(), layers.ops[0]._store
    op_store.write(layers.states[0], layers.builder.build(batch), k, v)
    store(k, v, batch.slot_mapping, batch.positions, kept, op_store._layout, op_store._key, op_store._value)
    expected = layers.states[0]["tkv"]
    differing = (kept != expected).float().mean()
    assert differing < 0.002, "sums in another order may move a code that lies between two"
    assert (kept[[0, 1, 3, 4, 6]] == expected[[0, 1, 3, 4, 6]]).all(), "other pages are left alone"


def test_store_in_fitted_coordinates_and_with_bad_numbers(tmp_path):
    from arbi_plugin_tkv.calibration.bundle import save_bundle
    from test_tkv_settings import bases

    path = tmp_path / "model.tkv"
    save_bundle(path, bases(dim=32), {})
    layers = Layers(CodecBackend("x", (4, 4)), [spec()], 16, 8, options={"tkv": TkvConfig(calibration=str(path))})
    batch = make_batch([(Request([5, 2]), 20)], 16)
    _, k, v = layers.draw(batch)
    k[3], v[4], k[5], v[6, 0, 2] = torch.nan, 0.0, 1e38, torch.inf
    kept, op_store = layers.states[0]["tkv"].clone(), layers.ops[0]._store
    op_store.write(layers.states[0], layers.builder.build(batch), k, v)
    store(k, v, batch.slot_mapping, batch.positions, kept, op_store._layout, op_store._key, op_store._value)
    assert (kept != layers.states[0]["tkv"]).float().mean() < 0.003


def test_store_refuses_what_it_cannot_write():
    layers = Layers(CodecBackend("x", (3, 4)), [spec(head_dim=40)], 16, 8)
    op_store = layers.ops[0]._store
    assert not can_store(op_store._layout.key)
    assert can_store(op_store._layout.value)
    with pytest.raises(ValueError, match="20 pairs"):
        store(torch.zeros(1, 2, 40), torch.zeros(1, 2, 40), *(torch.zeros(1, dtype=torch.int64),) * 2,
              layers.states[0]["tkv"], op_store._layout, op_store._key, op_store._value)  # fmt: skip
