"""The engine's front door: what a request must fulfil before it is queued."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from attrs import evolve

from arbi_core.engine.messages import Priority, SubmitMsg
from arbi_core.errors import OverloadedError, RequestError

if TYPE_CHECKING:
    from arbi_core.engine.client import ModelInfo
    from arbi_core.scheduler import Scheduler, TenantLimits
    from arbi_core.scheduler.tenants import Tenant

__all__ = ["AdmissionGate"]

LONGEST_RETRY_S = 60.0
RATE_OVER_S = 30.0
"""Ends of this many past seconds say how fast the queue moves."""


class AdmissionGate:
    """Checks requests one by one; keeps how fast requests end, to tell refused ones when to come back.

    Args:
        info: the served model.
        scheduler: whose queue is bounded.
        max_queue: waiting requests of all tenants.
        processors: names of installed logits processors.
    """

    def __init__(self, info: ModelInfo, scheduler: Scheduler, max_queue: int, processors: frozenset[str]) -> None:
        self._info = info
        self._scheduler = scheduler
        self._max_queue = max_queue
        self._processors = processors
        self._ends: deque[tuple[float, int]] = deque()
        self._fresh = 0

    def finished(self, count: int) -> None:
        """A step has run: count the requests that ended."""
        self._fresh = 0
        if count:
            self._ends.append((time.monotonic(), count))

    def check(self, msg: SubmitMsg, *, bounded: bool) -> SubmitMsg:
        """Return the request as it will run.

        Raises:
            RequestError: it can never be served as written.
            OverloadedError: a queue is full (only if `bounded`).
        """
        self._check_prompt(msg)
        self._check_sampling(msg)
        if msg.timeout_s is not None and not msg.timeout_s > 0:
            raise RequestError(f"timeout_s is {msg.timeout_s:g}; it must be greater than 0", param="timeout_s")
        if msg.job_id is not None and not msg.job_id.strip():
            raise RequestError("job_id is empty; leave it out, or name the job", param="job_id")
        if msg.request_id in self._scheduler.requests:
            raise RequestError(f"request id {msg.request_id!r} is already running", param="request_id")
        limits = self._scheduler.tenants.limits(msg.tenant)
        most = limits.max_prompt_tokens
        if most is not None and len(msg.prompt_token_ids) > most:
            raise RequestError(
                f"the prompt has {len(msg.prompt_token_ids)} tokens; this tenant may send at most {most}",
                param="prompt",
                code="quota_exceeded",
            )
        if bounded:
            self._check_queues(msg, limits)
        self._fresh += 1
        return evolve(msg, priority=_priority(msg.priority, limits.priority))

    def _check_queues(self, msg: SubmitMsg, limits: TenantLimits) -> None:
        """Refuse what finds no place in the queue beside those that will start at once.

        Those that came since the last step may find a free row in the next one.
        Requests that only their tenant's quota holds back take no places from other tenants; a tenant that is held
        back has as many places for itself.
        """
        now, scheduler = time.monotonic(), self._scheduler
        held = [t for t in scheduler.tenants if t.waiting and not t.may_start(now)]
        tenant = scheduler.tenants.find(msg.tenant)
        mine = 0 if tenant is None else tenant.waiting
        bound = tenant is not None and tenant in held
        free = 0 if bound else min(self._fresh, scheduler.limits.max_rows - len(scheduler.running))
        waiting = mine if bound else len(scheduler.waiting) - sum(t.waiting for t in held)
        if waiting >= self._max_queue + free:
            raise OverloadedError(
                f"{waiting} requests are already waiting (scheduler.max_queue is {self._max_queue}); try again later",
                retry_after=self._retry_after(waiting - self._max_queue - free + 1, tenant if bound else None),
            )
        most = limits.max_waiting
        if most is None:
            return
        running = 0 if tenant is None else tenant.running
        room = free if limits.max_running is None else min(free, max(0, limits.max_running - running))
        if mine >= most + room:
            raise OverloadedError(
                f"{mine} requests of this tenant are already waiting (its max_waiting is {most}); try again later",
                retry_after=self._retry_after(mine - most - room + 1, tenant),
            )

    def _retry_after(self, places: int, tenant: Tenant | None = None) -> float:
        """Seconds until `places` requests will have left the queue at the present rate, a tenant's debt paid before."""
        now = time.monotonic()
        start = None if tenant is None else tenant.next_start(now)
        if start is not None:
            return min(LONGEST_RETRY_S, max(1.0, start - now))
        while self._ends and self._ends[0][0] < now - RATE_OVER_S:
            self._ends.popleft()
        ended = sum(count for _, count in self._ends)
        if not ended:
            return 1.0
        return min(LONGEST_RETRY_S, max(1.0, places * (now - self._ends[0][0]) / ended))

    def _check_prompt(self, msg: SubmitMsg) -> None:
        ids, limit = msg.prompt_token_ids, self._info.max_model_len
        if not ids:
            raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
        if len(ids) >= limit:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but the context of this model is {limit} tokens and at least one "
                "must be left for the answer; shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )
        if min(ids) < 0 or max(ids) >= self._info.vocab_size:
            bad = next(t for t in ids if not 0 <= t < self._info.vocab_size)
            raise RequestError(
                f"token id {bad} is outside the vocabulary (0 to {self._info.vocab_size - 1})", param="prompt"
            )

    def _check_sampling(self, msg: SubmitMsg) -> None:
        unknown = sorted(set(msg.sampling.logits_processors) - self._processors)
        if unknown:
            installed = ", ".join(sorted(self._processors)) or "none"
            raise RequestError(
                f"no installed plugin offers the logits processor {unknown[0]!r} (installed: {installed})",
                param="logits_processors",
            )
        outside = [t for t in msg.sampling.logit_bias or () if t >= self._info.vocab_size]
        outside += [t for t in msg.stop_token_ids if t >= self._info.vocab_size]
        if outside:
            raise RequestError(f"token id {outside[0]} is outside the vocabulary (0 to {self._info.vocab_size - 1})")


def _priority(asked: Priority | None, granted: Priority) -> Priority:
    """A request may lower itself, never raise itself.

    Raises:
        RequestError: it asks for more than its tenant has.
    """
    if asked is None:
        return granted
    if asked is Priority.INTERACTIVE and granted is Priority.BATCH:
        raise RequestError(
            "this tenant's requests run as batch work; priority 'interactive' is above it", param="priority"
        )
    return asked
