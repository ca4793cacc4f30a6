"""Draws: sets, distributions, reproducibility, penalties, log-probabilities, bad logits."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arbi_core import SamplingParams
from arbi_core.sampler.filters import candidates, min_p_mask
from arbi_core.sampler.noise import draw as draw_index
from arbi_core.sampler.noise import row_bits, row_uniform
from arbi_core.sampler.sampler import Sampler, SamplerRow

V = 50


def row(seed=1, prompt=(), output=(), stop=(), **params):
    return SamplerRow(SamplingParams(**params), prompt, list(output), seed, frozenset(stop))


def draw(logits, rows, processors=None):
    return Sampler(processors).sample(logits, rows).to_host()


def random_logits(rows, seed=0, scale=2.0):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * scale


def test_greedy_takes_the_best_and_the_lowest_index_of_equals():
    logits = torch.zeros(2, V)
    logits[0, [7, 3]] = 5.0
    assert draw(logits, [row(temperature=0), row(temperature=0)]).token_ids.tolist() == [3, 0]


def test_mixed_batch_keeps_greedy_rows_greedy():
    logits = random_logits(4)
    out = draw(logits, [row(temperature=t) for t in (0, 1, 0, 1)]).token_ids
    assert out[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()


def test_logits_are_not_changed():
    logits = random_logits(1)
    before = logits.clone()
    draw(logits, [row(temperature=0.7, top_p=0.9, presence_penalty=1, output=[3], logit_bias={5: 2.0}, prompt=[1])])
    assert torch.equal(logits, before)


def kept_by_brute_force(logits, top_k, top_p, min_p):
    p = np.exp(logits.double().numpy() - logits.max().item())
    order = np.argsort(-p, kind="stable")
    if top_k:
        order = order[:top_k]
    q = p[order] / p[order].sum() if top_k else p[order] / p.sum()
    if top_p < 1:
        last = int(np.searchsorted(np.cumsum(q), top_p))
        cut = q[min(last, len(q) - 1)]
        order = order[q >= cut]
    return {int(t) for t in order if p[t] >= min_p * p.max()}


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    top_k=st.sampled_from([0, 1, 3, 10, 49, 50, 60]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
)
def test_filters_keep_exactly_the_right_tokens(seed, top_k, top_p, min_p):
    logits = random_logits(1, seed)
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    expected = kept_by_brute_force(logits[0], top_k if top_k < V else 0, top_p, min_p)
    if top_k or top_p < 1:
        values, index = candidates(logits, [params])
        got = set(index[0][values[0] > -math.inf].tolist())
    else:
        masked = min_p_mask(logits, torch.tensor([min_p]))
        got = set((masked[0] > -math.inf).nonzero().flatten().tolist())
    assert got == expected


def test_nucleus_keeps_the_whole_group_of_equals_at_its_boundary():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, -5.0]])
    values, index = candidates(logits, [SamplingParams(top_p=0.6)])
    assert set(index[0][values[0] > -math.inf].tolist()) == {0, 1, 2, 3}


def test_filters_of_one_row_do_not_depend_on_its_neighbours():
    logits = random_logits(3, 5)
    params = [SamplingParams(top_k=2), SamplingParams(top_p=0.8), SamplingParams(top_k=30, top_p=0.5)]
    values, index = candidates(logits, params)
    for i, p in enumerate(params):
        alone_v, alone_i = candidates(logits[i : i + 1], [p])
        together = {t: v for t, v in zip(index[i].tolist(), values[i].tolist(), strict=True) if v > -math.inf}
        alone = {t: v for t, v in zip(alone_i[0].tolist(), alone_v[0].tolist(), strict=True) if v > -math.inf}
        assert together == alone


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}])
def test_draws_follow_the_distribution(params):
    """Chi-square of 20,000 draws against the softmax over the kept set."""
    params = {"temperature": 1.0, **params}
    logits = random_logits(1, 3)
    count = 20_000
    p = torch.softmax(logits[0].double() / params["temperature"], -1)
    kept = kept_by_brute_force(
        logits[0] / params["temperature"], params.get("top_k", 0), params.get("top_p", 1.0), params.get("min_p", 0.0)
    )
    expected = np.array([p[t].item() if t in kept else 0.0 for t in range(V)])
    expected = expected / expected.sum() * count
    batch = 500
    hits = np.zeros(V)
    for start in range(0, count, batch):
        rows = [row(seed=start + i, **params) for i in range(batch)]
        np.add.at(hits, draw(logits.expand(batch, V), rows).token_ids, 1)
    assert hits[expected == 0].sum() == 0
    usable = expected >= 5
    chi2 = ((hits[usable] - expected[usable]) ** 2 / expected[usable]).sum()
    freedom = usable.sum() - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 5


def test_same_seed_gives_the_same_token_in_any_company():
    rng = random.Random(0)
    special = random_logits(1, 42)
    options = {"temperature": 0.9, "top_p": 0.95}
    alone = draw(special, [row(seed=5, output=[1, 2], **options)]).token_ids.item()
    for _ in range(20):
        others = rng.randint(0, 6)
        place = rng.randint(0, others)
        rows = [
            row(seed=rng.randint(0, 99), temperature=rng.choice([0, 0.5, 1.0]), top_k=rng.choice([0, 4]))
            for _ in range(others)
        ]
        logits = random_logits(others, rng.randint(0, 999))
        rows.insert(place, row(seed=5, output=[1, 2], **options))
        logits = torch.cat((logits[:place], special, logits[place:]))
        assert draw(logits, rows).token_ids[place].item() == alone


def test_next_position_draws_anew():
    logits = torch.zeros(1, V)
    drawn = {draw(logits, [row(seed=9, output=[0] * i)]).token_ids.item() for i in range(30)}
    assert len(drawn) > 10


def test_uniforms_are_uniform_and_never_one():
    values = np.array([row_uniform(b, p) for b in range(100) for p in range(200)])
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.01
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 50


def test_extreme_uniforms_draw_tokens_that_can_be_drawn():
    weights = torch.tensor([[-math.inf, 0.0, -math.inf, -1.0, -math.inf]])
    for u, expected in ((0.0, 1), (1 - 2.0**-53, 3)):
        assert draw_index(weights, torch.tensor([u], dtype=torch.float64)).item() == expected


def test_row_bits_differ_by_base_and_position():
    bits = {row_bits(b, p) for b in (0, 1, -1, 2**64 - 2) for p in range(50)}
    assert len(bits) == 200
    assert row_bits(-1, 3) == row_bits(2**64 - 1, 3), "seeds are taken modulo 2^64"


def test_penalties_count_what_they_should():
    logits = torch.ones(1, V)
    logits[0, 8] = -1.0
    sampler = Sampler()
    r = row(
        prompt=[7, 8],
        output=[5, 5, 6],
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=2.0,
        temperature=0,
    )
    edited = sampler._edit(logits, [r])[0]
    assert edited[5].item() == 1 / 2 - 2 * 0.25 - 0.5
    assert edited[6].item() == 1 / 2 - 0.25 - 0.5
    assert edited[7].item() == 1 / 2, "presence and frequency do not see the prompt"
    assert edited[8].item() == -2.0, "a negative logit is multiplied"
    assert edited[9].item() == 1.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, V - 1), max_size=200), st.integers(0, 200))
def test_incremental_counts_equal_a_recount(tokens, cut):
    r = row(presence_penalty=0.5, frequency_penalty=0.5, output=tokens[:cut], temperature=0)
    sampler = Sampler()
    sampler._edit(torch.zeros(1, V), [r])
    r.output_token_ids.extend(tokens[cut:])
    got = sampler._edit(torch.zeros(1, V), [r])[0]
    counts = torch.tensor([tokens.count(t) for t in range(V)], dtype=torch.float32)
    assert torch.equal(got, -0.5 * counts - 0.5 * (counts > 0))


def test_logit_bias_moves_the_choice():
    logits = random_logits(1)
    assert draw(logits, [row(temperature=0, logit_bias={13: 100.0})]).token_ids.item() == 13


def test_min_tokens_masks_stop_tokens_until_reached():
    logits = torch.zeros(1, V)
    logits[0, 4] = 9.0
    assert draw(logits, [row(temperature=0, min_tokens=2, stop=[4], output=[1])]).token_ids.item() != 4
    assert draw(logits, [row(temperature=0, min_tokens=2, stop=[4], output=[1, 1])]).token_ids.item() == 4


def test_named_processor_sees_only_its_rows():
    class Ban:
        name = "ban"

        def apply(self, logits, rows):
            assert len(rows) == 1
            logits[:, rows[0].output_token_ids] = -math.inf
            return logits

    logits = torch.zeros(2, V)
    logits[:, 3] = 5.0
    rows = [row(temperature=0, output=[3]), row(temperature=0, output=[3], logits_processors=["ban"])]
    assert draw(logits, rows, {"ban": Ban()}).token_ids.tolist() == [3, 0]


def test_logprobs_come_from_the_raw_logits():
    logits = random_logits(2, 8)
    rows = [row(temperature=0, logit_bias={7: 100.0}, logprobs=3), row(temperature=0)]
    out = draw(logits, rows)
    expected = torch.log_softmax(logits[0].double(), -1)
    entry = out.logprobs[0]
    assert set(out.logprobs) == {0}
    assert entry.token_id == 7
    assert entry.logprob == pytest.approx(expected[7].item(), abs=1e-5)
    assert entry.rank == 1 + int((logits[0] > logits[0, 7]).sum())
    assert [t for t, _ in entry.top] == logits[0].topk(3).indices.tolist()


@pytest.mark.parametrize(
    ("value", "reason"), [(math.nan, "NaN"), (math.inf, "infinite"), (None, "every token is masked")]
)
def test_bad_logits_end_that_row_alone(value, reason):
    logits = random_logits(3, 2)
    if value is None:
        logits[1] = -math.inf
    else:
        logits[1, 5] = value
    for temperature in (0, 1.0):
        out = draw(logits, [row(temperature=temperature) for _ in range(3)])
        assert set(out.errors) == {1}
        assert reason in out.errors[1]


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 50.0])
def test_extreme_temperatures_draw_a_token(temperature):
    logits = random_logits(1, 4, scale=30)
    out = draw(logits, [row(temperature=temperature)])
    assert not out.errors
    if temperature < 1e-2:
        assert out.token_ids.item() == logits.argmax().item()


def test_vocabulary_of_one():
    assert draw(torch.zeros(1, 1), [row(temperature=1.0, top_k=5, top_p=0.5)]).token_ids.tolist() == [0]
