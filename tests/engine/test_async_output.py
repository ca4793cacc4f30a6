"""Deciding a step before the last one's tokens are known changes no answer: whatever ends, stops or moves requests."""

import pytest

from arbi_core import LLM, SamplingParams
from arbi_core.config.load import from_values
from arbi_core.engine.boot import build_engine
from arbi_core.engine.messages import FinishReason, SubmitMsg

PROMPTS = [f"{'once upon a time ' * (1 + i % 3)}number {i}" for i in range(7)]


def generate(path, params, **options):
    with LLM(str(path), max_num_batched_tokens=48, page_size=8, **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        stats = llm.stats
    assert stats.pages_free == stats.pages_total
    return [(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs], stats


def both(path, params, **options):
    off, _ = generate(path, params, async_output="off", **options)
    on, stats = generate(path, params, async_output="on", **options)
    assert on == off
    return on, stats


def test_greedy_and_seeded_draws(tiny_text_dir):
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=5 + 3 * i, ignore_eos=True) for i in range(7)]
    answers, _ = both(tiny_text_dir, params)
    assert [len(ids) for ids, _, _ in answers] == [5 + 3 * i for i in range(7)]


def test_stop_tokens_end_a_request_at_the_same_token(tiny_text_dir):
    plain, _ = generate(tiny_text_dir, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[ids[3 + i]])
        for i, (ids, _, _) in enumerate(plain)
    ]
    answers, _ = both(tiny_text_dir, params)
    for i, (ids, _, reason) in enumerate(answers):
        stop = plain[i][0][3 + i]
        assert ids == plain[i][0][: plain[i][0].index(stop) + 1]
        assert reason == "stop"


def test_stop_strings_end_a_request_at_the_same_text(tiny_text_dir):
    plain, _ = generate(tiny_text_dir, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    stops = [text[6 + i] for i, (_, text, _) in enumerate(plain)]
    params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=[s]) for s in stops]
    answers, stats = both(tiny_text_dir, params)
    for i, (_, text, reason) in enumerate(answers):
        assert text == plain[i][1].split(stops[i])[0]
        assert reason == "stop"
    assert stats.finished == {FinishReason.STOP: 7}


def test_penalties_and_minimum_lengths(tiny_text_dir):
    params = [
        SamplingParams(temperature=0, max_tokens=16, repetition_penalty=1.3, min_tokens=9),
        SamplingParams(temperature=0.8, seed=3, max_tokens=16, frequency_penalty=0.7, presence_penalty=0.4),
        *[SamplingParams(temperature=0, max_tokens=12, min_tokens=i) for i in range(5)],
    ]
    both(tiny_text_dir, params)


def test_logprobs_are_those_of_the_same_tokens(tiny_text_dir):
    def scores(mode):
        with LLM(str(tiny_text_dir), async_output=mode) as llm:
            params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
            return [o.outputs[0].logprobs for o in llm.generate(PROMPTS, params, use_tqdm=False)]

    for on, off in zip(scores("on"), scores("off"), strict=True):
        assert [(e.token_id, e.rank) for e in on] == [(e.token_id, e.rank) for e in off]
        assert [e.logprob for e in on] == pytest.approx([e.logprob for e in off], abs=1e-4)


@pytest.mark.parametrize("host_tier_gib", [0.0, 0.05])
def test_preemption(tiny_text_dir, host_tier_gib):
    """Half of what the requests need: places change hands all the time."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    unlimited, _ = generate(tiny_text_dir, params, enable_prefix_caching=False)
    answers, stats = both(tiny_text_dir, params, num_pages=17, max_model_len=100, host_tier_gib=host_tier_gib)
    assert answers == unlimited
    assert stats.preemptions > 0
    assert (stats.resumed_tokens > 0) == bool(host_tier_gib)


@pytest.mark.parametrize("mode", ["on", "off"])
def test_a_cancelled_request_goes_at_once_and_leaves_its_pages(tiny_text_dir, mode):
    values = {"model.path": str(tiny_text_dir), "scheduler.async_output": mode, "cache.page_size": 8}
    core = build_engine(from_values(values)).core
    prompt = tuple(range(10, 60))
    sampling = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    core.submit(SubmitMsg(request_id="a", prompt_token_ids=prompt, sampling=sampling))
    tokens = [t for _ in range(6) for out in core.step().tokens for t in out.token_ids]
    core.cancel("a")
    assert core.stats().pages_free == core.stats().pages_total
    rest = [core.step() for _ in range(3)]
    assert [f.reason for b in rest for f in b.finished] == [FinishReason.CANCELLED]
    assert not [t for b in rest for t in b.tokens]
    core.submit(SubmitMsg(request_id="b", prompt_token_ids=(*prompt, *tokens), sampling=sampling))
    batches = []
    while core.has_work:
        batches.append(core.step())
    (end,) = [f for b in batches for f in b.finished]
    assert end.cached_tokens == (len(prompt) + len(tokens) - 1) // 8 * 8
    core.close()
