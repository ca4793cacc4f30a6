"""Who starts, who waits, who gives way, and who can never be served."""

import itertools

import pytest

from arbi_core.engine.admission import AdmissionGate
from arbi_core.engine.client import ModelInfo
from arbi_core.engine.messages import FinishReason, Priority, SubmitMsg
from arbi_core.errors import RequestError
from arbi_core.pool.savepoints import SavepointStore
from arbi_core.sampler.params import SamplingParams
from arbi_core.scheduler import TenantLimits, Tenants
from support.toy_ranks import World, alone

INFO = ModelInfo(
    name="m", architecture="A", max_model_len=64, vocab_size=100, default_sampling={}, kv_capacity_tokens=64, kv_backend={}
)  # fmt: skip


def running(w):
    return [r.id for r in w.scheduler.running.rows]


def ask(limits, priority):
    w = World(tenants=Tenants(limits))
    gate = AdmissionGate(INFO, w.scheduler, 8, frozenset())
    msg = SubmitMsg(request_id="a", prompt_token_ids=(5,), sampling=SamplingParams(), tenant="t", priority=priority)
    return gate.check(msg, bounded=True).priority


# -- priority ---------------------------------------------------------------------------------------------------------


def test_request_may_lower_its_priority_and_never_raise_it():
    batch = {"t": TenantLimits(priority=Priority.BATCH)}
    assert ask({}, None) is Priority.INTERACTIVE
    assert ask({}, Priority.BATCH) is Priority.BATCH
    assert ask(batch, None) is Priority.BATCH
    assert ask(batch, Priority.BATCH) is Priority.BATCH
    with pytest.raises(RequestError, match="above it"):
        ask(batch, Priority.INTERACTIVE)


def test_interactive_request_takes_the_slot_of_batch_work():
    w = World(seqs=2)
    w.add("old", [5, 6], max_tokens=20, priority=Priority.BATCH)
    w.add("young", [7, 8], max_tokens=20, priority=Priority.BATCH)
    w.step()
    w.add("chat", [9, 9], max_tokens=3)
    w.step()
    assert running(w) == ["chat", "old"], "of equal losses the latest gives way"
    w.run()
    assert list(w.ends) == ["chat", "old", "young"]
    assert w.outputs["young"] == alone([7, 8], 20)


def test_interactive_request_never_takes_the_slot_of_another():
    w = World(seqs=1)
    w.add("first", [5, 6])
    w.step()
    w.add("second", [7, 8])
    w.run()
    assert w.scheduler.counters.preemptions == 0
    assert list(w.ends) == ["first", "second"]


def test_batch_work_loses_as_little_progress_as_possible():
    w = World(seqs=2, pages=17)
    w.add("far", range(3, 15), max_tokens=20, priority=Priority.BATCH, cache_enabled=False)
    w.add("near", [7, 8], max_tokens=20, priority=Priority.BATCH, cache_enabled=False)
    w.step()
    w.add("chat", [9, 9], max_tokens=3)
    w.step()
    assert running(w) == ["chat", "far"]


def test_batch_work_is_left_alone_by_a_request_that_could_not_fit_anyway():
    w = World(pages=9, size=4, seqs=4, budget=32)
    w.add("chat", range(3, 19), max_tokens=12)
    w.add("bulk", [5, 6], max_tokens=8, priority=Priority.BATCH)
    w.step()
    w.add("long", range(30, 54), max_tokens=2)
    w.step()
    assert running(w) == ["chat", "bulk"]
    assert w.scheduler.counters.preemptions == 0
    w.run()
    assert w.outputs["long"] == alone(range(30, 54), 2)


# -- victims ----------------------------------------------------------------------------------------------------------


def grown(w):
    """Step until somebody has been preempted; returns who waits."""
    while not w.scheduler.counters.preemptions:
        w.step()
    return [r.id for r in w.scheduler.waiting]


def test_victim_is_of_the_lowest_class():
    w = World(pages=8, size=2, seqs=3, budget=12)
    w.add("bulk", [3, 4, 5, 6], max_tokens=8, priority=Priority.BATCH)
    w.add("one", [5, 6], max_tokens=8)
    w.add("two", [7, 8], max_tokens=8)
    assert grown(w) == ["bulk"], "it arrived first and has most to lose, but it is batch work"


def test_victim_of_one_class_loses_least():
    w = World(pages=9, size=2, seqs=3, budget=16)
    w.add("first", [5, 6], max_tokens=10)
    w.add("short", [7, 8], max_tokens=10, cache_enabled=False)
    w.add("long", range(30, 36), max_tokens=10, cache_enabled=False)
    assert grown(w) == ["short"]


def test_victim_among_equals_is_the_latest():
    w = World(pages=8, size=2, seqs=3, budget=16)
    for name, token in (("first", 5), ("second", 7), ("third", 9)):
        w.add(name, [token, token], max_tokens=10)
    assert grown(w) == ["third"]


def test_preempted_request_takes_its_pages_from_the_cache_when_it_returns():
    w = World(seqs=1)
    w.add("bulk", range(3, 12), max_tokens=12, priority=Priority.BATCH)
    for _ in range(4):
        w.step()
    w.add("chat", [9, 9], max_tokens=2)
    w.step()
    assert running(w) == ["chat"]
    while not (back := [a for a in w.plans[-1].admitted if a.request_id == "bulk"]):
        w.step()
    assert back[0].computed == 12, "9 prompt tokens and 3 of 4 generated ones were written: 3 full pages"
    assert len(back[0].token_ids) == 13
    w.run()
    assert w.outputs["bulk"] == alone(range(3, 12), 12)
    assert w.ends["bulk"].cached_tokens == 0, "what it had computed itself is no hit"


# -- shared prefixes --------------------------------------------------------------------------------------------------


def test_second_request_with_the_same_prefix_waits_and_then_hits():
    w = World(budget=24, chunk=8)
    prompt = list(range(3, 19))
    w.add("first", prompt, max_tokens=2)
    w.add("second", [*prompt, 50], max_tokens=2)
    w.step()
    assert running(w) == ["first"]
    w.step()
    assert running(w) == ["first"]
    w.run()
    assert w.ends["second"].cached_tokens == 16
    assert w.scheduler.counters.deferred_by_prefix == 2
    assert sum(n for p in w.plans for _, n in w.rows_of(p)) == 16 + 1 + 1 + 1, "nothing is computed twice"


def test_request_with_another_prefix_passes_those_that_wait():
    w = World(budget=24)
    prompt = list(range(3, 19))
    w.add("first", prompt)
    w.add("second", prompt)
    w.add("other", [7, 7])
    w.step()
    assert running(w) == ["first", "other"]


def test_interactive_request_does_not_wait_for_the_prefix_of_batch_work():
    w = World(budget=8, seqs=4)
    prompt = list(range(3, 19))
    w.add("bulk", prompt, priority=Priority.BATCH)
    w.step()
    w.add("chat", prompt)
    w.step()
    assert running(w) == ["chat", "bulk"]


@pytest.mark.parametrize("options", [{"tenant": "t"}, {"adapter": "x"}, {"cache_enabled": False}])
def test_nobody_waits_for_a_prefix_that_is_not_for_him(options):
    w = World(budget=24)
    prompt = list(range(3, 15))
    w.add("first", prompt)
    w.add("second", prompt, **options)
    w.step()
    assert running(w) == ["first", "second"]
    w.run()
    assert w.ends["second"].cached_tokens == 0


def test_who_waits_for_a_prefix_starts_when_its_leader_goes():
    w = World(budget=8)
    prompt = list(range(3, 19))
    w.add("first", prompt)
    w.add("second", prompt, max_tokens=3)
    w.step()
    w.scheduler.cancel("first")
    w.step()
    assert running(w) == ["second"]
    w.run()
    assert w.ends["second"].cached_tokens == 8
    assert w.outputs["second"] == alone(prompt, 3)


# -- quotas -----------------------------------------------------------------------------------------------------------


def test_tenant_above_its_running_limit_waits_and_others_pass():
    w = World(tenants=Tenants({"t": TenantLimits(max_running=1)}))
    for i in range(3):
        w.add(f"t{i}", [10 + i, 5], tenant="t")
    w.add("other", [7, 8])
    w.step()
    assert running(w) == ["t0", "other"]
    w.run()
    assert len(w.ends) == 4


def test_long_queue_of_a_limited_tenant_hides_nobody():
    w = World(seqs=8, tenants=Tenants({"t": TenantLimits(max_running=1)}))
    for i in range(100):
        w.add(f"t{i:03}", [5, 6], tenant="t", max_tokens=40)
    w.step()
    w.add("other", [7, 8])
    w.step()
    assert running(w) == ["t000", "other"]


def test_rate_in_debt_delays_the_next_start():
    w = World(tenants=Tenants({"t": TenantLimits(tokens_per_second=100.0)}))
    w.add("a", range(3, 63), tenant="t", max_tokens=2)
    w.add("b", range(63, 123), tenant="t", max_tokens=2)
    w.add("c", [5, 6], tenant="t", max_tokens=2)
    for _ in range(20):
        w.step()
    assert list(w.ends) == ["a", "b"], "100 tokens at once, the third waits for 0.24 s"
    event = w.scheduler.next_event(w.now)
    assert event == pytest.approx(0.23, abs=0.01)
    w.now = event
    w.step()
    assert running(w) == ["c"]


def test_tenant_pays_for_what_is_computed_and_not_for_what_the_cache_had():
    w = World(size=4)
    w.add("first", range(3, 13), tenant="t", max_tokens=9)
    w.step()
    assert w.scheduler.tenants.find("t").counter == 10
    w.step()
    w.step()
    assert w.scheduler.tenants.find("t").counter == 10 + 2 * 2, "a generated token costs two"
    w.add("second", range(3, 13), tenant="t")
    w.step()
    assert w.scheduler.tenants.find("t").counter == 14 + 2 + 2, "8 of 10 were cached; first draws once more"


# -- time and size ----------------------------------------------------------------------------------------------------


def test_deadline_ends_a_waiting_request():
    w = World(seqs=1)
    w.add("a", [5, 6], max_tokens=30)
    w.add("b", [7, 8], timeout_s=0.005)
    w.dispatch(w.scheduler.schedule(0.001))
    assert w.scheduler.next_event(0.001) == pytest.approx(0.005, abs=1e-4)
    w.run()
    assert w.reason("b") is FinishReason.TIMEOUT
    assert w.outputs["b"] == []
    assert w.outputs["a"] == alone([5, 6], 30)


def test_deadline_ends_a_running_request_and_keeps_its_pages_cached():
    w = World()
    w.add("a", range(3, 11), max_tokens=50, timeout_s=0.0055)
    for _ in range(5):
        w.step()
    assert w.reason("a") is None
    w.step()
    assert w.reason("a") is FinishReason.TIMEOUT
    assert w.outputs["a"] == alone(range(3, 11), 5)
    assert w.table.peek([*range(3, 11), *w.outputs["a"]]) == 12


def test_deadline_of_an_ended_request_does_not_touch_the_next_of_its_name():
    w = World()
    w.add("a", [5, 6], max_tokens=1, timeout_s=0.01)
    w.run()
    del w.ends["a"]
    w.add("a", [5, 6], max_tokens=30)
    w.run()
    assert w.reason("a") is FinishReason.LENGTH


def test_ended_requests_are_not_held_until_their_deadline():
    w = World()
    w.add("a", [5, 6], timeout_s=1e6)
    w.run()
    assert [name for _, name in w.scheduler._deadlines] == ["a"], "its name only"


def test_request_larger_than_the_pool_ends_at_once():
    w = World(pages=4, size=4, max_len=64)
    w.add("fits", range(3, 12), max_tokens=4)
    w.add("large", range(3, 12), max_tokens=5)
    (end,) = w.scheduler.take_finished()
    assert (end.request_id, end.reason) == ("large", FinishReason.ERROR)
    assert end.detail == "it may need 4 pages, the pool has 3"
    w.run()
    assert w.outputs["fits"] == alone(range(3, 12), 4)


def test_request_as_large_as_the_pool_is_served():
    w = World(pages=3, size=2, max_len=5)
    w.add("a", [5], max_tokens=4)
    w.run()
    assert w.outputs["a"] == alone([5], 4)


# -- the host ---------------------------------------------------------------------------------------------------------


def savepoints(capacity):
    return SavepointStore(row_bytes=1, max_bytes=capacity, page_size=4, grid=4, handles=itertools.count(1))


def test_recurrent_model_uses_the_cache_as_far_as_a_savepoint_goes():
    w = World(rows=4, savepoints=savepoints(8))
    prompt = list(range(3, 13))
    w.add("first", prompt, max_tokens=2)
    w.run()
    w.add("second", [*prompt, 50], max_tokens=4)
    w.run()
    assert w.ends["second"].cached_tokens == 8
    assert w.outputs["second"] == alone([*prompt, 50], 4)
    assert w.scheduler.savepoints.hits == 1


def test_room_for_a_savepoint_is_made_after_those_of_the_same_step():
    w = World(rows=4, budget=32, savepoints=savepoints(1))
    w.add("a", range(3, 9))
    w.add("b", range(30, 36))
    w.step()
    assert [t.handle for t in w.plans[-1].snapshots] == [1, 2]
    w.run()
    assert set(w.ranks.host) == {2}, "the ranks forget the first once it is saved, not before"


def test_running_request_leaves_no_savepoint_after_a_flush():
    w = World(rows=4, budget=4, savepoints=savepoints(8))
    w.add("a", range(3, 16), tenant="t")
    w.step()
    w.scheduler.flush("t")
    w.run()
    assert len(w.scheduler.savepoints) == 0
    assert w.ranks.host == {}


def test_admission_leaves_running_rows_the_pages_that_they_will_soon_need():
    """The first will fill 16 of 19 pages and holds 2; the second needs 15 at once."""
    started = {}
    for growth in (1, 4):
        w = World(pages=20, size=2, seqs=4, budget=64, growth=growth)
        w.add("a", [5, 6], max_tokens=30)
        w.step()
        w.add("b", range(10, 40), max_tokens=2)
        w.step()
        started[growth] = w.scheduler.requests["b"].running
    assert started == {1: True, 4: False}


def test_rows_that_end_soon_keep_nothing_free():
    w = World(pages=7, size=2, seqs=4, budget=64, growth=8)
    w.add("a", [5, 6], max_tokens=2)
    w.step()
    w.add("b", range(10, 18), max_tokens=2)
    w.step()
    assert w.scheduler.requests["b"].running


def test_prompts_of_the_least_served_tenant_come_first_within_a_step():
    w = World(pages=200, size=4, seqs=8, budget=8, max_len=300)
    for i in range(3):
        w.add(f"hog{i}", range(3 + 100 * i, 103 + 100 * i), max_tokens=1, tenant="hog")
    w.add("small", range(900, 1100), max_tokens=1, tenant="small")
    w.step()
    w.scheduler.tenants.charge(w.scheduler.tenants.find("hog"), 1000)
    w.step()
    assert dict(w.rows_of(w.plans[-1]))["small"] == 2, "a quarter, although it is the last and the longest"
