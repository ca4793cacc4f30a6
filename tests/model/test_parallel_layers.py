"""Linears, embedding and head: pieces, slices and the same numbers on any count of ranks."""

import pytest
import torch
import torch.nn.functional as F

from arbi_core.distributed.group import SingleProcessGroup
from arbi_core.loader.base import WeightPiece
from arbi_core.model.embedding import VocabParallelEmbedding
from arbi_core.model.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLMHead,
    ReplicatedLinear,
    RowParallelLinear,
)
from arbi_core.spec import WeightShardSpec
from support.ranks import on_ranks
from support.sources import MemoryTensor

CPU = torch.device("cpu")
SIZES = (1, 2, 4)


def piece(value, dim, shard=None, name="t"):
    return WeightPiece(WeightShardSpec(name, name, dim, shard), MemoryTensor(name, value))


def load(layer, leaf, *pieces, dtype=torch.float32):
    layer.load_pieces(leaf, pieces, CPU, dtype)
    return layer


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("size", SIZES)
def test_merged_columns_put_each_piece_in_its_rows_whatever_the_order(size):
    x, q, k = torch.randn(5, 6), torch.randn(8, 6), torch.randn(4, 6)
    bq, bk = torch.randn(8), torch.randn(4)

    def work(group):
        with torch.device("meta"):
            layer = MergedColumnParallelLinear(6, {"q": 8, "k": 4}, bias=True, group=group, dtype=torch.float32)
        assert layer.expected_shapes("weight") == {"q": (8, 6), "k": (4, 6)}
        assert layer.expected_shapes("bias") == {"q": (8,), "k": (4,)}
        assert (layer.in_features, layer.out_features) == (6, 12 // size)
        assert layer.piece_rows("k") == (8 // size, 4 // size)
        load(layer, "weight", piece(k, 0, "k"), piece(q, 0, "q"))
        load(layer, "bias", piece(bk, 0, "k"), piece(bq, 0, "q"))
        return layer(x).split([8 // size, 4 // size], dim=-1)

    results = on_ranks(size, work)
    assert torch.allclose(torch.cat([r[0] for r in results], -1), F.linear(x, q, bq), atol=1e-5)
    assert torch.allclose(torch.cat([r[1] for r in results], -1), F.linear(x, k, bk), atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_a_column_linear_feeds_a_row_linear_and_the_bias_is_added_once(size):
    x, up, down, bias = torch.randn(5, 6), torch.randn(8, 6), torch.randn(3, 8), torch.randn(3)

    def work(group):
        with torch.device("meta"):
            first = ColumnParallelLinear(6, 8, bias=False, group=group, dtype=torch.float32)
            second = RowParallelLinear(8, 3, bias=True, group=group, dtype=torch.float32)
        assert second.in_features == 8 // size
        assert second.expected_shapes("weight") == {None: (3, 8)}
        load(first, "weight", piece(up, 0))
        load(load(second, "weight", piece(down, 1)), "bias", piece(bias, None))
        return second(first(x))

    for result in on_ranks(size, work):
        assert torch.allclose(result, F.linear(F.linear(x, up), down, bias), atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab", [16, 15, 13, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_vocabulary_that_does_not_divide_is_padded_and_trimmed(size, vocab, tied):
    table, head_weight = torch.randn(vocab, 6), torch.randn(vocab, 6)
    ids, x = torch.arange(vocab).flip(0), torch.randn(5, 6)

    def work(group):
        with torch.device("meta"):
            embed = VocabParallelEmbedding(vocab, 6, group=group, dtype=torch.bfloat16)
            head = ParallelLMHead(6, vocab, tied=embed if tied else None, group=group, dtype=torch.bfloat16)
        assert embed.expected_shapes("weight") == head.expected_shapes("weight") == {None: (vocab, 6)}
        load(embed, "weight", piece(table, 0))
        load(head, "weight", piece(table if tied else head_weight, 0))
        assert sum(p.numel() for p in head.parameters()) == (0 if tied else head.out_features * 6)
        return embed(ids), head(x)

    for vectors, logits in on_ranks(size, work):
        assert torch.equal(vectors, table[ids])
        assert logits.shape == (5, vocab)
        assert torch.allclose(logits, x @ (table if tied else head_weight).T, atol=1e-5)


def test_logits_are_float32_whatever_the_weights_are():
    head = ParallelLMHead(4, 7, tied=None, group=SingleProcessGroup(), dtype=torch.bfloat16)
    load(head, "weight", piece(torch.randn(7, 4), 0), dtype=torch.bfloat16)
    assert head.weight.dtype == torch.bfloat16
    assert head(torch.randn(2, 4).bfloat16()).dtype == torch.float32


def test_a_rank_reads_only_its_slice():
    weight = torch.randn(8, 6)
    source = piece(weight, 0)

    def work(group):
        layer = ColumnParallelLinear(6, 8, bias=False, group=group, dtype=torch.float32)
        load(layer, "weight", source)
        return layer.weight

    assert torch.equal(torch.cat(on_ranks(2, work)), weight)
    assert source.source.reads == [24, 24]


def test_a_replicated_linear_is_whole_on_every_rank_in_the_dtype_asked_for():
    weight = torch.randn(3, 6)

    def work(group):
        layer = ReplicatedLinear(6, 3, bias=False, group=group, dtype=torch.float32)
        return load(layer, "weight", piece(weight, None), dtype=torch.float16).weight

    for loaded in on_ranks(2, work):
        assert torch.equal(loaded, weight.half())
        assert not loaded.requires_grad


def test_another_method_holds_the_weight_in_its_own_form_and_the_dense_one_goes():
    class Doubling:
        def load(self, layer, pieces, device, dtype):
            self.weight = pieces[0].source.load() * 2

        def apply(self, layer, x):
            return x @ self.weight.T

    weight, x = torch.randn(3, 6), torch.randn(2, 6)
    with torch.device("meta"):
        layer = ReplicatedLinear(6, 3, bias=True, group=SingleProcessGroup(), dtype=torch.float32)
    layer.method = Doubling()
    load(load(layer, "weight", piece(weight, None)), "bias", piece(torch.ones(3), None))
    assert dict(layer.named_parameters()).keys() == {"bias"}
    assert torch.allclose(layer(x), 2 * F.linear(x, weight) + 1)


def test_a_tied_head_under_another_method_loads_a_copy_of_its_own():
    class Copy:
        def load(self, layer, pieces, device, dtype):
            self.weight = pieces[0].source.load() + 1

        def apply(self, layer, x):
            return x @ self.weight.T

    table, x = torch.randn(7, 4), torch.randn(2, 4)
    embed = load(
        VocabParallelEmbedding(7, 4, group=SingleProcessGroup(), dtype=torch.float32), "weight", piece(table, 0)
    )
    head = ParallelLMHead(4, 7, tied=embed, group=SingleProcessGroup(), dtype=torch.float32)
    head.method = Copy()
    load(head, "weight", piece(table, 0))
    assert torch.allclose(head(x), x @ (table + 1).T)
    assert torch.equal(embed.weight, table)


def test_widths_that_do_not_divide_are_refused_by_name():
    def work(group):
        return MergedColumnParallelLinear(6, {"q": 8, "k": 3}, bias=False, group=group, dtype=torch.float32)

    with pytest.raises(ValueError, match=r"output rows of k \(3\) cannot be divided over 2"):
        on_ranks(2, work)


def test_an_unknown_piece_is_named():
    layer = MergedColumnParallelLinear(6, {"q": 8}, bias=False, group=SingleProcessGroup(), dtype=torch.float32)
    with pytest.raises(KeyError, match="no piece 'z'"):
        layer.piece_rows("z")
