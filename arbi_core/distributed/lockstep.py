"""What rank 0 knows of how far the ranks are, and when one of them is lost. Plain data and rules, no sockets.

Ranks are in step when they have entered the same number of collectives. A rank that failed in a step at the very
collective count at which rank 0 failed, or that only draws something else of a failed step, harms nobody: the engine
drops the requests of that step everywhere. Anything else leaves a rank waiting for another, or with other state than
its peers, and ends the group.
"""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from attrs import define, field, frozen

__all__ = ["DrawnDigest", "Follower", "Lockstep", "Progress", "StepFailure", "pack_beat", "read_beat"]

CHECKPOINT_EVERY = 64
"""Steps between two comparisons of what the ranks drew."""

REMEMBERED = 64
"""Checkpoints and failed steps that rank 0 keeps."""

BEAT = struct.Struct("<qQqI")


class Progress(NamedTuple):
    """How far a rank is; compares in the order of time.

    Attributes:
        step: index of the last step that the rank has dispatched.
        collectives: how many it has entered.
    """

    step: int = -1
    collectives: int = 0


@frozen
class StepFailure:
    """An exception in a step of another rank.

    Attributes:
        step: its index.
        collectives: how many the rank had entered.
        text: the exception.
        final: it cannot be made good, whatever rank 0 did in this step.
    """

    step: int
    collectives: int
    text: str
    final: bool = False


@define
class DrawnDigest:
    """A running checksum of drawn ids: ranks that draw different ids are found out within a second or so."""

    checkpoint: int = 0
    crc: int = 0
    _steps: int = field(default=0, init=False)
    _running: int = field(default=0, init=False)

    def add(self, token_ids: np.ndarray) -> bool:
        """Take in a step's ids; whether a new checkpoint was reached."""
        self._running = zlib.crc32(token_ids.tobytes(), self._running)
        self._steps += 1
        if self._steps % CHECKPOINT_EVERY:
            return False
        self.checkpoint, self.crc = self._steps, self._running
        return True


@define(eq=False)
class Follower:
    """What rank 0 knows of another rank.

    Attributes:
        rank: which.
        seen: when it was last heard of.
        progress: how far it said it was.
        since: when it last moved, or was last not behind.
        ready: it waits for steps; before that it loads, which may take any time.
        failure: what it reported, until rank 0 knows what that means.
        values: its values for agreements, oldest first.
        status: collectives it had entered when asked; None until it answers.
        ending: why it said that it ends.
    """

    rank: int
    seen: float
    progress: Progress = Progress()
    since: float = 0.0
    ready: bool = False
    failure: StepFailure | None = None
    values: list[int] = field(factory=list)
    status: int | None = None
    ending: str = ""

    def heard(self, now: float, progress: Progress | None = None) -> None:
        """It gave a sign of life."""
        self.seen = now
        if progress is not None and progress != self.progress:
            self.progress, self.since = progress, now


@define(eq=False)
class Lockstep:
    """Rank 0's own position, and the rules. Callers hold one lock, so that a rule sees no step half begun.

    Args:
        collectives: how many rank 0 has entered.
        timeout_s: how long a rank may be behind, or silent.
    """

    collectives: Callable[[], int]
    timeout_s: float
    current: int | None = None
    finished: int = -1
    failed: OrderedDict[int, int] = field(factory=OrderedDict, init=False)
    drawn: DrawnDigest = field(factory=DrawnDigest, init=False)
    _checkpoints: OrderedDict[int, int] = field(factory=OrderedDict, init=False)

    # -- what rank 0 does -------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Rank 0 begins to dispatch a step."""
        self.current = step

    def end(self, step: int) -> None:
        """The dispatch is over, well or not."""
        self.current, self.finished = None, step

    def fail(self, step: int) -> None:
        """Rank 0 failed in a step."""
        self.failed[step] = self.collectives()
        _forget_oldest(self.failed)

    def drew(self, token_ids: np.ndarray) -> None:
        """Rank 0 has taken a step's ids."""
        if self.drawn.add(token_ids):
            self._checkpoints[self.drawn.checkpoint] = self.drawn.crc
            _forget_oldest(self._checkpoints)

    # -- rules ------------------------------------------------------------------------------------------------------

    def judge(self, follower: Follower, now: float) -> str | None:
        """Why a rank is lost; None if it is not."""
        if follower.failure is not None:
            reason = self._judge_failure(follower.failure)
            if reason is not None:
                return reason
            if follower.failure.step in self.failed:
                follower.failure = None
        if not follower.ready:
            return None
        if now - follower.seen > self.timeout_s:
            return f"has not been heard of for {now - follower.seen:.1f} s"
        here = Progress(self.finished, self.collectives())
        if follower.progress >= here:
            follower.since = now
        elif now - follower.since > self.timeout_s:
            step = self.finished if self.current is None else self.current
            return f"has not finished step {step} within {self.timeout_s:g} s"
        if self.current is None and follower.progress.collectives > here.collectives:
            return "waits in a collective that rank 0 left out: rank 0 alone failed in a step"
        return None

    def _judge_failure(self, failure: StepFailure) -> str | None:
        reason = f"failed in step {failure.step}: {failure.text}"
        if failure.final:
            return reason
        if failure.step in self.failed:
            return None if self.failed[failure.step] == failure.collectives else reason
        undecided = self.current == failure.step and self.collectives() <= failure.collectives
        return None if undecided else reason

    def judge_status(self, follower: Follower) -> str | None:
        """After a step failed on rank 0: why the rank is not where rank 0 is; None if it is."""
        here = self.collectives()
        if follower.status == here:
            return None
        return f"has entered {follower.status} collectives, rank 0 {here}: rank 0 alone failed in a step"

    def judge_drawn(self, checkpoint: int, crc: int) -> str | None:
        """Whether a rank drew what rank 0 drew."""
        if self._checkpoints.get(checkpoint, crc) == crc:
            return None
        return f"drew other tokens than rank 0 within {CHECKPOINT_EVERY} steps before step number {checkpoint}"


def pack_beat(progress: Progress, drawn: DrawnDigest) -> bytes:
    """A sign of life, as bytes."""
    return BEAT.pack(progress.step, progress.collectives, drawn.checkpoint, drawn.crc)


def read_beat(payload: bytes) -> tuple[Progress, int, int]:
    """Progress, checkpoint and checksum of a sign of life."""
    step, collectives, checkpoint, crc = BEAT.unpack(payload)
    return Progress(step, collectives), checkpoint, crc


def _forget_oldest(kept: OrderedDict[int, int]) -> None:
    while len(kept) > REMEMBERED:
        kept.popitem(last=False)
