"""A request as the scheduler sees it."""

from __future__ import annotations

import enum

from attrs import define, field

from arbi_core.engine.messages import FinishReason, Priority, SubmitMsg
from arbi_core.pool import Namespace, Prefix

__all__ = ["Kept", "Request", "RequestState"]


class RequestState(enum.Enum):
    """Where a request is in its life; preemption leads from any running state back to WAITING."""

    WAITING = "waiting"
    PREFILL = "prefill"
    """Running, with known tokens left to compute."""
    DECODE = "decode"
    """Running; every step computes its newest token and draws the next."""
    CLOSING = "closing"
    """Running; its last draw is on the way, nothing more is scheduled."""
    FINISHED = "finished"


@define
class Kept:
    """What the host keeps of a preempted request beside its full pages, so that nothing is computed twice.

    Attributes:
        written: tokens whose state it completes.
        page: handle of the last page, which is filled in part; 0 if the state ends with a full page.
        row: handle of the recurrent row; 0 without one.
    """

    written: int
    page: int = 0
    row: int = 0


@define(eq=False)
class Request:
    """State of one request. Equality is identity.

    Attributes:
        msg: what was submitted.
        base_seed: seed of its draws.
        limit: most tokens it may reach, prompt and output together.
        token_ids: prompt followed by the generated tokens that the host knows.
        needs_history: its draws depend on the tokens drawn before, so the host must have seen them.
        computed: tokens whose state is written once the steps decided so far have run; meaningful in PREFILL.
        owed: draws that were on the way when it lost its place; it waits for them before it runs again.
        cached_tokens: prompt tokens that its first admission took from the prefix cache.
        charged: known tokens that its tenant has paid for.
        slot: where the ranks keep it while it runs.
        state_row: row-pool row while it runs; 0 where the model has no recurrent state.
        prefix: walk through the prefix cache while it waits.
        kept: what the host keeps of it while it waits after a preemption.
        fetched: its pages were sent for from disk while it waits: once is enough, or waiting could have no end.
        leads: key under which others wait for its next page.
        preemptions: how often it lost its place.
    """

    msg: SubmitMsg
    base_seed: int
    limit: int
    token_ids: list[int] = field(init=False)
    namespace: Namespace = field(init=False)
    stops: frozenset[int] = field(init=False)
    order: tuple[int, float, str] = field(init=False)
    needs_history: bool = field(init=False)
    state: RequestState = RequestState.WAITING
    computed: int = 0
    owed: int = 0
    cached_tokens: int | None = None
    charged: int = 0
    slot: int = -1
    state_row: int = 0
    prefix: Prefix | None = None
    kept: Kept | None = None
    fetched: bool = False
    leads: tuple[Namespace, bytes] | None = None
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    first_scheduled: float | None = None
    first_token: float | None = None

    def __attrs_post_init__(self) -> None:
        msg = self.msg
        self.token_ids = list(msg.prompt_token_ids)
        self.namespace = Namespace(msg.tenant, msg.adapter)
        self.stops = msg.stop_token_ids
        self.order = (self.rank, msg.arrival, msg.request_id)
        p = msg.sampling
        penalties = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1
        self.needs_history = bool(penalties or p.logits_processors)

    def resume(self, output: tuple[int, ...]) -> None:
        """Begin with tokens that an earlier run generated. Before it is queued only."""
        self.token_ids += output

    @property
    def id(self) -> str:
        """Request id."""
        return self.msg.request_id

    @property
    def rank(self) -> int:
        """0 for interactive, 1 for batch."""
        return 1 if self.msg.priority is Priority.BATCH else 0

    @property
    def num_prompt(self) -> int:
        """Length of the submitted prompt."""
        return len(self.msg.prompt_token_ids)

    @property
    def num_output(self) -> int:
        """Generated tokens that the host knows."""
        return len(self.token_ids) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Known tokens that are not computed yet; meaningful while it waits or is in PREFILL."""
        return len(self.token_ids) - self.computed

    @property
    def running(self) -> bool:
        """Whether it holds a slot and pages."""
        return self.state not in {RequestState.WAITING, RequestState.FINISHED}

    @property
    def deadline(self) -> float | None:
        """`time.monotonic` at which it times out, or None."""
        return None if self.msg.timeout_s is None else self.msg.arrival + self.msg.timeout_s
