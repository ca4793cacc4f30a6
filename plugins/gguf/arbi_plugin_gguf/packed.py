"""Linears that stay packed on the CPU.

A few rows cost the bytes of the weight, so Q4_0 and Q4_1 (``value = code * d + m`` over blocks of 32) go through
torch's int4 kernel, which computes exactly that up to the rounding of scale and zero to bfloat16. More rows, and every
other type, go through FBGEMM's half-precision weights with float32 activations: half the bytes of float32, its
arithmetic, and weights rounded to 11 bits. Where torch has no FBGEMM, or the file is too large to keep a half-precision
copy beside the codes, wide products unpack the mapped file on the spot.

Torch is imported when a weight is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from arbi_core.api import LinearBase, LinearMethod, WeightContext, WeightPiece

__all__ = ["HalfFormat", "PackedInt4Format"]

GROUP = 32
NARROW_WITH_HALF = 3
"""Most rows for the int4 kernel where a half-precision copy is there for more (measured, see the benchmark)."""
NARROW_ALONE = 47
"""Most rows for the int4 kernel where more rows must be unpacked first."""
HALF_COPY_BYTES = 1 << 30
"""Largest file whose 4-bit weights are kept in half precision too."""


def _enabled(ctx: WeightContext, pieces: Sequence[WeightPiece]) -> bool:
    """Whether packing may serve these pieces at all: float32 on the CPU, whole rows of a GGUF file."""
    import torch

    section = ctx.options.get("gguf")
    return (
        (section is None or section.packed == "auto")
        and ctx.device.type == "cpu"
        and ctx.dtype is torch.float32
        and all(hasattr(p.source, "info") for p in pieces)
        and (ctx.parallel.size == 1 or all(p.spec.shard_dim == 0 for p in pieces))
    )


def _has_fbgemm() -> bool:
    import torch

    engines = torch.backends.quantized.supported_engines
    return "fbgemm" in engines and hasattr(torch.ops.quantized, "linear_prepack_fp16")


class PackedInt4Format:
    """See `arbi_core.loader.base.WeightFormat`."""

    name = "gguf-int4"
    detection_priority = 50

    def linear_method(
        self, layer: LinearBase, pieces: Sequence[WeightPiece], ctx: WeightContext
    ) -> LinearMethod | None:
        """Serve linears all of whose pieces are Q4_0 or Q4_1 and whose shape fits the kernel's tiles."""
        fits = layer.in_features % GROUP == 0 and layer.out_features % 16 == 0
        if not fits or not _enabled(ctx, pieces):
            return None
        if not all(p.source.encoding in {"gguf:q4_0", "gguf:q4_1"} for p in pieces):
            return None
        small = all(p.source.file_bytes <= HALF_COPY_BYTES for p in pieces)  # type: ignore[attr-defined]  # GGUFSource
        return _Int4Method(keep_half=small and _has_fbgemm())


class HalfFormat:
    """See `arbi_core.loader.base.WeightFormat`."""

    name = "gguf-half"
    detection_priority = 51

    def linear_method(
        self,
        layer: LinearBase,  # noqa: ARG002  # any shape will do
        pieces: Sequence[WeightPiece],
        ctx: WeightContext,
    ) -> LinearMethod | None:
        """Serve linears whose pieces are quantised or half precision in the file; float32 ones stay exact."""
        narrow = all(p.source.encoding != "dense" or p.source.dtype == "float16" for p in pieces)
        return _HalfMethod() if narrow and _enabled(ctx, pieces) and _has_fbgemm() else None


def _rows(piece: WeightPiece, layer: LinearBase) -> tuple[Any, int, int]:
    """The piece's source, this rank's first row in it and its number of rows."""
    length = min(layer.piece_rows(piece.spec.shard_id)[1], piece.source.shape[0])
    return piece.source, layer.group.spec.rank * length, length


class _HalfMethod:
    """See `arbi_core.loader.base.LinearMethod`."""

    def load(
        self,
        layer: LinearBase,
        pieces: Sequence[WeightPiece],
        device: torch.device,  # noqa: ARG002  # the protocol's signature
        dtype: torch.dtype,  # noqa: ARG002
    ) -> None:
        """Pack all pieces as one half-precision matrix."""
        import torch

        parts = [source.load(0, start, length).float() for source, start, length in (_rows(p, layer) for p in pieces)]
        self.pack(torch.cat(parts) if len(parts) > 1 else parts[0])

    def pack(self, weight: torch.Tensor) -> None:
        """Take a float32 ``(out, in)`` weight."""
        import torch

        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
        self._multiply = torch.ops.quantized.linear_dynamic_fp16.default

    def apply(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """``x @ weight.T``, float32 in and out."""
        y: torch.Tensor = self._multiply(x, self._packed)
        return y


class _Int4Method:
    """See `arbi_core.loader.base.LinearMethod`.

    Args:
        keep_half: keep a half-precision copy for wide products.
    """

    def __init__(self, *, keep_half: bool) -> None:
        self._half = _HalfMethod() if keep_half else None
        self._narrow = NARROW_WITH_HALF if keep_half else NARROW_ALONE
        self._raw: list[tuple[torch.Tensor, Any]] = []

    def load(
        self,
        layer: LinearBase,
        pieces: Sequence[WeightPiece],
        device: torch.device,  # noqa: ARG002  # the protocol's signature
        dtype: torch.dtype,  # noqa: ARG002
    ) -> None:
        """Repack the codes."""
        import torch

        from arbi_plugin_gguf.dequant import as_blocks, q4_codes

        codes, scales, zeros = [], [], []
        for piece in pieces:
            source, start, length = _rows(piece, layer)
            raw = source.rows(start, length)
            code, scale, zero = q4_codes(raw, source.info.kind)
            codes.append(code.flatten(1))
            scales.append(scale)
            zeros.append(zero)
            if self._half is None:
                self._raw.append((as_blocks(raw, source.info.kind), source.info.kind))
        code, scale, zero = torch.cat(codes), torch.cat(scales), torch.cat(zeros)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(code.to(torch.int32), 2)
        pairs = torch.stack((scale, zero + 8 * scale), dim=-1)
        self._scale_zero = pairs.transpose(0, 1).to(torch.bfloat16).contiguous()
        self._multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        self._bf16 = torch.bfloat16
        if self._half is not None:
            blocks = code.view(*scale.shape, GROUP).float()
            self._half.pack(torch.addcmul(zero.unsqueeze(-1), blocks, scale.unsqueeze(-1)).flatten(1))

    def apply(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        """Few rows by the int4 kernel, more by a wide product."""
        if x.shape[0] > self._narrow:
            return self._unpacked(layer, x) if self._half is None else self._half.apply(layer, x)
        y: torch.Tensor = self._multiply(x.to(self._bf16), self._packed, GROUP, self._scale_zero)
        return y.float()

    def _unpacked(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        """Unpack the mapped file into a float32 weight and multiply."""
        import torch
        import torch.nn.functional as F

        from arbi_plugin_gguf.dequant import unpack_q4

        weight = torch.empty((layer.out_features, layer.in_features))
        start = 0
        for raw, kind in self._raw:
            unpack_q4(raw, kind, weight[start : start + raw.shape[0]])
            start += raw.shape[0]
        return F.linear(x, weight)
