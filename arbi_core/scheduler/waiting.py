"""The waiting queue: interactive before batch, the least served tenant first, within a tenant by arrival."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator

from arbi_core.scheduler.request import Request
from arbi_core.scheduler.tenants import Tenants

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """Requests that wait for a place.

    Args:
        tenants: whose counters decide between tenants.

    Attributes:
        blocked: tenants whose quota is used up: nobody else waits behind their requests.
    """

    def __init__(self, tenants: Tenants) -> None:
        self.blocked: set[str] = set()
        self._tenants = tenants
        self._queues: tuple[dict[str, list[Request]], ...] = ({}, {})
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        for queues in self._queues:
            for queue in queues.values():
                yield from queue

    def add(self, request: Request) -> None:
        """Queue a request at its place by arrival; a preempted one is thus ahead of later ones."""
        bisect.insort(self._queues[request.rank].setdefault(request.msg.tenant, []), request, key=_order)
        self._size += 1

    def remove(self, request: Request) -> None:
        """Take a request out."""
        queues = self._queues[request.rank]
        queue = queues[request.msg.tenant]
        queue.remove(request)
        if not queue:
            del queues[request.msg.tenant]
        self._size -= 1

    def candidates(self, rank: int, window: int) -> Iterator[Request]:
        """The first `window` requests of a class in the order in which they should start.

        Counters are read again for every candidate, so that what one admission costs its tenant counts at once.
        Tenants that the caller puts into `blocked` meanwhile are passed over.
        """
        blocked = self.blocked
        queues = {name: list(queue[:window]) for name, queue in self._queues[rank].items() if name not in blocked}
        heads = [self._head(name, queue, 0) for name, queue in queues.items()]
        heapq.heapify(heads)
        given = 0
        while heads and given < window:
            counter, _, name, at = heads[0]
            if name in blocked:
                heapq.heappop(heads)
                continue
            if counter != self._counter(name):
                heapq.heapreplace(heads, self._head(name, queues[name], at))
                continue
            heapq.heappop(heads)
            if at + 1 < len(queues[name]):
                heapq.heappush(heads, self._head(name, queues[name], at + 1))
            given += 1
            yield queues[name][at]

    def _head(self, name: str, queue: list[Request], at: int) -> tuple[float, float, str, int]:
        return self._counter(name), queue[at].msg.arrival, name, at

    def _counter(self, name: str) -> float:
        tenant = self._tenants.find(name)
        return 0.0 if tenant is None else tenant.counter


def _order(request: Request) -> tuple[int, float, str]:
    return request.order
