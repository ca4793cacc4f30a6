"""The page table against a plain model: conservation, sharing, isolation, eviction."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from arbi_core.pool import PagePool, PageTable, PoolExhausted

SIZE = 2


def table(pages=16, **options):
    return PageTable(PagePool(pages, SIZE), **options)


def run_to(t, name, tokens, **options):
    """Register, compute everything, commit."""
    matched = t.add(name, tokens, **options)
    t.extend(name, len(tokens) - matched)
    t.commit(name, tokens)
    return matched


def test_null_page_is_never_handed_out():
    pool = PagePool(4, SIZE)
    assert pool.alloc(4) is None
    assert pool.alloc(3) == [1, 2, 3]
    assert pool.available == 0


def test_double_free_and_unknown_pages_are_refused():
    pool = PagePool(4, SIZE)
    pages = pool.alloc(1)
    pool.free(pages)
    for bad in (pages, [0], [99], [-1]):
        with pytest.raises(ValueError, match="not allocated"):
            pool.free(bad)


def test_lone_request_gets_consecutive_pages():
    t = table()
    t.add("a", range(3))
    assert list(t.extend("a", 3)) + list(t.extend("a", 5)) == [1, 2, 3, 4]


def test_match_is_the_longest_whole_page_prefix():
    t = table()
    run_to(t, "a", [1, 2, 3, 4, 5])
    t.release("a", [1, 2, 3, 4, 5])
    assert t.add("b", [1, 2, 3, 4, 9, 9]) == 4
    assert t.add("c", [1, 2, 3, 4], max_match=3) == 2
    assert t.add("d", [1, 9, 3, 4]) == 0


def test_output_pages_are_found_by_the_next_turn():
    t = table()
    run_to(t, "a", [1, 2, 3])
    t.extend("a", 3)
    t.release("a", [1, 2, 3, 7, 8, 9])
    assert t.add("b", [1, 2, 3, 7, 8, 9, 5]) == 6


def test_pages_beyond_the_written_length_are_not_committed():
    t = table()
    t.add("a", [1, 2, 3, 4])
    t.extend("a", 3)
    t.release("a", [1, 2, 3, 4])
    assert t.peek([1, 2, 3, 4]) == 2


def test_namespaces_share_nothing():
    t = table()
    run_to(t, "a", [1, 2, 3, 4], namespace="x")
    assert t.add("b", [1, 2, 3, 4], namespace="y") == 0
    assert t.add("c", [1, 2, 3, 4], namespace="x") == 4


def test_request_with_caching_off_neither_reads_nor_writes():
    t = table()
    run_to(t, "a", [1, 2, 3, 4])
    assert t.add("b", [1, 2, 3, 4], cache_enabled=False) == 0
    t.extend("b", 4)
    t.release("a")
    t.flush()
    t.release("b", [1, 2, 3, 4])
    assert t.peek([1, 2, 3, 4]) == 0


def test_concurrent_twins_share_what_follows():
    """Both compute the prefix; the second's later pages hang below the first's node and are found."""
    t = table()
    t.add("a", [1, 2])
    t.add("b", [1, 2])
    t.extend("a", 2)
    t.extend("b", 2)
    t.commit("a", [1, 2])
    t.extend("b", 2)
    t.release("b", [1, 2, 5, 6])
    t.check()
    assert t.peek([1, 2, 5, 6]) == 4


def test_eviction_takes_leaves_least_recently_used_first():
    t = table(pages=5)
    run_to(t, "old", [1, 2, 3, 4])
    t.release("old")
    run_to(t, "new", [7, 8])
    t.release("new")
    t.add("big", range(50, 56), namespace="z")
    t.extend("big", 4)
    assert t.peek([1, 2, 3, 4]) == 2, "the leaf went before its parent, and before the newer page"
    assert t.peek([7, 8]) == 2
    assert t.evictions == 1


def test_exhaustion_changes_nothing():
    t = table(pages=3)
    t.add("a", range(10))
    t.extend("a", 4)
    with pytest.raises(PoolExhausted, match="1 pages are needed and 0 are available"):
        t.extend("a", 1)
    assert t.length("a") == 4
    t.check()


def test_flush_frees_idle_pages_and_hides_live_ones():
    t = table()
    run_to(t, "live", [1, 2, 3, 4])
    run_to(t, "idle", [5, 6])
    t.release("idle")
    assert t.flush("") == 1
    assert t.peek([1, 2, 3, 4]) == 0
    t.check()
    t.release("live", [1, 2, 3, 4])
    assert t.available == t.total_pages


def test_digests_accept_negative_and_huge_ids():
    t = table()
    tokens = [-1, 2**63 + 5, -(2**62), 2**64 - 1]
    run_to(t, "a", tokens)
    assert t.peek(tokens) == 4


def test_unknown_request_raises():
    with pytest.raises(KeyError):
        table().release("nobody")


class PageTableMachine(RuleBasedStateMachine):
    """Random lives of requests on a small pool."""

    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)

    def __init__(self):
        super().__init__()
        self.table = table(pages=9)
        self.live = {}
        self.committed = {}
        self.count = 0

    @rule(tokens=tokens, namespace=st.sampled_from("xy"), cache=st.booleans())
    def add(self, tokens, namespace, cache):
        self.count += 1
        name = f"r{self.count}"
        matched = self.table.add(name, tokens, namespace=namespace, cache_enabled=cache, max_match=len(tokens) - 1)
        assert matched % SIZE == 0
        assert matched <= len(tokens) - 1
        if matched:
            assert cache
            assert tuple(tokens[:matched]) in self.committed.get(namespace, set())
        self.live[name] = (list(tokens), namespace, cache)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n=st.integers(1, 4))
    def extend(self, data, n):
        name = data.draw(st.sampled_from(sorted(self.live)))
        tokens = self.live[name][0]
        need = self.table.pages_needed(name, n)
        length = self.table.length(name)
        if need > self.table.available:
            with pytest.raises(PoolExhausted):
                self.table.extend(name, n)
            assert self.table.length(name) == length
        else:
            assert len(self.table.extend(name, n)) == need
            while len(tokens) < length + n:
                tokens.append(data.draw(st.integers(0, 1)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def commit(self, data):
        name = data.draw(st.sampled_from(sorted(self.live)))
        self._note(name)
        self.table.commit(name, self.live[name][0])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data, keep):
        name = data.draw(st.sampled_from(sorted(self.live)))
        if keep:
            self._note(name)
        self.table.release(name, self.live[name][0] if keep else None)
        del self.live[name]

    @rule(namespace=st.sampled_from("xy"))
    def flush(self, namespace):
        self.table.flush(namespace)
        assert self.table.peek([0, 0], namespace) == 0

    def _note(self, name):
        tokens, namespace, cache = self.live[name]
        if cache:
            full = self.table.length(name) // SIZE * SIZE
            for end in range(SIZE, full + 1, SIZE):
                self.committed.setdefault(namespace, set()).add(tuple(tokens[:end]))

    @invariant()
    def everything_adds_up(self):
        self.table.check()


PageTableMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPageTableMachine = PageTableMachine.TestCase
