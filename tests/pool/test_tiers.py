"""The index of the host tier: what it keeps, what it moves, what it forgets."""

import itertools
import logging

import pytest

from arbi_core.pool import Namespace, PagePool, PageTable, Prefix
from arbi_core.pool.tiers import TOO_SLOW, HostTier, TierSettings
from arbi_core.pool.transfers import TransferOp, TransferResult

SIZE, PAGE, ROW = 2, 100, 30


class Tiered:
    """A table whose evicted pages go to a tier; `log` has the transfers as ``(op, handle, where)``."""

    def __init__(self, pages=16, ram=8, disk=0, **settings):
        self.now = 0.0
        self.table = PageTable(PagePool(pages, SIZE))
        sizes = TierSettings(
            page_bytes=PAGE, row_bytes=ROW, page_size=SIZE, ram_bytes=ram * PAGE, disk_bytes=disk * PAGE, **settings
        )
        self.tier = HostTier(sizes, itertools.count(1), clock=lambda: self.now)
        self.transfers = []
        self.tier.emit = self.transfers.append
        self.table.cache.on_evict = self.tier.keep_node

    @property
    def log(self):
        """What was emitted since the last look."""
        seen = [(t.op.name, t.handle, t.where) for t in self.transfers]
        self.transfers.clear()
        return seen

    def cache(self, tokens, tenant=""):
        """Leave the pages of a sequence in the cache."""
        self.table.add("x", tokens, namespace=Namespace(tenant))
        self.table.extend("x", len(tokens) - self.table.length("x"))
        self.table.release("x", tokens)

    def evict(self, count=None):
        self.table.cache.evict(self.table.cached_pages if count is None else count)

    def put(self, tokens, tenant=""):
        """Leave the pages of a sequence on the host alone."""
        self.cache(tokens, tenant)
        self.evict()

    def find(self, tokens, tenant="", send=True):
        prefix = Prefix.of(tokens, SIZE, Namespace(tenant))
        self.table.cache.match(prefix)
        return self.tier.find(prefix, send=send)

    def answer(self, op, handle, error=""):
        self.tier.settle([TransferResult(op, handle, ok=not error, error=error)])

    @property
    def places(self):
        return {h: b.place.name for h, b in self.tier._by_handle.items()}


def test_evicted_pages_are_saved_leaf_first_and_found_in_order():
    t = Tiered()
    t.put([1, 2, 3, 4])
    assert t.log == [("SAVE_PAGE", 1, 2), ("SAVE_PAGE", 2, 1)]
    tail = t.find([1, 2, 3, 4])
    assert tail.handles == (2, 1)
    assert not tail.fetching
    assert (t.tier.ram_bytes, t.tier.saved) == (200, 2)


def test_found_pages_continue_what_the_device_has():
    t = Tiered()
    t.cache([1, 2, 3, 4, 5, 6])
    t.evict(2)
    tail = t.find([1, 2, 3, 4, 5, 6, 7])
    assert tail.handles == (2, 1)
    assert [p[0] for p in tail.pages] == [3, 5]


def test_tail_ends_at_the_first_page_that_is_nowhere():
    t = Tiered(ram=2)
    t.put([1, 2, 3, 4, 5, 6])
    assert t.places == {2: "RAM", 3: "RAM"}
    assert t.find([1, 2, 3, 4, 5, 6]).handles == (3, 2)
    assert t.find([9, 9]).handles == ()


def test_nobody_finds_the_pages_of_another_tenant():
    t = Tiered()
    t.put([1, 2], tenant="x")
    assert t.find([1, 2], tenant="y").handles == ()
    assert t.find([1, 2]).handles == ()
    assert t.find([1, 2], tenant="x").handles == (1,)


def test_page_that_the_host_has_is_not_saved_again():
    t = Tiered()
    t.put([1, 2])
    t.put([1, 2])
    assert t.log == [("SAVE_PAGE", 1, 1)]
    assert t.tier.ram_bytes == 100


def test_restored_page_stays_on_the_host():
    t = Tiered()
    t.put([1, 2])
    tail = t.find([1, 2, 3])
    t.table.add("a", [1, 2, 3])
    assert t.table.restore("a", tail.pages, lambda i, page: t.tier.load(tail.handles[i], page)) == 2
    assert t.log == [("SAVE_PAGE", 1, 1), ("LOAD_PAGE", 1, 1)]
    assert (t.tier.restored, t.tier.ram_bytes) == (1, 100)
    assert t.table.peek([1, 2]) == 2
    t.table.check()


def test_least_recently_used_page_makes_room():
    t = Tiered(ram=2)
    for token in (1, 2):
        t.put([token, token])
    t.find([1, 1])
    t.put([3, 3])
    assert t.places == {1: "RAM", 3: "RAM"}
    assert t.log[-2:] == [("DROP", 2, 0), ("SAVE_PAGE", 3, 1)]
    assert t.tier.dropped == 1


def test_pinned_pages_are_not_pushed_out():
    t = Tiered(ram=2)
    t.put([1, 1])
    t.put([2, 2])
    t.tier.pin(t.find([1, 1]))
    t.put([3, 3])
    assert t.places == {1: "RAM", 3: "RAM"}
    t.tier.pin(t.find([3, 3]))
    assert t.tier.keep_page(9) == 0
    t.tier.unpin()
    assert t.tier.keep_page(9) == 4


def test_short_prefixes_are_not_worth_the_copy():
    t = Tiered(ram_min_tokens=4)
    t.put([1, 2])
    assert t.log == []
    t.put([1, 2, 3, 4])
    assert t.log == [("SAVE_PAGE", 1, 2), ("SAVE_PAGE", 2, 1)], "the pages behind the first are of no use without it"
    assert t.find([1, 2, 3, 4]).handles == (2, 1)
    assert t.find([1, 2]).handles == ()


def test_what_preempted_requests_leave_counts_and_is_given_back():
    t = Tiered(ram=2)
    page, row = t.tier.keep_page(5), t.tier.keep_row(3)
    assert t.log == [("SAVE_PAGE", page, 5), ("SAVE_ROW", row, 3)]
    assert t.tier.ram_bytes == PAGE + ROW
    t.tier.release(page)
    t.tier.release(page)
    t.tier.release(0)
    assert t.log == [("DROP", page, 0)]
    assert t.tier.ram_bytes == ROW


def test_what_can_never_fit_pushes_nothing_out():
    t = Tiered(ram=1)
    t.put([1, 1])
    row = t.tier.keep_row(1)
    assert t.places == {}
    t.put([2, 2])
    assert t.places == {}, "30 bytes are taken, a page of 100 is more than the rest"
    t.tier.release(row)
    t.put([3, 3])
    t.log.clear()
    small = Tiered(ram=0.2)
    assert small.tier.keep_row(1) == 0
    assert small.log == []


def test_flush_forgets_a_tenants_pages_and_nobody_elses():
    t = Tiered()
    t.put([1, 1], tenant="x")
    t.put([1, 1], tenant="y")
    kept = t.tier.keep_page(5)
    t.log.clear()
    t.tier.flush("x")
    assert t.find([1, 1], tenant="x").handles == ()
    assert t.find([1, 1], tenant="y").handles == (2,)
    t.tier.flush()
    assert t.places == {}
    assert t.tier.ram_bytes == PAGE, "what a preempted request left stays its own"
    t.tier.release(kept)


def test_unused_pages_are_forgotten_after_their_time():
    t = Tiered(disk=4, ram=1, ttl_s=10.0)
    t.put([1, 1])
    t.now = 5.0
    t.put([2, 2])
    t.now = 10.0
    t.tier.sweep()
    assert t.places == {1: "DISK", 2: "RAM"}
    t.now = 10.1
    t.tier.sweep()
    assert t.places == {2: "RAM"}
    t.now = 15.1
    t.tier.sweep()
    assert t.places == {}


# -- disk -------------------------------------------------------------------------------------------------------------


def on_disk():
    """One page on disk, another in RAM that fills it."""
    t = Tiered(ram=1, disk=2)
    t.put([1, 1])
    t.put([2, 2])
    assert t.places == {1: "DISK", 2: "RAM"}
    assert t.log == [("SAVE_PAGE", 1, 1), ("SPILL", 1, 0), ("SAVE_PAGE", 2, 1)]
    return t


def test_page_on_disk_is_sent_for_once_and_waited_for():
    t = on_disk()
    assert t.find([1, 1]).fetching
    assert t.find([1, 1]).fetching
    assert t.tier.fetching
    assert t.log == [("FETCH", 1, 0)]
    t.answer(TransferOp.FETCH, 1)
    assert t.find([1, 1]).handles == (1,)
    assert t.log == [("SPILL", 2, 0)], "the other one makes room"
    assert (t.tier.fetched, t.tier.ram_bytes, t.tier.disk_bytes) == (1, 100, 100)


def test_whoever_has_waited_once_takes_what_is_in_ram():
    t = on_disk()
    assert t.find([1, 1], send=False).handles == ()
    assert t.log == []
    t.find([1, 1])
    assert t.find([1, 1], send=False).fetching, "somebody else's order is worth waiting for"


def test_no_more_is_sent_for_than_ram_can_hold():
    t = Tiered(ram=2, disk=8)
    t.put([1, 1, 2, 2, 3, 3])
    t.put([7, 7])
    t.put([8, 8])
    t.log.clear()
    assert t.find([1, 1, 2, 2, 3, 3]).fetching
    assert t.log == [("FETCH", 3, 0), ("FETCH", 2, 0)]
    for handle in (3, 2):
        t.answer(TransferOp.FETCH, handle)
    assert t.find([1, 1, 2, 2, 3, 3]).handles == (3, 2)


def test_fetched_page_that_finds_no_room_goes_back():
    t = Tiered(ram=1, disk=2)
    t.put([1, 1])
    t.put([2, 2])
    t.find([1, 1])
    t.tier.release(2)
    kept = [t.tier.keep_row(1) for _ in range(3)]
    assert all(kept)
    t.answer(TransferOp.FETCH, 1)
    assert t.tier.ram_bytes == 3 * ROW
    assert t.places[1] == "DISK"


def test_page_that_cannot_be_read_is_forgotten():
    t = on_disk()
    t.find([1, 1])
    t.answer(TransferOp.FETCH, 1, error="unreadable")
    assert not t.tier.fetching
    assert t.places == {2: "RAM"}
    assert t.find([1, 1]).handles == ()
    assert t.tier.disk_error is None


def test_failed_spill_ends_the_disk_tier(caplog):
    t = on_disk()
    with caplog.at_level(logging.WARNING, "arbi.tiers"):
        t.answer(TransferOp.SPILL, 1, error="no space left")
        t.answer(TransferOp.SPILL, 1, error="no space left")
    assert caplog.text.count("the disk tier is off from now on") == 1
    assert t.tier.disk_error == "no space left"
    t.put([3, 3])
    assert t.places == {3: "RAM"}


def test_slow_disk_costs_one_page_and_goes_on():
    t = on_disk()
    t.answer(TransferOp.SPILL, 1, error=TOO_SLOW + ", 5 bytes wait to be written")
    assert t.tier.disk_error is None
    t.put([3, 3])
    assert t.places == {2: "DISK", 3: "RAM"}


def test_full_disk_forgets_its_oldest_page_but_none_on_its_way():
    t = on_disk()
    t.put([3, 3])
    t.put([4, 4])
    assert t.places == {2: "DISK", 3: "DISK", 4: "RAM"}
    t.find([2, 2])
    t.find([3, 3])
    t.put([5, 5])
    assert t.places == {2: "FETCHING", 3: "FETCHING", 5: "RAM"}
    assert t.tier.disk_bytes == 200


def test_short_prefixes_do_not_go_to_disk():
    t = Tiered(ram=1, disk=4, disk_min_tokens=4)
    t.put([1, 1])
    t.put([2, 2])
    assert t.places == {2: "RAM"}


def test_answers_for_pages_that_were_flushed_meanwhile_change_nothing():
    t = on_disk()
    t.find([1, 1])
    t.tier.flush()
    t.answer(TransferOp.FETCH, 1)
    t.answer(TransferOp.FETCH, 99)
    assert t.places == {}
    assert (t.tier.ram_bytes, t.tier.disk_bytes) == (0, 0)


def test_failed_step_loses_what_it_moved_and_what_is_on_its_way():
    t = on_disk()
    t.put([3, 3])
    t.find([1, 1])
    t.log.clear()
    t.tier.lose({3, 77})
    assert t.places == {2: "DISK"}
    assert sorted(t.log) == [("DROP", 1, 0), ("DROP", 3, 0)]


@pytest.mark.parametrize("ram", [0, 0.5])
def test_tier_without_room_keeps_nothing(ram):
    t = Tiered(ram=ram)
    t.put([1, 1])
    assert t.places == {}
    assert t.log == []
