"""Rank 0's end of the control channel: sends what to do, hears how the others are, and decides that one is lost.

The channel is apart from the collectives, so a rank that hangs in one can still be told of, and told, the reason.
Nothing is waited for in a good step: a plan goes out and rank 0 carries it out itself. One thread listens.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from arbi_core.distributed.channel import FrameKind, pack_frame, take_frames
from arbi_core.distributed.lockstep import Follower, Lockstep, StepFailure, read_beat
from arbi_core.errors import RankFailedError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["LOAD_TIMEOUT_S", "Control", "beat_period"]

log = logging.getLogger("arbi.ranks")

LOAD_TIMEOUT_S = 1800.0
"""How long a rank may take to load, as long as it gives signs of life."""

CLOSE_TIMEOUT_S = 5.0
"""How long the others may take to end in good order."""

VERDICT_TIMEOUT_S = 3.0
"""After a collective failed: how long to wait for the news of who is to blame."""


def beat_period(timeout_s: float) -> float:
    """Seconds between two signs of life."""
    return min(1.0, timeout_s / 4)


class Control:
    """Connections to all other ranks.

    Args:
        sockets: by rank; this object owns them.
        timeout_s: how long a rank may be behind or silent.
        collectives: how many rank 0 has entered.
        describe: what is known of a rank whose connection ended, e.g. ``was killed by SIGKILL``.
        on_failure: called once, on any thread, when the group has ended by a fault.

    Attributes:
        failure: why the group has ended, or None.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        *,
        timeout_s: float,
        collectives: Callable[[], int],
        describe: Callable[[int], str] = lambda _: "closed its connection",
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        now = time.monotonic()
        self.failure: RankFailedError | None = None
        self._sockets = dict(sockets)
        self._followers = {rank: Follower(rank, now, since=now) for rank in sockets}
        self._lockstep = Lockstep(collectives, timeout_s)
        self._timeout_s = timeout_s
        self._describe, self._on_failure = describe, on_failure
        self._news = threading.Condition()
        self._sending = threading.Lock()
        self._closing = False
        self._waiting_since: float | None = None
        for sock in self._sockets.values():
            sock.settimeout(timeout_s)
        self._thread = threading.Thread(target=self._listen, name="arbi-ranks", daemon=True)
        self._thread.start()

    # -- boot -------------------------------------------------------------------------------------------------------

    def agree_min(self, value: int) -> int:
        """The smallest of all ranks' values. Raises `RankFailedError`."""
        followers = self._followers.values()
        self._wait(lambda f: bool(f.values), "has not loaded", LOAD_TIMEOUT_S)
        with self._news:
            agreed = min(value, *(f.values.pop(0) for f in followers))
        self._send(pack_frame(FrameKind.AGREED, str(agreed).encode()))
        return agreed

    def wait_ready(self) -> None:
        """Wait until all ranks are built. Raises `RankFailedError`."""
        self._wait(lambda f: f.ready, "has not loaded", LOAD_TIMEOUT_S)

    # -- steps ------------------------------------------------------------------------------------------------------

    def send_step(self, step: int, frame: bytes) -> None:
        """Give a step to the other ranks; from now on rank 0 is in it too. Raises `RankFailedError`."""
        self.raise_if_failed()
        with self._news:
            self._lockstep.begin(step)
        self._send(pack_frame(FrameKind.STEP, frame))

    def step_dispatched(self, step: int) -> None:
        """Rank 0 has dispatched the step. Raises `RankFailedError` if another rank is known to have failed in it."""
        with self._news:
            self._lockstep.end(step)
            if any(f.failure is not None for f in self._followers.values()):
                self._judge_all(time.monotonic())
        self.raise_if_failed()

    def drew(self, token_ids: np.ndarray) -> None:
        """Rank 0 has taken a step's ids. Raises `RankFailedError` if the group has ended meanwhile."""
        self.raise_if_failed()
        with self._news:
            self._lockstep.drew(token_ids)

    def step_failed(self, step: int, *, dispatching: bool) -> None:
        """Rank 0 failed in a step: find out whether the others are where it is.

        Returns if they are: the failure is the step's alone. Raises `RankFailedError` if the group has ended.
        """
        with self._news:
            self._lockstep.fail(step)
            if dispatching:
                self._lockstep.end(step)
            for follower in self._followers.values():
                follower.status = None
        self._send(pack_frame(FrameKind.CHECK, str(step).encode()))
        self._wait(lambda f: f.status is not None, f"has not finished step {step}", self._timeout_s)
        with self._news:
            for follower in self._followers.values():
                reason = self._lockstep.judge_status(follower)
                if reason is not None:
                    self._fail(follower.rank, reason)
        self.raise_if_failed()

    def collective_failed(self, error: BaseException) -> None:
        """A collective failed on rank 0: raises `RankFailedError`, with the best reason that turns up."""
        with self._news:
            self._news.wait_for(lambda: self.failure is not None, VERDICT_TIMEOUT_S)
            laggard = min(self._followers.values(), key=lambda f: (f.progress, f.seen))
            self._fail(laggard.rank, f"is the furthest behind, and {error}")
        self.raise_if_failed()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Rank 0 waits for its device, which waits for the other ranks."""
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = None

    def fail(self, rank: int, reason: str) -> None:
        """End the group: a fault of `rank`. The first reason stays."""
        with self._news:
            self._fail(rank, reason)

    def raise_if_failed(self) -> None:
        """Raise `RankFailedError` if the group has ended by a fault."""
        if self.failure is not None:
            raise RankFailedError(self.failure.rank, self.failure.reason)

    def close(self) -> None:
        """End the other ranks in good order. Idempotent."""
        with self._news:
            if self._closing:
                return
            self._closing = True
        if self.failure is None:
            with suppress(RankFailedError):
                self._send(pack_frame(FrameKind.CLOSE))
            ready = all(f.ready for f in self._followers.values())
            # A rank that still loads hears nothing; it ends when the connection does.
            deadline = time.monotonic() + (CLOSE_TIMEOUT_S if ready else 0.2)
            while self._thread.is_alive() and time.monotonic() < deadline:
                self._thread.join(0.05)
        self._shut()

    # -- sending ----------------------------------------------------------------------------------------------------

    def _send(self, frame: bytes) -> None:
        with self._sending:
            for rank, sock in self._sockets.items():
                try:
                    sock.sendall(frame)
                except OSError as exc:
                    if not self._closing:
                        self._lost(rank, f"takes no messages any more ({exc.strerror or exc})")
        self.raise_if_failed()

    def _wait(self, arrived: Callable[[Follower], bool], reason: str, timeout_s: float) -> None:
        """Wait until something has arrived from every rank. Raises `RankFailedError`."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while self.failure is None:
                missing = [f for f in self._followers.values() if not arrived(f)]
                if not missing:
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    self._fail(missing[0].rank, f"{reason} within {timeout_s:g} s")
                    break
                self._news.wait(left)
        self.raise_if_failed()

    # -- listening --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """The thread: read what comes, look at the clock."""
        tick = beat_period(self._timeout_s) / 2
        buffers = {rank: bytearray() for rank in self._sockets}
        with selectors.DefaultSelector() as selector:
            for rank, sock in self._sockets.items():
                selector.register(sock, selectors.EVENT_READ, rank)
            while selector.get_map() and self.failure is None:
                for key, _ in selector.select(tick):
                    if not self._read(key.data, buffers[key.data]):
                        selector.unregister(key.fileobj)
                with self._news:
                    if not self._closing:
                        self._judge_all(time.monotonic())

    def _read(self, rank: int, buffer: bytearray) -> bool:
        """Take in what a rank sent; False when it has closed."""
        try:
            data = self._sockets[rank].recv(1 << 16)
            buffer += data
            frames = take_frames(buffer)
        except (OSError, ValueError) as exc:
            data, frames = b"", []
            log.debug("rank %d: %s", rank, exc)
        if frames:
            with self._news:
                for kind, payload in frames:
                    self._take(self._followers[rank], kind, payload)
                self._news.notify_all()
        if not data and not self._closing:
            self._lost(rank, self._describe(rank))
        return bool(data)

    def _take(self, follower: Follower, kind: FrameKind, payload: bytes) -> None:
        now = time.monotonic()
        follower.heard(now)
        if kind is FrameKind.BEAT:
            progress, checkpoint, crc = read_beat(payload)
            follower.heard(now, progress)
            reason = self._lockstep.judge_drawn(checkpoint, crc)
            if reason is not None:
                self._fail(follower.rank, reason)
        elif kind is FrameKind.READY:
            follower.ready, follower.since = True, now
        elif kind is FrameKind.VALUE:
            follower.values.append(int(payload))
        elif kind is FrameKind.STATUS:
            follower.status = int(payload)
        elif kind is FrameKind.STEP_FAILED:
            step, collectives, final, text = payload.decode().split(" ", 3)
            follower.failure = StepFailure(int(step), int(collectives), text, final == "1")
        elif kind is FrameKind.FAILED:
            follower.ending = payload.decode()

    def _judge_all(self, now: float) -> None:
        for follower in self._followers.values():
            reason = self._lockstep.judge(follower, now)
            if reason is not None:
                self._fail(follower.rank, reason)
                return
        since = self._waiting_since
        if since is not None and now - since > self._timeout_s:
            self._fail(0, f"has waited for its device for {now - since:.1f} s; all ranks have dispatched the step")

    # -- the end ----------------------------------------------------------------------------------------------------

    def _lost(self, rank: int, reason: str) -> None:
        with self._news:
            self._fail(rank, self._followers[rank].ending or reason)

    def _fail(self, rank: int, reason: str) -> None:
        """With the lock held."""
        if self.failure is not None or self._closing:
            return
        self.failure = RankFailedError(rank, reason)
        log.error("the ranks end: %s", self.failure)
        self._news.notify_all()
        threading.Thread(target=self._end, args=(str(self.failure),), name="arbi-ranks-end", daemon=True).start()

    def _end(self, reason: str) -> None:
        """Tell the others, as far as they listen, and cut the connections; those that hang in a collective then end."""
        frame = pack_frame(FrameKind.FATAL, reason.encode())
        if self._sending.acquire(timeout=0.5):
            try:
                for sock in self._sockets.values():
                    with suppress(OSError):
                        sock.settimeout(0.2)
                        sock.sendall(frame)
            finally:
                self._sending.release()
        self._shut()
        self._on_failure()

    def _shut(self) -> None:
        """Cut all connections, which ends the listening thread; their descriptors are free only after it."""
        for sock in self._sockets.values():
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(CLOSE_TIMEOUT_S)
        for sock in self._sockets.values():
            sock.close()
