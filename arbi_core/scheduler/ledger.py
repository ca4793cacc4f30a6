"""Every live request, what it holds, what steps did to it, and the one way in which it ends.

`Scheduler` adds the decision of a step to this.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable

from arbi_core.engine.messages import FinishOut, FinishReason, RequestRecord, TokenOut
from arbi_core.pool import PageTable, RowPool
from arbi_core.pool.savepoints import SavepointStore
from arbi_core.pool.tiers import HostTier
from arbi_core.pool.transfers import Transfer, TransferOp
from arbi_core.pool.tree import Namespace, Node
from arbi_core.scheduler.flight import InFlight
from arbi_core.scheduler.limits import SchedulerCounters, SchedulerLimits
from arbi_core.scheduler.plan import StepOutput, StepPlan
from arbi_core.scheduler.request import Kept, Request, RequestState
from arbi_core.scheduler.running import RunningSet
from arbi_core.scheduler.tenants import Tenant, Tenants
from arbi_core.scheduler.waiting import WaitingQueue

__all__ = ["Ledger"]


class Ledger:
    """Intake, commit and end of requests.

    Args:
        limits: bounds of a step.
        table: page table of the paged kinds.
        rows: row pool of the recurrent kinds, or None.
        tenants: limits and shares.
        tier: where evicted pages go on the host, or None.
        savepoints: saved states of recurrent rows, or None.
        on_finished: called once with the record of every ended request.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        table: PageTable,
        rows: RowPool | None = None,
        *,
        tenants: Tenants | None = None,
        tier: HostTier | None = None,
        savepoints: SavepointStore | None = None,
        on_finished: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self.limits = limits
        self.table = table
        self.row_pool = rows
        self.tenants = Tenants() if tenants is None else tenants
        self.tier = tier
        self.savepoints = savepoints
        self.requests: dict[str, Request] = {}
        self.running = RunningSet(limits.max_rows)
        self.waiting = WaitingQueue(self.tenants)
        self.counters = SchedulerCounters()
        self._on_finished = on_finished
        self._in_flight: deque[InFlight] = deque()
        self._dropped: list[int] = []
        self._transfers: list[Transfer] = []
        self._new_pages: list[tuple[int, int]] = []
        self._finished: list[FinishOut] = []
        self._deadlines: list[tuple[float, str]] = []
        self._news = False
        self._with_history = 0
        self._leaders: dict[tuple[Namespace, bytes], Request] = {}
        for store in (tier, savepoints):
            if store is not None:
                store.emit = self._transfers.append
                table.cache.on_evict = self._on_evict

    # -- intake ---------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float | None = None) -> None:
        """Queue a request. Never raises for lack of room: it waits its turn, or ends at once if that cannot come."""
        tenant = self.tenants.enter(request.msg.tenant, request.msg.arrival if now is None else now)
        tenant.waiting += 1
        self.requests[request.id] = request
        self.waiting.add(request)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.id))
        need, usable = -(-(request.limit - 1) // self.table.page_size), self.table.total_pages
        if need > usable:  # the last token's state is never written
            self._finish(request, FinishReason.ERROR, detail=f"it may need {need} pages, the pool has {usable}")

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED, detail: str = "") -> None:
        """End a request now, whatever it is doing. Unknown or ended ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, reason, detail=detail)

    @property
    def has_work(self) -> bool:
        """Whether any request is queued or running, or a step is on the way."""
        return bool(self.requests or self._in_flight)

    @property
    def draws_need_history(self) -> bool:
        """Whether a running request's next draw depends on tokens that may still be on the way to the host."""
        return self._with_history > 0

    @property
    def has_finished(self) -> bool:
        """Whether ended requests wait to be reported, or the ranks have rows or bytes to forget."""
        return bool(self._finished or self._dropped or self._transfers)

    @property
    def has_ends(self) -> bool:
        """Whether ended requests wait to be reported."""
        return bool(self._finished)

    def take_finished(self) -> list[FinishOut]:
        """Requests that ended since the last call, each exactly once."""
        finished, self._finished = self._finished, []
        return finished

    # -- what steps did -----------------------------------------------------------------------------------------------

    def dispatched(self, plan: StepPlan) -> None:
        """The ranks have taken the step: whatever follows on the device sees what it writes."""
        flight = self._in_flight[-1]
        if flight.plan is not plan:
            raise RuntimeError(f"step {plan.index} was dispatched out of order")
        for request in flight.chunked:
            if request.running:
                self.table.commit(request.id, request.token_ids[: request.computed])
                self._lead(request)

    def commit(self, plan: StepPlan, output: StepOutput, now: float) -> list[TokenOut]:
        """Take in what the oldest step in flight drew; returns the new tokens. Ended requests are in `take_finished`.

        Draws of requests that have ended meanwhile are dropped: never shown, never billed.
        """
        flight = self._in_flight.popleft()
        if flight.plan is not plan:
            raise RuntimeError(f"step {plan.index} was committed out of order")
        self._news = True
        if self.tier is not None and output.transfers:
            self.tier.settle(output.transfers)
        tokens: list[TokenOut] = []
        if flight.void:
            return tokens
        errors, logprobs = output.errors, output.logprobs
        for i, (request, token) in enumerate(zip(flight.drawing, output.token_ids.tolist(), strict=True)):
            ended = request.state is RequestState.FINISHED
            if i in errors:
                # Its earlier chunks may be as bad as the row that showed it: nothing of its namespace is reused.
                self.flush(request.msg.tenant)
                if not ended:
                    self._finish(request, FinishReason.ERROR, detail=errors[i])
            if ended or i in errors:
                continue
            ids = request.token_ids
            ids.append(token)
            tokens.append(TokenOut(request.msg.request_id, (token,), (logprobs[i],) if i in logprobs else ()))
            if request.owed:
                request.owed -= 1
            if request.first_token is None:
                request.first_token = now
            if token in request.stops and request.num_output > request.msg.sampling.min_tokens:
                self._finish(request, FinishReason.STOP, stop_token_id=token)
            elif len(ids) >= request.limit:
                self._finish(request, FinishReason.LENGTH)
        return tokens

    def fail(self, plan: StepPlan, reason: str) -> None:
        """End every request that a step which could not be executed was to compute.

        Nobody knows how far the ranks came with it, and steps decided after it may have read what it did not write:
        their draws are void, and whoever it or they touched beside begins again, with nothing of its tenant reused.
        """
        failed = self._in_flight.popleft()
        if failed.plan is not plan:
            raise RuntimeError(f"step {plan.index} failed while an older one was on the way")
        self._news = True
        for request in failed.requests:
            self.flush(request.msg.tenant)
            if request.state is not RequestState.FINISHED:
                self._finish(request, FinishReason.ERROR, detail=reason)
        for flight in self._in_flight:
            flight.void = True
        for flight in (failed, *self._in_flight):
            for request in flight.touched:
                self.flush(request.msg.tenant)
                if request.running:
                    self._preempt(request, keep=False)
                self._forget_kept(request)
                request.owed = 0
        self._undo(plan)

    def _undo(self, plan: StepPlan) -> None:
        """Have the ranks forget once more what a failed step was to forget; count on nothing that it was to move."""
        self._dropped += [slot for slot in plan.dropped if slot not in self._dropped]
        self._transfers += [t for t in plan.transfers if t.op is TransferOp.DROP]
        moved = {t.handle for t in plan.transfers}
        if self.tier is not None:
            self.tier.lose(moved)
        for request in self.waiting:
            if request.kept is not None and moved & {request.kept.page, request.kept.row}:
                self._forget_kept(request)

    def void_in_flight(self) -> None:
        """Nothing on the way will be committed: the ranks are gone."""
        self._in_flight.clear()

    # -- leaving ------------------------------------------------------------------------------------------------------

    def _pending(self, request: Request) -> int:
        """Draws of a request that are on the way."""
        return sum(request in flight.drawing for flight in self._in_flight if not flight.void)

    def _written(self, request: Request) -> int:
        """Tokens whose state is written once the steps decided so far have run."""
        if request.state is RequestState.PREFILL:
            return request.computed
        return len(request.token_ids) + self._pending(request) - 1

    def _preempt(self, request: Request, *, keep: bool = True) -> None:
        """Take a running request's place; it waits again and goes on later from what is kept of it."""
        owed, written = self._pending(request), self._written(request)
        request.kept = self._keep(request, written) if keep else None
        self._new_pages[:] = [p for p in self._new_pages if p[0] != request.slot]
        self._leave_running(request, written, keep=keep)
        request.state = RequestState.WAITING
        request.computed, request.owed, request.prefix, request.fetched = 0, owed, None, False
        request.charged = len(request.token_ids) + owed
        request.preemptions += 1
        self.counters.preemptions += 1
        self._tenant(request).waiting += 1
        self.waiting.add(request)

    def _keep(self, request: Request, written: int) -> Kept | None:
        """Save on the host what the prefix cache cannot hold: the last, partly filled page and the recurrent row."""
        tier = self.tier
        if tier is None or not written or not self._caches(request):
            return None
        kept = Kept(written)
        if written % self.table.page_size:
            page = self.table.pages(request.id)[written // self.table.page_size]
            kept.page = tier.keep_page(page)
            if not kept.page:
                return None
        if request.state_row:
            kept.row = tier.keep_row(request.state_row)
            if not kept.row:
                tier.release(kept.page)
                return None
        return kept

    def _caches(self, request: Request) -> bool:
        """Whether a request reads and writes the prefix cache; recurrent state can only be reused from savepoints."""
        reusable = self.row_pool is None or self.savepoints is not None
        return reusable and request.msg.cache_enabled and self.table.enabled

    def _forget_kept(self, request: Request) -> None:
        """Give back what the host keeps of a preempted request."""
        kept, request.kept = request.kept, None
        if kept is not None and self.tier is not None:
            self.tier.release(kept.page)
            self.tier.release(kept.row)

    def _finish(
        self, request: Request, reason: FinishReason, *, detail: str = "", stop_token_id: int | None = None
    ) -> None:
        """The one terminal routine: every request passes here exactly once."""
        tenant = self._tenant(request)
        if request.running:
            self._leave_running(request, self._written(request), keep=reason is not FinishReason.ERROR)
        else:
            self.waiting.remove(request)
            tenant.waiting -= 1
            self._forget_kept(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.prefix = None
        del self.requests[request.id]
        self.tenants.leave(tenant)
        cached = request.cached_tokens or 0
        self._finished.append(
            FinishOut(
                request_id=request.id,
                reason=reason,
                detail=detail,
                stop_token_id=stop_token_id,
                prompt_tokens=request.num_prompt,
                completion_tokens=request.num_output,
                cached_tokens=cached,
            )
        )
        if self._on_finished is not None:
            self._on_finished(_record(request, reason, cached))

    def _leave_running(self, request: Request, written: int, *, keep: bool) -> None:
        """Give back slot, pages and row. With `keep`, full pages whose state is written stay in the prefix cache."""
        self._dropped.append(self.running.remove(request))
        self._with_history -= request.needs_history
        self.table.release(request.id, request.token_ids[:written] if keep else None)
        if self.row_pool is not None:
            self.row_pool.free(request.id)
        request.state_row = 0
        self._unlead(request)
        self._tenant(request).running -= 1

    def _tenant(self, request: Request) -> Tenant:
        """The tenant of a live request."""
        tenant = self.tenants.find(request.msg.tenant)
        assert tenant is not None  # noqa: S101  # it stays while it has requests
        return tenant

    def _lead(self, request: Request) -> None:
        """Say which page the request computes next, so that others with the same prefix wait for it."""
        self._unlead(request)
        if request.state is RequestState.PREFILL:
            key = self.table.next_key(request.id, request.token_ids)
            if key is not None and self._leaders.setdefault(key, request) is request:
                request.leads = key

    def _unlead(self, request: Request) -> None:
        if request.leads is not None:
            del self._leaders[request.leads]
            request.leads = None

    def flush(self, tenant: str | None = None) -> int:
        """Forget what the prefix cache holds of one tenant, or of all, on the device and on the host.

        Returns:
            Pages freed at once; pages that running requests hold stay theirs.
        """
        if self.tier is not None:
            self.tier.flush(tenant)
        if self.savepoints is not None:
            self.savepoints.flush(tenant)
        for request in self.running.rows:
            if tenant in {None, request.msg.tenant}:
                self._unlead(request)
                request.prefix = None  # it leaves no savepoints any more
        return self.table.flush(tenant)

    def _on_evict(self, node: Node) -> None:
        """A cached page leaves the device: the host takes it, or nothing of it is left."""
        if not (self.tier is not None and self.tier.keep_node(node)) and self.savepoints is not None:
            self.savepoints.drop(node.digest)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self.requests.get(heapq.heappop(self._deadlines)[1])
            if request is not None and request.deadline is not None and request.deadline <= now:
                self._finish(request, FinishReason.TIMEOUT)


def _record(request: Request, reason: FinishReason, cached: int) -> RequestRecord:
    return RequestRecord(
        request_id=request.id,
        tenant=request.msg.tenant,
        reason=reason,
        prompt_tokens=request.num_prompt,
        completion_tokens=request.num_output,
        cached_tokens=cached,
        arrival=request.msg.arrival,
        first_scheduled=request.first_scheduled,
        first_token=request.first_token,
        finished=time.monotonic(),
        preemptions=request.preemptions,
    )
