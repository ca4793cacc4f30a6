"""A worker of which something goes wrong: ``faulty_worker.py FAULT``; started in the place of the real one."""

import os
import sys


def break_it(fault):
    """Put the fault where the worker will meet it."""
    from arbi_core.engine import rank
    from arbi_core.errors import WeightError
    from arbi_core.runner.runner import ModelRunner

    dispatch = ModelRunner.dispatch

    def cannot_load(*_):
        raise WeightError("model.layers.3.mlp.down_proj.weight is missing")

    def fails_in_a_step(self, plan):
        if plan.index == 4:
            raise RuntimeError("the device fell off the bus")
        return dispatch(self, plan)

    if fault == "cannot load":
        rank.build_rank = cannot_load
    elif fault == "fails in a step":
        ModelRunner.dispatch = fails_in_a_step


if sys.argv[1] == "never joins":
    print("the cable is cut")
    sys.exit(3)

break_it(sys.argv[1])
from arbi_core.distributed import worker  # noqa: E402  # a worker that never joins imports nothing

status = worker.main()
sys.stderr.flush()
os._exit(status)
