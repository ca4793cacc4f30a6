"""The codec's parts: rotations, bytes, words, grids, bases, yardsticks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arbi_plugin_tkv.codec import lloyd, naive, vq2
from arbi_plugin_tkv.codec.basis import default_key_basis, default_value_basis, fitted_basis, frequency_order
from arbi_plugin_tkv.codec.grid import GridFitter
from arbi_plugin_tkv.codec.layout import page_layout, side_layout
from arbi_plugin_tkv.codec.packing import pack, unpack
from arbi_plugin_tkv.codec.rotation import rotation, walsh_hadamard
from arbi_plugin_tkv.codec.sides import Side, SideCodec, decode
from arbi_plugin_tkv.codec.words import SCALE_LIMIT, join_word, split_word

CPU = torch.device("cpu")


@pytest.mark.parametrize("width", [1, 2, 5, 12, 64, 80, 96, 112, 128, 576])
def test_a_rotation_is_orthogonal_for_any_width_and_input_0_becomes_the_mean(width):
    matrix = rotation(width)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width, dtype=torch.float64))
    torch.testing.assert_close(matrix[0], torch.full((width,), width**-0.5, dtype=torch.float64))


@pytest.mark.parametrize("width", [0, 3, 24])
def test_a_walsh_hadamard_matrix_of_another_width_is_refused(width):
    with pytest.raises(ValueError, match=str(width)):
        walsh_hadamard(width)


@given(st.integers(1, 20), st.integers(2, 8), st.integers(-3, 3), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_codes_come_back_from_their_bytes_and_lie_where_the_specification_says(eighths, bits, skew, seed):
    if not (1 <= bits + skew <= 8 and 1 <= bits - skew <= 8):
        return
    layout = side_layout(8 * eighths, bits, skew)
    random = torch.Generator().manual_seed(seed)
    codes = torch.cat(
        [torch.randint(0, 2**b, (3, layout.pairs), generator=random) for b in (layout.bits_a, layout.bits_b)], dim=1
    ).to(torch.uint8)
    data = pack(codes, layout)
    assert data.shape == (3, layout.code_bytes)
    assert layout.code_bytes * 8 == layout.padded * bits
    assert torch.equal(torch.cat(unpack(data, layout), dim=1), codes)
    assert torch.equal(torch.cat(unpack(data.T, layout, axis=0), dim=0), codes.T)
    block = bytearray(layout.code_bytes)
    for pair in range(layout.pairs):
        naive.write_code(
            block, range(layout.code_bytes), layout, pair, int(codes[0, pair]), int(codes[0, layout.pairs + pair])
        )
    assert bytes(block) == bytes(data[0].tolist())


@pytest.mark.parametrize(
    ("dim", "bits", "skew", "said"),
    [(0, 4, 0, "0 numbers"), (64, 1, 0, "1 bits"), (64, 9, 0, "9 bits"), (64, 8, 1, "9 and 7"), (64, 2, 2, "4 and 0")],
)
def test_layouts_that_do_not_exist_are_refused(dim, bits, skew, said):
    with pytest.raises(ValueError, match=said):
        side_layout(dim, bits, skew)


def test_a_page_holds_its_parts_one_after_the_other():
    for size in (1, 3, 16, 64):
        for bits in range(2, 9):
            page = page_layout(size, side_layout(64, bits), side_layout(48, 10 - bits))
            assert page.value_codes == size * 64 * bits // 8
            assert page.key_words >= page.value_codes + size * 48 * (10 - bits) // 8
            assert page.key_words % 4 == 0
            assert page.block_bytes == page.value_words + 4 * size == page.key_words + 8 * size
    page = page_layout(16, side_layout(64, 4), side_layout(64, 4))
    assert page.slot_bytes == 72
    assert page.block_bytes == 16 * 72
    assert page.bits_per_number == 4.5
    assert page_layout(64, side_layout(128, 4), side_layout(128, 4)).bits_per_number == 4.25


@given(st.integers(0, 2**11 - 1), st.integers(-2048, 2047), st.integers(0, 2**8 - 10), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_words_carry_their_fields_exactly(a, offset, b, bits):
    def number(pattern, shift):
        return torch.tensor([pattern << shift], dtype=torch.int32).to(torch.int16).view(torch.float16).float()

    scale = torch.stack((number(a, 3), number(b, 7)), dim=-1)
    word = join_word(scale, torch.tensor([float(offset)]))
    got_a, got_offset, got_b = split_word(word, bits)
    assert (got_a, got_b) == (scale[0, 0], scale[0, 1])
    assert (got_a.item(), got_offset.item(), got_b.item()) == naive.read_word(word.numpy().tobytes(), 0, bits)
    assert naive.read_word(word.numpy().tobytes(), 0, 4)[1] == offset / 32


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_grid_is_as_good_as_lloyd_max_and_its_error_is_orthogonal_to_what_is_read(bits):
    x = torch.randn(1, 4000, 1, 2, 32, generator=torch.Generator().manual_seed(0))
    codes, scale, offset = GridFitter([(bits, bits)], CPU).fit(x)
    data, words = pack(codes.flatten(-2)[0], side_layout(64, bits)), join_word(scale, offset)[0]
    read = decode(data, words, side_layout(64, bits)).view_as(x)
    book = lloyd.gaussian_codebook(bits)
    error = (x - read).square().mean()
    assert error < 1.03 * (x - lloyd.quantize(x.flatten(-2), book).view_as(x)).square().mean()
    along = ((x - read) * read).sum((-1, -2)).mean() / read.square().sum((-1, -2)).mean()
    assert along.abs() < 0.05


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1.0, 300.0, 1e6, 1e30])
def test_vectors_of_any_length_read_back_finite(size):
    sides = [Side(side_layout(64, 4), default_key_basis(1, 64))]
    x = torch.randn(50, 1, 64, generator=torch.Generator().manual_seed(0)) * size
    ((data, words),) = SideCodec(sides, CPU).encode([x], torch.arange(50))
    read = decode(data, words, sides[0].layout)
    assert read.isfinite().all()
    if 1e-4 <= size <= 300.0:
        y = torch.einsum("nhd,hdp->nhp", x, sides[0].basis.encode)
        assert (read - y).norm() < 0.12 * y.norm()


def test_scales_stop_at_the_limit():
    _, scale, _ = GridFitter([(2, 2)], CPU).fit(torch.full((1, 1, 1, 2, 8), 3e4).cumsum(-1) * 100)
    assert (scale <= SCALE_LIMIT).all()


def test_codes_do_not_depend_on_the_tokens_beside_them():
    sides = [Side(side_layout(64, 4), default_key_basis(2, 64)), Side(side_layout(64, 3), default_value_basis(2, 64))]
    codec = SideCodec(sides, CPU)
    k, v = torch.randn(9, 2, 64), torch.randn(9, 2, 64)
    together = codec.encode((k, v), torch.arange(9))
    for i in range(9):
        alone = codec.encode((k[i : i + 1], v[i : i + 1]), torch.tensor([i]))
        for (a, wa), (b, wb) in zip(together, alone, strict=True):
            assert torch.equal(a[i : i + 1], b)
            assert torch.equal(wa[i : i + 1], wb)


@pytest.mark.parametrize("dim", [2, 10, 64, 80, 128])
def test_default_bases_undo_themselves(dim):
    for basis in (default_key_basis(3, dim), default_value_basis(3, dim)):
        assert basis.padded % 8 == 0
        torch.testing.assert_close(basis.encode @ basis.decode, torch.eye(dim).expand(3, -1, -1), rtol=0, atol=1e-5)


def test_low_frequencies_come_first():
    assert frequency_order(8).tolist() == [3, 7, 2, 6, 1, 5, 0, 4]
    assert sorted(frequency_order(7).tolist()) == list(range(7))


def moments(dim, seed, decay):
    random = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(2, dim, dim, generator=random, dtype=torch.float64))
    spectrum = torch.exp(-decay * torch.arange(dim, dtype=torch.float64))
    return (q * spectrum) @ q.transpose(1, 2)


@pytest.mark.parametrize("dim", [16, 20])
def test_a_fitted_basis_undoes_itself_balances_both_moments_and_puts_the_strong_half_first(dim):
    covariance, readers = moments(dim, 1, 0.2), moments(dim, 2, 0.1)
    basis = fitted_basis(covariance, readers, ridge=0.0)
    encode, back = basis.encode.double(), basis.decode.double()
    torch.testing.assert_close(encode @ back, torch.eye(dim, dtype=torch.float64).expand(2, -1, -1), rtol=0, atol=1e-3)
    stored = encode.transpose(1, 2) @ covariance @ encode
    seen = back @ readers @ back.transpose(1, 2)
    if dim % 8 == 0:
        torch.testing.assert_close(stored, seen, rtol=1e-3, atol=1e-5)
    half = basis.padded // 2
    energy = stored.diagonal(dim1=1, dim2=2)
    assert (energy[:, :half].sum(1) > 2 * energy[:, half:].sum(1)).all()
    # The strongest direction is the mean of the first half, which the offset carries.
    values = torch.linalg.eigvalsh(stored)
    mean = encode[..., :half].sum(-1, keepdim=True) / half**0.5
    torch.testing.assert_close(
        (mean.transpose(1, 2) @ covariance @ mean).flatten(), values[:, -1], rtol=1e-2, atol=1e-5
    )


def test_a_fitted_basis_disturbs_readers_less_than_the_default_one():
    random = torch.Generator().manual_seed(0)
    covariance, readers = moments(64, 3, 0.1), moments(64, 4, 0.1)
    k, q = (
        torch.einsum(
            "hde,nhe->nhd", torch.linalg.cholesky(m), torch.randn(2000, 2, 64, generator=random).double()
        ).float()
        for m in (covariance, readers)
    )
    noise = {}
    for name, basis, skew in (
        ("default", default_key_basis(2, 64), 0),
        ("fitted", fitted_basis(covariance, readers), 1),
    ):
        side = Side(side_layout(64, 4, skew), basis)
        ((data, words),) = SideCodec([side], CPU).encode([k], torch.arange(1, 2001))
        error = torch.einsum("nhp,hpd->nhd", decode(data, words, side.layout), basis.decode) - k
        noise[name] = (q * error).sum(-1).square().mean()
    assert noise["fitted"] < 0.3 * noise["default"]


@pytest.mark.parametrize(("bits", "error"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_gaussian_codebooks_have_the_error_that_max_published(bits, error):
    book = lloyd.gaussian_codebook(bits).double()
    x = torch.linspace(-8, 8, 400_001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2)
    nearest = book[torch.bucketize(x, (book[1:] + book[:-1]) / 2)]
    assert math.isclose(((x - nearest).square() * density).sum() / density.sum(), error, rel_tol=2e-3)


def test_a_fitted_codebook_beats_the_gaussian_one_on_its_samples():
    samples = torch.empty(20_000).exponential_(generator=torch.Generator().manual_seed(0)) - 1
    errors = []
    for book in (lloyd.gaussian_codebook(3), lloyd.fit_codebook(samples, 3)):
        nearest = book[torch.bucketize(samples, (book[1:] + book[:-1]) / 2)]
        errors.append((samples - nearest).square().mean())
    assert errors[1] < 0.7 * errors[0]
    with pytest.raises(ValueError, match="no samples"):
        lloyd.fit_codebook(torch.tensor([math.nan]), 3)


def test_pairs_of_coordinates_quantise_better_than_single_ones():
    random = torch.Generator().manual_seed(0)
    book = vq2.fit_codebook(torch.randn(60_000, 2, generator=random), 3)
    assert book.shape == (64, 2)
    x = torch.randn(2000, 64, generator=random)
    scalar = lloyd.quantize(x, lloyd.gaussian_codebook(3))
    assert (x - vq2.quantize(x, book)).square().mean() < 0.95 * (x - scalar).square().mean()


def test_corrected_norms_are_kept():
    x = torch.randn(100, 64)
    read = lloyd.quantize(x, lloyd.gaussian_codebook(4))
    torch.testing.assert_close(read.norm(dim=-1), x.norm(dim=-1), rtol=1e-3, atol=0)
