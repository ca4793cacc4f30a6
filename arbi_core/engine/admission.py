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

    def finished(self, count: int) -> None:
        """Count requests that ended now."""
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
        return evolve(msg, priority=_priority(msg.priority, limits.priority))

    def _check_queues(self, msg: SubmitMsg, limits: TenantLimits) -> None:
        waiting = len(self._scheduler.waiting)
        if waiting >= self._max_queue:
            raise OverloadedError(
                f"{waiting} requests are already waiting (scheduler.max_queue is {self._max_queue}); try again later",
                retry_after=self._retry_after(waiting - self._max_queue + 1),
            )
        tenant = self._scheduler.tenants.find(msg.tenant)
        mine = 0 if tenant is None else tenant.waiting
        if limits.max_waiting is not None and mine >= limits.max_waiting:
            raise OverloadedError(
                f"{mine} requests of this tenant are already waiting (its max_waiting is {limits.max_waiting}); try "
                "again later",
                retry_after=self._retry_after(mine - limits.max_waiting + 1),
            )

    def _retry_after(self, places: int) -> float:
        """Seconds until `places` requests will have left the queue at the present rate."""
        now = time.monotonic()
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
