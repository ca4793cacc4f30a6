"""Who runs in a step: requests, their states, and the one function that decides. Torch-free."""

from arbi_core.scheduler.plan import AdmitRow, PlanRow, StepOutput, StepPlan
from arbi_core.scheduler.request import Request, RequestState
from arbi_core.scheduler.scheduler import Scheduler, SchedulerLimits

__all__ = [
    "AdmitRow",
    "PlanRow",
    "Request",
    "RequestState",
    "Scheduler",
    "SchedulerLimits",
    "StepOutput",
    "StepPlan",
]
