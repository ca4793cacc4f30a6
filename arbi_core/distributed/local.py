"""One rank, in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arbi_core.distributed.group import SingleProcessGroup

if TYPE_CHECKING:
    from arbi_core.offers import Executor, Runner

__all__ = ["LocalRanks"]


class LocalRanks:
    """See `arbi_core.offers.Ranks`: a group of one needs neither channels nor agreement."""

    rank = 0
    size = 1
    device_index = 0

    def __init__(self) -> None:
        self.group = SingleProcessGroup()

    def agree_min(self, value: int) -> int:
        """Return `value`."""
        return value

    def drive(self, runner: Runner) -> Executor:
        """The runner is its own executor."""
        return runner

    def follow(self, runner: Runner) -> None:  # noqa: ARG002  # the protocol's signature
        """Raise: nobody drives."""
        raise RuntimeError("a group of one rank has no followers")

    def close(self) -> None:
        """Do nothing."""
