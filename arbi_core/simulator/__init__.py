"""The real scheduler and pools over a cost model instead of a device, in virtual time. Torch-free.

`simulate` runs a trace (`trace`, or one of the synthetic `workloads`); `report` sums up what it saw. `policies` holds
the alternatives that the scheduler's own policies are compared with (docs/simulations.md).
"""

from arbi_core.simulator.cost import PRESETS, CostModel, Preset
from arbi_core.simulator.policies import Policies
from arbi_core.simulator.report import summarise
from arbi_core.simulator.simulate import EngineKnobs, Outcome, RequestLog, SimulationStuckError, simulate
from arbi_core.simulator.trace import TraceRequest, read_trace, write_trace
from arbi_core.simulator.workloads import WORKLOADS, make_workload

__all__ = [
    "PRESETS",
    "WORKLOADS",
    "CostModel",
    "EngineKnobs",
    "Outcome",
    "Policies",
    "Preset",
    "RequestLog",
    "SimulationStuckError",
    "TraceRequest",
    "make_workload",
    "read_trace",
    "simulate",
    "summarise",
    "write_trace",
]
