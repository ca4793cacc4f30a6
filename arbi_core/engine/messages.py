"""What crosses between the engine and its consumers: plain data, no tensors. Torch-free."""

from __future__ import annotations

import enum

from attrs import define, field, frozen

from arbi_core.sampler.params import SamplingParams

__all__ = [
    "EngineStats",
    "FinishOut",
    "FinishReason",
    "OutputBatch",
    "Priority",
    "RequestRecord",
    "SubmitMsg",
    "TokenLogprobs",
    "TokenOut",
]


class Priority(enum.StrEnum):
    """Scheduling class. Batch work runs when no interactive work waits."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class FinishReason(enum.StrEnum):
    """Why a request ended; every request ends exactly once, with one of these."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


@frozen(kw_only=True)
class SubmitMsg:
    """A request as the engine takes it.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: at least one id, each in ``[0, vocab)``.
        sampling: ``n`` is expanded by the caller: the engine runs one completion per message.
        stop_token_ids: the model's end tokens merged with the request's (empty under `ignore_eos`).
        tenant: prefix-cache namespace and fairness key; ``""`` is shared by all anonymous callers.
        adapter: name of the adapter it runs with; part of the prefix-cache namespace.
        priority: scheduling class; None takes the tenant's.
        cache_enabled: read and write the prefix cache.
        timeout_s: seconds from arrival after which the request ends with ``timeout``; None never.
        arrival: `time.monotonic` at arrival.
        job_id: name under which its progress survives a restart; None for requests that do not.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    tenant: str = ""
    adapter: str = ""
    priority: Priority | None = None
    cache_enabled: bool = True
    timeout_s: float | None = None
    arrival: float = 0.0
    job_id: str | None = None


@frozen
class TokenLogprobs:
    """Log-probabilities at one generated position, over the raw logits (before penalties and filters).

    Attributes:
        token_id: the token that was drawn.
        logprob: natural log of its probability.
        rank: 1 + number of tokens that were more likely.
        top: ``(token_id, logprob)`` of the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@define
class TokenOut:
    """New tokens of one request. `logprobs` is as long as `token_ids` where the request asked for them, else empty.

    Not frozen because one is made for every token: a frozen one takes twice as long. Nobody changes it.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@frozen(kw_only=True)
class FinishOut:
    """The one terminal message of a request.

    Attributes:
        request_id: whose.
        reason: why.
        detail: for ``error``: what happened; else empty.
        stop_token_id: the id that ended it, if one did. It counts in usage and is not part of the text.
        prompt_tokens: length of the prompt.
        completion_tokens: tokens generated.
        cached_tokens: prompt tokens served from the prefix cache; 0 on a miss.
    """

    request_id: str
    reason: FinishReason
    detail: str = ""
    stop_token_id: int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@frozen
class OutputBatch:
    """Everything that one step produced; tokens come before finishes."""

    tokens: tuple[TokenOut, ...] = ()
    finished: tuple[FinishOut, ...] = ()


@frozen(kw_only=True)
class RequestRecord:
    """What `request_finished` hooks see. Times are `time.monotonic` seconds; None where the phase was not reached."""

    request_id: str
    tenant: str
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finished: float
    preemptions: int = 0


@frozen(kw_only=True)
class EngineStats:
    """A reading of the engine's counters and gauges.

    Attributes:
        waiting: queued requests.
        running: requests holding pages.
        pages_total: pages of the pool, the null page apart.
        pages_free: pages nobody needs (free and evictable).
        page_size: tokens per page.
        prompt_tokens: prompt tokens computed since start.
        generated_tokens: tokens generated since start.
        cached_tokens: prompt tokens taken from the prefix cache since start.
        resumed_tokens: tokens of preempted requests that were brought back instead of being computed again.
        preemptions: since start.
        prefix_waits: times that a request waited a step for a prefix that another was computing.
        quota_waits: times that a request waited a step for its tenant's quota.
        evictions: cached pages that had to go.
        steps: since start.
        finished: ended requests by reason.
        pages_cached: cached pages that nobody holds.
        tier_ram_bytes, tier_disk_bytes: what the host tier keeps, on one rank.
        tier_saved, tier_restored: pages that went to the host and came back since start.
        tier_disk_error: why the disk tier is off, if it failed.
        savepoints, savepoint_bytes: saved recurrent states, on one rank.
        savepoint_hits, savepoint_misses: prefix hits that found a saved state, or none.
    """

    waiting: int = 0
    running: int = 0
    pages_total: int = 0
    pages_free: int = 0
    page_size: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    resumed_tokens: int = 0
    preemptions: int = 0
    prefix_waits: int = 0
    quota_waits: int = 0
    evictions: int = 0
    steps: int = 0
    finished: dict[str, int] = field(factory=dict)
    pages_cached: int = 0
    tier_ram_bytes: int = 0
    tier_disk_bytes: int = 0
    tier_saved: int = 0
    tier_restored: int = 0
    tier_disk_error: str = ""
    savepoints: int = 0
    savepoint_bytes: int = 0
    savepoint_hits: int = 0
    savepoint_misses: int = 0
