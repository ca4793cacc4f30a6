"""Rows of recurrent state."""

import pytest

from arbi_core.pool import RowPool


def test_sentinel_row_is_never_handed_out_and_first_row_is_one():
    pool = RowPool(2)
    assert [pool.alloc("a"), pool.alloc("b"), pool.alloc("c")] == [1, 2, None]


def test_alloc_is_idempotent_and_free_tolerates_strangers():
    pool = RowPool(2)
    assert pool.alloc("a") == pool.alloc("a") == 1
    pool.free("a")
    pool.free("a")
    assert pool.available == 2


def test_missing_row_raises_by_name():
    with pytest.raises(KeyError, match="'ghost' owns no state row"):
        RowPool(1).row_for("ghost")


def test_freed_row_is_handed_out_next():
    pool = RowPool(3)
    pool.alloc("a")
    pool.alloc("b")
    pool.free("a")
    assert pool.alloc("c") == 1
    assert pool.row_for("c") == 1
    assert pool.row_for("b") == 2
