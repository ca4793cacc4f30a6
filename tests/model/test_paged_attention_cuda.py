"""The reference attention on a CUDA device against loops in float64, over aligned and unaligned masks."""

import pytest
import torch

from arbi_core.spec import LayerSpec
from support.paged import Attention, Sequence

pytestmark = pytest.mark.gpu
PREFIXES = (1, 7, 16, 21, 64, 100)


@pytest.fixture(autouse=True)
def _exact_float32():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=str
)
@pytest.mark.parametrize("options", [{}, {"window": 13}, {"window": 48}, {"soft_cap": 5.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, None), (24, None), (20, None), (128, 64)])
def test_chunks_after_prefixes_of_any_length_and_decodes(dtype, bound, options, head_dim, value_dim):
    layer = LayerSpec(0, num_heads=6, num_kv_heads=2, head_dim=head_dim, v_head_dim=value_dim, **options)
    sinks = torch.linspace(-1, 2, 6) if layer.sinks else None
    attention = Attention(layer, 16, 80, dtype=dtype, sinks=sinks, device="cuda")
    sequences = [Sequence(list(range(70 - 12 * i, 58 - 12 * i, -1))) for i in range(5)] + [
        Sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    ]
    for counts in (PREFIXES, (16, 16, 16, 9, 3, 1), (1, 5, 16, 32, 1, 8), (1,) * 6):
        got, expected = attention.step(list(zip(sequences, counts, strict=True)))
        assert (got - expected).abs().max() < bound


@pytest.mark.parametrize("window", [None, 600])
def test_a_chunk_longer_than_the_query_block_after_a_prefix(window):
    layer = LayerSpec(0, num_heads=2, num_kv_heads=1, head_dim=32, window=window)
    attention = Attention(layer, 16, 80, device="cuda")
    sequence = Sequence(list(range(79, 19, -1)))
    for count in (171, 640, 1):
        got, expected = attention.step([(sequence, count)])
        assert (got - expected).abs().max() < 2e-5
