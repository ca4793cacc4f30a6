"""Who runs in a step: requests, their states, and the one function that decides. Torch-free."""

from arbi_core.scheduler.limits import SchedulerLimits
from arbi_core.scheduler.plan import AdmitRow, Chunk, StepOutput, StepPlan
from arbi_core.scheduler.request import Request, RequestState
from arbi_core.scheduler.scheduler import Scheduler
from arbi_core.scheduler.tenants import TenantLimits, Tenants, parse_tenant_limits

__all__ = [
    "AdmitRow",
    "Chunk",
    "Request",
    "RequestState",
    "Scheduler",
    "SchedulerLimits",
    "StepOutput",
    "StepPlan",
    "TenantLimits",
    "Tenants",
    "parse_tenant_limits",
]
