"""Executor ``local``: one rank, in the engine's own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from arbi_core.api import hookimpl

if TYPE_CHECKING:
    from arbi_core.offers import ExecutorFactory
    from arbi_core.runner.runner import ModelRunner
    from arbi_core.scheduler.plan import StepOutput, StepPlan

__all__ = ["LocalExecutorFactory"]

arbi_api_version = 1


class _LocalExecutor:
    def __init__(self, runner: ModelRunner) -> None:
        self._runner: ModelRunner | None = runner

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run the plan here."""
        if self._runner is None:
            raise RuntimeError("the executor is closed")
        return self._runner.execute(plan)

    def close(self) -> None:
        """Drop model and state."""
        if self._runner is not None:
            self._runner.binding.release()
            self._runner = None


class LocalExecutorFactory:
    """See `arbi_core.offers.ExecutorFactory`."""

    name = "local"

    def start(self, build_rank: Callable[[], Any]) -> _LocalExecutor:
        """Build the one rank."""
        return _LocalExecutor(build_rank())


@hookimpl
def arbi_executors() -> list[ExecutorFactory]:
    """Offer it."""
    return [LocalExecutorFactory()]
