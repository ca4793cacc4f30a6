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


def test_rows_are_zeroed_once_before_their_first_forward():
    pool, zeroed = RowPool(3), []
    pool.alloc("a")
    pool.alloc("b")
    pool.drain(zeroed.extend)
    pool.drain(zeroed.extend)
    assert zeroed == [1, 2]


def test_forward_refuses_to_run_over_rows_that_were_not_zeroed():
    pool = RowPool(1)
    pool.alloc("a")
    with pytest.raises(RuntimeError, match="not zeroed"):
        pool.begin_forward()


def test_admission_during_a_forward_is_zeroed_after_it():
    pool, zeroed = RowPool(2), []
    pool.alloc("a")
    pool.drain(zeroed.extend)
    pool.begin_forward()
    pool.alloc("b")
    assert pool.pending == 0, "the running forward must not see its state cleared"
    pool.end_forward()
    assert pool.pending == 1
    pool.drain(zeroed.extend)
    assert zeroed == [1, 2]


def test_reused_row_is_zeroed_again():
    pool, zeroed = RowPool(1), []
    pool.alloc("a")
    pool.drain(zeroed.extend)
    pool.free("a")
    pool.alloc("b")
    pool.drain(zeroed.extend)
    assert zeroed == [1, 1]
