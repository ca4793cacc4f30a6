"""Linears that stay packed on the CPU.

Q4_0 and Q4_1 (``value = code * d + m`` over blocks of 32) are what torch's int4 CPU kernel computes, up to the rounding
of scale and zero to bfloat16. It reads an eighth of the bytes of float32, which is what a few rows cost; many rows are
bound by arithmetic and go through a float32 product over weights unpacked on the spot from the mapped file.

Q8_0 linears (the head of small tied models) are requantised to one scale per output row for torch's int8 kernel.

Torch is imported when a weight is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from arbi_core.api import LinearBase, LinearMethod, WeightContext, WeightPiece

__all__ = ["PackedInt4Format", "PackedInt8Format"]

GROUP = 32
WIDE_INT4 = 48
"""Rows from which unpacking and a float32 product are faster than the int4 kernel (measured, see the benchmark)."""


def _applies(pieces: Sequence[WeightPiece], ctx: WeightContext, encodings: frozenset[str]) -> bool:
    import torch

    section = ctx.options.get("gguf")
    return (
        (section is None or section.packed == "auto")
        and ctx.device.type == "cpu"
        and ctx.dtype is torch.float32
        and all(p.source.encoding in encodings for p in pieces)
        and (ctx.parallel.size == 1 or all(p.spec.shard_dim == 0 for p in pieces))
    )


class PackedInt4Format:
    """See `arbi_core.loader.base.WeightFormat`."""

    name = "gguf-int4"
    detection_priority = 50

    def linear_method(
        self, layer: LinearBase, pieces: Sequence[WeightPiece], ctx: WeightContext
    ) -> LinearMethod | None:
        """Serve linears all of whose pieces are Q4_0 or Q4_1 and whose shape fits the kernel's tiles."""
        fits = layer.in_features % GROUP == 0 and layer.out_features % 16 == 0
        if fits and _applies(pieces, ctx, frozenset({"gguf:q4_0", "gguf:q4_1"})):
            return _Int4Method()
        return None


class PackedInt8Format:
    """See `arbi_core.loader.base.WeightFormat`."""

    name = "gguf-int8"
    detection_priority = 51

    def linear_method(
        self, layer: LinearBase, pieces: Sequence[WeightPiece], ctx: WeightContext
    ) -> LinearMethod | None:
        """Serve linears all of whose pieces are Q8_0."""
        fits = layer.in_features % GROUP == 0 and layer.out_features % 16 == 0
        if fits and _applies(pieces, ctx, frozenset({"gguf:q8_0"})):
            return _Int8Method()
        return None


def _slice(piece: WeightPiece, layer: LinearBase) -> tuple[Any, int, int]:
    """The piece's source, this rank's first row in it and its number of rows."""
    _, length = layer.piece_rows(piece.spec.shard_id)
    return piece.source, layer.group.spec.rank * length, length


class _Int4Method:
    """See `arbi_core.loader.base.LinearMethod`."""

    def __init__(self) -> None:
        self._raw: list[tuple[torch.Tensor, Any]] = []

    def load(
        self,
        layer: LinearBase,
        pieces: Sequence[WeightPiece],
        device: torch.device,  # noqa: ARG002  # the protocol's signature
        dtype: torch.dtype,  # noqa: ARG002
    ) -> None:
        """Repack the codes; the file's own bytes stay mapped for wide products."""
        import torch

        from arbi_plugin_gguf.dequant import as_blocks, q4_codes

        codes, scales, zeros = [], [], []
        for piece in pieces:
            source, start, length = _slice(piece, layer)
            raw = source.rows(start, length)
            code, scale, zero = q4_codes(raw, source.info.kind)
            codes.append(code.flatten(1))
            scales.append(scale)
            zeros.append(zero + 8 * scale)
            self._raw.append((as_blocks(raw, source.info.kind), source.info.kind))
        whole = torch.cat(codes).to(torch.int32)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, 2)
        scale_zero = torch.stack((torch.cat(scales), torch.cat(zeros)), dim=-1)
        self._scale_zero = scale_zero.transpose(0, 1).to(torch.bfloat16).contiguous()

    def apply(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        """Few rows by the int4 kernel, many by a float32 product."""
        import torch

        if x.shape[0] >= WIDE_INT4:
            return self._wide(layer, x)
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), self._packed, GROUP, self._scale_zero)
        return y.float()

    def _wide(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        import torch
        import torch.nn.functional as F

        from arbi_plugin_gguf.dequant import unpack_q4

        weight = torch.empty((layer.out_features, layer.in_features))
        start = 0
        for raw, kind in self._raw:
            unpack_q4(raw, kind, weight[start : start + raw.shape[0]])
            start += raw.shape[0]
        return F.linear(x, weight)


class _Int8Method:
    """See `arbi_core.loader.base.LinearMethod`."""

    def load(
        self,
        layer: LinearBase,
        pieces: Sequence[WeightPiece],
        device: torch.device,  # noqa: ARG002  # the protocol's signature
        dtype: torch.dtype,  # noqa: ARG002
    ) -> None:
        """Requantise every output row to int8 with one scale."""
        import torch

        codes, scales = [], []
        for piece in pieces:
            source, start, length = _slice(piece, layer)
            weight = source.load(0, start, length)
            scale = weight.abs().amax(dim=1, keepdim=True).clamp_(min=1e-30) / 127
            codes.append((weight / scale).round_().to(torch.int8))
            scales.append(scale.squeeze(1))
        self._codes = torch.cat(codes)
        self._scales = torch.cat(scales).to(torch.bfloat16)

    def apply(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """``x @ weight.T`` with bfloat16 activations."""
        import torch

        y: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x.bfloat16(), self._codes, self._scales)
        return y.float()
