"""Steps and rows that fail: who ends, who begins again, and what is not counted on any more."""

import itertools

import pytest

from arbi_core.engine.messages import FinishReason, Priority
from arbi_core.pool.savepoints import SavepointStore
from arbi_core.scheduler import RequestState
from support.toy_ranks import World, alone
from support.toy_worlds import begun, small_tier


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("fault", [0, "compute", "result"])
def test_failed_step_ends_whom_it_computed_and_nobody_else(depth, fault):
    w = begun(depth, seqs=1)
    w.add("b", [7, 8], tenant="t")
    w.step(fault=fault)
    w.collect(0)
    assert w.reason("a") is FinishReason.ERROR
    assert w.ends["a"].detail in {"transfers", "compute", "result"}
    w.run()
    assert w.outputs["b"] == alone([7, 8], 5)


def test_steps_behind_a_failed_one_are_void_and_their_requests_begin_again():
    w = World(depth=1, budget=4)
    w.add("a", range(3, 7), max_tokens=1)
    w.step(fault="result")
    w.add("b", range(7, 11), max_tokens=3)
    w.step(collect=2)
    assert w.rows_of(w.plans[-1]) == [("b", 4)]
    w.collect(0)
    b = w.scheduler.requests["b"]
    assert (b.state, b.owed, b.preemptions) == (RequestState.WAITING, 0, 1)
    assert w.outputs["b"] == []
    w.run()
    assert w.reason("a") is FinishReason.ERROR
    assert w.outputs["b"] == alone(range(7, 11), 3)


def admitted_without_tokens():
    """A step that admits a request and then gives its tokens to one that came behind it."""
    w = World(budget=6, size=4, seqs=4)
    w.add("first", range(3, 33), max_tokens=2)
    w.add("long", range(40, 60), max_tokens=2)
    w.add("short", range(70, 74), max_tokens=2)
    return w


def test_request_that_a_failed_step_only_admitted_begins_again():
    w = admitted_without_tokens()
    w.step(fault=0)
    plan = w.plans[-1]
    assert [a.request_id for a in plan.admitted] == ["first", "long", "short"]
    assert [name for name, _ in w.rows_of(plan)] == ["first", "short"]
    assert [w.reason(name) for name in ("first", "long", "short")] == [FinishReason.ERROR, None, FinishReason.ERROR]
    w.run()
    assert w.outputs["long"] == alone(range(40, 60), 2)


def test_rows_that_a_failed_step_was_to_drop_are_dropped_by_the_next():
    w = World(seqs=2)
    w.add("a", [5, 6], max_tokens=1)
    w.add("b", [7, 8], max_tokens=9)
    w.step()
    w.step(fault=0)
    assert w.plans[-1].dropped == (0,)
    w.step()
    assert set(w.plans[-1].dropped) == {0, 1}
    assert w.ranks.rows == {}


def test_pages_that_a_failed_step_was_to_save_are_not_counted_on():
    w = World(pages=5, size=4, tier=small_tier())
    w.add("old", range(3, 16), max_tokens=2, tenant="t")
    w.run()
    w.add("new", range(20, 33), max_tokens=2)
    w.step(fault=0)
    assert w.scheduler.tier.ram_bytes == 0
    w.add("again", range(3, 16), max_tokens=2, tenant="t")
    w.run()
    assert w.ends["again"].cached_tokens == 0
    assert w.outputs["again"] == alone(range(3, 16), 2)


def test_what_a_failed_step_was_to_forget_on_the_host_is_forgotten():
    w = World(seqs=1, tier=small_tier())
    w.add("bulk", [5, 6], max_tokens=9, priority=Priority.BATCH)
    w.step()
    w.add("chat", [7, 8], max_tokens=2)
    w.step()
    w.scheduler.cancel("bulk")
    assert len(w.ranks.host) == 1
    w.step(fault=0)
    w.run()
    assert w.ranks.host == {}


def test_nan_of_a_request_that_was_cancelled_meanwhile_empties_the_cache_too():
    w = World(depth=1, size=2)
    w.add("a", range(3, 9), max_tokens=9)
    w.step(nan=(0,))
    w.scheduler.cancel("a")
    assert w.table.peek(list(range(3, 9))) == 6
    w.collect(0)
    assert w.table.peek(list(range(3, 9))) == 0
    assert w.reason("a") is FinishReason.CANCELLED


def test_ranks_that_are_gone_leave_nothing_behind():
    w = begun(2, rows=4)
    w.add("b", [7, 8])
    w.step()
    w.scheduler.void_in_flight()
    for name in list(w.scheduler.requests):
        w.scheduler.cancel(name, FinishReason.ERROR, "gone")
    assert not w.scheduler.has_work
    assert w.table.available == w.table.total_pages
    assert w.rows.available == 4
    assert {e.reason for e in w.scheduler.take_finished()} == {FinishReason.ERROR}


def test_savepoints_survive_the_failure_of_another_tenants_step():
    store = SavepointStore(row_bytes=1, max_bytes=4, page_size=4, grid=4, handles=itertools.count(1))
    w = World(rows=4, savepoints=store)
    w.add("a", range(3, 9), tenant="t", max_tokens=1)
    w.run()
    w.add("b", [5, 6])
    w.step(fault="compute")
    w.add("again", range(3, 9), tenant="t")
    w.run()
    assert w.ends["again"].cached_tokens == 4
