"""The two kinds of rank: the one that drives and those that follow."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from arbi_core.distributed.channel import FrameKind
from arbi_core.distributed.executor import DistributedExecutor
from arbi_core.distributed.link import describe
from arbi_core.distributed.lockstep import Progress
from arbi_core.distributed.torch_group import CollectiveError
from arbi_core.distributed.wire import decode_plan

if TYPE_CHECKING:
    from arbi_core.distributed.control import Control
    from arbi_core.distributed.link import Link
    from arbi_core.distributed.torch_group import TorchProcessGroup
    from arbi_core.offers import Executor, PendingStep, Runner

__all__ = ["DistributedRanks", "FollowingRanks", "LeadingRanks"]

log = logging.getLogger("arbi.ranks")


class DistributedRanks:
    """What both kinds have; see `arbi_core.offers.Ranks`.

    Args:
        group: collectives with the other ranks.
        device_index: CUDA device of this rank on its host.
    """

    def __init__(self, group: TorchProcessGroup, device_index: int) -> None:
        self.group = group
        self.rank = group.spec.rank
        self.size = group.spec.size
        self.device_index = device_index


class LeadingRanks(DistributedRanks):
    """Rank 0.

    Args:
        group: collectives with the other ranks.
        device_index: CUDA device of this rank on its host.
        control: reaches the other ranks.
        release: called once at the end: waits for processes, removes files.
    """

    def __init__(
        self, group: TorchProcessGroup, device_index: int, control: Control, release: Callable[[], None]
    ) -> None:
        super().__init__(group, device_index)
        self._control = control
        self._release = release
        self._closed = False

    def agree_min(self, value: int) -> int:
        """The smallest of all ranks' values. Raises `RankFailedError`."""
        return self._control.agree_min(value)

    def drive(self, runner: Runner) -> Executor:
        """Wait until the others are built; returns what hands plans to all. Raises `RankFailedError`."""
        self._control.wait_ready()
        return DistributedExecutor(runner, self._control)

    def follow(self, runner: Runner) -> None:  # noqa: ARG002  # the protocol's signature
        """Raise: rank 0 drives."""
        raise RuntimeError("rank 0 follows nobody")

    def close(self) -> None:
        """End the other ranks and leave. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._control.close()
        self.group.abort()
        self._release()


class FollowingRanks(DistributedRanks):
    """Any other rank.

    Args:
        group: collectives with the other ranks.
        device_index: CUDA device of this rank on its host.
        link: the connection to rank 0.
    """

    def __init__(self, group: TorchProcessGroup, device_index: int, link: Link) -> None:
        super().__init__(group, device_index)
        self._link = link
        self._step = -1
        self._failed = False
        self._flights: deque[tuple[int, PendingStep]] = deque()
        link.progress = lambda: Progress(self._step, group.collectives)

    def agree_min(self, value: int) -> int:
        """The smallest of all ranks' values. Raises `RankFailedError`."""
        return self._link.agree_min(value)

    def drive(self, runner: Runner) -> Executor:  # noqa: ARG002  # the protocol's signature
        """Raise: this rank follows."""
        raise RuntimeError(f"rank {self.rank} does not drive; only rank 0 does")

    def follow(self, runner: Runner) -> None:
        """Carry out steps until rank 0 closes.

        Raises:
            RankFailedError: rank 0 is lost, or has ended the group.
        """
        self._link.send(FrameKind.READY)
        while True:
            kind, payload = self._link.receive()
            if kind is FrameKind.CLOSE:
                return
            if kind is FrameKind.CHECK:
                self._forget(int(payload))
                self._link.send(FrameKind.STATUS, str(self.group.collectives))
            elif kind is FrameKind.STEP and not self._failed:
                self._carry_out(runner, payload)

    def reporting(self) -> contextlib.AbstractContextManager[None]:
        """See `Link.reporting`: this rank's whole life after it has joined."""
        return self._link.reporting()

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._link.close()
        with contextlib.suppress(RuntimeError):
            self.group.abort()

    def _carry_out(self, runner: Runner, payload: bytes) -> None:
        """One step, at the same point of this rank's history as on rank 0."""
        step, final = self._step, True
        try:
            frame = decode_plan(payload)
            step = frame.plan.index
            while self._flights and self._flights[0][0] <= frame.collected:
                self._link.drawn.add(self._flights.popleft()[1].result().token_ids)
            final = False
            self._flights.append((step, runner.dispatch(frame.plan)))
        except CollectiveError as exc:
            # Another rank is to blame. Rank 0 finds out which; this rank only waits to be told.
            log.warning("step %d: %s", step, exc)
            self._failed = True
        except Exception as exc:  # rank 0 decides what it means
            log.exception("step %d failed on rank %d", step, self.rank)
            self._failed = True
            self._link.send(FrameKind.STEP_FAILED, f"{step} {self.group.collectives} {int(final)} {describe(exc)}")
        self._step = step

    def _forget(self, step: int) -> None:
        """Rank 0 failed in this step: nothing of it will be taken."""
        self._flights = deque(f for f in self._flights if f[0] != step)
        self._failed = False
