"""Bytes that one rank keeps under handles: in RAM, and on disk where the operator gave it a directory.

The store does what it is told; what to keep, where and how long is decided by the index beside the scheduler.

One background thread moves bytes. Between two calls a handle is in one of four places:

    RAM --spill--> SPILLING --(written)--> DISK --fetch--> FETCHING --(read)--> RAM

An order that undoes the one in flight needs no disk: a fetch of a handle that is still being written keeps the RAM
copy, a spill of a handle that is still being read keeps the file. So operations on one handle take effect in the order
in which they were given, whatever the thread has or has not done yet, and a fetch never waits behind writes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import torch
from attrs import define

from arbi_core.errors import EngineClosedError
from arbi_core.pool.transfers import TransferOp, TransferResult
from arbi_core.runner.disk_mover import DiskMover, MoveJob

if TYPE_CHECKING:
    from arbi_core.runner.blob_files import Blob, BlobFiles

__all__ = ["HostStore"]


def _allocate(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


class _Place(enum.Enum):
    RAM = enum.auto()
    SPILLING = enum.auto()
    DISK = enum.auto()
    FETCHING = enum.auto()


@define(eq=False)
class _Entry:
    """Where a handle's bytes are: `data` in RAM and SPILLING, `blob` in DISK and FETCHING, `job` while on the move."""

    nbytes: int
    place: _Place
    data: torch.Tensor | None = None
    ready: torch.cuda.Event | None = None
    blob: Blob | None = None
    job: MoveJob | None = None


class HostStore:
    """Bytes under integer handles. All methods are called from one thread.

    Args:
        files: the disk tier, which the store owns from now on; None: RAM only.
        max_in_flight_bytes: spills that would make more bytes than this wait for the disk fail at once, so that a slow
            disk costs kept bytes instead of memory. One spill is always let through.
        allocate: makes the ``(nbytes,)`` uint8 CPU tensor that a fetch fills (pinned on CUDA machines); called from
            the background thread.
    """

    def __init__(
        self,
        files: BlobFiles | None = None,
        *,
        max_in_flight_bytes: int = 256 << 20,
        allocate: Callable[[int], torch.Tensor] = _allocate,
    ) -> None:
        self._entries: dict[int, _Entry] = {}
        self._results: dict[int, list[TransferResult]] = {}
        self._pending = 0
        self._ram_bytes = self._disk_bytes = 0
        self._max_in_flight_bytes = max_in_flight_bytes
        self._mover = DiskMover(files, allocate) if files is not None else None
        self._closed = False

    @property
    def ram_bytes(self) -> int:
        """Bytes of the handles in RAM; those being spilled still count, those being fetched not yet."""
        return self._ram_bytes

    @property
    def disk_bytes(self) -> int:
        """Payload bytes of the handles on disk; those being fetched still count, those being spilled not yet."""
        return self._disk_bytes

    @property
    def pending(self) -> int:
        """Results that `poll` still owes: of operations in flight and of those that ended since the last call."""
        return self._pending

    @property
    def disk_error(self) -> str | None:
        """Why the disk tier was switched off; None while it works, or where there is none."""
        return self._mover.fault if self._mover is not None else None

    def put(self, handle: int, data: torch.Tensor, ready: torch.cuda.Event | None = None) -> None:
        """Keeps bytes in RAM. The tensor is the store's from now on and must not change once it is filled.

        Args:
            handle: names the bytes; fits in 64 bits, signed; never used before.
            data: ``(nbytes,)`` uint8 CPU tensor, contiguous; pinned on CUDA machines.
            ready: recorded after the copy that fills `data`; None: it is filled.

        Raises:
            ValueError: the handle is in use, or the tensor is of another kind.
            EngineClosedError: the store is closed.
        """
        if self._closed:
            raise EngineClosedError(f"handle {handle}: the host store is closed")
        if handle in self._entries:
            raise ValueError(f"handle {handle} is in use")
        if data.dtype != torch.uint8 or data.ndim != 1 or data.device.type != "cpu" or not data.is_contiguous():
            raise ValueError(
                f"handle {handle}: expected a contiguous 1-D uint8 CPU tensor, got {tuple(data.shape)} {data.dtype} on "
                f"{data.device} with stride {data.stride()}"
            )
        self._entries[handle] = _Entry(data.numel(), _Place.RAM, data, ready)
        self._ram_bytes += data.numel()

    def get(self, handle: int) -> torch.Tensor:
        """The handle's bytes, ``(nbytes,)`` uint8, after waiting until they are filled. Read only.

        Raises:
            KeyError: they are not in RAM: unknown, on disk, or a fetch whose result was not polled yet.
        """
        entry = self._entries.get(handle)
        if entry is None or entry.data is None:
            where = "not kept here" if entry is None else f"not in RAM ({entry.place.name.lower()})"
            raise KeyError(f"the bytes of handle {handle} are {where}")
        if entry.ready is not None:
            entry.ready.synchronize()
            entry.ready = None
        return entry.data

    def spill(self, handle: int) -> None:
        """Starts moving bytes from RAM to disk; they stay readable until written. `poll` has the result.

        When it fails, the bytes are gone: no disk tier, it was switched off, it is too slow, an unknown handle.
        """
        self._settle()
        self._pending += 1
        entry = self._entries.get(handle)
        if entry is None:
            self._answer(TransferOp.SPILL, handle, f"handle {handle} is not kept here")
        elif entry.place is _Place.SPILLING and entry.job is not None:
            entry.job.asked += 1
        elif entry.place is _Place.DISK:
            self._answer(TransferOp.SPILL, handle)
        elif refusal := self._refusal(entry):
            self._recall(entry)
            self._forget(handle)
            self._answer(TransferOp.SPILL, handle, f"spill of handle {handle}: {refusal}")
        elif entry.place is _Place.FETCHING:
            self._recall(entry)
            self._place(entry, _Place.DISK, blob=entry.blob)
            self._answer(TransferOp.SPILL, handle)
        else:
            job = MoveJob(TransferOp.SPILL, handle, entry.nbytes, entry.data, entry.ready)
            self._place(entry, _Place.SPILLING, data=entry.data, ready=entry.ready, job=job)
            self._disk.submit(job)

    def fetch(self, handle: int) -> None:
        """Starts bringing bytes from disk to RAM, from where `get` reads them once `poll` has said so.

        When it fails, the bytes are gone: a missing, damaged or unreadable file, an unknown handle.
        """
        self._settle()
        self._pending += 1
        entry = self._entries.get(handle)
        if entry is None:
            self._answer(TransferOp.FETCH, handle, f"handle {handle} is not kept here")
        elif entry.place is _Place.FETCHING and entry.job is not None:
            entry.job.asked += 1
        elif entry.place is _Place.DISK:
            job = MoveJob(TransferOp.FETCH, handle, entry.nbytes, blob=entry.blob)
            self._place(entry, _Place.FETCHING, blob=entry.blob, job=job)
            self._disk.submit(job)
        else:
            self._recall(entry)
            self._place(entry, _Place.RAM, data=entry.data, ready=entry.ready)
            self._answer(TransferOp.FETCH, handle)

    def drop(self, handle: int) -> None:
        """Forgets the handle's bytes wherever they are, and every result of it that was not polled yet."""
        self._pending -= len(self._results.pop(handle, ()))
        entry = self._entries.get(handle)
        if entry is None:
            return
        if entry.job is not None:
            self._pending -= entry.job.asked
            self._disk.cancel(entry.job)
        self._forget(handle)

    def poll(self) -> tuple[TransferResult, ...]:
        """Spills and fetches that ended since the last call, each once; those of one handle in the order given."""
        self._settle()
        results = tuple(result for of_handle in self._results.values() for result in of_handle)
        self._results.clear()
        self._pending -= len(results)
        return results

    def close(self) -> None:
        """Forgets everything: waits for the thread and removes all files. Idempotent."""
        self._closed = True
        if self._mover is not None:
            self._mover.close()
        self._entries.clear()
        self._results.clear()
        self._pending = self._ram_bytes = self._disk_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def _disk(self) -> DiskMover:
        assert self._mover is not None  # noqa: S101  # without a disk tier nothing is on disk or on its way there
        return self._mover

    def _refusal(self, entry: _Entry) -> str:
        """Why an entry may not move to (or stay on) disk; empty where it may."""
        if self._mover is None:
            return "no disk tier"
        if self._mover.fault is not None:
            return f"the disk tier is off: {self._mover.fault}"
        if entry.place is _Place.RAM:
            waiting = self._mover.in_flight_bytes
            if waiting and waiting + entry.nbytes > self._max_in_flight_bytes:
                return f"disk is too slow, {waiting} bytes wait to be written"
        return ""

    def _settle(self) -> None:
        """Applies what the thread has ended."""
        for job in self._mover.take_ended() if self._mover is not None else ():
            entry = self._entries[job.handle]
            for _ in range(job.asked):
                self._answer(job.op, job.handle, job.error)
            if job.error:
                entry.job = None
                self._forget(job.handle)
            elif job.op is TransferOp.SPILL:
                self._place(entry, _Place.DISK, blob=job.blob)
            else:
                self._remove_file(entry)
                self._place(entry, _Place.RAM, data=job.data)

    def _recall(self, entry: _Entry) -> None:
        """Calls off the job in flight, whose caller is told that it was done: the bytes are where it is undone."""
        if entry.job is None:
            return
        self._disk.cancel(entry.job)
        for _ in range(entry.job.asked):
            self._answer(entry.job.op, entry.job.handle)
        entry.job = None

    def _forget(self, handle: int) -> None:
        entry = self._entries.pop(handle)
        self._remove_file(entry)
        self._count(entry, -1)

    def _remove_file(self, entry: _Entry) -> None:
        if entry.blob is not None:
            self._disk.remove(entry.blob)

    def _place(
        self,
        entry: _Entry,
        place: _Place,
        *,
        data: torch.Tensor | None = None,
        ready: torch.cuda.Event | None = None,
        blob: Blob | None = None,
        job: MoveJob | None = None,
    ) -> None:
        self._count(entry, -1)
        entry.place, entry.data, entry.ready, entry.blob, entry.job = place, data, ready, blob, job
        self._count(entry, +1)

    def _count(self, entry: _Entry, sign: int) -> None:
        if entry.data is not None:
            self._ram_bytes += sign * entry.nbytes
        else:
            self._disk_bytes += sign * entry.nbytes

    def _answer(self, op: TransferOp, handle: int, error: str = "") -> None:
        self._results.setdefault(handle, []).append(TransferResult(op, handle, not error, error))
