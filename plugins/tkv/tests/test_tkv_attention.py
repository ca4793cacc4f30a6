"""The ops against the specification: loops over single numbers of the stored bytes."""

import pytest
import torch

from arbi_core.api import LayerSpec
from arbi_plugin_tkv.backend import BypassBackend, CodecBackend, offered
from tkv_pages import Layers, Request

PAGE = 4
VARIANTS = {
    "plain": {},
    "window": {"window": 5},
    "sinks": {"sinks": True},
    "cap": {"soft_cap": 3.0},
    "scale": {"scale": 0.7},
    "all": {"window": 6, "sinks": True, "soft_cap": 5.0, "scale": 0.4},
}


def layer(index=0, **options):
    return LayerSpec(**({"index": index, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16} | options))


def check(layers, steps):
    requests = [r for r, _ in steps]
    outs, q, _, _ = layers.step(steps)
    at = 0
    for request, n in steps:
        for la, out in zip(layers.layers, outs, strict=True):
            if n:
                torch.testing.assert_close(
                    out[at : at + n].double(), layers.expected(la, request, n, q[at : at + n]), rtol=1e-4, atol=1e-5
                )
        at += n
    return requests


@pytest.mark.parametrize("backend", [CodecBackend("x", (4, 4)), CodecBackend("x", (3, 5)), BypassBackend()], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_mixed_steps_equal_the_specification(backend, variant):
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    layers = Layers(backend, [layer(**VARIANTS[variant])], PAGE, 20, sinks=sinks)
    one, two, three = Request([3, 4, 5, 6]), Request([9, 7, 12, 2]), Request([15, 14, 13])
    check(layers, [(one, 6), (two, 1)])
    check(layers, [(one, 1), (two, 7), (three, 3)])
    check(layers, [(three, 1), (two, 1), (one, 1)])
    check(layers, [(one, 5), (two, 3), (three, 1)])


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_width_equals_the_specification(bits):
    layers = Layers(CodecBackend("x", (bits, 10 - bits)), [layer()], PAGE, 8)
    request = Request([5, 2, 3])
    for n in (5, 1, 3, 1):
        check(layers, [(request, n)])


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(24, 16), (8, 8), (20, 12), (16, 40), (10, 10)])
def test_any_and_unequal_head_widths(head_dim, v_head_dim):
    layers = Layers(CodecBackend("x", (4, 4)), [layer(head_dim=head_dim, v_head_dim=v_head_dim)], PAGE, 8)
    request = Request([5, 2, 3])
    for n in (5, 1, 3, 1):
        check(layers, [(request, n)])


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_any_page_size(page_size):
    layers = Layers(CodecBackend("x", (4, 4)), [layer()], page_size, 16)
    request = Request(list(range(1, 14)))
    for n in (5, 1, 5, 1):
        check(layers, [(request, n)])


@pytest.mark.parametrize("backend", [CodecBackend("x", (4, 4)), BypassBackend()], ids=str)
def test_layers_that_share_a_cache_read_fresh_tokens_raw_too(backend):
    layers = Layers(backend, [layer(0), layer(1, kv_source_layer=0, window=3)], PAGE, 8)
    assert backend.storage(layers.layers[1], None).page_bytes == 0
    request = Request([5, 2, 3])
    for n in (5, 1, 3, 1):
        check(layers, [(request, n)])


def test_a_row_without_tokens_changes_nothing():
    layers = Layers(CodecBackend("x", (4, 4)), [layer()], PAGE, 8)
    one, two = Request([5, 2]), Request([3, 4])
    check(layers, [(one, 3), (two, 2)])
    check(layers, [(one, 0), (two, 1)])
    check(layers, [(one, 2), (two, 0)])


def test_a_bad_vector_poisons_nobody_else():
    backend = CodecBackend("x", (4, 4))
    clean, dirty = (Layers(backend, [layer()], PAGE, 8, seed=1) for _ in range(2))
    q, k, v = torch.randn(6, 4, 16), torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[2], bad_v[2, :, 3] = torch.nan, torch.inf
    clean.step([(Request([2, 3]), 6)], (q, k, v))
    dirty.step([(Request([2, 3]), 6)], (q, bad_k, bad_v))
    left, right = (la.stored(la.layers[0], Request([2, 3]), 6) for la in (clean, dirty))
    for a, b in zip(left, right, strict=True):
        assert b.isfinite().all()
        keep = [0, 1, 3, 4, 5]
        assert torch.equal(a[keep], b[keep])
    other = Request([6, 7])
    check(dirty, [(other, 3)])
    check(dirty, [(other, 1)])


@pytest.mark.parametrize("fill", [0.0, 1e-42, -3.0])
def test_constant_and_denormal_vectors_read_back(fill):
    layers = Layers(CodecBackend("x", (4, 4)), [layer()], PAGE, 8)
    request = Request([2, 3])
    same = torch.full((5, 2, 16), fill)
    layers.step([(request, 5)], (torch.randn(5, 4, 16), same, same))
    for read in layers.stored(layers.layers[0], request, 5):
        torch.testing.assert_close(read, same.double(), rtol=0.15, atol=1e-5)


def test_chunks_of_one_prompt_differ_by_no_more_than_the_codec_does():
    torch.manual_seed(0)
    q, k, v = torch.randn(24, 4, 16), torch.randn(24, 2, 16), torch.randn(24, 2, 16)
    outs = {}
    for bits in (4, 8):
        for cut in ((24,), (8, 8, 8), (1,) * 24):
            layers, request, at, parts = (
                Layers(CodecBackend("x", (bits, bits)), [layer()], PAGE, 8),
                Request([1, 2, 3, 4, 5, 6]),
                0,
                [],
            )
            for n in cut:
                own = slice(at, at + n)
                parts += layers.step([(request, n)], (q[own], k[own], v[own]))[0]
                at += n
            outs[bits, cut] = torch.cat(parts)
            stored = layers.states[0]["tkv"]
            first = outs.setdefault(("bytes", bits), stored[1:7])
            assert torch.equal(first, stored[1:7]), "what is stored must not depend on the chunks"
        whole = outs[bits, (24,)]
        for cut in ((8, 8, 8), (1,) * 24):
            assert (outs[bits, cut] - whole).abs().max() < (0.4 if bits == 4 else 0.02)


def test_heads_that_cannot_be_stored_are_refused():
    backend = CodecBackend("x", (4, 4))
    assert "2048" in backend.supports(layer(head_dim=2048), torch.device("cpu"))
    assert "values of 1 " in backend.supports(layer(v_head_dim=1), torch.device("cpu"))
    assert backend.supports(layer(head_dim=80, window=4, sinks=True, soft_cap=1.0), torch.device("cpu")) is None


def test_names_and_bytes():
    from tkv_pages import context

    names = {b.name for b in offered()}
    assert {"tkv", "tkv-bypass", "tkv-k4v4", "tkv-k2v8"} <= names
    assert len(names) == 51
    for dim, most in ((64, 4.5), (128, 4.25)):
        spec = LayerSpec(0, num_heads=8, num_kv_heads=2, head_dim=dim)
        page = CodecBackend("tkv-k4v4", (4, 4)).storage(spec, context(16)).page_bytes
        assert page * 8 == 16 * 2 * 2 * dim * most
