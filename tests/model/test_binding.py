"""Binding of layers to backends: storage, sharing, sinks, and what is left after release."""

import gc
import weakref

import pytest
import torch

from arbi_core.backend.base import BackendContext
from arbi_core.backend.binding import LayerBinding
from arbi_core.builtin.reference_attention import ReferenceBackend
from arbi_core.errors import BackendError
from arbi_core.spec import NONE, PAGED_KV, LayerSpec, ParallelSpec, StateKind, StorageSpec, TensorSpec
from support.paged import Sequence, make_batch

CTX = BackendContext(
    device=torch.device("cpu"),
    dtype=torch.float32,
    page_size=4,
    max_num_seqs=4,
    max_num_tokens=64,
    max_model_len=64,
    parallel=ParallelSpec(),
)
COUNTER = StateKind("counter")


class SinkModel:
    """Only what a binding asks a model for."""

    def __init__(self, sinks=None):
        self.sinks = sinks

    def attention_sinks(self, layer):
        return self.sinks


class CounterBackend:
    """A kind of its own: one number per request, which every step raises by the query's sum."""

    name, state_kind = "counter", COUNTER

    def supports(self, layer, device):
        return None

    def storage(self, layer, ctx):
        return StorageSpec(rows=(TensorSpec("count", (1,), "float32"),))

    def metadata_builder(self, layers, ctx):
        return self

    def build(self, batch):
        return batch.state_rows

    def attn_op(self, layer, ctx, sinks=None):
        return self

    def forward(self, q, k, v, state, meta, out):
        state["count"][meta] += q.sum((1, 2)).unsqueeze(-1)
        return out.copy_(state["count"][meta].unsqueeze(-1))


def paged(index, **options):
    return LayerSpec(index=index, num_heads=2, num_kv_heads=1, head_dim=8, **options)


def bind(*layers, model=None):
    return LayerBinding(layers, model or SinkModel(), {PAGED_KV: ReferenceBackend(), COUNTER: CounterBackend()}, CTX)


def test_bytes_are_summed_over_layers_and_shared_caches_count_once():
    binding = bind(paged(0), paged(1, v_head_dim=16), paged(2, kv_source_layer=0), LayerSpec(3, NONE))
    assert binding.page_bytes == 4 * 4 * (8 + 8 + 8 + 16)
    assert binding.row_bytes == 0
    assert not binding.needs_rows


def test_allocated_state_is_zero_and_a_reading_layer_sees_its_source():
    binding = bind(paged(0), paged(1), paged(2, kv_source_layer=0))
    binding.allocate(num_pages=6, num_rows=0)
    first, second, third = (call.state for call in binding.calls)
    assert first["k"].shape == (6, 4, 1, 8)
    assert not first["k"].any()
    assert third is first
    assert second["k"].data_ptr() != first["k"].data_ptr()
    sequence = Sequence([2, 5])
    binding.begin_step(make_batch([(sequence, 5)], 4))
    q, k, v = torch.randn(5, 2, 8), torch.randn(5, 1, 8), torch.randn(5, 1, 8)
    own = binding.calls[0](q, k, v)
    assert own.shape == (5, 2, 8)
    assert torch.equal(binding.calls[2](q, None, None), own)


def test_rows_are_zeroed_one_by_one_and_kinds_mix_in_one_model():
    binding = bind(paged(0), LayerSpec(index=1, state_kind=COUNTER, num_heads=1, head_dim=1))
    binding.allocate(num_pages=3, num_rows=4)
    assert binding.needs_rows
    assert binding.row_bytes == 4
    counts = binding.calls[1].state["count"]
    batch = make_batch([(Sequence([1]), 1), (Sequence([2]), 1)], 4)
    batch.state_rows.copy_(torch.tensor([3, 1]))
    binding.begin_step(batch)
    binding.calls[1](torch.ones(2, 1, 1), None, None)
    assert counts.flatten().tolist() == [0, 1, 0, 1]
    binding.zero_rows([3])
    assert counts.flatten().tolist() == [0, 1, 0, 0]


def test_release_frees_the_pages_even_where_ops_held_views_and_allocate_starts_anew():
    binding = bind(paged(0))
    binding.allocate(4, 0)
    binding.begin_step(make_batch([(Sequence([1]), 1)], 4))
    q, k = torch.randn(1, 2, 8), torch.randn(1, 1, 8)
    before = binding.calls[0](q, k, k)
    pages = weakref.ref(binding.calls[0].state["k"])
    binding.release()
    gc.collect()
    assert pages() is None
    with pytest.raises(RuntimeError, match="no state is allocated"):
        binding.calls[0](q, k, k)
    binding.allocate(4, 0)
    assert torch.equal(binding.calls[0](q, k, k), before)


def test_a_stateless_layer_refuses_to_attend():
    binding = bind(LayerSpec(0, NONE))
    binding.allocate(2, 0)
    with pytest.raises(RuntimeError, match="without state"):
        binding.calls[0](torch.zeros(1, 1, 1), None, None)


def test_sinks_reach_the_op_in_float32():
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 8), torch.randn(1, 1, 8)
    results = []
    for layer, model in ((paged(0), None), (paged(0, sinks=True), SinkModel(torch.tensor([9.0, -9.0]).bfloat16()))):
        binding = bind(layer, model=model)
        binding.allocate(4, 0)
        binding.begin_step(make_batch([(Sequence([1]), 1)], 4))
        results.append(binding.calls[0](q, k, k)[0])
    plain, sunk = results
    assert sunk[0].norm() < plain[0].norm() / 10
    assert torch.allclose(sunk[1], plain[1], rtol=0.02)


@pytest.mark.parametrize(("sinks", "got"), [(None, "none"), (torch.zeros(3), r"a tensor of shape \(3,\)")])
def test_declared_sinks_that_the_model_lacks_are_refused(sinks, got):
    with pytest.raises(BackendError, match=f"layer 0 declares attention sinks for 2 heads; its model has {got}"):
        bind(paged(0, sinks=True), model=SinkModel(sinks)).allocate(2, 0)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((paged(0, kv_source_layer=1), paged(1)), "does not run before it"),
        ((paged(0, kv_source_layer=0),), "does not run before it"),
        ((paged(0), paged(1, kv_source_layer=0), paged(2, kv_source_layer=1)), "name that one"),
        ((paged(0, v_head_dim=4), paged(1, kv_source_layer=0)), "value_dim is 8 here and 4 there"),
    ],
)
def test_a_cache_that_cannot_be_shared_is_refused(layers, message):
    with pytest.raises(BackendError, match=message):
        bind(*layers)
