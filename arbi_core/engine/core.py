"""The engine: takes requests, runs steps, reports what they produced. One thread drives it.

With asynchronous output the engine decides and dispatches a step before it has seen what the previous one drew: the ids
are fed back on the device, and the host catches up one step late. What a request draws after its end is dropped.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from typing import TYPE_CHECKING

from attrs import evolve

from arbi_core.engine.admission import AdmissionGate
from arbi_core.engine.client import Health, HealthState, ModelInfo
from arbi_core.engine.messages import EngineStats, FinishOut, FinishReason, OutputBatch, SubmitMsg, TokenOut
from arbi_core.errors import EngineClosedError, EngineFailedError, RequestError
from arbi_core.scheduler import Request, Scheduler, StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from arbi_core.engine.jobs import JobStore, SavedJob
    from arbi_core.offers import Executor, PendingStep

__all__ = ["EngineCore"]

log = logging.getLogger("arbi.engine")

MAX_FAILED_STEPS = 3
"""Steps that may fail in a row before the engine gives up; one good step resets the count."""

LONGEST_WAIT_S = 0.5
"""How long a driver may sleep while nothing is due."""


class EngineCore:
    """Scheduler and executor joined into one loop.

    Args:
        scheduler: owns requests and pages.
        executor: runs plans.
        info: the served model.
        max_queue: waiting requests beyond which `submit` raises `OverloadedError`.
        default_timeout_s: timeout of requests that bring none.
        seed: seeds the draws of requests that bring no seed.
        processors: names of installed logits processors.
        depth: steps that may be dispatched before the host has seen the output of the oldest; 0 is synchronous.
        jobs: keeps the progress of requests with a ``job_id``.
        on_close: called once by `close`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        info: ModelInfo,
        *,
        max_queue: int,
        default_timeout_s: float | None = None,
        seed: int = 0,
        processors: Iterable[str] = (),
        depth: int = 0,
        jobs: JobStore | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._executor = executor
        self._gate = AdmissionGate(info, scheduler, max_queue, frozenset(processors))
        self._default_timeout_s = default_timeout_s
        self._seeds = random.Random(seed)  # noqa: S311  # reproducible draws, not secrets
        self._depth = depth
        self._jobs = jobs
        self._restored: list[TokenOut] = []
        self._on_close = on_close
        self._health = Health(HealthState.READY)
        self._flights: deque[tuple[StepPlan, PendingStep]] = deque()
        self._stalled = False
        self._failed_steps = 0
        self._steps = self._generated = 0
        self._finished: dict[str, int] = {}

    # -- intake ---------------------------------------------------------------------------------------------------

    def submit(self, msg: SubmitMsg, *, bounded: bool = True) -> None:
        """Queue a request. `bounded` false ignores the queue limits (the offline API queues all its work at once).

        Raises:
            RequestError: empty, too long or out-of-vocabulary prompt, an id that is already live, or a priority above
                the tenant's.
            OverloadedError: the queue is full.
            EngineClosedError: draining, failed or closed.
        """
        if self._health.state is HealthState.FAILED:
            raise EngineFailedError(f"the engine has failed: {self._health.reason}")
        if self._health.state is HealthState.DRAINING:
            raise EngineClosedError("the engine is shutting down and takes no new requests")
        msg = self._gate.check(msg, bounded=bounded)
        seed = msg.sampling.seed if msg.sampling.seed is not None else self._seeds.getrandbits(63)
        if msg.timeout_s is None and self._default_timeout_s is not None:
            msg = evolve(msg, timeout_s=self._default_timeout_s)
        limit = self.info.max_model_len
        if msg.sampling.max_tokens is not None:
            limit = min(limit, len(msg.prompt_token_ids) + msg.sampling.max_tokens)
        saved = self._saved_job(msg)
        request = Request(msg, base_seed=seed if saved is None else saved.seed, limit=limit)
        if saved is not None and saved.output:
            request.resume(saved.output)
            self._restored.append(TokenOut(msg.request_id, saved.output))
        if self._jobs is not None and msg.job_id is not None:
            self._jobs.begin(request)
        self._scheduler.add(request)
        self._stalled = False

    def _saved_job(self, msg: SubmitMsg) -> SavedJob | None:
        if msg.job_id is None:
            return None
        if self._jobs is None:
            raise RequestError(
                "this server keeps no jobs (scheduler.jobs_dir is not set); leave job_id out", param="job_id"
            )
        return self._jobs.load(msg)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request; its pages are free when this returns. Unknown ids are ignored."""
        self._scheduler.cancel(request_id, reason)
        self._stalled = False

    def flush_cache(self, tenant: str | None = None) -> int:
        """Forget the prefix cache of a tenant, or of all; returns the pages freed at once. Running requests go on."""
        self._stalled = False
        return self._scheduler.flush(tenant)

    # -- the loop ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether anything is queued, running, on the way, or waits to be reported."""
        if self._health.state is HealthState.FAILED:
            return self._scheduler.has_ends
        return bool(self._scheduler.has_work or self._scheduler.has_finished or self._flights)

    def wait_s(self) -> float:
        """Seconds that a driver may sleep before the next `step`, unless something arrives; 0 while there is work."""
        if not self._stalled:
            return 0.0 if self.has_work else LONGEST_WAIT_S
        now = time.monotonic()
        event = self._scheduler.next_event(now)
        return LONGEST_WAIT_S if event is None else min(max(0.0, event - now), LONGEST_WAIT_S)

    def tick(self) -> None:
        """Look after the ranks while there is nothing to do."""
        reason = self._executor.failure
        if reason is not None and self._health.state is not HealthState.FAILED:
            self.fail(reason)

    def step(self) -> OutputBatch:
        """Run one step and return everything that it produced or ended; with depth, what an earlier step produced."""
        if self._health.state is HealthState.FAILED:
            return self.drain_finished()
        tokens, self._restored = self._restored, []
        restored = sum(len(t.token_ids) for t in tokens)
        if self._flights and self._scheduler.draws_need_history:
            self._collect(0, tokens)
        plan = self._scheduler.schedule(time.monotonic())
        if not plan.empty:
            self._dispatch(plan, tokens)
        self._collect(0 if plan.empty else self._depth, tokens)
        finished = self._take_finished()
        self._stalled = plan.empty and not (tokens or finished)
        self._generated += sum(len(t.token_ids) for t in tokens) - restored
        if self._jobs is not None:
            self._jobs.tick(time.monotonic())
        return OutputBatch(tuple(tokens), finished)

    def _take_finished(self) -> tuple[FinishOut, ...]:
        finished = tuple(self._scheduler.take_finished())
        for f in finished:
            self._finished[f.reason] = self._finished.get(f.reason, 0) + 1
            if self._jobs is not None:
                self._jobs.end(f.request_id, f.reason)
        self._gate.finished(len(finished))
        return finished

    def _dispatch(self, plan: StepPlan, tokens: list[TokenOut]) -> None:
        try:
            pending = self._executor.dispatch(plan)
        except BaseException as exc:  # any failure of a step ends its rows, never the loop
            self._collect(0, tokens)
            self._step_failed(plan, exc)
            if not isinstance(exc, Exception):
                raise  # Ctrl-C: the books are in order, whoever drives may go on
            return
        self._scheduler.dispatched(plan)
        self._flights.append((plan, pending))

    def _collect(self, keep: int, tokens: list[TokenOut]) -> None:
        """Commit the oldest steps until only `keep` are on the way."""
        while len(self._flights) > keep:
            plan, pending = self._flights.popleft()
            try:
                output = pending.result()
            except BaseException as exc:  # as above
                self._step_failed(plan, exc)
                if not isinstance(exc, Exception):
                    raise
                continue
            tokens += self._scheduler.commit(plan, output, time.monotonic())
            if plan.num_rows:
                self._step_succeeded()

    def _step_succeeded(self) -> None:
        self._steps += 1
        self._failed_steps = 0
        if self._health.state is HealthState.DEGRADED:
            self._health = Health(HealthState.READY)

    def _step_failed(self, plan: StepPlan, exc: BaseException) -> None:
        if self._health.state is HealthState.FAILED:
            return
        reason = f"{type(exc).__name__}: {exc}"
        self._failed_steps += 1
        log.error("step failed (%d in a row): %s", self._failed_steps, reason, exc_info=exc)
        self._scheduler.fail(plan, f"the step that computed this request failed: {reason}")
        if isinstance(exc, EngineFailedError):
            self.fail(str(exc))
        elif self._failed_steps >= MAX_FAILED_STEPS:
            self.fail(f"{self._failed_steps} steps in a row failed; the last: {reason}")
        elif self._health.state is HealthState.READY:
            self._health = Health(HealthState.DEGRADED, reason)

    # -- life ---------------------------------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Refuse new requests from now on; those in flight go on."""
        if self._health.state is not HealthState.FAILED:
            self._health = Health(HealthState.DRAINING)

    def fail(self, reason: str) -> None:
        """Give up: every live request ends with an error and no new one is taken."""
        self._health = Health(HealthState.FAILED, reason)
        self._flights.clear()
        self._scheduler.void_in_flight()
        for request_id in list(self._scheduler.requests):
            self._scheduler.cancel(request_id, FinishReason.ERROR, reason)

    def drain_finished(self) -> OutputBatch:
        """Ends that no step has reported yet."""
        return OutputBatch((), self._take_finished())

    def cancel_all(self) -> None:
        """Cancel every live request."""
        for request_id in list(self._scheduler.requests):
            self._scheduler.cancel(request_id)
        self._stalled = False

    def close(self) -> None:
        """Cancel what is live and release the device. Idempotent."""
        self.cancel_all()
        self._flights.clear()
        self._scheduler.void_in_flight()
        if self._jobs is not None:
            self._jobs.close()
        self._executor.close()
        if self._on_close is not None:
            self._on_close()
            self._on_close = None
        self._health = Health(HealthState.FAILED, "the engine is closed")

    @property
    def health(self) -> Health:
        """Whether requests are served now."""
        return self._health

    def stats(self) -> EngineStats:
        """Counters and gauges."""
        s = self._scheduler
        tier, points = s.tier, s.savepoints
        return EngineStats(
            waiting=len(s.waiting),
            running=len(s.running),
            pages_total=s.table.total_pages,
            pages_free=s.table.available,
            pages_cached=s.table.cached_pages,
            page_size=s.table.page_size,
            prompt_tokens=s.counters.prompt_tokens,
            generated_tokens=self._generated,
            cached_tokens=s.counters.cached_tokens,
            resumed_tokens=s.counters.resumed_tokens,
            preemptions=s.counters.preemptions,
            prefix_waits=s.counters.deferred_by_prefix,
            quota_waits=s.counters.deferred_by_quota,
            evictions=s.table.evictions,
            steps=self._steps,
            finished=dict(self._finished),
            tier_ram_bytes=0 if tier is None else tier.ram_bytes,
            tier_disk_bytes=0 if tier is None else tier.disk_bytes,
            tier_saved=0 if tier is None else tier.saved,
            tier_restored=0 if tier is None else tier.restored,
            tier_disk_error="" if tier is None else tier.disk_error or "",
            savepoints=0 if points is None else len(points),
            savepoint_bytes=0 if points is None else points.nbytes,
            savepoint_hits=0 if points is None else points.hits,
            savepoint_misses=0 if points is None else points.misses,
        )
