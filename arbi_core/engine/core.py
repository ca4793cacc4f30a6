"""The engine: takes requests, runs steps, reports what they produced. One thread drives it."""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING, Protocol

from attrs import evolve

from arbi_core.engine.client import Health, HealthState, ModelInfo
from arbi_core.engine.messages import EngineStats, FinishReason, OutputBatch, SubmitMsg, TokenOut
from arbi_core.errors import EngineClosedError, EngineFailedError, OverloadedError, RequestError
from arbi_core.scheduler import Request, Scheduler, StepOutput, StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["EngineCore", "Executor"]

log = logging.getLogger("arbi.engine")

MAX_FAILED_STEPS = 3
"""Steps that may fail in a row before the engine gives up; one good step resets the count."""


class Executor(Protocol):
    """Whatever runs a plan on the ranks."""

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step."""
        ...

    def close(self) -> None:
        """Release device memory and end other ranks."""
        ...


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
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._executor = executor
        self._max_queue = max_queue
        self._default_timeout_s = default_timeout_s
        self._seeds = random.Random(seed)  # noqa: S311  # reproducible draws, not secrets
        self._processors = frozenset(processors)
        self._on_close = on_close
        self._health = Health(HealthState.READY)
        self._failed_steps = 0
        self._steps = self._generated = self._cached = 0
        self._finished: dict[str, int] = {}

    # -- intake ---------------------------------------------------------------------------------------------------

    def submit(self, msg: SubmitMsg, *, bounded: bool = True) -> None:
        """Queue a request. `bounded` false ignores the queue limit (the offline API queues all its work at once).

        Raises:
            RequestError: empty, too long or out-of-vocabulary prompt, or an id that is already live.
            OverloadedError: the queue is full.
            EngineClosedError: draining, failed or closed.
        """
        if self._health.state is HealthState.FAILED:
            raise EngineFailedError(f"the engine has failed: {self._health.reason}")
        if self._health.state is HealthState.DRAINING:
            raise EngineClosedError("the engine is shutting down and takes no new requests")
        self._check(msg)
        waiting = len(self._scheduler.waiting)
        if bounded and waiting >= self._max_queue:
            raise OverloadedError(
                f"{waiting} requests are already waiting (scheduler.max_queue is {self._max_queue}); try again later"
            )
        seed = msg.sampling.seed if msg.sampling.seed is not None else self._seeds.getrandbits(63)
        if msg.timeout_s is None and self._default_timeout_s is not None:
            msg = evolve(msg, timeout_s=self._default_timeout_s)
        self._scheduler.add(Request(msg, base_seed=seed))

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request; its pages are free when this returns. Unknown ids are ignored."""
        self._scheduler.cancel(request_id, reason)

    def _check(self, msg: SubmitMsg) -> None:
        ids, limit = msg.prompt_token_ids, self.info.max_model_len
        if not ids:
            raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
        if len(ids) >= limit:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but the context of this model is {limit} tokens and at least one "
                "must be left for the answer; shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )
        bad = next((t for t in ids if not 0 <= t < self.info.vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"token id {bad} is outside the vocabulary (0 to {self.info.vocab_size - 1})", param="prompt"
            )
        unknown = sorted(set(msg.sampling.logits_processors) - self._processors)
        if unknown:
            installed = ", ".join(sorted(self._processors)) or "none"
            raise RequestError(
                f"no installed plugin offers the logits processor {unknown[0]!r} (installed: {installed})",
                param="logits_processors",
            )
        outside = [t for t in msg.sampling.logit_bias or () if t >= self.info.vocab_size]
        outside += [t for t in msg.stop_token_ids if t >= self.info.vocab_size]
        if outside:
            raise RequestError(f"token id {outside[0]} is outside the vocabulary (0 to {self.info.vocab_size - 1})")
        if msg.request_id in self._scheduler.requests:
            raise RequestError(f"request id {msg.request_id!r} is already running", param="request_id")

    # -- the loop ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a `step` would do anything."""
        return self._scheduler.has_work or self._scheduler.has_finished

    def step(self) -> OutputBatch:
        """Run one step and return everything that it produced or ended."""
        plan = self._scheduler.schedule(time.monotonic())
        tokens: list[TokenOut] = []
        if plan.rows or plan.dropped:
            try:
                output = self._executor.execute(plan)
            except Exception as exc:  # noqa: BLE001  # any failure of a step ends its rows, never the loop
                self._step_failed(plan, exc)
            else:
                tokens = self._scheduler.commit(plan, output, time.monotonic())
                if plan.rows:
                    self._step_succeeded(plan)
        finished = self._scheduler.take_finished()
        self._generated += sum(len(t.token_ids) for t in tokens)
        for f in finished:
            self._finished[f.reason] = self._finished.get(f.reason, 0) + 1
        return OutputBatch(tuple(tokens), tuple(finished))

    def _step_succeeded(self, plan: StepPlan) -> None:
        self._steps += 1
        self._failed_steps = 0
        for a in plan.admitted:
            self._cached += a.computed
        if self._health.state is HealthState.DEGRADED:
            self._health = Health(HealthState.READY)

    def _step_failed(self, plan: StepPlan, exc: Exception) -> None:
        reason = f"{type(exc).__name__}: {exc}"
        self._failed_steps += 1
        log.error("step failed (%d in a row): %s", self._failed_steps, reason, exc_info=exc)
        self._scheduler.fail(plan, f"the step that computed this request failed: {reason}")
        if self._failed_steps >= MAX_FAILED_STEPS:
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
        for request_id in list(self._scheduler.requests):
            self._scheduler.cancel(request_id, FinishReason.ERROR, reason)

    def drain_finished(self) -> OutputBatch:
        """Ends that no step has reported yet."""
        return OutputBatch((), tuple(self._scheduler.take_finished()))

    def cancel_all(self) -> None:
        """Cancel every live request."""
        for request_id in list(self._scheduler.requests):
            self._scheduler.cancel(request_id)

    def close(self) -> None:
        """Cancel what is live and release the device. Idempotent."""
        self.cancel_all()
        if self._on_close is not None:
            self._on_close()
            self._on_close = None
        self._executor.close()
        self._health = Health(HealthState.FAILED, "the engine is closed")

    @property
    def health(self) -> Health:
        """Whether requests are served now."""
        return self._health

    def stats(self) -> EngineStats:
        """Counters and gauges."""
        s = self._scheduler
        return EngineStats(
            waiting=len(s.waiting),
            running=len(s.running),
            pages_total=s.table.total_pages,
            pages_free=s.table.available,
            page_size=s.table.page_size,
            prompt_tokens=s.prompt_tokens,
            generated_tokens=self._generated,
            cached_tokens=self._cached,
            preemptions=s.preemptions,
            steps=self._steps,
            finished=dict(self._finished),
        )
