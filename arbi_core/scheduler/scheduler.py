"""The scheduler: `schedule()` decides a step, `commit()` takes in what it drew. Everything else serves these two.

Policy
- Decode rows first, in order of precedence (interactive before batch, then arrival); then running prefills, then
  waiting requests, up to the token budget. Prefill and decode share the step.
- Pages are taken when a row is put on the slate, never promised twice. A waiting request is admitted only if its whole
  prompt fits beside what running prefills still need and one page for every running row, so that an admission does not
  turn into a preemption a few steps later.
- When pages run out, a row may take them only from rows of lower precedence that are not on the slate yet; the victim
  is the lowest of those. It returns to the queue with its generated tokens as part of its prompt and is recomputed.
  The row of highest precedence can therefore always go on: nothing livelocks.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable

from attrs import frozen

from arbi_core.engine.messages import (
    FinishOut,
    FinishReason,
    Priority,
    RequestRecord,
    TokenLogprobs,
    TokenOut,
)
from arbi_core.pool import PageTable, RowPool
from arbi_core.scheduler.plan import AdmitRow, PlanRow, StepOutput, StepPlan
from arbi_core.scheduler.request import Request, RequestState

__all__ = ["Scheduler", "SchedulerLimits"]


@frozen(kw_only=True)
class SchedulerLimits:
    """Bounds of a step.

    Attributes:
        max_num_seqs: rows.
        max_num_batched_tokens: tokens.
        max_prefill_chunk: tokens of one prefill row.
        max_model_len: tokens of one request, prompt and output together.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int
    max_model_len: int


class Scheduler:
    """Owns every live request and its pages.

    Args:
        limits: bounds of a step.
        table: page table of the paged kinds.
        rows: row pool of the recurrent kinds, or None.
        on_finished: called once with the record of every ended request.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        table: PageTable,
        rows: RowPool | None = None,
        on_finished: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self.limits = limits
        self.table = table
        self.row_pool = rows
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.preemptions = 0
        self.prompt_tokens = 0
        self._on_finished = on_finished
        self._dropped: list[str] = []
        self._finished: list[FinishOut] = []
        self._deadlines = 0

    # -- intake ---------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Never raises for lack of room: it waits its turn."""
        self.requests[request.id] = request
        bisect.insort(self.waiting, request, key=_order)
        self._deadlines += request.deadline is not None

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED, detail: str = "") -> None:
        """End a request now, whatever it is doing. Unknown or ended ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, reason, detail=detail)

    @property
    def has_work(self) -> bool:
        """Whether any request is queued or running."""
        return bool(self.requests)

    @property
    def has_finished(self) -> bool:
        """Whether ended requests wait to be reported, or dropped rows to be told to the runner."""
        return bool(self._finished or self._dropped)

    # -- the decision ---------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Decide one step. Takes the pages that its rows need; computes nothing."""
        self._expire(now)
        slate: list[PlanRow] = []
        admitted: list[AdmitRow] = []
        budget = self.limits.max_num_batched_tokens
        decoding = [r for r in self.running if r.decoding]
        prefilling = [r for r in self.running if not r.decoding]
        on_slate: set[str] = set()

        for request in decoding:
            if budget == 0:
                break
            if request.state is RequestState.RUNNING and self._make_room(request, 1, on_slate) == 1:
                slate.append(self._slate_row(request, 1))
                on_slate.add(request.id)
                budget -= 1

        for request in prefilling:
            if budget == 0:
                break
            if request.state is not RequestState.RUNNING:
                continue
            n = self._make_room(request, min(request.remaining, self.limits.max_prefill_chunk, budget), on_slate)
            if n:
                slate.append(self._slate_row(request, n))
                on_slate.add(request.id)
                budget -= n

        while budget and self.waiting and len(self.running) < self.limits.max_num_seqs:
            head = self._next_waiting()
            admit = None if head is None else self._admit(head, now)
            if head is None or admit is None:
                break
            n = min(head.remaining, self.limits.max_prefill_chunk, budget)
            admitted.append(admit)
            slate.append(self._slate_row(head, n))
            budget -= n

        dropped, self._dropped = tuple(self._dropped), []
        return StepPlan(rows=tuple(slate), admitted=tuple(admitted), dropped=dropped)

    def commit(self, plan: StepPlan, output: StepOutput, now: float) -> list[TokenOut]:
        """Take in what a step computed and drew; returns the new tokens. Ended requests are in `take_finished`."""
        tokens: list[TokenOut] = []
        for row in plan.rows:
            request = self.requests.get(row.request_id)
            if request is None:
                continue
            before, request.computed = request.computed, request.computed + row.num_tokens
            self.prompt_tokens += max(0, min(request.computed, request.num_prompt) - before)
            error = output.errors.get(row.request_id)
            if error is not None:
                # Its earlier chunks may be as bad as the row that showed it: nothing of its namespace is reused.
                self.table.flush(request.msg.tenant)
                self._finish(request, FinishReason.ERROR, detail=error)
                continue
            if row.num_tokens > 1 or request.num_output == 0:
                self.table.commit(request.id, request.token_ids)
            if row.samples:
                token = output.token_ids[row.request_id]
                tokens.append(self._append(request, token, output.logprobs.get(row.request_id), now))
        return tokens

    def take_finished(self) -> list[FinishOut]:
        """Requests that ended since the last call, each exactly once."""
        finished, self._finished = self._finished, []
        return finished

    def fail(self, plan: StepPlan, reason: str) -> None:
        """End every request of a step that could not be executed."""
        for row in plan.rows:
            self.cancel(row.request_id, FinishReason.ERROR, reason)

    # -- pages ----------------------------------------------------------------------------------------------------

    def _make_room(self, request: Request, want: int, on_slate: set[str]) -> int:
        """Preempt lower rows until `want` tokens fit; returns how many fit in the end (for a prefill, maybe fewer)."""
        while self.table.pages_needed(request.id, want) > self.table.available:
            victim = self._victim(request, on_slate)
            if victim is not None:
                self._preempt(victim)
            elif request.decoding:
                self._preempt(request)
                return 0
            else:
                room = self._tokens_that_fit(request)
                return min(want, room)
        return want

    def _tokens_that_fit(self, request: Request) -> int:
        size = self.table.page_size
        held = len(self.table.pages(request.id)) * size
        return held - self.table.length(request.id) + self.table.available * size

    def _victim(self, request: Request, on_slate: set[str]) -> Request | None:
        """The running row of lowest precedence below `request` that is not on the slate."""
        for other in reversed(self.running):
            if other is request:
                return None
            if other.id not in on_slate:
                return other
        return None

    def _preempt(self, request: Request) -> None:
        """Take a running request's pages; it waits again and will be recomputed."""
        self._leave_running(request, keep=True)
        request.state = RequestState.WAITING
        request.computed = 0
        request.preemptions += 1
        self.preemptions += 1
        bisect.insort(self.waiting, request, key=_order)

    def _slate_row(self, request: Request, num_tokens: int) -> PlanRow:
        pages = self.table.extend(request.id, num_tokens)
        return PlanRow(request.id, num_tokens, tuple(pages), samples=num_tokens == request.remaining)

    # -- admission ------------------------------------------------------------------------------------------------

    def _next_waiting(self) -> Request | None:
        """Head of the queue; batch work stays there while interactive work runs or waits."""
        head = self.waiting[0]
        if head.msg.priority is Priority.BATCH and any(r.msg.priority is Priority.INTERACTIVE for r in self.running):
            return None
        return head

    def _admit(self, request: Request, now: float) -> AdmitRow | None:
        """Move the head of the queue into the running set if its whole prompt fits; None leaves it waiting."""
        row = 0
        if self.row_pool is not None:
            allocated = self.row_pool.alloc(request.id)
            if allocated is None:
                return None
            row = allocated
        matched = self.table.add(
            request.id,
            request.token_ids,
            namespace=request.msg.tenant,
            cache_enabled=request.msg.cache_enabled and self.row_pool is None,
            max_match=len(request.token_ids) - 1,
        )
        promised = sum(self.table.pages_needed(r.id, r.remaining) for r in self.running if not r.decoding)
        need = self.table.pages_needed(request.id, len(request.token_ids) - matched) + promised
        if self.running and need + len(self.running) > self.table.available:
            self.table.release(request.id, None)
            if self.row_pool is not None:
                self.row_pool.free(request.id)
            return None
        self.waiting.pop(0)
        request.state, request.computed, request.state_row = RequestState.RUNNING, matched, row
        if request.cached_tokens is None:
            request.cached_tokens = matched
            request.first_scheduled = now
        bisect.insort(self.running, request, key=_order)
        return AdmitRow(
            request_id=request.id,
            token_ids=tuple(request.token_ids),
            num_prompt=request.num_prompt,
            computed=matched,
            pages=tuple(self.table.pages(request.id)),
            sampling=request.msg.sampling,
            base_seed=request.base_seed,
            stop_token_ids=request.msg.stop_token_ids,
            state_row=row,
        )

    # -- the end of a request ---------------------------------------------------------------------------------------

    def _append(self, request: Request, token: int, logprobs: TokenLogprobs | None, now: float) -> TokenOut:
        request.token_ids.append(token)
        if request.first_token is None:
            request.first_token = now
        sampling = request.msg.sampling
        stops = token in request.msg.stop_token_ids and request.num_output > sampling.min_tokens
        if stops:
            self._finish(request, FinishReason.STOP, stop_token_id=token)
        elif (sampling.max_tokens is not None and request.num_output >= sampling.max_tokens) or len(
            request.token_ids
        ) >= self.limits.max_model_len:
            self._finish(request, FinishReason.LENGTH)
        return TokenOut(request.id, (token,), () if logprobs is None else (logprobs,))

    def _expire(self, now: float) -> None:
        if self._deadlines:
            for request in [r for r in self.requests.values() if r.deadline is not None and r.deadline <= now]:
                self._finish(request, FinishReason.TIMEOUT)

    def _finish(
        self, request: Request, reason: FinishReason, *, detail: str = "", stop_token_id: int | None = None
    ) -> None:
        """The one terminal routine: every request passes here exactly once."""
        if request.state is RequestState.RUNNING:
            self._leave_running(request, keep=reason is not FinishReason.ERROR)
        else:
            self.waiting.remove(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        del self.requests[request.id]
        self._deadlines -= request.deadline is not None
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

    def _leave_running(self, request: Request, *, keep: bool) -> None:
        """Give back pages and row. With `keep`, full pages whose state is written stay in the prefix cache."""
        self.running.remove(request)
        self.table.release(request.id, request.token_ids[: request.computed] if keep else None)
        if self.row_pool is not None:
            self.row_pool.free(request.id)
        self._dropped.append(request.id)


def _order(request: Request) -> tuple[int, float, str]:
    return request.order


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
