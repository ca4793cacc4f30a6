"""The bypass op over whole steps: its kernels and its twin against each other and against the core's reference."""

import os

import numpy as np
import pytest
import torch
from attrs import evolve

from arbi_core.api import LayerSpec
from arbi_core.kernels.paged_attention import PagedAttention, PagedPlanBuilder
from arbi_plugin_tkv.kernels.paged_fresh import attend_fresh, can_attend_fresh
from arbi_plugin_tkv.kernels.paged_op import PagedBypass, PagedBypassBuilder, page_tensors
from tkv_pages import Request, context, make_batch

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.importorskip("triton")
    import tkv_interpreter  # noqa: F401
needs_kernels = pytest.mark.skipif(
    not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter or a GPU"
)
PAGE = 16
LAYERS = {"plain": {}, "window": {"window": 19}, "all": {"window": 30, "sinks": True, "soft_cap": 3.0, "scale": 0.4}}


def spec(**options):
    return LayerSpec(**({"index": 0, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32} | options))


class Bench:
    """One layer, by the op and by the core's reference, over pages that begin as NaN."""

    def __init__(self, layer, *, kernels, pages=40, dtype=torch.float32):
        self.layer, self.random = layer, torch.Generator().manual_seed(3)
        sinks = torch.linspace(-1, 2, layer.num_heads) if layer.sinks else None
        self.builder = PagedBypassBuilder(
            [layer], evolve(context(PAGE), max_model_len=128), kernels=kernels, fresh_flash=False
        )
        self.op = PagedBypass(layer, layer.num_heads, layer.num_kv_heads, sinks, kernels=kernels)
        tensors = page_tensors(layer, layer.num_kv_heads, PAGE, "float32")
        self.state = {t.name: torch.full((pages, *t.shape), torch.nan) for t in tensors}
        self.reference = PagedAttention(layer, layer.num_heads, layer.num_kv_heads, sinks)
        widths = {"k": layer.head_dim, "v": layer.value_dim}
        self.other = {n: torch.full((pages, PAGE, layer.num_kv_heads, w), torch.nan) for n, w in widths.items()}

    def step(self, steps, *, write=True):
        la, batch = self.layer, make_batch(steps, PAGE)
        draw = lambda heads, dim: torch.randn(batch.num_tokens, heads, dim, generator=self.random)  # noqa: E731
        q, k, v = (
            draw(la.num_heads, la.head_dim),
            draw(la.num_kv_heads, la.head_dim),
            draw(la.num_kv_heads, la.value_dim),
        )
        out, want = (torch.full((batch.num_tokens, la.num_heads, la.value_dim), torch.nan) for _ in range(2))
        meta = self.builder.build(batch)
        new = (k, v) if write else (None, None)
        assert self.op.forward(q, *new, self.state, meta, out) is out
        self.reference.forward(q, *new, self.other, PagedPlanBuilder().build(batch), want)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
        for request, n in steps:
            request.computed += n
        return meta


def drive(bench):
    """Chunks alone, decode alone, both, drafts in between; returns the runs that steps were cut into."""
    a, b, c = Request([3, 9, 4, 7]), Request([11, 2, 30, 8]), Request([20, 21, 22, 23])
    runs = []
    for steps in ([(a, 20), (b, 33)], [(a, 1), (b, 1)], [(a, 1), (b, 1), (c, 29)], [(a, 1), (b, 4), (c, 17)],
                  [(a, 3), (b, 2), (c, 1)], [(c, 1), (a, 19), (b, 1)]):  # fmt: skip
        meta = bench.step(steps)
        parts = (meta.decode, meta.verify, meta.chunks)
        runs.append(tuple(0 if r is None else r.lengths.shape[0] for r in parts))
    return runs


RUNS = [(0, 0, 2), (2, 0, 0), (2, 0, 1), (1, 1, 1), (0, 3, 0), (1, 0, 2)]


@pytest.mark.parametrize("name", LAYERS)
def test_the_twin_equals_the_reference(name):
    assert drive(Bench(spec(**LAYERS[name]), kernels=False)) == RUNS


@needs_kernels
@pytest.mark.skipif(HAS_GPU, reason="tensors of this test are on the CPU")
@pytest.mark.parametrize("name", LAYERS)
def test_the_kernels_equal_the_reference(name):
    assert drive(Bench(spec(**LAYERS[name]), kernels=True)) == RUNS


@needs_kernels
@pytest.mark.skipif(HAS_GPU, reason="tensors of this test are on the CPU")
@pytest.mark.parametrize("kernels", [False, True])
def test_a_layer_without_keys_reads_what_another_wrote(kernels):
    bench = Bench(spec(v_head_dim=16), kernels=kernels)
    request, other = Request([3, 9]), Request([5, 6])
    bench.step([(request, 20), (other, 20)])
    request.computed = other.computed = 0
    bench.step([(request, 20), (other, 20)], write=False)


@needs_kernels
def test_the_workspace_is_made_once_and_holds_every_batch():
    layers = [spec(), spec(index=1, num_heads=8, num_kv_heads=1, head_dim=64)]
    ctx = context(PAGE)
    builder = PagedBypassBuilder(layers, ctx, kernels=True)
    room = builder._workspace.logs.numel()
    assert builder._workspace.sums.numel() == room * 64
    for rows in range(1, ctx.max_num_seqs + 1):
        for shape in builder_shapes(layers):
            splits = shape.plan(rows, 4, ctx.max_model_len, 132).splits
            assert splits == 1 or rows * shape.heads * splits <= room
    batch = make_batch([(Request([1, 2]), 20)], PAGE)
    assert builder.build(batch).workspace is builder._workspace


def builder_shapes(layers):
    from arbi_plugin_tkv.kernels.paged_op import Geometry

    return [Geometry(la.num_heads, la.num_kv_heads, la.head_dim, la.value_dim, la.window) for la in layers]


def test_building_a_decode_step_makes_no_tensor_but_views():
    builder = PagedBypassBuilder([spec()], context(PAGE), kernels=False)
    batch = make_batch([(Request([1, 2]), 1), (Request([3]), 1)], PAGE)
    step = builder.build(batch)
    assert step.decode.table.data_ptr() == batch.block_table.data_ptr()
    assert step.decode.lengths.data_ptr() == batch.seq_lens.data_ptr()
    assert (step.verify, step.chunks, step.fresh_from) == (None, None, -1)


def test_fresh_chunks_are_not_offered_where_torch_has_no_kernel():
    assert not can_attend_fresh(torch.device("cpu"), torch.bfloat16, 128, 128, soft_cap=None, sinks=False)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 37])
def test_torch_attends_fresh_chunks_like_the_twin(window):
    from arbi_plugin_tkv.kernels import paged_twin

    starts = torch.tensor([0, 100, 117], dtype=torch.int32, device="cuda")
    q = torch.randn(117, 8, 128, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(117, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out, want = torch.empty_like(q), torch.empty(q.shape, dtype=torch.float64, device="cuda")
    attend_fresh(q, k, v, starts, 100, out, scale=0.1, window=window)
    table = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [8, 9, 0, 0, 0, 0, 0]], dtype=torch.int32, device="cuda")
    pages = [torch.full((10, 2, PAGE, 128), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    slots = torch.cat((torch.arange(16, 116), torch.arange(128, 145))).cuda()
    paged_twin.store(k, v, slots, *pages)
    paged_twin.attend(q, *pages, table, starts.diff(), starts, want, scale=0.1, window=window, dtype=torch.float64)
    assert (out.double() - want).norm() / want.norm() < 2e-2


def test_make_batch_of_these_tests_puts_decode_rows_first():
    batch = make_batch([(Request([1]), 1), (Request([2]), 5)], PAGE)
    assert np.diff(batch.cu_seqlens_q_host).tolist() == [1, 5]
