"""The free list of pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbi_core.pool import PagePool


def test_null_page_is_never_handed_out():
    pool = PagePool(4, 2)
    assert pool.alloc(4) is None
    assert pool.alloc(3) == [1, 2, 3]
    assert pool.available == 0


def test_double_free_and_unknown_pages_are_refused():
    pool = PagePool(4, 2)
    pages = pool.alloc(1)
    pool.free(pages)
    for bad in (pages, [0], [99], [-1]):
        with pytest.raises(ValueError, match="not allocated"):
            pool.free(bad)


def test_pool_without_a_usable_page_and_negative_counts_are_refused():
    with pytest.raises(ValueError, match="not 1 pages"):
        PagePool(1, 2)
    with pytest.raises(ValueError, match="cannot allocate -1 pages"):
        PagePool(2, 2).alloc(-1)


@given(
    pages=st.integers(2, 12),
    moves=st.lists(st.one_of(st.integers(0, 5), st.lists(st.integers(0, 11), unique=True, max_size=5)), max_size=40),
)
def test_pool_hands_out_the_lowest_free_pages_all_or_nothing(pages, moves):
    """A number allocates that many pages; a list frees those of its pages that are taken."""
    pool = PagePool(pages, 2)
    free = set(range(1, pages))
    for move in moves:
        if isinstance(move, int):
            expected = sorted(free)[:move] if move <= len(free) else None
            assert pool.alloc(move) == expected
            free -= set(expected or ())
        else:
            taken = [p for p in move if 0 < p < pages and p not in free]
            pool.free(taken)
            free |= set(taken)
        assert pool.available == len(free)
