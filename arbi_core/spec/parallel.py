"""Which slice of the model this process holds."""

from __future__ import annotations

from attrs import frozen

__all__ = ["ParallelSpec"]


@frozen
class ParallelSpec:
    """Position of this rank in the tensor-parallel group.

    Attributes:
        rank: 0-based rank.
        size: number of ranks; 1 means no parallelism.
    """

    rank: int = 0
    size: int = 1

    def divide(self, total: int, what: str) -> int:
        """Return ``total / size``; raises `ValueError` naming `what` when it does not divide."""
        if total % self.size:
            raise ValueError(f"{what} ({total}) cannot be divided over {self.size} tensor-parallel ranks")
        return total // self.size
