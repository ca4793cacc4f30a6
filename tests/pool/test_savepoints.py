"""Savepoints of recurrent rows: where they are taken, what they answer, what makes them go."""

import itertools

import pytest

from arbi_core.pool import Namespace, Prefix
from arbi_core.pool.savepoints import Savepoint, SavepointStore

PAGE, ROW = 4, 10


def store(rows=8, grid=1, handles=None):
    s = SavepointStore(
        row_bytes=ROW, max_bytes=rows * ROW, page_size=PAGE, grid=grid, handles=handles or itertools.count(1)
    )
    s.dropped = []
    s.emit = lambda t: s.dropped.append((t.op.name, t.handle))
    return s


def prefix(tokens, tenant="", adapter=""):
    return Prefix.of(tokens, PAGE, Namespace(tenant, adapter))


@pytest.mark.parametrize(("grid", "common"), [(1, 4), (2, 4), (3, 12), (4, 4), (6, 12), (8, 8)])
def test_grid_is_a_multiple_of_pages_and_of_the_kernels_folds(grid, common):
    assert store(grid=grid).grid == common


@pytest.mark.parametrize(
    ("before", "after", "known", "point"),
    [
        (0, 16, 17, 16),
        (0, 16, 16, 12),
        (0, 12, 16, 12),
        (0, 13, 16, 12),
        (12, 16, 16, None),
        (8, 16, 40, None),
        (0, 4, 4, None),
        (0, 4, 5, 4),
        (0, 3, 3, None),
    ],
)
def test_savepoint_is_taken_at_the_last_point_that_leaves_a_token(before, after, known, point):
    assert store().boundary(before, after, known) == point


def test_longest_savepoint_within_the_matched_pages_is_found():
    s, p = store(), prefix(range(20))
    assert [s.take(p, n) for n in (4, 12)] == [1, 2]
    assert s.find(p, 5) == Savepoint(2, "", 12)
    assert s.find(p, 3) == Savepoint(2, "", 12)
    assert s.find(p, 2) == Savepoint(1, "", 4)
    assert s.find(p, 0) is None
    assert (s.hits, s.misses) == (3, 1)


def test_savepoint_is_of_exactly_its_tokens():
    s = store()
    s.take(prefix(range(8)), 8)
    assert s.find(prefix([*range(7), 99]), 2) is None
    assert s.find(prefix(range(8), tenant="t"), 2) is None
    assert s.find(prefix(range(8), adapter="a"), 2) is None
    assert s.find(prefix([*range(8), 50, 51, 52, 53]), 3) == Savepoint(1, "", 8)


def test_search_keeps_to_the_grid():
    s, p = store(grid=8), prefix(range(24))
    s.take(p, 8)
    assert s.find(p, 3) == Savepoint(1, "", 8)
    assert s.find(p, 1) is None


@pytest.mark.parametrize("tokens", [0, -4, 3, 6])
def test_state_in_the_middle_of_a_page_is_refused(tokens):
    with pytest.raises(ValueError, match=f"after {tokens} tokens is not on the grid of 4"):
        store().take(prefix(range(8)), tokens)


def test_same_state_is_saved_once():
    s, p = store(), prefix(range(8))
    assert s.take(p, 8) == 1
    assert s.take(prefix(range(8)), 8) is None
    assert (len(s), s.nbytes) == (1, ROW)


def test_least_recently_used_goes_first():
    s = store(rows=2)
    one, two, three = (prefix([n] * 4) for n in (1, 2, 3))
    s.take(one, 4)
    s.take(two, 4)
    s.find(one, 1)
    s.take(three, 4)
    assert s.dropped == [("DROP", 2)]
    assert s.find(two, 1) is None
    assert s.find(one, 1) == Savepoint(1, "", 4)
    assert (s.nbytes, s.evictions) == (2 * ROW, 1)


def test_savepoint_goes_with_its_page():
    s, p = store(), prefix(range(8))
    s.take(p, 4)
    s.take(p, 8)
    s.drop(p.digest(2))
    s.drop(p.digest(2))
    assert s.dropped == [("DROP", 2)]
    assert s.find(p, 2) == Savepoint(1, "", 4)


def test_flush_forgets_a_tenants_savepoints_and_nobody_elses():
    s = store()
    s.take(prefix(range(4), tenant="t"), 4)
    s.take(prefix(range(4), tenant="t", adapter="a"), 4)
    s.take(prefix(range(4)), 4)
    s.flush("t")
    assert s.dropped == [("DROP", 1), ("DROP", 2)]
    assert len(s) == 1
    s.flush()
    assert s.nbytes == 0


def test_store_too_small_for_one_savepoint_is_refused():
    with pytest.raises(ValueError, match="one savepoint takes 10 bytes, more than the 9 allowed"):
        SavepointStore(row_bytes=ROW, max_bytes=9, page_size=PAGE, grid=1, handles=itertools.count(1))
