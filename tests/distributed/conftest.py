"""Ranks as threads of one process over real sockets, with runners that do what a script says."""

import threading
import time

import numpy as np
import pytest

from arbi_core.distributed.channel import Listener, connect
from arbi_core.distributed.control import Control
from arbi_core.distributed.executor import DistributedExecutor
from arbi_core.distributed.link import Link
from arbi_core.distributed.ranks import FollowingRanks
from arbi_core.distributed.torch_group import CollectiveError
from arbi_core.errors import RankFailedError
from arbi_core.scheduler.plan import StepOutput, StepPlan
from arbi_core.spec import ParallelSpec

TOKEN = b"t" * 32


class Meeting:
    """Where fake ranks do their collectives; `abort` lets all that wait go with an error."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size)
        self.groups = [FakeGroup(self, ParallelSpec(rank, size)) for rank in range(size)]

    def abort(self):
        self.barrier.abort()


class FakeGroup:
    def __init__(self, meeting, spec):
        self.meeting, self.spec, self.collectives = meeting, spec, 0

    def meet(self):
        self.collectives += 1
        try:
            self.meeting.barrier.wait(20)
        except threading.BrokenBarrierError as exc:
            raise CollectiveError("a rank is gone") from exc

    def abort(self):
        self.meeting.abort()


class ScriptedRunner:
    """Two collectives per step; `script[(index, point)]` is called before the first (0), between (1) and after (2)."""

    def __init__(self, group, script=None):
        self.group, self.script = group, script or {}
        self.log, self.closed = [], False

    def dispatch(self, plan):
        self.log.append(("dispatch", plan.index))
        for point in (0, 1, 2):
            self.script.get((plan.index, point), lambda: None)()
            if point < 2:
                self.group.meet()
        return ScriptedStep(self, plan.index)

    def close(self):
        self.closed = True


class ScriptedStep:
    def __init__(self, runner, index):
        self.runner, self.index = runner, index

    def result(self):
        self.runner.log.append(("result", self.index))
        ids = self.runner.script.get((self.index, "result"), lambda: [self.index])()
        return StepOutput(np.array(ids))


class Party:
    """A leader and its followers."""

    def __init__(self, size, timeout_s, scripts, autoready=True):
        self.meeting = Meeting(size)
        self.runners = [ScriptedRunner(g, scripts.get(g.spec.rank)) for g in self.meeting.groups]
        self.lost = threading.Event()
        self.ends = {}
        listener = Listener("127.0.0.1", size, TOKEN)
        self.links = [
            Link(connect("127.0.0.1", listener.port, TOKEN, rank, 5), timeout_s=timeout_s, on_lost=self.lost.set)
            for rank in range(1, size)
        ]
        self.ranks = [
            FollowingRanks(group, group.spec.rank, link)
            for group, link in zip(self.meeting.groups[1:], self.links, strict=True)
        ]
        self.control = Control(
            listener.join(5, lambda: None),
            timeout_s=timeout_s,
            collectives=lambda: self.meeting.groups[0].collectives,
            on_failure=self.meeting.abort,
        )
        self.executor = DistributedExecutor(self.runners[0], self.control)
        self.threads = []
        if autoready:
            self.threads = [threading.Thread(target=self._follow, args=(r,), daemon=True) for r in self.ranks]
            for thread in self.threads:
                thread.start()
            self.control.wait_ready()

    def _follow(self, ranks):
        try:
            ranks.follow(self.runners[ranks.rank])
            self.ends[ranks.rank] = "closed"
        except RankFailedError as exc:
            self.ends[ranks.rank] = str(exc)
        finally:
            ranks.close()

    def step(self, index):
        return self.executor.dispatch(StepPlan(index=index, decode=[0]))

    def run(self, first, last, pause_s=0.0):
        """Whole steps, one after the other."""
        for index in range(first, last):
            self.step(index).result()
            time.sleep(pause_s)

    def wait_for_failure(self):
        """Raise it."""
        self.until_failed(10)
        self.control.raise_if_failed()

    def until_failed(self, timeout_s):
        deadline = time.monotonic() + timeout_s
        while self.control.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return str(self.control.failure)

    def close(self):
        if not self.threads:
            for link in self.links:
                link.close()
        self.executor.close()
        self.meeting.abort()
        for link in self.links:
            link.close()
        for thread in self.threads:
            thread.join(5)
            assert not thread.is_alive(), "a follower hangs"


@pytest.fixture
def party():
    """Makes a group of threads: ``party(size=2, timeout_s=5.0, scripts={rank: {(step, point): call}})``."""
    made = []

    def make(size=2, timeout_s=5.0, scripts=None, **options):
        made.append(Party(size, timeout_s, scripts or {}, **options))
        return made[-1]

    yield make
    for group in made:
        group.close()
