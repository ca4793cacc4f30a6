"""A device that computes nothing: it knows how long a step takes and what it would draw."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from arbi_core.scheduler import StepPlan
from arbi_core.simulator.cost import CostModel

__all__ = ["Device"]


class Device:
    """Knows of each slot how much is computed; says what a step costs and what it draws.

    Args:
        max_rows: slots.
        cost: what its steps cost.

    Attributes:
        free_at: when it has done what it was given, virtual seconds.
        owner: request id by slot.
        reached: by request, how far it was computed when it last lost its slot.
        recomputed: tokens computed a second time.
    """

    def __init__(self, max_rows: int, cost: CostModel) -> None:
        self.cost = cost
        self.free_at = 0.0
        self.context = np.zeros(max_rows, dtype=np.int64)
        self.base = np.zeros(max_rows, dtype=np.int64)
        self.owner = [""] * max_rows
        self.reached: dict[str, int] = {}
        self.recomputed = 0

    def admit(self, plan: StepPlan, base: Callable[[str], int]) -> None:
        """Apply what the plan changes about rows. `base` gives the first id of a request's own text."""
        for slot in plan.dropped:
            owner = self.owner[slot]
            self.reached[owner] = max(self.reached.get(owner, 0), int(self.context[slot]))
        for row in plan.admitted:
            self.owner[row.slot] = row.request_id
            self.context[row.slot] = row.computed
            self.base[row.slot] = base(row.request_id)

    def execute(self, plan: StepPlan) -> tuple[float, np.ndarray]:
        """Seconds of the step, and the ids that it draws."""
        decode, cost, context = plan.decode, self.cost, self.context
        seconds = 0.0
        if plan.num_rows:
            context[decode] += 1
            seconds = cost.step_s + cost.decode(len(decode), int(context[decode].sum()))
        for c in plan.chunks:
            before = int(context[c.slot])
            seconds += cost.chunk(before, c.num_tokens)
            reached = self.reached.get(self.owner[c.slot], 0)
            self.recomputed += max(0, min(reached, before + c.num_tokens) - before)
            context[c.slot] += c.num_tokens
        slots = np.concatenate([decode, np.array([c.slot for c in plan.chunks if c.samples], dtype=np.int64)])
        return seconds, self.base[slots] + context[slots]
