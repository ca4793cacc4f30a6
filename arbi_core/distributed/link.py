"""Another rank's end of the control channel."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator

from arbi_core.distributed.channel import Frame, FrameKind, pack_frame, receive
from arbi_core.distributed.control import beat_period
from arbi_core.distributed.lockstep import DrawnDigest, Progress, pack_beat
from arbi_core.errors import RankFailedError

__all__ = ["Link", "describe"]

log = logging.getLogger("arbi.ranks")

GRACE_S = 2.0
"""How long a rank may take to end by itself after rank 0 is gone: it may hang in a collective for ever."""

HANG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


def _exit() -> None:
    sys.stderr.flush()
    os._exit(1)


class Link:
    """The connection to rank 0, and a thread that gives signs of life and notices that rank 0 is gone.

    Args:
        sock: connected; this object owns it.
        timeout_s: how long rank 0 tolerates silence.
        on_lost: called when rank 0 is gone and this rank has not ended within `GRACE_S`; ends the process.

    Attributes:
        progress: how far this rank is; the owner keeps it up to date.
        drawn: checksum of what it drew; likewise.
    """

    def __init__(self, sock: socket.socket, *, timeout_s: float, on_lost: Callable[[], None] = _exit) -> None:
        self.progress: Callable[[], Progress] = Progress
        self.drawn = DrawnDigest()
        self._sock = sock
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._period = beat_period(timeout_s)
        self._on_lost = on_lost
        threading.Thread(target=self._watch, name="arbi-rank-link", daemon=True).start()

    def receive(self) -> Frame:
        """Wait for rank 0's next message. Raises `RankFailedError` if there will be none."""
        try:
            frame = receive(self._sock)
        except (OSError, ValueError) as exc:
            raise RankFailedError(0, f"is lost: {exc}") from exc
        if frame is None:
            raise RankFailedError(0, "is gone: it closed the connection")
        if frame[0] is FrameKind.FATAL:
            raise RankFailedError(0, f"has ended the group: {frame[1].decode()}")
        return frame

    def send(self, kind: FrameKind, text: str = "") -> None:
        """Tell rank 0; silent if it is gone, which `receive` reports."""
        self._send(pack_frame(kind, text.encode()))

    def agree_min(self, value: int) -> int:
        """The smallest of all ranks' values. Raises `RankFailedError`."""
        self.send(FrameKind.VALUE, str(value))
        kind, payload = self.receive()
        if kind is not FrameKind.AGREED:
            raise RankFailedError(0, f"sent {kind.name} where the ranks had to agree")
        return int(payload)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Whatever is raised inside is told to rank 0 as the reason for which this rank leaves, and raised on."""
        try:
            yield
        except BaseException as exc:
            self.send(FrameKind.FAILED, f"ended: {describe(exc)}")
            self.close()
            raise

    def close(self) -> None:
        """Leave. Idempotent."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _send(self, frame: bytes) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._sock.sendall(frame)

    def _watch(self) -> None:
        poll = select.poll()
        try:
            poll.register(self._sock, HANG_UP)
        except ValueError:
            return
        while not self._closed.is_set():
            self._send(pack_frame(FrameKind.BEAT, pack_beat(self.progress(), self.drawn)))
            if poll.poll(self._period * 1000):
                break
        if not self._closed.wait(GRACE_S):
            log.error("rank 0 is gone; this rank ends")
            self._on_lost()


def describe(error: BaseException) -> str:
    """An exception as text."""
    return f"{type(error).__name__}: {error}"
