"""Steps that are decided before the host has seen what earlier ones drew."""

import pytest

from arbi_core.engine.messages import FinishReason, Priority
from arbi_core.scheduler import RequestState
from support.toy_ranks import World, alone, next_token
from support.toy_worlds import begun, small_tier


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_host_is_as_many_steps_late_as_it_may_be(depth):
    w = begun(depth)
    assert w.outputs["a"] == alone([5, 6], 3 - depth)
    w.run()
    assert w.outputs["a"] == alone([5, 6], 20)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_draws_after_a_stop_token_are_dropped(depth):
    stop = next_token([5, 6])
    w = World(depth=depth)
    w.add("a", [5, 6], max_tokens=20, stop_token_ids=frozenset({stop}))
    w.run()
    assert w.outputs["a"] == [stop]
    assert w.ends["a"].completion_tokens == 1
    assert sum(p.num_draws for p in w.plans) == 1 + depth


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_nothing_is_drawn_beyond_the_limit(depth):
    w = World(depth=depth)
    w.add("a", [5, 6], max_tokens=3)
    w.run()
    assert sum(p.num_draws for p in w.plans) == 3
    assert w.reason("a") is FinishReason.LENGTH


def test_request_whose_last_draw_is_on_the_way_is_not_scheduled_again():
    w = World(depth=2)
    w.add("a", [5, 6], max_tokens=2)
    w.step()
    w.step()
    assert w.scheduler.requests["a"].state is RequestState.CLOSING
    assert w.scheduler.schedule(1.0).empty


def test_cancel_in_flight_drops_the_draws_and_keeps_what_was_computed():
    w = begun(2)
    w.scheduler.cancel("a")
    assert w.table.available == w.table.total_pages
    w.run()
    assert w.reason("a") is FinishReason.CANCELLED
    assert w.outputs["a"] == alone([5, 6], 1)
    assert w.ends["a"].completion_tokens == 1


def test_slot_of_a_cancelled_request_is_dropped_before_it_is_given_away():
    w = begun(1, seqs=1)
    w.scheduler.cancel("a")
    w.add("b", [7, 8])
    plan = w.step()
    assert plan.dropped == (0,)
    assert [a.slot for a in plan.admitted] == [0]
    w.run()
    assert w.outputs["b"] == alone([7, 8], 5)


def preempted(depth, **options):
    """Batch work that lost its place to an interactive request while `depth` of its draws were on the way."""
    w = World(depth=depth, seqs=1, **options)
    w.add("bulk", [5, 6], max_tokens=20, priority=Priority.BATCH)
    for _ in range(4):
        w.step()
    w.add("chat", [7, 8], max_tokens=3)
    w.step(collect=depth + 1)
    assert [r.id for r in w.scheduler.running.rows] == ["chat"]
    return w


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_preempted_in_flight_waits_for_its_draws_and_loses_none(depth):
    w = preempted(depth)
    bulk = w.scheduler.requests["bulk"]
    assert bulk.owed == depth
    w.collect(0)
    assert bulk.owed == 0
    assert w.outputs["bulk"] == alone([5, 6], 4)
    w.run()
    assert w.outputs["bulk"] == alone([5, 6], 20)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_preempted_in_flight_goes_on_where_it_was_with_a_host_tier(depth):
    w = preempted(depth, tier=small_tier())
    w.run()
    back = [a for p in w.plans for a in p.admitted if a.request_id == "bulk"][1]
    assert back.computed == 5, (
        "2 prompt tokens and 3 of 4 generated ones were written, the 5th state in a part of a page"
    )
    assert len(back.token_ids) == 6
    assert w.scheduler.counters.resumed_tokens == 5
    assert w.outputs["bulk"] == alone([5, 6], 20)
    assert w.ranks.host == {}


def test_request_that_ends_while_it_waits_leaves_nothing_on_the_host():
    w = World(depth=1, seqs=1, tier=small_tier())
    w.add("bulk", [5, 6], max_tokens=3, priority=Priority.BATCH)
    for _ in range(3):
        w.step()
    w.add("chat", [7, 8], max_tokens=3)
    w.run()
    assert w.outputs["bulk"] == alone([5, 6], 3)
    assert w.scheduler.tier.ram_bytes == 0
    assert w.ranks.host == {}


@pytest.mark.parametrize("depth", [1, 2])
def test_draws_that_depend_on_history_wait_for_the_host(depth):
    w = World(depth=depth)
    w.add("a", [5, 6], max_tokens=5, history=True)
    assert not w.scheduler.draws_need_history
    w.step()
    assert w.scheduler.draws_need_history
    for n in range(1, 4):
        assert len(w.outputs["a"]) == n - 1
        w.step()
    w.run()
    assert not w.scheduler.draws_need_history
    assert w.outputs["a"] == alone([5, 6], 5)


def test_steps_are_committed_and_dispatched_in_order():
    w = World(depth=2)
    w.add("a", [5, 6], max_tokens=9)
    w.step()
    w.step()
    (first, _), (second, output) = w.flights
    with pytest.raises(RuntimeError, match="step 1 was dispatched out of order"):
        w.scheduler.dispatched(first)
    with pytest.raises(RuntimeError, match="step 2 was committed out of order"):
        w.scheduler.commit(second, output, 1.0)
