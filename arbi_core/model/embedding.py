"""Token embedding with rows cut over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from arbi_core.model.loadable import LoadableModule, set_parameter

if TYPE_CHECKING:
    from arbi_core.distributed.group import ProcessGroup
    from arbi_core.loader.base import WeightPiece
    from arbi_core.spec import ParallelSpec

__all__ = ["VocabParallelEmbedding", "load_vocab_rows"]


def load_vocab_rows(
    piece: WeightPiece, rows: int, parallel: ParallelSpec, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Read this rank's `rows` vocabulary rows; rows past the end of the vocabulary are zero."""
    vocab, width = piece.source.shape
    start = parallel.rank * rows
    length = max(0, min(rows, vocab - start))
    out = torch.empty((rows, width), dtype=dtype, device=device)
    out[:length].copy_(piece.source.load(0, start, length))
    out[length:].zero_()
    return out


class VocabParallelEmbedding(LoadableModule):
    """Looks up token vectors; each rank holds an equal share of the (padded) vocabulary.

    Args:
        vocab_size: number of tokens.
        hidden_size: width of a vector.
        group: the tensor-parallel group.
        dtype: dtype of the (meta) weight.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, group: ProcessGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.group = group
        self.vocab_size = vocab_size
        self.rows = -(-vocab_size // group.spec.size)
        self.weight = nn.Parameter(
            torch.empty((self.rows, hidden_size), dtype=dtype, device="meta"), requires_grad=False
        )

    def expected_shapes(self, leaf: str) -> Mapping[str | None, tuple[int, ...]]:  # noqa: ARG002
        """See `LoadableModule`."""
        return {None: (self.vocab_size, self.weight.shape[1])}

    def load_pieces(self, leaf: str, pieces: Sequence[WeightPiece], device: torch.device, dtype: torch.dtype) -> None:
        """See `LoadableModule`."""
        set_parameter(self, leaf, load_vocab_rows(pieces[0], self.rows, self.group.spec, device, dtype))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``(N,)`` ids to ``(N, hidden)``."""
        if self.group.spec.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.group.spec.rank * self.rows
        mine = (local >= 0) & (local < self.rows)
        vectors = F.embedding(local.masked_fill(~mine, 0), self.weight).masked_fill(~mine.unsqueeze(-1), 0)
        return self.group.all_reduce(vectors)
