"""The paged kernels against their twin in float64, under Triton's interpreter without a GPU.

Every slot that no token was written to holds NaN, and block tables hold page ids beyond a row's context that lead
nowhere or to such slots, so that a kernel that looks where it must not shows.
"""

import os
from collections import namedtuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl
from triton.runtime import interpreter

import tkv_interpreter  # noqa: F401
from arbi_plugin_tkv.kernels import paged_twin
from arbi_plugin_tkv.kernels.paged_decode import Workspace, decode
from arbi_plugin_tkv.kernels.paged_prefill import prefill, query_tiles
from arbi_plugin_tkv.kernels.paged_splits import DecodePlan, PrefillTile, decode_plan, prefill_tile, query_block
from arbi_plugin_tkv.kernels.paged_store import store

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter or a GPU"
)
BAD_PAGE = 1 << 24


def teach_bfloat16(builder):
    """Triton 3.6's interpreter multiplies the bits of bfloat16 numbers as integers, and cuts instead of rounding."""
    cast_impl, create_dot = builder.cast_impl, builder.create_dot

    def cast(self, src, dst_type):
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            bits = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.int16).numpy()
            return interpreter.TensorHandle(bits.view(np.uint16), tl.bfloat16)
        return cast_impl(self, src, dst_type)

    def dot(self, a, b, *rest):
        wide = [cast_impl(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return create_dot(self, *wide, *rest)

    builder.cast_impl, builder.create_dot = cast, dot


teach_bfloat16(interpreter.InterpreterBuilder)
Case = namedtuple("Case", "q k_pages v_pages table lengths starts heads_of")


def make_case(lengths, counts, *, kv_heads=2, group=2, dim=64, value_dim=None, page=16, dtype=torch.float32, seed=0,
              window=None):  # fmt: skip
    """Pages of random contexts; with a window, pages wholly before it are gone from the table too."""
    value_dim = value_dim or dim
    g = torch.Generator().manual_seed(seed)
    pages_of = [-(-n // page) for n in lengths]
    total = sum(pages_of) + 3
    order = (torch.randperm(total - 1, generator=g) + 1).tolist()
    k_pages = torch.full((total, kv_heads, page, dim), torch.nan, dtype=dtype)
    v_pages = torch.full((total, kv_heads, page, value_dim), torch.nan, dtype=dtype)
    table = torch.full((len(lengths), max([*pages_of, 1]) + 2), BAD_PAGE, dtype=torch.int32)
    for row, (n, used) in enumerate(zip(lengths, pages_of, strict=True)):
        mine = torch.tensor([order.pop() for _ in range(used)], dtype=torch.int64)
        table[row, :used] = mine.int()
        for i, p in enumerate(mine.tolist()):
            valid = min(page, n - i * page)
            k_pages[p, :, :valid] = torch.randn(kv_heads, valid, dim, generator=g).to(dtype)
            v_pages[p, :, :valid] = torch.randn(kv_heads, valid, value_dim, generator=g).to(dtype)
        if window is not None:
            gone = max(0, n - counts[row] - window + 1) // page
            table[row, :gone] = BAD_PAGE
    starts = torch.tensor(np.concatenate(([0], np.cumsum(counts))), dtype=torch.int32)
    q = torch.randn(int(starts[-1]), kv_heads * group, dim, generator=g).to(dtype)
    tensors = (q, k_pages, v_pages, table, torch.tensor(lengths, dtype=torch.int32), starts)
    return Case(*(t.to(DEVICE) for t in tensors), (kv_heads, group, dim, value_dim))


def expected(case, options):
    table = case.table.clone()
    table[table == BAD_PAGE] = 0
    out = torch.zeros(case.q.shape[0], case.q.shape[1], case.v_pages.shape[3], dtype=torch.float64, device=DEVICE)
    return paged_twin.attend(
        case.q, case.k_pages, case.v_pages, table, case.lengths, case.starts, out, dtype=torch.float64, **options
    )


def check(case, out, options):
    want = expected(case, options)
    assert not out.isnan().any(), "a slot that was not written shows, or an output was not"
    error = (out.double() - want).norm() / want.norm()
    assert error < (1e-4 if out.dtype == torch.float32 else 2e-2)


def poisoned(case):
    return torch.full((*case.q.shape[:2], case.v_pages.shape[3]), torch.nan, dtype=case.q.dtype, device=DEVICE)


def run_decode(case, options, *, splits=3, min_share=16, tile=16, ragged=False, workspace=None):
    _, group, _, _ = case.heads_of
    queries = int(case.starts.diff().max()) if ragged else 1
    plan = DecodePlan(splits, min_share, tile, query_block(group, queries), 4, 1)
    starts = case.starts if ragged else None
    return decode(
        case.q, case.k_pages, case.v_pages, case.table, case.lengths, poisoned(case), plan, starts=starts,
        queries=queries, workspace=workspace, **options,
    )  # fmt: skip


def run_prefill(case, options, *, rows=32, tile=32):
    _, group, _, _ = case.heads_of
    tiles = query_tiles(case.starts.cpu().numpy(), case.lengths.cpu().numpy(), rows // group)
    return prefill(
        case.q, case.k_pages, case.v_pages, case.table, case.lengths, case.starts, torch.from_numpy(tiles).to(DEVICE),
        poisoned(case), PrefillTile(rows, tile, 4, 1), **options,
    )  # fmt: skip


def sinks_of(kv_heads, group):
    return torch.linspace(-2, 3, kv_heads * group, device=DEVICE)


LAYERS = {
    "plain": {},
    "window": {"window": 21},
    "narrow": {"window": 1},
    "sinks": {"sinks": True},
    "cap": {"soft_cap": 2.0},
    "all": {"window": 40, "sinks": True, "soft_cap": 3.0, "scale": 0.4},
}


def layer(name, dim, kv_heads, group):
    options = {"scale": dim**-0.5} | LAYERS[name]
    if "sinks" in options:
        options["sinks"] = sinks_of(kv_heads, group)
    return options


SHAPES = [(2, 1, 64, 64, 16), (1, 2, 80, 80, 32), (2, 3, 64, 32, 64), (1, 4, 128, 128, 16), (1, 7, 40, 24, 8),
          (1, 8, 64, 80, 32)]  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "group", "dim", "value_dim", "page"), SHAPES)
def test_decode_of_any_shape(kv_heads, group, dim, value_dim, page, dtype):
    case = make_case([70, 1, 33], [1, 1, 1], kv_heads=kv_heads, group=group, dim=dim, value_dim=value_dim, page=page,
                     dtype=dtype)  # fmt: skip
    options = {"scale": dim**-0.5}
    check(case, run_decode(case, options), options)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_decode_of_any_layer(name, splits):
    options = layer(name, 64, 2, 2)
    case = make_case([70, 1, 33, 16], [1] * 4, window=options.get("window"))
    check(case, run_decode(case, options, splits=splits), options)


@pytest.mark.parametrize(("tile", "page"), [(64, 16), (64, 64), (32, 64), (16, 48), (64, 24)])
def test_decode_tiles_of_several_pages_and_of_parts_of_one(tile, page):
    options = {"scale": 0.2, "window": 50}
    case = make_case([130, 65, 64], [1] * 3, page=page, window=50)
    check(case, run_decode(case, options, tile=tile, min_share=tile), options)


@pytest.mark.parametrize("splits", [1, 4])
def test_decode_of_rows_that_pad_the_batch_gives_zeros(splits):
    options = {"scale": 0.2, "sinks": sinks_of(2, 2)}
    case = make_case([40, 0, 0], [1] * 3)
    out = run_decode(case, options, splits=splits)
    check(case, out, options)
    assert (out[1:] == 0).all()


def test_a_short_row_has_the_same_bits_whatever_the_splits_it_does_not_fill():
    options = {"scale": 0.2}
    case = make_case([40], [1])
    outs = [run_decode(case, options, splits=s, min_share=32) for s in (2, 8, 40)]
    assert all((o == outs[0]).all() for o in outs)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("splits", [1, 4])
def test_verified_rows_of_unequal_length(name, splits):
    options = layer(name, 64, 2, 2)
    case = make_case([70, 5, 33, 50], [3, 5, 1, 4], window=options.get("window"))
    check(case, run_decode(case, options, splits=splits, ragged=True), options)


@pytest.mark.parametrize(("group", "counts"), [(8, [16, 2]), (3, [7, 16]), (20, [9, 1])])
def test_verified_rows_of_several_query_blocks(group, counts):
    options = {"scale": 0.2}
    case = make_case([33, 20], counts, kv_heads=1, group=group, dim=32)
    check(case, run_decode(case, options, splits=2, ragged=True), options)


def test_verified_rows_without_tokens_write_nothing():
    options = {"scale": 0.2}
    case = make_case([33, 0, 17], [2, 0, 1])
    check(case, run_decode(case, options, splits=2, ragged=True), options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "group", "dim", "value_dim", "page"), SHAPES)
def test_prefill_of_any_shape(kv_heads, group, dim, value_dim, page, dtype):
    case = make_case([70, 9, 33], [20, 9, 1], kv_heads=kv_heads, group=group, dim=dim, value_dim=value_dim, page=page,
                     dtype=dtype)  # fmt: skip
    options = {"scale": dim**-0.5}
    check(case, run_prefill(case, options), options)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("rows", "tile", "page"), [(32, 64, 16), (64, 32, 64), (32, 32, 24)])
def test_prefill_of_any_layer_and_tile(name, rows, tile, page):
    options = layer(name, 64, 2, 2)
    case = make_case([90, 37, 64], [40, 37, 3], page=page, window=options.get("window"))
    check(case, run_prefill(case, options, rows=rows, tile=tile), options)


def test_query_tiles_cover_every_token_once_and_begin_with_the_longest_context():
    starts, lengths = np.array([0, 5, 5, 6, 20]), np.array([50, 9, 1, 14])
    tiles = query_tiles(starts, lengths, 4)
    assert sorted(map(tuple, tiles.tolist())) == [(0, 0), (0, 4), (2, 0), (3, 0), (3, 4), (3, 8), (3, 12)]
    ends = [int(lengths[r] - (starts[r + 1] - starts[r]) + f) for r, f in tiles.tolist()]
    assert ends == sorted(ends, reverse=True)


@pytest.mark.parametrize("seed", range(6))
def test_random_steps(seed):
    rng = np.random.default_rng(seed)
    group, kv_heads = int(rng.integers(1, 9)), int(rng.integers(1, 3))
    dim, page = int(rng.choice([64, 80, 128])), int(rng.choice([16, 32, 64]))
    kv_heads = 1 if group > 3 else kv_heads
    lengths = rng.integers(1, 100, 4).tolist()
    options = layer(str(rng.choice(list(LAYERS))), dim, kv_heads, group)
    shape = {"kv_heads": kv_heads, "group": group, "dim": dim, "page": page, "seed": seed,
             "dtype": DTYPES[seed % 3], "window": options.get("window")}  # fmt: skip
    case = make_case(lengths, [1] * 4, **shape)
    check(case, run_decode(case, options, splits=int(rng.integers(1, 6)), tile=int(rng.choice([16, 32, 64]))), options)
    counts = [int(rng.integers(1, min(n, 8) + 1)) for n in lengths]
    case = make_case(lengths, counts, **shape)
    check(case, run_decode(case, options, splits=int(rng.integers(1, 6)), ragged=True), options)
    check(case, run_prefill(case, options, rows=int(rng.choice([16, 32, 64]))), options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (80, 48)])
def test_store_writes_what_its_twin_writes_and_nothing_else(dim, value_dim, dtype):
    g = torch.Generator().manual_seed(0)
    joined = torch.randn(21, 3 * (dim + value_dim), generator=g).to(DEVICE)
    k, v = joined[:, : 3 * dim].view(21, 3, dim), joined[:, 3 * dim :].view(21, 3, value_dim)
    slots = torch.randperm(8 * 16 - 16, generator=g)[:21].to(DEVICE) + 16
    pages = [torch.full((8, 3, 16, d), torch.nan, dtype=dtype, device=DEVICE) for d in (dim, value_dim)]
    twins = [p.clone() for p in pages]
    store(k, v, slots, *pages)
    paged_twin.store(k, v, slots, *twins)
    for page, twin in zip(pages, twins, strict=True):
        assert torch.equal(page.isnan(), twin.isnan())
        assert torch.equal(page.nan_to_num(), twin.nan_to_num()), "a number differs"


def test_rows_that_pad_the_batch_store_to_the_null_page():
    pages = [torch.zeros(3, 2, 16, 32, device=DEVICE) for _ in range(2)]
    k = torch.randn(5, 2, 32, device=DEVICE)
    store(k, k, torch.tensor([17, 0, 0, 0, 0], device=DEVICE), *pages)
    assert (pages[0][1, :, 1] == k[0]).all()
    assert (pages[0][2] == 0).all()


def test_a_workspace_that_is_too_small_is_refused():
    case = make_case([40], [1])
    with pytest.raises(ValueError, match="too small"):
        run_decode(case, {"scale": 0.2}, workspace=Workspace.allocate(5, 64, torch.device(DEVICE)))


def test_plans_hold_for_every_batch_of_a_bucket():
    plans = {decode_plan(n, 8, 4, 128, 2, 40960, 132) for n in range(17, 33)}
    assert len(plans) == 1


@pytest.mark.parametrize("rows", [1, 2, 16, 64, 256, 1024])
@pytest.mark.parametrize("bound", [1024, 40960, 1 << 20])
def test_plans_fill_the_device_and_bound_the_longest_share(rows, bound):
    plan = decode_plan(rows, 8, 4, 128, 2, bound, 132)
    assert rows * 8 * plan.splits >= min(132, rows * 8 * bound // plan.min_share)
    assert plan.splits == 64 or bound / plan.splits <= 8192
    assert plan.min_share % plan.tile == 0


def test_plans_keep_to_the_room_there_is():
    plan = decode_plan(200, 8, 4, 128, 2, 40960, 132, 16, 256 * 32 * 8)
    assert plan.splits == 1
    plan = decode_plan(200, 8, 4, 128, 2, 40960, 132, 4, 256 * 32 * 8)
    assert 256 * 4 * 32 * plan.splits <= 256 * 32 * 8


@pytest.mark.parametrize("dim", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_shared_memory(dim, itemsize):
    padded = 1 << (dim - 1).bit_length()
    tile = prefill_tile(dim, 4, itemsize)
    assert (tile.rows + 2 * max(1, tile.stages - 1) * tile.tile) * padded * itemsize <= 227 * 1024
