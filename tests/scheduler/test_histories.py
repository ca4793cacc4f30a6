"""Random histories: no request is lost, leaked or mixed with another, whatever happens to it and when.

`benchmarks/run_histories.py` drives the same world for hundreds of thousands of steps.
"""

import logging

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from arbi_core.engine.messages import Priority
from support.histories import ADAPTERS, TENANTS, History
from support.random_acts import random_setup

TEXTS = st.builds(lambda head, tail: head + tail, st.lists(st.just(5), max_size=20), st.lists(st.sampled_from([5, 6])))


@pytest.fixture(autouse=True)
def _failing_disks_are_part_of_the_plan(caplog):
    caplog.set_level(logging.ERROR, "arbi.tiers")


class Histories(RuleBasedStateMachine):
    depth = None

    @initialize(rng=st.randoms(use_true_random=False))
    def begin(self, rng):
        fixed = {} if self.depth is None else {"depth": self.depth}
        self.history = History(random_setup(rng, **fixed))
        self.names = 0

    @rule(
        text=TEXTS,
        max_tokens=st.integers(1, 20),
        tenant=st.sampled_from(TENANTS),
        adapter=st.sampled_from(ADAPTERS),
        more=st.fixed_dictionaries(
            {},
            optional={
                "priority": st.sampled_from(Priority),
                "cache_enabled": st.just(False),
                "stop_token_ids": st.frozensets(st.integers(3, 25), min_size=1, max_size=8),
                "timeout_s": st.sampled_from([0.002, 0.02]),
                "history": st.just(True),
            },
        ),
    )
    def submit(self, text, max_tokens, tenant, adapter, more):
        self.arrive((text or [5])[: self.history.setup.max_len - 1], max_tokens, tenant, adapter, more)

    @precondition(lambda self: self.history.texts)
    @rule(data=st.data(), more=st.integers(0, 3))
    def next_turn(self, data, more):
        """Go on from what an earlier request said."""
        earlier = data.draw(st.sampled_from(sorted(self.history.texts)))
        msg = self.history.asked[earlier].msg
        text = [*self.history.texts[earlier], 5, 6, 5][: self.history.setup.max_len - 1]
        self.arrive(text, 1 + more, msg.tenant, msg.adapter, {})

    def arrive(self, prompt, max_tokens, tenant, adapter, more):
        self.names += 1
        options = {"tenant": tenant, "adapter": adapter, **more}
        self.history.act("submit", f"r{self.names}", prompt, max_tokens, options)

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.history.act("turn")

    @rule(keep=st.integers(0, 1))
    def step_and_catch_up(self, keep):
        self.history.act("turn", None, (), keep)

    @rule(fault=st.sampled_from([0, 1, 2, "compute", "result"]))
    def failing_step(self, fault):
        self.history.act("turn", fault)

    @rule(row=st.integers(0, 3))
    def step_with_nan(self, row):
        self.history.act("turn", None, (row,))

    @precondition(lambda self: self.history.scheduler.requests)
    @rule(data=st.data())
    def cancel(self, data):
        self.history.act("cancel", data.draw(st.sampled_from(sorted(self.history.scheduler.requests))))

    @rule(tenant=st.sampled_from([None, *TENANTS]))
    def flush(self, tenant):
        self.history.act("flush", tenant)

    @rule(fail_spills=st.booleans(), fail_fetches=st.booleans(), delay=st.integers(0, 4))
    def disk(self, fail_spills, fail_fetches, delay):
        self.history.act("disk", fail_spills, fail_fetches, delay)

    @rule(seconds=st.sampled_from([0.01, 0.1]))
    def sleep(self, seconds):
        self.history.act("sleep", seconds)

    @rule()
    def idle(self):
        self.history.act("idle")

    @precondition(lambda self: self.names > 3)
    @rule()
    def crash(self):
        """The ranks are gone for good: the history ends, another begins."""
        setup = self.history.setup
        self.history.act("crash")
        self.history = History(setup)

    def teardown(self):
        if hasattr(self, "history"):
            self.history.act("idle")


class Synchronous(Histories):
    depth = 0


class OneAhead(Histories):
    depth = 1


class TwoAhead(Histories):
    depth = 2


SMALL = settings(max_examples=200, stateful_step_count=50, deadline=None)
for machine in (Synchronous, OneAhead, TwoAhead):
    machine.TestCase.settings = SMALL
TestSynchronous = Synchronous.TestCase
TestOneAhead = OneAhead.TestCase
TestTwoAhead = TwoAhead.TestCase
