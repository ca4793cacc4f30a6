"""The background thread that moves blobs between RAM and disk for a host store."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from attrs import define, field

from arbi_core.scheduler.plan import TransferOp

if TYPE_CHECKING:
    from arbi_core.runner.blob_files import Blob, BlobFiles

__all__ = ["DiskMover", "MoveJob"]

log = logging.getLogger("arbi.tiers")


@define(eq=False)
class MoveJob:
    """A spill or a fetch on its way through the background thread.

    Attributes:
        op: ``SPILL`` or ``FETCH``.
        handle: whose.
        nbytes: how many bytes move.
        data: what a spill writes; what a fetch has read.
        ready: what a spill waits for before it reads `data`.
        blob: what a spill has written; what a fetch reads.
        error: why it failed.
        cancelled: nobody waits for it any more.
        asked: how many times the caller asked, so how many results it is owed.
    """

    op: TransferOp
    handle: int
    nbytes: int
    data: torch.Tensor | None = None
    ready: torch.cuda.Event | None = None
    blob: Blob | None = None
    error: str = ""
    cancelled: bool = False
    asked: int = 1


@define(eq=False)
class _Queues:
    """What waits for the thread, by kind: someone waits for a fetch, removals free room for spills."""

    fetches: deque[MoveJob] = field(factory=deque)
    removals: deque[Blob] = field(factory=deque)
    spills: deque[MoveJob] = field(factory=deque)

    def pop(self) -> MoveJob | Blob | None:
        if self.fetches:
            return self.fetches.popleft()
        if self.removals:
            return self.removals.popleft()
        return self.spills.popleft() if self.spills else None


class DiskMover:
    """The background thread with its queues. Owns the files; every method but `_run` and below is the caller's.

    Attributes:
        fault: why nothing is written any more.
    """

    def __init__(self, files: BlobFiles, allocate: Callable[[int], torch.Tensor]) -> None:
        self.fault: str | None = None
        self._files, self._allocate = files, allocate
        self._queues = _Queues()
        self._ended: deque[MoveJob] = deque()
        self._in_flight_bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="arbi-host-store", daemon=True)
        self._thread.start()

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of spills that are not written yet."""
        with self._changed:
            return self._in_flight_bytes

    def submit(self, job: MoveJob) -> None:
        """Queues a job."""
        with self._changed:
            if job.op is TransferOp.SPILL:
                self._queues.spills.append(job)
                self._in_flight_bytes += job.nbytes
            else:
                self._queues.fetches.append(job)
            self._changed.notify()

    def cancel(self, job: MoveJob) -> None:
        """Calls a job off, however far it is: it never ends, and a file that it has written goes away."""
        with self._changed:
            queue = self._queues.spills if job.op is TransferOp.SPILL else self._queues.fetches
            if job in queue:
                queue.remove(job)
                self._release(job)
            elif job in self._ended:
                self._ended.remove(job)
                self._discard(job)
            else:
                job.cancelled = True

    def remove(self, blob: Blob) -> None:
        """Queues the removal of a file, after any read of it that is under way."""
        with self._changed:
            self._queues.removals.append(blob)
            self._changed.notify()

    def take_ended(self) -> list[MoveJob]:
        """Jobs that ended since the last call and were not called off, in order."""
        with self._changed:
            ended = list(self._ended)
            self._ended.clear()
            return ended

    def close(self) -> None:
        """Waits for the job under way, leaves the others undone and removes all files. Idempotent."""
        with self._changed:
            self._closed = True
            self._queues = _Queues()
            self._changed.notify()
        self._thread.join()
        self._ended.clear()
        self._in_flight_bytes = 0
        self._files.close()

    def _run(self) -> None:
        while self._step():  # a function, so that an idle thread holds no job and no bytes
            pass

    def _step(self) -> bool:
        work = self._next()
        if work is None:
            return False
        if not isinstance(work, MoveJob):
            self._remove(work)
            return True
        try:
            self._spill(work) if work.op is TransferOp.SPILL else self._fetch(work)
        except Exception as error:  # noqa: BLE001  # any fault is the job's answer: a silent thread would hang it
            work.error = f"{work.op.name.lower()} of handle {work.handle}: {str(error) or type(error).__name__}"
        with self._changed:
            self._release(work)
            if work.cancelled:
                self._discard(work)
            else:
                self._ended.append(work)
        return True

    def _next(self) -> MoveJob | Blob | None:
        with self._changed:
            while not self._closed:
                if (work := self._queues.pop()) is not None:
                    return work
                self._changed.wait()
            return None

    def _spill(self, job: MoveJob) -> None:
        assert job.data is not None  # noqa: S101  # a spill is submitted with its bytes
        if self.fault is not None:
            raise OSError(f"the disk tier is off: {self.fault}")
        if job.ready is not None:
            job.ready.synchronize()
        try:
            job.blob = self._files.write(job.handle, job.data.numpy().data)
        except OSError as error:
            self._switch_off(f"cannot write to {self._files.path}: {error.strerror or error}")
            raise

    def _fetch(self, job: MoveJob) -> None:
        assert job.blob is not None  # noqa: S101  # a fetch is submitted with its file
        data = self._allocate(job.nbytes)
        self._files.read(job.blob, data.numpy().data)
        job.data = data

    def _remove(self, blob: Blob) -> None:
        try:
            self._files.remove(blob)
        except OSError as error:  # what is dropped would pile up on the disk
            self._switch_off(f"cannot remove files from {self._files.path}: {error.strerror or error}")

    def _switch_off(self, fault: str) -> None:
        if self.fault is None:
            self.fault = fault
            log.warning("the disk tier is switched off, what is kept stays in RAM only: %s", fault)

    def _release(self, job: MoveJob) -> None:
        if job.op is TransferOp.SPILL:
            job.data = None
            self._in_flight_bytes -= job.nbytes

    def _discard(self, job: MoveJob) -> None:
        if job.op is TransferOp.SPILL and job.blob is not None:
            self._queues.removals.append(job.blob)
            self._changed.notify()
