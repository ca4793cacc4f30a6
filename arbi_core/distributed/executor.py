"""Rank 0's executor: every plan goes to the other ranks, then to its own runner.

When a step fails on rank 0 with an ordinary exception, the other ranks are asked where they are. Those that failed at
the same point, or have got to the end of the step, are in step: only the requests of that step end, and the engine
drops their rows on all ranks with the next plan. If a rank is anywhere else, the group ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arbi_core.distributed.torch_group import CollectiveError
from arbi_core.distributed.wire import encode_plan

if TYPE_CHECKING:
    from arbi_core.distributed.control import Control
    from arbi_core.offers import PendingStep, Runner
    from arbi_core.scheduler.plan import StepOutput, StepPlan

__all__ = ["DistributedExecutor"]


class DistributedExecutor:
    """See `arbi_core.offers.Executor`.

    Args:
        runner: rank 0's own.
        control: reaches the other ranks.
    """

    def __init__(self, runner: Runner, control: Control) -> None:
        self._runner = runner
        self._control = control
        self._collected = -1

    @property
    def failure(self) -> str | None:
        """Why the group has ended by a fault, known also while no step runs; None while it has not."""
        return None if self._control.failure is None else str(self._control.failure)

    def dispatch(self, plan: StepPlan) -> PendingStep:
        """Give every rank one step.

        Raises:
            RankFailedError: a rank is lost, and with it the group.
            Exception: what rank 0's runner raised; the group is in step and goes on.
        """
        self._control.send_step(plan.index, encode_plan(plan, self._collected))
        try:
            pending = self._runner.dispatch(plan)
        except Exception as exc:
            self._settle(plan.index, exc, dispatching=True)
            raise
        except BaseException:
            self._control.fail(0, f"was interrupted in step {plan.index}")
            raise
        self._control.step_dispatched(plan.index)
        return _DistributedStep(self, plan.index, pending)

    def collect(self, step: int, pending: PendingStep) -> StepOutput:
        """What the step drew. Raises as `dispatch` does."""
        try:
            with self._control.waiting():
                output = pending.result()
        except Exception as exc:
            self._settle(step, exc, dispatching=False)
            raise
        self._control.drew(output.token_ids)
        self._collected = step
        return output

    def close(self) -> None:
        """End the other ranks and release the device. Idempotent."""
        self._control.close()
        self._runner.close()

    def _settle(self, step: int, error: Exception, *, dispatching: bool) -> None:
        """After rank 0 failed: raises `RankFailedError` unless all ranks are in step."""
        if isinstance(error, CollectiveError):
            self._control.collective_failed(error)
        self._control.step_failed(step, dispatching=dispatching)


class _DistributedStep:
    """See `arbi_core.offers.PendingStep`."""

    def __init__(self, executor: DistributedExecutor, step: int, pending: PendingStep) -> None:
        self._executor, self._step, self._pending = executor, step, pending

    def result(self) -> StepOutput:
        """See `DistributedExecutor.collect`."""
        return self._executor.collect(self._step, self._pending)
