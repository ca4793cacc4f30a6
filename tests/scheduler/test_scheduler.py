"""The scheduler over toy ranks: tokens come from a rule, so that outputs can be checked without a model."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbi_core.engine.messages import FinishReason, Priority
from arbi_core.scheduler import StepOutput
from support.toy_ranks import World, alone, next_token


def test_decode_rows_come_first_and_prefill_fills_the_budget():
    w = World(budget=8)
    w.add("a", range(3, 7))
    w.step()
    w.add("b", range(3, 30))
    w.step()
    assert w.rows_of(w.plans[-1]) == [("a", 1), ("b", 7)]


def test_long_prompt_is_cut_into_chunks():
    w = World(budget=16, chunk=5)
    w.add("a", range(3, 16), max_tokens=2)
    w.run()
    assert [n for p in w.plans for _, n in w.rows_of(p)] == [5, 5, 3, 1]
    assert w.outputs["a"] == alone(range(3, 16), 2)


def test_preemption_takes_the_lowest_row_and_its_text_does_not_change():
    w = World(pages=7, size=2, seqs=3, budget=12)
    for name in "abc":
        w.add(name, [ord(name), 5], max_tokens=7)
    w.run()
    assert w.scheduler.counters.preemptions > 0
    by_id = {r.request_id: r for r in w.records}
    assert by_id["a"].preemptions == 0, "the oldest never loses its pages"
    for name in "abc":
        assert w.outputs[name] == alone([ord(name), 5], 7)


def test_interactive_goes_before_batch():
    w = World(seqs=1)
    w.add("bulk", [5, 6], priority=Priority.BATCH)
    w.add("chat", [7, 8])
    w.step()
    assert [name for name, _ in w.rows_of(w.plans[-1])] == ["chat"]
    w.run()
    assert list(w.ends) == ["chat", "bulk"]


def test_two_page_pool_still_serves():
    w = World(pages=2, size=4, max_len=4)
    for i in range(5):
        w.add(f"r{i}", [10 + i], max_tokens=9)
    w.run()
    assert {e.reason for e in w.ends.values()} == {FinishReason.LENGTH}
    assert all(w.outputs[f"r{i}"] == alone([10 + i], 9, max_len=4) for i in range(5))


def test_stop_token_ends_and_min_tokens_holds_it_back():
    first = next_token([5, 6])
    w = World()
    w.add("a", [5, 6], stop_token_ids=frozenset({first}))
    w.add("b", [5, 6], stop_token_ids=frozenset({first}), min_tokens=2)
    w.run()
    assert w.outputs["a"] == [first]
    assert w.ends["a"].reason is FinishReason.STOP
    assert w.ends["a"].stop_token_id == first
    assert len(w.outputs["b"]) == 5


@pytest.mark.parametrize("phase", [0, 1, 3])
def test_cancel_frees_everything_in_every_phase(phase):
    w = World(budget=4)
    w.add("a", range(3, 13))
    for _ in range(phase):
        w.step()
    w.scheduler.cancel("a")
    w.scheduler.cancel("a")
    w.step()
    assert w.ends["a"].reason is FinishReason.CANCELLED
    assert w.table.available == w.table.total_pages
    assert w.table.peek(list(range(3, 13))) == min(4 * phase, 8) // 4 * 4, "computed full pages stay in the cache"


def test_deadline_ends_a_request():
    w = World()
    w.add("a", [5, 6], max_tokens=50, timeout_s=0.01)
    w.run()
    assert w.ends["a"].reason is FinishReason.TIMEOUT
    assert 0 < len(w.outputs["a"]) < 50


def test_row_failure_ends_that_request_alone():
    w = World()
    w.add("bad", [5, 6])
    w.add("good", [7, 8])
    plan = w.scheduler.schedule(1.0)
    output = w.ranks.execute(plan)
    w.scheduler.dispatched(plan)
    w.scheduler.commit(plan, StepOutput(output.token_ids, errors={0: "NaN"}), 1.0)
    (end,) = w.scheduler.take_finished()
    assert (end.request_id, end.reason, end.detail) == ("bad", FinishReason.ERROR, "NaN")
    assert "good" in w.scheduler.requests


def test_failed_row_leaves_nothing_in_the_prefix_cache():
    """A NaN in the last chunk says that the chunks before it cannot be trusted either."""
    w = World(budget=4)
    prompt = list(range(3, 13))
    w.add("bad", prompt)
    w.step()
    assert w.table.peek(prompt) == 4
    w.step()
    plan = w.scheduler.schedule(1.0)
    w.scheduler.dispatched(plan)
    w.scheduler.commit(plan, StepOutput([0], errors={0: "NaN"}), 1.0)
    assert w.table.peek(prompt) == 0
    w.table.check()
    assert w.table.available == w.table.total_pages


def test_rows_exhausted_defers_admission():
    w = World(rows=1, seqs=4)
    w.add("a", [5, 6])
    w.add("b", [7, 8])
    w.step()
    assert [name for name, _ in w.rows_of(w.plans[-1])] == ["a"]
    w.run()
    assert {e.reason for e in w.ends.values()} == {FinishReason.LENGTH}


def test_prompt_is_not_admitted_when_it_would_push_out_running_rows():
    w = World(pages=6, size=4, budget=32)
    w.add("a", range(3, 15), max_tokens=4)
    w.step()
    w.add("b", range(3, 10), cache_enabled=False)
    w.step()
    assert "b" not in {name for name, _ in w.rows_of(w.plans[-1])}
    w.run()
    assert w.scheduler.counters.preemptions == 0


def test_second_turn_reuses_prompt_and_answer():
    w = World()
    w.add("first", range(3, 13), max_tokens=6)
    w.run()
    turn = list(range(3, 13)) + w.outputs["first"] + [50, 51]
    w.add("second", turn)
    w.run()
    assert w.ends["second"].cached_tokens == 12
    assert w.ends["first"].cached_tokens == 0


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_random_histories_lose_leak_and_mix_nothing(data):
    size = data.draw(st.sampled_from([1, 2, 4]))
    max_len = data.draw(st.integers(6, 24))
    least = -(-max_len // size) + 1
    w = World(
        pages=data.draw(st.integers(least, least + 12)),
        size=size,
        seqs=data.draw(st.integers(1, 5)),
        budget=data.draw(st.integers(5, 20)),
        chunk=data.draw(st.integers(1, 9)),
        cache=data.draw(st.booleans()),
        max_len=max_len,
        depth=data.draw(st.integers(0, 2)),
    )
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    expected = {}
    cancelled = set()
    for i in range(data.draw(st.integers(1, 25))):
        name = f"r{i}"
        prompt = [rng.choice((5, 6)) for _ in range(rng.randint(1, max_len - 1))]
        count = rng.randint(1, 12)
        expected[name] = alone(prompt, count, max_len)
        w.add(
            name,
            prompt,
            count,
            priority=rng.choice(list(Priority)),
            tenant=rng.choice(("", "t")),
            cache_enabled=rng.random() < 0.8,
        )
        for _ in range(rng.randint(0, 3)):
            w.step()
        if rng.random() < 0.2:
            victim = rng.choice(sorted(expected))
            if victim not in w.ends:
                cancelled.add(victim)
            w.scheduler.cancel(victim)
        if rng.random() < 0.05:
            w.scheduler.flush()
    w.run()
    assert set(w.ends) == set(expected)
    for name, tokens in expected.items():
        if name in cancelled:
            assert w.outputs[name] == tokens[: len(w.outputs[name])]
        else:
            assert w.outputs[name] == tokens
