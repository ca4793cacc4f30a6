"""How a step's prefill tokens are divided."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbi_core.scheduler.shares import share_prefill


@pytest.mark.parametrize(
    ("remaining", "budget", "chunk", "shares"),
    [
        ([], 8, 8, []),
        ([5], 8, 8, [5]),
        ([100], 16, 16, [16]),
        ([100], 16, 5, [5]),
        ([100, 10, 50], 40, 64, [10, 10, 20]),
        ([4, 100], 16, 16, [4, 12]),
        ([100, 100], 16, 16, [16, 0]),
        ([100, 30, 30], 16, 16, [4, 12, 0]),
        ([100, 2], 16, 16, [14, 2]),
        ([100, 100, 3], 20, 6, [6, 6, 3]),
        ([9, 9], 1, 8, [1, 0]),
        ([9, 9], 0, 8, [0, 0]),
    ],
)
def test_a_quarter_to_the_first_then_the_shortest_then_the_rest(remaining, budget, chunk, shares):
    assert share_prefill(remaining, budget, chunk) == shares


def test_batch_comes_after_all_others_and_within_its_budget():
    assert share_prefill([100, 1, 100], 16, 16, batch=[False, True, False], batch_budget=4) == [16, 0, 0]
    assert share_prefill([6, 100], 16, 16, batch=[False, True], batch_budget=4) == [6, 4]
    assert share_prefill([100, 3], 16, 16, batch=[True, True], batch_budget=4) == [4, 0]


def test_batch_alone_takes_everything():
    assert share_prefill([100], 16, 16, batch=[True]) == [16]


prompts = st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=6)


@given(prompts=prompts, budget=st.integers(0, 60), chunk=st.integers(1, 40), most=st.none() | st.integers(0, 20))
def test_nothing_is_given_twice_or_wasted(prompts, budget, chunk, most):
    remaining, batch = [r for r, _ in prompts], [b for _, b in prompts]
    shares = share_prefill(remaining, budget, chunk, batch=batch, batch_budget=most)
    wants = [min(r, chunk) for r in remaining]
    assert all(0 <= s <= w for s, w in zip(shares, wants, strict=True))
    bulk = sum(s for s, b in zip(shares, batch, strict=True) if b)
    bulk_want = sum(w for w, b in zip(wants, batch, strict=True) if b)
    assert most is None or bulk <= most
    others = sum(wants) - bulk_want
    assert sum(shares) == min(budget, others + (bulk_want if most is None else min(most, bulk_want)))


@given(prompts=prompts.filter(bool), budget=st.integers(0, 60), chunk=st.integers(1, 40))
def test_first_in_order_gets_a_quarter_whatever_is_behind_it(prompts, budget, chunk):
    remaining = [r for r, _ in prompts]
    assert share_prefill(remaining, budget, chunk)[0] >= min(remaining[0], chunk, -(-budget // 4))
