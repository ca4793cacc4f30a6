"""A step that was decided and whose output has not been committed."""

from __future__ import annotations

from attrs import define

from arbi_core.scheduler.plan import StepPlan
from arbi_core.scheduler.request import Request

__all__ = ["InFlight"]


@define(eq=False)
class InFlight:
    """What is remembered of a step until its output is there.

    Attributes:
        plan: the step.
        drawing: whose draws its output will hold, in order.
        chunked: requests whose prompt pieces it computes.
        admitted: requests that it made known to the ranks.
        void: its output is not to be used: a step before it failed.
    """

    plan: StepPlan
    drawing: list[Request]
    chunked: list[Request]
    admitted: list[Request]
    void: bool = False

    @property
    def requests(self) -> list[Request]:
        """Whom it computes, each once."""
        return list({id(r): r for r in self.drawing + self.chunked}.values())

    @property
    def touched(self) -> list[Request]:
        """Whom it computes or makes known to the ranks, each once."""
        return list({id(r): r for r in self.drawing + self.chunked + self.admitted}.values())
