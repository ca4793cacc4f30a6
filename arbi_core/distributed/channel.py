"""Framed, authenticated TCP connections between rank 0 and the other ranks.

Both ends prove that they know a random token, by an HMAC over the other end's nonce; the token itself never crosses the
network. A frame is its payload's length, its kind, and the payload. Nothing that is read can run code.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import logging
import os
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

from arbi_core.distributed.wire import WIRE_VERSION
from arbi_core.errors import ConfigError, RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TOKEN_BYTES", "Frame", "FrameKind", "Listener", "connect", "pack_frame", "receive", "take_frames"]

log = logging.getLogger("arbi.ranks")

TOKEN_BYTES = 32
NONCE_BYTES = 16
MAC_BYTES = 32

HANDSHAKE_TIMEOUT_S = 10.0
"""How long a connected peer may take to prove that it knows the token."""

MAX_PAYLOAD = 1 << 30
"""A longer frame is no frame but noise."""

HEADER = struct.Struct("<IB")
GREETING = struct.Struct(f"<4sB{NONCE_BYTES}s")
ANSWER = struct.Struct(f"<I{NONCE_BYTES}s{MAC_BYTES}s")
MAGIC = b"arbi"


class FrameKind(enum.IntEnum):
    """What a frame says."""

    STEP = 0
    """Down: carry out this `PlanFrame`."""
    CHECK = 1
    """Down: rank 0 has failed in this step; forget it and say where you are."""
    AGREED = 2
    """Down: the smallest of the ranks' values."""
    CLOSE = 3
    """Down: orderly end."""
    FATAL = 4
    """Down: the group has ended, for this reason."""
    READY = 5
    """Up: built; waits for steps."""
    BEAT = 6
    """Up: alive, and how far."""
    VALUE = 7
    """Up: this rank's value for an agreement."""
    STATUS = 8
    """Up: the answer to `CHECK`."""
    STEP_FAILED = 9
    """Up: an exception in a step."""
    FAILED = 10
    """Up: the rank ends, for this reason."""


Frame = tuple[FrameKind, bytes]


def pack_frame(kind: FrameKind, payload: bytes = b"") -> bytes:
    """Bytes of one frame."""
    return HEADER.pack(len(payload), kind) + payload


def receive(sock: socket.socket) -> Frame | None:
    """Wait for the next frame; None when the other end has closed.

    Raises:
        OSError: the connection broke.
        ValueError: what came is no frame.
    """
    header = _receive_exactly(sock, HEADER.size)
    if header is None:
        return None
    size, kind = _check_header(header)
    payload = _receive_exactly(sock, size)
    return None if payload is None else (kind, payload)


def take_frames(buffer: bytearray) -> list[Frame]:
    """Remove the complete frames from the front of `buffer`. Raises `ValueError` if they are none."""
    frames: list[Frame] = []
    at = 0
    while len(buffer) - at >= HEADER.size:
        size, kind = _check_header(buffer[at : at + HEADER.size])
        end = at + HEADER.size + size
        if end > len(buffer):
            break
        frames.append((kind, bytes(buffer[at + HEADER.size : end])))
        at = end
    del buffer[:at]
    return frames


def _check_header(header: bytes | bytearray) -> tuple[int, FrameKind]:
    size, kind = HEADER.unpack(header)
    if size > MAX_PAYLOAD:
        raise ValueError(f"a frame of {size} bytes was announced")
    return size, FrameKind(kind)


def _receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return bytes(data)


class Listener:
    """Rank 0's end while the others join.

    Args:
        host: address to listen on.
        size: ranks of the group, rank 0 included.
        token: shared secret.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, host: str, size: int, token: bytes) -> None:
        self._size, self._token = size, token
        self._joined: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        try:
            info = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(info[0], info[1])
            self._socket.bind(info[4])
        except OSError as exc:
            raise ConfigError(
                "scheduler.executor",
                f"rank 0 cannot listen on {host}: {exc.strerror or exc}",
                "MASTER_ADDR must be an address of the host that runs rank 0",
            ) from exc
        self._socket.listen(size)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="arbi-ranks-join", daemon=True).start()

    def join(self, timeout_s: float, alive: Callable[[], None]) -> dict[int, socket.socket]:
        """Wait for all other ranks; returns their connections by rank.

        Args:
            timeout_s: longest wait.
            alive: called now and then; raises if a rank can no longer come.

        Raises:
            RankFailedError: one has not come.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(self._joined) < self._size - 1:
                alive()
                if time.monotonic() > deadline:
                    missing = min(set(range(1, self._size)) - set(self._joined))
                    raise RankFailedError(missing, f"has not joined within {timeout_s:g} s")
                self._changed.wait(0.1)
            joined, self._joined = self._joined, {}
        self.close()
        return joined

    def close(self) -> None:
        """Listen no longer. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for sock in self._joined.values():
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._admit, args=(sock, address), name="arbi-ranks-admit", daemon=True).start()

    def _admit(self, sock: socket.socket, address: object) -> None:
        """One connection; whoever cannot prove to be one of the ranks is closed and does no harm."""
        try:
            rank = self._greet(sock)
        except (OSError, ValueError, struct.error) as exc:
            log.warning("a connection from %s was refused: %s", address, exc)
            sock.close()
            return
        with self._changed:
            self._joined[rank] = sock
            self._changed.notify_all()

    def _greet(self, sock: socket.socket) -> int:
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        mine = os.urandom(NONCE_BYTES)
        sock.sendall(GREETING.pack(MAGIC, WIRE_VERSION, mine))
        answer = _receive_exactly(sock, ANSWER.size)
        if answer is None:
            raise ValueError("it closed before it said who it is")
        rank: int
        rank, theirs, mac = ANSWER.unpack(answer)
        if not hmac.compare_digest(mac, _mac(self._token, b"rank", mine, theirs, rank)):
            raise ValueError("it does not know the token")
        if not 0 < rank < self._size or rank in self._joined:
            raise ValueError(f"there is no place for a rank {rank}")
        sock.sendall(_mac(self._token, b"zero", mine, theirs, rank))
        _tune(sock)
        return rank


def connect(host: str, port: int, token: bytes, rank: int, timeout_s: float) -> socket.socket:
    """Join rank 0 as `rank`; returns a blocking connection.

    Raises:
        RankFailedError: rank 0 cannot be reached, is of another version or does not know the token.
    """
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as exc:
        raise RankFailedError(0, f"cannot be reached at {host}:{port}: {exc.strerror or exc}") from exc
    try:
        greeting = _receive_exactly(sock, GREETING.size)
        if greeting is None:
            raise ValueError("it closed the connection")
        magic, version, theirs = GREETING.unpack(greeting)
        if magic != MAGIC or version != WIRE_VERSION:
            raise ValueError(f"it speaks version {version}, this rank {WIRE_VERSION}: install the same arbi everywhere")
        mine = os.urandom(NONCE_BYTES)
        sock.sendall(ANSWER.pack(rank, mine, _mac(token, b"rank", theirs, mine, rank)))
        proof = _receive_exactly(sock, MAC_BYTES)
        if proof is None or not hmac.compare_digest(proof, _mac(token, b"zero", theirs, mine, rank)):
            raise ValueError("it refused this rank, or does not know the token")
    except (OSError, ValueError) as exc:
        sock.close()
        raise RankFailedError(0, f"did not let rank {rank} in: {exc}") from exc
    sock.settimeout(None)
    _tune(sock)
    return sock


def _mac(token: bytes, label: bytes, server: bytes, client: bytes, rank: int) -> bytes:
    return hmac.digest(token, label + server + client + rank.to_bytes(4, "little"), "sha256")


def _tune(sock: socket.socket) -> None:
    """Small frames leave at once, and a host that vanished is noticed though nothing is sent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
