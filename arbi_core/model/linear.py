"""Linear layers that know their place in the tensor-parallel group, and how their weight is held.

What a linear computes is fixed here (pieces, slices, bias, collective); how its weight is stored and multiplied is its
`LinearMethod`: dense by default, replaced by a weight format at load time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from arbi_core.model.loadable import LoadableModule, read_piece, set_parameter

if TYPE_CHECKING:
    from arbi_core.distributed.group import ProcessGroup
    from arbi_core.loader.base import LinearMethod, WeightPiece
    from arbi_core.model.embedding import VocabParallelEmbedding

__all__ = [
    "ColumnParallelLinear",
    "DenseMethod",
    "LinearBase",
    "MergedColumnParallelLinear",
    "ParallelLMHead",
    "ReplicatedLinear",
    "RowParallelLinear",
]


class DenseMethod:
    """A plain weight matrix ``(out, in)`` in the dtype of the activations."""

    def load(self, layer: LinearBase, pieces: Sequence[WeightPiece], device: torch.device, dtype: torch.dtype) -> None:
        """Copy each piece into its rows of one preallocated matrix."""
        weight = torch.empty((layer.out_features, layer.in_features), dtype=dtype, device=device)
        for piece in pieces:
            start, length = layer.piece_rows(piece.spec.shard_id)
            weight[start : start + length].copy_(read_piece(piece, layer.group.spec))
        set_parameter(layer, "weight", weight)

    def apply(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T``."""
        return F.linear(x, layer.weight)


DENSE = DenseMethod()


class LinearBase(LoadableModule):
    """A weight of one or more stacked pieces and an optional bias.

    Args:
        in_features: global input width.
        pieces: global output rows by shard id, in order; ``{None: rows}`` for a plain linear.
        bias: whether there is one.
        group: the tensor-parallel group.
        cut: ``"out"`` slices every piece's rows over the ranks, ``"in"`` slices the input, None replicates.
        dtype: dtype of the (meta) parameters.

    Attributes:
        in_features: this rank's input width.
        out_features: this rank's output width.
        method: how the weight is held.
        adapter_key: name under which adapters find this layer, e.g. ``layers.5.attn.qkv``; set by the builder.
    """

    cut: str | None = None

    def __init__(
        self,
        in_features: int,
        pieces: Mapping[str | None, int],
        *,
        bias: bool,
        group: ProcessGroup,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        parallel = group.spec
        self.group = group
        self.global_in = in_features
        self.global_pieces = dict(pieces)
        self.in_features = parallel.divide(in_features, "input width") if self.cut == "in" else in_features
        self._local = {
            key: parallel.divide(rows, f"output rows of {key or 'the layer'}") if self.cut == "out" else rows
            for key, rows in pieces.items()
        }
        self.out_features = sum(self._local.values())
        self.method: LinearMethod = DENSE
        self.has_bias = bias
        self.adapter_key = ""
        empty = torch.empty((self.out_features, self.in_features), dtype=dtype, device="meta")
        self.weight = nn.Parameter(empty, requires_grad=False)
        if bias:
            self.bias: nn.Parameter | None = nn.Parameter(empty.new_empty(self.out_features), requires_grad=False)
        else:
            self.register_parameter("bias", None)

    def piece_rows(self, shard_id: str | None) -> tuple[int, int]:
        """First row and number of rows of a piece in this rank's weight."""
        start = 0
        for key, rows in self._local.items():
            if key == shard_id:
                return start, rows
            start += rows
        raise KeyError(f"this layer has no piece {shard_id!r}; it has {list(self._local)}")

    def expected_shapes(self, leaf: str) -> Mapping[str | None, tuple[int, ...]]:
        """See `LoadableModule`."""
        if leaf == "weight":
            return {key: (rows, self.global_in) for key, rows in self.global_pieces.items()}
        return {key: (rows,) for key, rows in self.global_pieces.items()}

    def load_pieces(self, leaf: str, pieces: Sequence[WeightPiece], device: torch.device, dtype: torch.dtype) -> None:
        """See `LoadableModule`."""
        if leaf == "weight":
            self.method.load(self, pieces, device, dtype)
            if self.weight is not None and self.weight.is_meta:
                self.register_parameter("weight", None)
            return
        bias = torch.empty(self.out_features, dtype=dtype, device=device)
        for piece in pieces:
            start, length = self.piece_rows(piece.spec.shard_id)
            bias[start : start + length].copy_(read_piece(piece, self.group.spec))
        set_parameter(self, leaf, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(..., in) -> (..., out)``."""
        y = self.method.apply(self, x)
        return y + self.bias if self.has_bias else y  # type: ignore[operator]  # a bias exists where has_bias says so


class ReplicatedLinear(LinearBase):
    """Every rank holds the whole weight."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, group: ProcessGroup, dtype: torch.dtype
    ) -> None:
        super().__init__(in_features, {None: out_features}, bias=bias, group=group, dtype=dtype)


class MergedColumnParallelLinear(LinearBase):
    """Several projections of one input as one product (q, k, v; gate, up); each piece's rows are cut over the ranks."""

    cut = "out"


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One projection whose output rows are cut over the ranks."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, group: ProcessGroup, dtype: torch.dtype
    ) -> None:
        super().__init__(in_features, {None: out_features}, bias=bias, group=group, dtype=dtype)


class RowParallelLinear(LinearBase):
    """The input is cut over the ranks; the partial products are summed, then the bias is added once."""

    cut = "in"

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, group: ProcessGroup, dtype: torch.dtype
    ) -> None:
        super().__init__(in_features, {None: out_features}, bias=bias, group=group, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(..., in / ranks) -> (..., out)``, summed over the ranks."""
        y = self.group.all_reduce(self.method.apply(self, x))
        return y + self.bias if self.has_bias else y  # type: ignore[operator]  # a bias exists where has_bias says so


class ParallelLMHead(LinearBase):
    """Projects hidden states to logits; vocabulary rows are cut over the ranks.

    A tied head names the embedding's checkpoint tensor in the weight map: held dense it shares the embedding's matrix,
    held by a weight format it gets its own packed copy.

    Args:
        hidden_size: input width.
        vocab_size: true vocabulary; padding up to a multiple of the ranks is trimmed from the logits.
        tied: the embedding to share the weight with, or None.
        group: the tensor-parallel group.
        dtype: dtype of the (meta) weight.
    """

    cut = "out"

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        tied: VocabParallelEmbedding | None,
        group: ProcessGroup,
        dtype: torch.dtype,
    ) -> None:
        size = group.spec.size
        self.vocab_size = vocab_size
        padded = -(-vocab_size // size) * size
        super().__init__(hidden_size, {None: padded}, bias=False, group=group, dtype=dtype)
        self._tied = (tied,)  # in a tuple, so that the embedding is not registered twice
        if tied is not None:
            self.register_parameter("weight", None)

    def expected_shapes(self, leaf: str) -> Mapping[str | None, tuple[int, ...]]:  # noqa: ARG002
        """See `LoadableModule`."""
        return {None: (self.vocab_size, self.global_in)}

    def load_pieces(self, leaf: str, pieces: Sequence[WeightPiece], device: torch.device, dtype: torch.dtype) -> None:
        """See `LoadableModule`."""
        if not isinstance(self.method, DenseMethod):
            super().load_pieces(leaf, pieces, device, dtype)
        elif self._tied[0] is None:
            from arbi_core.model.embedding import load_vocab_rows

            set_parameter(self, "weight", load_vocab_rows(pieces[0], self.out_features, self.group.spec, device, dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(R, hidden) -> (R, vocab)`` float32."""
        tied = self._tied[0]
        if tied is not None and isinstance(self.method, DenseMethod):
            y = F.linear(x, tied.weight)
        else:
            y = self.method.apply(self, x)
        return self.group.all_gather(y)[..., : self.vocab_size].float()
