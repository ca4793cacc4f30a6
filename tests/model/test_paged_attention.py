"""The reference attention against loops in float64, over every way to cut requests into steps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import arbi_core.kernels.paged_attention as kernel
from arbi_core.builtin.reference_attention import ReferenceBackend, arbi_attention_backends
from arbi_core.spec import LayerSpec
from support.paged import Attention, Sequence, context, make_batch, naive_attention

TOLERANCE = 2e-5


@st.composite
def layers(draw):
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    head_dim = draw(st.sampled_from([4, 6, 16, 24]))
    return LayerSpec(
        index=0,
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 3])),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=draw(st.sampled_from([None, 5, 16])),
        window=draw(st.one_of(st.none(), st.integers(1, 20))),
        soft_cap=draw(st.sampled_from([None, 2.0])),
        scale=draw(st.sampled_from([None, 0.3])),
        sinks=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(
    layer=layers(),
    page_size=st.sampled_from([1, 3, 8]),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    consecutive=st.booleans(),
    blocks=st.sampled_from([(4, 1 << 24), (5, 64), (512, 1 << 24)]),
    data=st.data(),
)
def test_any_mixture_of_chunks_and_decodes_equals_the_loops(layer, page_size, lengths, consecutive, blocks, data):
    counts = [-(-n // page_size) for n in lengths]
    ids = list(range(1, sum(counts) + 1))
    if not consecutive:
        data.draw(st.randoms(use_true_random=False)).shuffle(ids)
    sequences = [Sequence([ids.pop(0) for _ in range(count)]) for count in counts]
    sinks = torch.linspace(-1, 2, layer.num_heads) if layer.sinks else None
    attention = Attention(layer, page_size, sum(counts) + 1, sinks=sinks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "QUERY_BLOCK", blocks[0])
        patch.setattr(kernel, "SCORES", blocks[1])
        while any(s.computed < n for s, n in zip(sequences, lengths, strict=True)):
            steps = []
            for sequence, length in zip(sequences, lengths, strict=True):
                left = length - sequence.computed
                take = data.draw(st.one_of(st.just(min(1, left)), st.integers(0, left)))
                if take:
                    steps.append((sequence, take))
            if not steps:
                continue
            got, expected = attention.step(steps)
            assert (got - expected).abs().max() < TOLERANCE
    assert attention.state["k"][0].isnan().all(), "the null page stays untouched"


@pytest.mark.parametrize("window", [None, 100, 600])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_a_chunk_longer_than_the_query_block_after_a_prefix(window, soft_cap):
    layer = LayerSpec(index=0, num_heads=2, num_kv_heads=1, head_dim=8, window=window, soft_cap=soft_cap)
    attention = Attention(layer, 16, 80)
    sequence, other = Sequence(list(range(79, 19, -1))), Sequence([3, 4, 5])
    for steps in ([(sequence, 170)], [(sequence, 640), (other, 33)], [(sequence, 1), (other, 7)]):
        got, expected = attention.step(steps)
        assert (got - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_half_precision_activations(dtype, bound, soft_cap):
    layer = LayerSpec(index=0, num_heads=4, num_kv_heads=2, head_dim=32, soft_cap=soft_cap)
    attention = Attention(layer, 8, 20, dtype=dtype)
    sequences = [Sequence(list(range(1, 8))), Sequence([12, 9, 15, 17])]
    for counts in ((20, 9), (1, 5), (1, 1)):
        got, expected = attention.step(list(zip(sequences, counts, strict=True)))
        assert (got - expected).abs().max() < bound


@pytest.mark.parametrize(
    ("name", "bound"), [("reference-bf16", 3e-2), ("reference-fp16", 4e-3), ("reference-fp32", 2e-5)]
)
def test_pages_may_be_narrower_or_wider_than_activations(name, bound):
    (backend,) = (b for b in arbi_attention_backends() if b.name == name)
    layer = LayerSpec(index=0, num_heads=4, num_kv_heads=2, head_dim=16)
    attention = Attention(layer, 4, 20, backend=backend)
    assert attention.state["k"].dtype == getattr(torch, backend.storage_dtype)
    sequences = [Sequence(list(range(1, 8))), Sequence([12, 9, 15, 17])]
    for counts in ((20, 9), (1, 5), (1, 1)):
        got, expected = attention.step(list(zip(sequences, counts, strict=True)))
        assert (got - expected).abs().max() < bound


def test_only_the_slots_of_the_step_are_written():
    layer = LayerSpec(index=0, num_heads=2, num_kv_heads=1, head_dim=4, v_head_dim=6)
    attention = Attention(layer, 4, 8)
    attention.step([(Sequence([5, 2]), 6), (Sequence([7]), 1)])
    written = {5 * 4 + i for i in range(4)} | {2 * 4, 2 * 4 + 1, 7 * 4}
    for name in ("k", "v"):
        filled = ~attention.state[name].flatten(0, 1).isnan().flatten(1).any(1)
        assert set(filled.nonzero().flatten().tolist()) == written


def test_a_layer_without_keys_of_its_own_reads_what_the_pages_hold():
    writer = LayerSpec(index=0, num_heads=2, num_kv_heads=1, head_dim=8)
    reader = LayerSpec(index=1, num_heads=4, num_kv_heads=1, head_dim=8, window=5, kv_source_layer=0)
    attention, ctx, backend = Attention(writer, 4, 8), context(4), ReferenceBackend()
    assert backend.storage(reader, ctx).page_bytes == 0
    sequence = Sequence([3, 6, 1])
    attention.step([(sequence, 10)])
    sequence.computed = 7
    q = torch.randn(3, 4, 8)
    before = attention.state["k"].clone()
    out = torch.empty(3, 4, 8)
    meta = backend.metadata_builder([reader], ctx).build(make_batch([(sequence, 3)], 4))
    backend.attn_op(reader, ctx).forward(q, None, None, attention.state, meta, out)
    expected = naive_attention(reader, q, torch.stack(sequence.k), torch.stack(sequence.v))
    assert (out.double() - expected).abs().max() < TOLERANCE
    assert torch.equal(before.nan_to_num(7), attention.state["k"].nan_to_num(7))


def test_masks_of_a_step_are_views_of_one_matrix_no_taller_than_a_query_block():
    layer = LayerSpec(index=0, num_heads=1, num_kv_heads=1, head_dim=4)
    attention = Attention(layer, 16, 200)
    sequence = Sequence(list(range(1, 150)))
    attention.step([(sequence, 5)])
    plan = attention.builder.build(make_batch([(sequence, 2000)], 16))
    like = torch.empty(0)
    masks = [plan.masks.mask(n, before, None, like) for n, before in ((512, 5), (512, 1029), (3, 2))]
    assert len({m.untyped_storage().data_ptr() for m in masks}) == 1
    assert masks[0].untyped_storage().nbytes() <= 512 * (512 + 2005) * 4
    assert torch.equal(masks[2].isinf(), torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]).bool())
