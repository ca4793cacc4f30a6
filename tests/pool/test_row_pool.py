"""Rows of recurrent state."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

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


def test_pool_without_rows_is_refused():
    with pytest.raises(ValueError, match="not 0"):
        RowPool(0)


class RowPoolMachine(RuleBasedStateMachine):
    """Against a dictionary of owners and a stack of free rows."""

    names = st.sampled_from("abcde")

    @initialize(rows=st.integers(1, 4))
    def begin(self, rows):
        self.pool = RowPool(rows)
        self.num_rows = rows
        self.owned, self.stack = {}, list(range(rows, 0, -1))

    @rule(name=names)
    def alloc(self, name):
        if name not in self.owned and self.stack:
            self.owned[name] = self.stack.pop()
        assert self.pool.alloc(name) == self.owned.get(name)

    @rule(name=names)
    def free(self, name):
        self.pool.free(name)
        if name in self.owned:
            self.stack.append(self.owned.pop(name))

    @rule(name=names)
    def look_up(self, name):
        if name in self.owned:
            assert self.pool.row_for(name) == self.owned[name]
        else:
            with pytest.raises(KeyError, match="owns no state row"):
                self.pool.row_for(name)

    @invariant()
    def rows_are_conserved_and_the_sentinel_is_nobodys(self):
        assert self.pool.available == len(self.stack)
        assert sorted([*self.owned.values(), *self.stack]) == list(range(1, self.num_rows + 1))


RowPoolMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestRowPoolMachine = RowPoolMachine.TestCase
