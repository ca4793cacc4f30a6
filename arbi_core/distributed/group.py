"""The one process-group object that parallel layers talk to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from arbi_core.spec import ParallelSpec

if TYPE_CHECKING:
    import torch

__all__ = ["ProcessGroup", "SingleProcessGroup"]


class ProcessGroup(Protocol):
    """Collectives of the tensor-parallel ranks."""

    @property
    def spec(self) -> ParallelSpec:
        """This rank's position."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place where possible; returns the sum."""
        ...

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate every rank's `x` along `dim`, in rank order."""
        ...


class SingleProcessGroup:
    """A group of one rank: every collective is the identity."""

    spec = ParallelSpec()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:  # noqa: ARG002  # the protocol's signature
        """Return `x`."""
        return x
