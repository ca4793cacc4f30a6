"""Rows of recurrent state: one per running request. Row 0 is the zero sentinel: padding reads it, nobody owns it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

__all__ = ["RowPool"]


class RowPool:
    """Hands out rows and sees to it that each is zeroed between its admission and its owner's first forward.

    Rows admitted while a forward runs cannot be part of it; they are held apart until the forward ends, so that a
    forward never sees its own state cleared.

    Args:
        num_rows: rows that requests can own; the tensors have one more, row 0.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows, 0, -1))
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()
        self._visible: list[int] = []
        self._deferred: list[int] = []
        self._in_forward = False

    @property
    def available(self) -> int:
        """Free rows."""
        return len(self._free)

    @property
    def pending(self) -> int:
        """Rows that must be zeroed before the next metadata is built."""
        return len(self._visible)

    def alloc(self, request_id: str) -> int | None:
        """Row of a request, taken now if it has none; None when all are taken. The row is queued for zeroing."""
        with self._lock:
            row = self._rows.get(request_id)
            if row is None and self._free:
                row = self._rows[request_id] = self._free.pop()
                (self._deferred if self._in_forward else self._visible).append(row)
            return row

    def free(self, request_id: str) -> None:
        """Give a request's row back; unknown ids are ignored."""
        with self._lock:
            row = self._rows.pop(request_id, None)
            if row is not None:
                self._free.append(row)

    def row_for(self, request_id: str) -> int:
        """Row of a request. Raises `KeyError` naming the id: no caller may fall back to another row."""
        try:
            return self._rows[request_id]
        except KeyError:
            raise KeyError(f"request {request_id!r} owns no state row") from None

    def begin_forward(self) -> None:
        """From now on admissions belong to a later step."""
        with self._lock:
            if self._visible:
                raise RuntimeError(f"rows {self._visible} were not zeroed before the forward")
            self._in_forward = True

    def end_forward(self) -> None:
        """The forward is over: rows admitted during it are zeroed with the next drain."""
        with self._lock:
            self._in_forward = False
            self._visible += self._deferred
            self._deferred = []

    def drain(self, zero: Callable[[Sequence[int]], None]) -> None:
        """Zero all rows that are due, by one call of `zero`. Call before any metadata of the step is built."""
        with self._lock:
            due, self._visible = self._visible, []
        if due:
            zero(sorted(set(due)))
