"""The scheduler with a host tier: waiting for the disk, making room, forgetting."""

import pytest

from arbi_core.engine.messages import Priority
from support.toy_ranks import World, alone
from support.toy_worlds import small_tier


def from_disk(delay, **options):
    """A lone request whose prefix is on disk."""
    w = World(pages=6, size=4, tier=small_tier(ram=3, disk=8), **options)
    w.add("old", range(3, 16), max_tokens=2)
    w.run()
    w.add("new", range(20, 36), max_tokens=2)
    w.run()
    w.add("newer", range(50, 66), max_tokens=2)
    w.run()
    w.ranks.delay = delay
    w.add("again", range(3, 16), max_tokens=2)
    return w


@pytest.mark.parametrize("depth", [0, 1])
def test_lone_request_asks_for_its_pages_until_they_are_there(depth):
    w = from_disk(delay=3, depth=depth)
    w.run()
    assert w.ends["again"].cached_tokens == 12
    assert w.outputs["again"] == alone(range(3, 16), 2)
    polls = [p for p in w.plans if p.polls and not p.num_rows]
    assert len(polls) == 4, "once with the order and three times more"


def test_driver_is_told_when_to_look_again():
    w = from_disk(delay=9)
    w.step()
    w.scheduler.schedule(w.now)
    assert w.scheduler.next_event(w.now) == pytest.approx(w.now + 0.002)
    assert not w.scheduler.schedule(w.now + 0.002).empty


def test_driver_does_not_sleep_on_what_it_has_just_heard():
    w = from_disk(delay=0, depth=1)
    w.step()
    assert w.flights
    assert w.scheduler.schedule(w.now).empty
    w.collect(0)
    assert w.scheduler.next_event(w.now) == w.now
    w.run()


def test_everything_that_ends_is_forgotten_by_the_ranks_without_further_work():
    w = World(seqs=1, tier=small_tier())
    w.add("bulk", [5, 6], max_tokens=9, priority=Priority.BATCH)
    w.step()
    w.add("chat", [7, 8], max_tokens=1)
    w.step()
    w.scheduler.cancel("bulk")
    w.scheduler.take_finished()
    assert not w.scheduler.has_work
    while w.scheduler.has_finished:
        w.step()
    assert w.ranks.host == {}
    assert w.ranks.rows == {}


def test_flush_without_work_still_reaches_the_ranks():
    w = from_disk(delay=0)
    w.run()
    assert w.ranks.host
    assert w.ranks.disk
    w.scheduler.flush()
    assert w.scheduler.has_finished
    w.run()
    assert w.ranks.host == w.ranks.disk == {}


def test_prefix_larger_than_ram_is_not_sent_for_again_and_again():
    w = World(pages=6, size=4, tier=small_tier(ram=1, disk=8))
    for first in (3, 20, 50):
        w.add(f"r{first}", range(first, first + 13), max_tokens=2)
        w.run()
    w.add("again", range(3, 16), max_tokens=2)
    w.run(limit=20)
    assert w.scheduler.tier.fetched == 1
    assert w.ends["again"].cached_tokens == 4
    assert w.outputs["again"] == alone(range(3, 16), 2)


def test_prefixes_that_push_each_other_out_of_ram_are_waited_for_once():
    """Both come from disk page by page in turn, so that each is always there in part only."""
    w = World(pages=13, size=4, tier=small_tier(ram=2, disk=16))
    for first in (3, 30, 60):
        w.add(f"r{first}", range(first, first + 9), max_tokens=2)
        w.run()
    w.table.cache.evict(w.table.cached_pages)
    w.ranks.delay = 1
    for first in (3, 30):
        w.add(f"again{first}", range(first, first + 9), max_tokens=2)
    w.step()
    one, two, three, four = w.ranks.moving[-4:]
    w.ranks.moving[-4:] = [one, three, two, four]
    w.run(limit=30)
    for first in (3, 30):
        assert w.outputs[f"again{first}"] == alone(range(first, first + 9), 2)


def test_pages_that_a_request_is_about_to_load_are_not_pushed_out_by_whom_it_preempts():
    w = World(seqs=1, size=4, tier=small_tier(ram=1))
    w.add("old", range(3, 8), max_tokens=1)
    w.run()
    w.table.cache.evict(1)
    w.add("bulk", [5, 6], max_tokens=9, priority=Priority.BATCH)
    w.step()
    w.add("again", range(3, 8), max_tokens=2)
    w.run()
    assert w.ends["again"].cached_tokens == 4
    assert w.scheduler.counters.preemptions == 1
    assert w.outputs["bulk"] == alone([5, 6], 9)


def test_page_on_its_way_from_disk_when_a_step_fails_is_not_waited_for():
    w = from_disk(delay=3)
    w.add("bystander", [5, 6], max_tokens=12, tenant="u")
    w.step()
    assert w.scheduler.tier.fetching
    w.step(fault="result")
    assert not w.scheduler.tier.fetching
    w.run()
    assert w.outputs["again"] == alone(range(3, 16), 2)
