"""The codecs that `tkv_quality.py` compares, each as a function from keys and values to what a reader gets back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from attrs import frozen

from arbi_core.spec import LayerSpec
from arbi_plugin_tkv.calibration.statistics import LayerStatistics, output_moment
from arbi_plugin_tkv.codec import lloyd, vq2
from arbi_plugin_tkv.codec.basis import Basis, default_key_basis, default_value_basis
from arbi_plugin_tkv.codec.layout import side_layout
from arbi_plugin_tkv.codec.rotation import rotation
from arbi_plugin_tkv.codec.sides import Side, SideCodec, decode

Vectors = Callable[[int, torch.Tensor], torch.Tensor]


@frozen
class Codec:
    """One way to store keys and values.

    Attributes:
        name: for people.
        bits: per number, everything included.
        through: ``(layer, k, v)``, each ``(N, kv_heads, dim)``, to what is read back.
        first_raw: first tokens of a sequence kept as they are (not in `bits`).
        recent_raw: tokens before the reader kept as they are (not in `bits`).
    """

    name: str
    bits: float
    through: Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    first_raw: int = 0
    recent_raw: int = 0


def pair(name: str, bits: float, keys: Vectors, values: Vectors, first: int = 0, recent: int = 0) -> Codec:
    """A codec of independent sides."""
    return Codec(name, bits, lambda i, k, v: (keys(i, k), values(i, v)), first, recent)


def half(x: torch.Tensor) -> torch.Tensor:
    """As float16 would store it."""
    return x.half().float()


def symmetric(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers times the largest magnitude."""
    top = 2 ** (bits - 1) - 1
    scale = half(x.abs().amax(-1, keepdim=True) / top).clamp_min(1e-7)
    return (x / scale).round().clamp(-top - 1, top) * scale


def asymmetric(x: torch.Tensor, bits: int, axis: int = -1) -> torch.Tensor:
    """Integers between the least and the greatest number along an axis."""
    low, high = half(x.amin(axis, keepdim=True)), x.amax(axis, keepdim=True)
    scale = half((high - low) / (2**bits - 1)).clamp_min(1e-7)
    return ((x - low) / scale).round().clamp(0, 2**bits - 1) * scale + low


def turned(
    inner: Callable[[torch.Tensor], torch.Tensor],
    scales: Sequence[torch.Tensor] | None = None,
    means: Sequence[torch.Tensor] | None = None,
) -> Vectors:
    """Quantise in rotated coordinates, after taking means and dividing by scales per layer."""

    def through(layer: int, x: torch.Tensor) -> torch.Tensor:
        matrix = rotation(x.shape[-1]).float()
        scale = torch.ones(()) if scales is None else scales[layer]
        mean = torch.zeros(()) if means is None else means[layer]
        return (inner(((x - mean) / scale) @ matrix) @ matrix.T) * scale + mean

    return through


def kivi_keys(bits: int, group: int = 32) -> Vectors:
    """Per channel over groups of tokens (KIVI, Liu et al., 2024); the rest of a group is kept raw, as KIVI does."""

    def through(_: int, k: torch.Tensor) -> torch.Tensor:
        whole = k.shape[0] // group * group
        groups = k[:whole].unflatten(0, (-1, group))
        return torch.cat((asymmetric(groups, bits, 1).flatten(0, 1), k[whole:]))

    return through


def kivi_values(bits: int, group: int = 32) -> Vectors:
    """Per token over groups of channels."""
    return lambda _, v: asymmetric(v.unflatten(-1, (-1, group)), bits).flatten(-2)


def tkv(
    name: str,
    k_bits: int,
    v_bits: int,
    bases: Sequence[tuple[Basis, Basis]],
    skew: int,
    first: int = 0,
    recent: int = 0,
) -> Codec:
    """What the plugin stores, byte for byte."""
    dim = bases[0][0].encode.shape[1]
    keys, values = side_layout(dim, k_bits, skew), side_layout(dim, v_bits)
    codecs = [
        ((Side(keys, kb), Side(values, vb)), SideCodec((Side(keys, kb), Side(values, vb)), torch.device("cpu")))
        for kb, vb in bases
    ]

    def through(layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sides, codec = codecs[layer]
        positions = torch.arange(k.shape[0])
        read = []
        for side, (data, words) in zip(sides, codec.encode((k, v), positions), strict=True):
            x = torch.einsum("nhp,hpd->nhd", decode(data, words, side.layout), side.basis.decode)
            x += side.basis.mean
            x[0] += side.basis.first - side.basis.mean
            read.append(x)
        return read[0], read[1]

    return Codec(name, 4.0 * (keys.vector_bytes + values.vector_bytes) / dim, through, first, recent)


def candidates(
    layers: Sequence[LayerSpec], stats: Sequence[LayerStatistics] | None, outputs: Sequence[torch.Tensor]
) -> Iterator[Codec]:
    """All codecs, cheapest idea first; fitted ones where there are statistics."""
    yield from _plain(layers[0].head_dim)
    heads, dim = layers[0].num_kv_heads, layers[0].head_dim
    default = [(default_key_basis(heads, dim), default_value_basis(heads, dim))] * len(layers)
    for k_bits, v_bits in ((4, 4), (3, 3), (4, 3), (5, 4), (6, 4), (8, 4), (5, 5), (6, 6), (8, 8), (2, 2)):
        yield tkv(f"tkv-k{k_bits}v{v_bits} default", k_bits, v_bits, default, 0)
    yield tkv("tkv-k4v4 default, 4 first raw", 4, 4, default, 0, first=4)
    yield tkv("tkv-k4v4 default, 64 recent raw", 4, 4, default, 0, recent=64)
    if stats is not None:
        yield from _fitted(layers, stats, outputs)


def _plain(dim: int) -> Iterator[Codec]:
    """Other people's codecs, and steps of ours."""
    one, two = 4 + 16 / dim, 4 + 32 / dim
    yield pair("bf16", 16, lambda _, k: k.bfloat16().float(), lambda _, v: v.bfloat16().float())
    yield pair("fp8 e4m3", 8, *(lambda _, x: x.to(torch.float8_e4m3fn).float(),) * 2)
    yield pair("int4 symmetric per token", one, *(lambda _, x: symmetric(x, 4),) * 2)
    yield pair("int4 asymmetric per token", two, *(lambda _, x: asymmetric(x, 4),) * 2)
    yield pair("KIVI-style 4/4, groups of 32", 5, kivi_keys(4), kivi_values(4))
    yield pair("KIVI-style 2/2, groups of 32", 3, kivi_keys(2), kivi_values(2))
    book = lloyd.gaussian_codebook(4)
    plain = turned(lambda y: lloyd.quantize(y, book, norm_correction=False))
    yield pair("rotated Lloyd-Max", one, plain, plain)
    turbo = turned(lambda y: lloyd.quantize(y, book))
    yield pair("rotated Lloyd-Max, norms corrected", one, turbo, turbo)
    grid = turned(lambda y: asymmetric(y, 4))
    yield pair("rotated int4 asymmetric", two, grid, grid)
    yield pair("rotated asymmetric, 4 first raw", two, grid, grid, 4)
    yield pair("rotated asymmetric, 64 recent raw", two, grid, grid, 0, 64)
    generator = torch.Generator().manual_seed(0)
    pairs = vq2.fit_codebook(torch.randn(200_000, 2, generator=generator), 4)
    vq = turned(lambda y: vq2.quantize(y, pairs))
    yield pair("rotated vq2, norms corrected", one, vq, vq)


def _fitted(
    layers: Sequence[LayerSpec], stats: Sequence[LayerStatistics], outputs: Sequence[torch.Tensor]
) -> Iterator[Codec]:
    """Codecs that know the model."""
    dim = layers[0].head_dim
    keys = [s.key_basis() for s in stats]
    means, deviations = [b.mean for b in keys], [s.key_deviation() for s in stats]
    grid = turned(lambda y: asymmetric(y, 4))
    two = 4 + 32 / dim
    yield pair("rotated asymmetric, K mean", two, turned(lambda y: asymmetric(y, 4), None, means), grid)
    scaled = turned(lambda y: asymmetric(y, 4), deviations, means)
    yield pair("rotated asymmetric, K mean and scale", two, scaled, grid)
    yield pair("rotated asymmetric, K mean, 4 first raw", two, turned(lambda y: asymmetric(y, 4), None, means), grid, 4)
    values = [
        s.value_basis(output_moment(w, la.num_heads, la.num_kv_heads))
        for s, w, la in zip(stats, outputs, layers, strict=True)
    ]
    bases = list(zip(keys, values, strict=True))
    for k_bits, v_bits, skew in (
        (4, 4, 1), (4, 4, 0), (2, 2, 1), (3, 3, 1), (4, 3, 1), (3, 4, 1), (5, 4, 1), (6, 4, 1), (5, 5, 1), (6, 6, 1),
        (7, 7, 1), (8, 4, 0), (8, 8, 0),
    ):  # fmt: skip
        yield tkv(f"tkv-k{k_bits}v{v_bits} fitted, skew {skew}", k_bits, v_bits, bases, skew)
    alike = [(s.key_basis(), s.value_basis()) for s in stats]
    yield tkv("tkv-k4v4 fitted without o_proj, skew 1", 4, 4, alike, 1)
    yield tkv("tkv-k4v4 fitted, skew 1, 4 first raw", 4, 4, bases, 1, first=4)
    yield tkv("tkv-k4v4 fitted, skew 1, 64 recent raw", 4, 4, bases, 1, recent=64)
