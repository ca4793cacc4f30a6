"""What consumers of an engine see: the HTTP server, `arbi chat`, `arbi bench`. Torch-free."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from arbi_core.engine.messages import EngineStats, FinishReason, Priority, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from arbi_core.sampler.params import SamplingParams
    from arbi_core.text.tokenizer import Tokenizer

__all__ = ["EngineClient", "Finish", "GenerationDelta", "Health", "HealthState", "ModelInfo"]


class HealthState(enum.StrEnum):
    """Where the engine is in its life."""

    BOOTING = "booting"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    FAILED = "failed"


@frozen
class Health:
    """State and, where it is not ready, the reason."""

    state: HealthState
    reason: str = ""


@frozen(kw_only=True)
class ModelInfo:
    """What clients may know of the served model.

    Attributes:
        name: name that requests use.
        architecture: HF architecture.
        max_model_len: prompt plus completion, in tokens.
        vocab_size: width of the logits; valid token ids are below it.
        default_sampling: sampling defaults from the checkpoint's generation config (``temperature``, ``top_p``, ...).
        kv_capacity_tokens: tokens that fit in the KV pool.
        kv_backend: resolved attention backends by state kind.
        max_pending: completions that may run and wait together.
    """

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    default_sampling: Mapping[str, Any]
    kv_capacity_tokens: int
    kv_backend: Mapping[str, str]
    max_pending: int = 1 << 30


@frozen(kw_only=True)
class Finish:
    """How one completion ended.

    Attributes:
        reason: why.
        detail: what happened, for ``error``.
        stop: the stop string or stop token id that ended it, if one did.
        prompt_tokens: length of the prompt.
        completion_tokens: tokens billed (those after a stop string are not).
        cached_tokens: prompt tokens served from the prefix cache.
    """

    reason: FinishReason
    detail: str = ""
    stop: str | int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@frozen(kw_only=True)
class GenerationDelta:
    """News of one completion.

    Attributes:
        index: which of the request's ``n`` completions.
        text: new text; valid UTF-8, never part of a stop string. Several tokens may pass before text appears.
        token_ids: new tokens.
        logprobs: one entry per token of `token_ids`, if the request asked for them.
        finish: set on the last delta of this completion.
    """

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None


class EngineClient(Protocol):
    """An engine as its consumers see it. All methods may be called from one asyncio loop."""

    @property
    def info(self) -> ModelInfo:
        """The served model."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None under ``skip_tokenizer_init``."""
        ...

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        tenant: str = "",
        priority: Priority | None = None,
        cache_enabled: bool = True,
        timeout_s: float | None = None,
        job_id: str | None = None,
    ) -> AsyncGenerator[GenerationDelta, None]:
        """Run ``sampling.n`` completions; yields deltas as steps end, the last of each completion with `finish`.

        `job_id` names a job whose progress survives a restart; see `arbi_core.engine.jobs`.

        Closing the generator early (or cancelling the task that iterates it) cancels the request and frees its pages.

        Raises:
            RequestError: the request cannot be served as written; raised at the first iteration.
            OverloadedError: the queue is full.
            EngineClosedError: the engine drains or is closed.
        """
        ...

    def stats(self) -> EngineStats:
        """A recent reading of counters and gauges."""
        ...

    def health(self) -> Health:
        """Whether requests are served now."""
        ...

    async def flush_cache(self, tenant: str | None = None) -> int:
        """Forget the prefix cache of a tenant, or of all; returns the pages freed. Running requests go on."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests, let running ones finish; returns whether all did. Then cancels the rest."""
        ...
