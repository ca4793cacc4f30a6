"""What crosses between scheduler and ranks: one `StepPlan` down, one `StepOutput` up. Plain data, torch-free.

A plan is a delta: every rank keeps its own copy of the running rows, addressed by slot, and is told only what changed.
A step of 256 decoding rows is an array of 256 slots and a handful of new pages.
"""

from __future__ import annotations

import numpy as np
from attrs import field, frozen

from arbi_core.engine.messages import TokenLogprobs
from arbi_core.pool.transfers import Transfer, TransferOp, TransferResult
from arbi_core.sampler.params import SamplingParams

__all__ = ["AdmitRow", "Chunk", "StepOutput", "StepPlan", "Transfer", "TransferOp", "TransferResult"]


@frozen(kw_only=True)
class AdmitRow:
    """A request that enters the running set, for the first time or after a preemption.

    Attributes:
        slot: where the ranks keep it until it is dropped.
        request_id: whose.
        token_ids: prompt followed by what was generated before a preemption.
        num_prompt: how many of them are the prompt.
        computed: tokens whose state is already there (a prefix hit or a resumed preemption).
        pages: its pages in token order: those of the matched prefix, then those that the rest will fill.
        sampling: how to draw.
        base_seed: seed of the request's draws.
        stop_token_ids: ids that `min_tokens` must hold back.
        state_row: row-pool row; 0 where the model has no recurrent state.
    """

    slot: int
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
class Chunk:
    """A piece of one row's known tokens.

    Attributes:
        slot: whose.
        num_tokens: how many of its tokens are computed in this step.
        samples: the chunk reaches the last known token, so the step draws the next one.
    """

    slot: int
    num_tokens: int
    samples: bool


def _slots(values: object) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


@frozen(eq=False)
class StepPlan:
    """One step, carried out in the order of its fields.

    Attributes:
        index: number of the step; plans are carried out in this order.
        dropped: slots of requests that left the running set since the previous plan.
        transfers: moves between pages, rows and the host, in order, before anything is computed. A page or row is
            saved before its next owner loads, clears or writes it, because the list is in the order of the decisions.
        admitted: rows that are new to the ranks.
        new_pages: ``(slot, page)``, each appended to the slot's block table, in order.
        decode: ``(D,)`` int64, slots that compute their last token and draw the next.
        chunks: prompt pieces, computed in the same forward after the decode rows.
        snapshots: row savepoints, taken after the forward.
        polls: there may be nothing to do but to ask the ranks how background transfers went.
    """

    index: int
    dropped: tuple[int, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    admitted: tuple[AdmitRow, ...] = ()
    new_pages: tuple[tuple[int, int], ...] = ()
    decode: np.ndarray = field(factory=lambda: np.empty(0, dtype=np.int64), converter=_slots)
    chunks: tuple[Chunk, ...] = ()
    snapshots: tuple[Transfer, ...] = ()
    polls: bool = False

    @property
    def num_rows(self) -> int:
        """Rows computed by the step."""
        return len(self.decode) + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens computed by the step."""
        return len(self.decode) + sum(c.num_tokens for c in self.chunks)

    @property
    def num_draws(self) -> int:
        """Tokens drawn by the step: one per decode row, then one per chunk that samples, in this order."""
        return len(self.decode) + sum(c.samples for c in self.chunks)

    @property
    def empty(self) -> bool:
        """Whether the ranks have nothing to do, not even to forget a row."""
        return not (self.num_rows or self.dropped or self.transfers or self.admitted or self.polls)


@frozen(eq=False)
class StepOutput:
    """What a step drew.

    Attributes:
        token_ids: ``(R,)`` int64 drawn ids, in the order of `StepPlan.num_draws`.
        logprobs: by position in `token_ids`, where asked for.
        errors: by position in `token_ids`: rows that failed alone (for example a NaN in the logits), with the reason.
        transfers: background transfers that ended since the previous output.
    """

    token_ids: np.ndarray = field(factory=lambda: np.empty(0, dtype=np.int64), converter=_slots)
    logprobs: dict[int, TokenLogprobs] = field(factory=dict)
    errors: dict[int, str] = field(factory=dict)
    transfers: tuple[TransferResult, ...] = ()
