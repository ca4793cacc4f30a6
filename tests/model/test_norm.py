"""RMS norm: both forms against float64, and the fused addition."""

import pytest
import torch

from arbi_core.loader.base import WeightPiece
from arbi_core.model.norm import RMSNorm
from arbi_core.spec import WeightShardSpec
from support.sources import MemoryTensor


def loaded(weight, eps, dtype):
    norm = RMSNorm(weight.numel(), eps, dtype=dtype)
    spec = WeightShardSpec("weight", "w")
    norm.load_pieces("weight", [WeightPiece(spec, MemoryTensor("w", weight))], torch.device("cpu"), dtype)
    return norm


def exact(x, weight, eps):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_norm_equals_float64(eps, scale, dtype, bound):
    torch.manual_seed(0)
    x = (torch.randn(7, 3, 24) * scale).to(dtype)
    weight = torch.linspace(-2, 2, 24)
    got = loaded(weight, eps, dtype)(x)
    assert got.dtype == dtype
    assert got.shape == x.shape
    assert (got.double() - exact(x, weight.to(dtype), eps)).abs().max() < bound * 10


def test_zero_rows_stay_zero():
    assert not loaded(torch.ones(8), 1e-6, torch.float32)(torch.zeros(2, 8)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_addition_updates_the_residual_in_place(dtype):
    torch.manual_seed(0)
    x, residual = torch.randn(3, 8).to(dtype), torch.randn(3, 8).to(dtype)
    norm, total = loaded(torch.ones(8), 1e-6, dtype), x + residual
    got = norm.add(x, residual)
    assert torch.equal(residual, total)
    assert torch.equal(got, norm(total))


def test_loading_again_in_another_dtype_leaves_nothing_of_the_first():
    norm = loaded(torch.ones(8), 1e-6, torch.float32)
    spec = WeightShardSpec("weight", "w")
    piece = WeightPiece(spec, MemoryTensor("w", torch.full((8,), 3.0)))
    norm.load_pieces("weight", [piece], torch.device("cpu"), torch.bfloat16)
    assert norm(torch.ones(1, 8).bfloat16()).float().mean() == pytest.approx(3.0, rel=1e-2)
