"""The base of every module that holds parameters: it knows the checkpoint shapes it expects and how to fill itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from arbi_core.loader.base import WeightPiece
    from arbi_core.spec import ParallelSpec

__all__ = ["LoadableModule", "read_piece"]


class LoadableModule(nn.Module):
    """A module whose parameters are filled from `WeightPiece`s.

    The default serves replicated parameters that one checkpoint tensor fills whole (norm weights, sinks).
    """

    def expected_shapes(self, leaf: str) -> Mapping[str | None, tuple[int, ...]]:
        """Checkpoint shape (all ranks together) of every piece of parameter `leaf`, by shard id."""
        return {None: tuple(self.get_parameter(leaf).shape)}

    def load_pieces(self, leaf: str, pieces: Sequence[WeightPiece], device: torch.device, dtype: torch.dtype) -> None:
        """Fill parameter `leaf`.

        Args:
            leaf: parameter name within this module.
            pieces: all checkpoint tensors that belong to it; their shapes have been checked.
            device: where the parameter lives from now on.
            dtype: dtype of activations.
        """
        (piece,) = pieces
        # A source may hand out a view of the mapped file, which must not outlive the checkpoint: hence the copy.
        set_parameter(self, leaf, piece.source.load().to(device=device, dtype=dtype, copy=True))


def set_parameter(module: nn.Module, leaf: str, value: torch.Tensor) -> None:
    """Replace a (meta) parameter by a loaded tensor that takes no gradient."""
    module.register_parameter(leaf, nn.Parameter(value, requires_grad=False))


def read_piece(piece: WeightPiece, parallel: ParallelSpec) -> torch.Tensor:
    """Read this rank's slice of a piece, cut along its declared dimension."""
    dim = piece.spec.shard_dim
    if dim is None or parallel.size == 1:
        return piece.source.load()
    length = parallel.divide(piece.source.shape[dim], f"{piece.source.name} dimension {dim}")
    return piece.source.load(dim, parallel.rank * length, length)
