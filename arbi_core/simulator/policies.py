"""Alternatives to the scheduler's policies, for comparison. Nothing outside the simulator uses them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from attrs import evolve, field, frozen, validators

from arbi_core.pool import PageTable
from arbi_core.scheduler import Request, Scheduler, SchedulerLimits, Tenants
from arbi_core.scheduler.shares import share_prefill
from arbi_core.scheduler.waiting import WaitingQueue

__all__ = ["CHOICES", "Policies", "PolicyScheduler", "make_scheduler"]


class Share(Protocol):
    """Divides a step's prefill tokens; arguments and result as `arbi_core.scheduler.shares.share_prefill`."""

    def __call__(
        self,
        remaining: Sequence[int],
        budget: int,
        chunk: int,
        *,
        batch: Sequence[bool] = (),
        batch_budget: int | None = None,
    ) -> list[int]:
        """Tokens for each prompt."""


def _in_order(
    order: Sequence[int], remaining: Sequence[int], budget: int, chunk: int, batch: Sequence[bool], batch_budget: int
) -> list[int]:
    """Serve prompts to the end, one after another."""
    given = [0] * len(remaining)
    for i in order:
        n = min(remaining[i], chunk, budget, batch_budget if batch and batch[i] else budget)
        given[i] = n
        budget -= n
        batch_budget -= n if batch and batch[i] else 0
    return given


def share_fcfs(
    remaining: Sequence[int], budget: int, chunk: int, *, batch: Sequence[bool] = (), batch_budget: int | None = None
) -> list[int]:
    """First come, first served: whoever is first in order takes all that it can use."""
    limit = budget if batch_budget is None else batch_budget
    return _in_order(range(len(remaining)), remaining, budget, chunk, batch, limit)


def share_shortest(
    remaining: Sequence[int], budget: int, chunk: int, *, batch: Sequence[bool] = (), batch_budget: int | None = None
) -> list[int]:
    """Whoever has least left takes all that it can use, interactive work first."""
    limit = budget if batch_budget is None else batch_budget
    order = sorted(range(len(remaining)), key=lambda i: (bool(batch) and batch[i], remaining[i], i))
    return _in_order(order, remaining, budget, chunk, batch, limit)


def share_equal(
    remaining: Sequence[int], budget: int, chunk: int, *, batch: Sequence[bool] = (), batch_budget: int | None = None
) -> list[int]:
    """The same for everybody; what a short prompt does not need goes to the others."""
    given = [0] * len(remaining)
    limit = budget if batch_budget is None else batch_budget
    groups = (
        [i for i in range(len(given)) if batch and batch[i]],
        [i for i in range(len(given)) if not (batch and batch[i])],
    )
    for members, most in ((groups[1], budget), (groups[0], limit)):
        left = min(most, budget)
        members = sorted(members, key=lambda i: remaining[i])
        for place, i in enumerate(members):
            n = min(remaining[i], chunk, -(-left // (len(members) - place)))
            given[i] = n
            left -= n
            budget -= n
    return given


def share_first(part: int, *, rejoins: bool = True) -> Share:
    """The scheduler's rule with 1 in `part` for the first in order.

    Args:
        part: one in so many tokens is for the first.
        rejoins: whether the first also has the rest while it has least left, as anybody else (the scheduler's way);
            otherwise it gets only what nobody else can use.
    """

    def share(
        remaining: Sequence[int],
        budget: int,
        chunk: int,
        *,
        batch: Sequence[bool] = (),
        batch_budget: int | None = None,
    ) -> list[int]:
        if not remaining:
            return []
        limit = budget if batch_budget is None else min(budget, batch_budget)
        bulk = list(batch) or [False] * len(remaining)
        most = [min(r, chunk) for r in remaining]
        first = min(most[0], -(-budget // part), limit if bulk[0] else budget)
        most[0] -= first
        left = [remaining[0] - first, *remaining[1:]]
        order = sorted(range(len(left)), key=lambda i: (not (i or rejoins), bulk[i], left[i], i))
        rest = _in_order(order, most, budget - first, chunk, batch, limit - (first if bulk[0] else 0))
        return [first + rest[0], *rest[1:]]

    return share


SHARES: dict[str, Share] = {
    "quarter": share_prefill,
    "halves": share_first(2),
    "eighth": share_first(8),
    "quarter-last": share_first(4, rejoins=False),
    "fcfs": share_fcfs,
    "equal": share_equal,
    "shortest": share_shortest,
}

Victim = Callable[[Scheduler, Request], tuple[object, ...]]

VICTIMS: dict[str, Victim] = {
    "least-loss": lambda scheduler, r: (r.rank, -scheduler._loss(r), r.order),
    "latest": lambda _, r: (r.rank, r.order),
    "largest": lambda scheduler, r: (r.rank, len(scheduler.table.pages(r.id)), r.order),
}

CHOICES = {
    "prefill_share": tuple(SHARES),
    "prefill_order": ("served", "arrival", "admission"),
    "tenant_order": ("served", "arrival"),
    "victim": tuple(VICTIMS),
    "prefix_wait": ("on", "off"),
    "admission_room": ("8", "1", "4", "16"),
}
"""Values of each policy; the first is the scheduler's own."""


def _policy(name: str) -> str:
    value: str = field(default=CHOICES[name][0], validator=validators.in_(CHOICES[name]))
    return value


@frozen(kw_only=True)
class Policies:
    """One choice for each policy.

    Attributes:
        prefill_share: how a step's prefill tokens are divided: ``quarter`` to the first in order (the scheduler's),
            ``halves``, ``eighth``, ``quarter-last`` (where the first has more only if nobody else can use it),
            ``fcfs``, ``equal``, ``shortest``.
        prefill_order: which prompt comes first in that: the least ``served`` tenant's, by ``arrival``, or by
            ``admission``; interactive work always precedes batch work.
        tenant_order: who starts next: the least ``served`` tenant, or by ``arrival``, whoever asks.
        victim: who loses its place: the row of lower precedence with the ``least-loss``, the ``latest``, or the
            ``largest``.
        prefix_wait: whether a request waits for a prefix that another one is computing.
        admission_room: free pages that an admission leaves for every running row, as far as it may need them.
    """

    prefill_share: str = _policy("prefill_share")
    prefill_order: str = _policy("prefill_order")
    tenant_order: str = _policy("tenant_order")
    victim: str = _policy("victim")
    prefix_wait: str = _policy("prefix_wait")
    admission_room: str = _policy("admission_room")


class _ArrivalQueue(WaitingQueue):
    """Tenants do not matter."""

    def candidates(self, rank: int, window: int) -> Iterator[Request]:
        """The first `window` requests of a class by arrival."""
        queues = [queue[:window] for queue in self._queues[rank].values()]
        return islice(heapq.merge(*queues, key=lambda r: r.order), window)


class PolicyScheduler(Scheduler):
    """The scheduler with some of its policies exchanged."""

    def __init__(self, limits: SchedulerLimits, table: PageTable, tenants: Tenants, policies: Policies) -> None:
        super().__init__(evolve(limits, growth_pages=int(policies.admission_room)), table, tenants=tenants)
        self._policies = policies
        self.divide = SHARES[policies.prefill_share]
        if policies.tenant_order == "arrival":
            self.waiting = _ArrivalQueue(self.tenants)

    def _turn(self, request: Request) -> tuple[int, float, tuple[int, float, str]]:
        by = self._policies.prefill_order
        if by == "admission":
            admitted = request.first_scheduled
            return request.rank, float("inf") if admitted is None else admitted, request.order
        return super()._turn(request) if by == "served" else (request.rank, 0.0, request.order)

    def _victim(self, request: Request) -> Request | None:
        key = VICTIMS[self._policies.victim]
        below = [r for r in self.running.rows if r.order > request.order]
        return max(below, key=lambda r: key(self, r), default=None)

    def _lead(self, request: Request) -> None:
        if self._policies.prefix_wait == "on":
            super()._lead(request)


def make_scheduler(limits: SchedulerLimits, table: PageTable, tenants: Tenants, policies: Policies) -> Scheduler:
    """The scheduler itself, or one with the policies that differ from its own."""
    if policies == Policies():
        return Scheduler(limits, table, tenants=tenants)
    return PolicyScheduler(limits, table, tenants, policies)
