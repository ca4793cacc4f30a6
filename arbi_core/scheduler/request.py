"""A request as the scheduler sees it."""

from __future__ import annotations

import enum

from attrs import define, field

from arbi_core.engine.messages import FinishReason, Priority, SubmitMsg

__all__ = ["Request", "RequestState"]


class RequestState(enum.Enum):
    """Where a request is in its life; preemption leads from RUNNING back to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@define(eq=False)
class Request:
    """State of one request. Equality is identity.

    Attributes:
        msg: what was submitted.
        base_seed: seed of its draws.
        token_ids: prompt followed by the generated tokens.
        computed: tokens whose state is in the pages.
        cached_tokens: prompt tokens that its first admission took from the prefix cache.
        state_row: row-pool row while running; 0 where the model has no recurrent state.
        preemptions: how often it lost its pages.
    """

    msg: SubmitMsg
    base_seed: int
    token_ids: list[int] = field(init=False)
    state: RequestState = RequestState.WAITING
    computed: int = 0
    cached_tokens: int | None = None
    state_row: int = 0
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    first_scheduled: float | None = None
    first_token: float | None = None

    def __attrs_post_init__(self) -> None:
        self.token_ids = list(self.msg.prompt_token_ids)

    @property
    def id(self) -> str:
        """Request id."""
        return self.msg.request_id

    @property
    def num_prompt(self) -> int:
        """Length of the submitted prompt."""
        return len(self.msg.prompt_token_ids)

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Known tokens that are not computed yet; 1 while decoding."""
        return len(self.token_ids) - self.computed

    @property
    def decoding(self) -> bool:
        """Whether its next step computes exactly the token it drew last."""
        return self.num_output > 0 and self.remaining == 1

    @property
    def order(self) -> tuple[int, float, str]:
        """Precedence: interactive before batch, then by arrival. A request may take pages only from later ones."""
        return (0 if self.msg.priority is Priority.INTERACTIVE else 1, self.msg.arrival, self.id)

    @property
    def deadline(self) -> float | None:
        """`time.monotonic` at which it times out, or None."""
        return None if self.msg.timeout_s is None else self.msg.arrival + self.msg.timeout_s
