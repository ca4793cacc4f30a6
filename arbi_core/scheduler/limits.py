"""Bounds of a step, and what is counted."""

from __future__ import annotations

from attrs import define, frozen

__all__ = ["SchedulerCounters", "SchedulerLimits"]


@frozen(kw_only=True)
class SchedulerLimits:
    """Bounds of a step.

    Attributes:
        max_num_seqs: rows.
        max_num_batched_tokens: tokens.
        max_prefill_chunk: tokens of one prefill row.
        max_model_len: tokens of one request, prompt and output together.
        lookahead: room kept beyond every decoding row's next token, for the drafts of a verify step.
        batch_prefill_share: share of the prefill tokens of a step that batch work may take while interactive requests
            run: it bounds how long an arriving request waits for the step that is under way.
        growth_pages: pages that an admission leaves free for each running row, as far as the row may still need them:
            with fewer, rows soon take pages from each other, and what is preempted is computed again.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int
    max_model_len: int
    lookahead: int = 0
    batch_prefill_share: float = 0.25
    growth_pages: int = 8

    @property
    def max_rows(self) -> int:
        """Most running requests: every one of them must find a token in the budget of a step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


@define
class SchedulerCounters:
    """What happened since start."""

    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    resumed_tokens: int = 0
    deferred_by_prefix: int = 0
    deferred_by_quota: int = 0
