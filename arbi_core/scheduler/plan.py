"""What crosses between scheduler and runner: one `StepPlan` down, one `StepOutput` up. Plain data.

A plan is a delta: the runner keeps its own copy of every admitted row and is told only what changed, so that the same
few bytes can be broadcast to every rank.
"""

from __future__ import annotations

from attrs import field, frozen

from arbi_core.engine.messages import TokenLogprobs
from arbi_core.sampler.params import SamplingParams

__all__ = ["AdmitRow", "PlanRow", "StepOutput", "StepPlan"]


@frozen(kw_only=True)
class AdmitRow:
    """A request that enters the running set, for the first time or after a preemption.

    Attributes:
        request_id: whose.
        token_ids: prompt followed by what was generated before a preemption.
        num_prompt: how many of them are the prompt.
        computed: tokens whose state is already in the pages (a prefix-cache hit).
        pages: pages of the matched prefix, in order.
        sampling: how to draw.
        base_seed: seed of the request's draws.
        stop_token_ids: ids that `min_tokens` must hold back.
        state_row: row-pool row; 0 where the model has no recurrent state.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt: int
    computed: int
    pages: tuple[int, ...]
    sampling: SamplingParams
    base_seed: int
    stop_token_ids: frozenset[int] = frozenset()
    state_row: int = 0


@frozen
class PlanRow:
    """One row of the step.

    Attributes:
        request_id: whose.
        num_tokens: how many of its tokens are computed in this step.
        new_pages: pages appended to its block table before the step.
        samples: the row reaches its last known token, so the step draws the next one.
    """

    request_id: str
    num_tokens: int
    new_pages: tuple[int, ...] = ()
    samples: bool = True


@frozen
class StepPlan:
    """One step.

    Attributes:
        rows: decode rows first, then prefill chunks.
        admitted: rows that are new to the runner; each also appears in `rows`.
        dropped: requests that left the running set since the previous plan (finished or preempted).
    """

    rows: tuple[PlanRow, ...]
    admitted: tuple[AdmitRow, ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed by the step."""
        return sum(r.num_tokens for r in self.rows)


@frozen
class StepOutput:
    """What a step drew.

    Attributes:
        token_ids: drawn token by request, for rows with `PlanRow.samples`.
        logprobs: by request, where asked for.
        errors: requests whose row failed alone (for example a NaN in its logits), with the reason.
    """

    token_ids: dict[str, int]
    logprobs: dict[str, TokenLogprobs] = field(factory=dict)
    errors: dict[str, str] = field(factory=dict)
