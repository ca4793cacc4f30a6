"""Cases for `test_fused` (in the interpreter) and for the GPU suite (on the device)."""

import pytest
import torch

from arbi_core.kernels.device import uses_triton
from arbi_core.kernels.gated import gated
from arbi_core.kernels.qk_rope import HeadNorms, qk_rope
from arbi_core.kernels.rms_norm import add_rms_norm, rms_norm
from arbi_core.model.norm import RMSNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}
dtypes = pytest.mark.parametrize("dtype", list(LIMIT))


def rand(*shape, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g).to(device=DEVICE, dtype=dtype)


def close(got, want):
    got = got.double()
    assert not got.isnan().any()
    error = ((got - want).norm() / want.norm()).item()
    assert error < LIMIT[close.dtype], error


@pytest.fixture(autouse=True)
def on_triton(request):
    close.dtype = request.getfixturevalue("dtype") if "dtype" in request.fixturenames else torch.float32
    assert uses_triton(torch.empty(1, device=DEVICE))


def norm(weight):
    module = RMSNorm(len(weight), 1e-6, dtype=weight.dtype)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


def norm64(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@dtypes
@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (3, 4096), (2, 5, 80), (0, 64)])
def test_rms_norm(dtype, shape):
    x, weight = rand(*shape, dtype=dtype), rand(shape[-1], dtype=dtype, seed=1)
    got = rms_norm(x, weight, 1e-5)
    assert got.shape == x.shape
    assert got.dtype == dtype
    if x.numel():
        close(got, norm64(x, weight, 1e-5))


@dtypes
@pytest.mark.parametrize("shape", [(1, 64), (5, 576), (2, 4096)])
def test_add_rms_norm_adds_in_place(dtype, shape):
    x, residual = rand(*shape, dtype=dtype), rand(*shape, dtype=dtype, seed=2)
    weight, total = rand(shape[-1], dtype=dtype, seed=1), (x + residual)
    got = add_rms_norm(x, residual, weight, 1e-6)
    # The interpreter cuts float32 down to bfloat16 instead of rounding it.
    torch.testing.assert_close(residual, total, rtol=0.0 if DEVICE == "cuda" else 2.0**-7, atol=0.0)
    close(got, norm64(total, weight, 1e-6))


@dtypes
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("shape", [(1, 128), (5, 3072), (3, 2 * 1030)])
def test_gated(dtype, silu, shape):
    x = rand(*shape, dtype=dtype) * 3
    gate, up = x.double().chunk(2, -1)
    act = torch.nn.functional.silu(gate) if silu else torch.nn.functional.gelu(gate, approximate="tanh")
    close(gated(x, silu=silu), act * up)


def test_gated_of_great_numbers_is_finite():
    x = torch.tensor([[1e4, -1e4, 60.0, -60.0, 1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    for silu in (True, False):
        assert gated(x, silu=silu).tolist()[0] == pytest.approx([1e4, 0.0, 60.0, 0.0], abs=1e-5)


@dtypes
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (128, 128), (80, 80), (64, 32), (128, 0)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (32, 8), (1, 1)])
def test_qk_rope(dtype, norms, dim, rotary, heads, kv_heads):
    tokens = 5
    wide = rand(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    qk = wide[:, : heads + kv_heads]
    q_weight, k_weight = rand(dim, dtype=dtype, seed=3), rand(dim, dtype=dtype, seed=4)
    positions = torch.tensor([0, 3, 17, 1, 9], device=DEVICE)
    rope = None
    want_q, want_k = qk[:, :heads].double(), qk[:, heads:].double()
    if norms:
        want_q, want_k = norm64(want_q, q_weight, 1e-6), norm64(want_k, k_weight, 1e-6)
    if rotary:
        angles = torch.rand(20, rotary // 2, generator=torch.Generator().manual_seed(5)).to(DEVICE) * 6
        cos, sin = angles.cos(), angles.sin()
        tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        rope = tuple(t[positions].unsqueeze(1) for t in tables)
        c, s = cos.double()[positions, None], sin.double()[positions, None]

        def turn(x):
            a, b = x[..., : rotary // 2], x[..., rotary // 2 : rotary]
            return torch.cat((a * c - b * s, b * c + a * s, x[..., rotary:]), -1)

        want_q, want_k = turn(want_q), turn(want_k)
    q, k = qk_rope(qk, heads, HeadNorms(norm(q_weight), norm(k_weight)) if norms else None, rope)
    close(q, want_q)
    close(k, want_k)
