"""The running set: slots, and counters per slot in arrays: a step of decoding rows is a few array operations."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from arbi_core.scheduler.request import Request, RequestState

__all__ = ["RunningSet"]


class RunningSet:
    """Requests that hold a slot and pages, in order of precedence.

    Args:
        max_rows: slots.

    Attributes:
        rows: the requests.
        room: ``(max_rows,)`` int64, tokens that still fit in the pages of each slot; 0 for rows that do not
            decode yet.
        left: ``(max_rows,)`` int64, draws that each slot may still make; 0 for free slots.
        tenant: ``(max_rows,)`` int64, index of each slot's tenant.
    """

    def __init__(self, max_rows: int) -> None:
        self.rows: list[Request] = []
        self.room = np.zeros(max_rows, dtype=np.int64)
        self.left = np.zeros(max_rows, dtype=np.int64)
        self.tenant = np.zeros(max_rows, dtype=np.int64)
        self._free = list(range(max_rows - 1, -1, -1))
        self._decoding: list[Request] | None = []
        self._prefilling: list[Request] | None = []
        self._slots = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return not self._free

    def add(self, request: Request, tenant: int) -> None:
        """Give a request a slot; it begins with prefill."""
        request.slot = self._free.pop()
        request.state = RequestState.PREFILL
        self.tenant[request.slot] = tenant
        self.left[request.slot] = max(0, request.limit - len(request.token_ids))
        self._prefilling = None
        bisect.insort(self.rows, request, key=_order)

    def remove(self, request: Request) -> int:
        """Take a request's slot away; returns it. The caller sets the next state."""
        if request.state is RequestState.DECODE:
            self._decoding = None
        self._prefilling = None
        self.rows.remove(request)
        slot, request.slot = request.slot, -1
        self.left[slot] = self.room[slot] = 0
        self._free.append(slot)
        return slot

    def start_decoding(self, request: Request, *, room: int, left: int) -> None:
        """The request has drawn, or is drawing, its next token; with no draw left it only waits for that one."""
        request.state = RequestState.DECODE if left else RequestState.CLOSING
        self.room[request.slot] = room
        self.left[request.slot] = left
        self._decoding = self._prefilling = None

    def close(self, request: Request) -> None:
        """Schedule nothing more for a decoding request: its last draw is on the way."""
        request.state = RequestState.CLOSING
        self._decoding = None

    def prefilling(self) -> list[Request]:
        """Requests with known tokens left to compute, in order of precedence. Not to be changed by the caller."""
        if self._prefilling is None:
            self._prefilling = [r for r in self.rows if r.state is RequestState.PREFILL]
        return self._prefilling

    def growth(self, page_size: int, most: int, *, without: Sequence[Request] = ()) -> int:
        """Pages that all rows but some may together still need, counting at most `most` for each."""
        tokens = np.maximum(self.left - self.room, 0)
        tokens[[r.slot for r in without]] = 0
        return int(np.minimum(-(-tokens // page_size), most).sum())

    def decoding(self) -> tuple[list[Request], np.ndarray]:
        """Decoding requests in order of precedence, and their slots ``(D,)``. Neither may be changed by the caller."""
        if self._decoding is None:
            self._decoding = [r for r in self.rows if r.state is RequestState.DECODE]
            self._slots = np.fromiter((r.slot for r in self._decoding), dtype=np.int64, count=len(self._decoding))
        return self._decoding, self._slots


def _order(request: Request) -> tuple[int, float, str]:
    return request.order
