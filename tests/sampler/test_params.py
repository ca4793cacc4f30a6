"""Sampling parameters refuse what cannot be meant."""

import math

import pytest

from arbi_core import SamplingParams
from arbi_core.errors import RequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 2.0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("n", 0),
        ("n", 1000),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("seed", 1.5),
        ("logprobs", -1),
        ("stop", ["ok", ""]),
        ("stop_token_ids", [-3]),
    ],
)
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert caught.value.status == 400


def test_min_tokens_above_max_tokens_names_both():
    with pytest.raises(RequestError, match=r"min_tokens \(9\) is larger than max_tokens \(4\)"):
        SamplingParams(min_tokens=9, max_tokens=4)


def test_one_stop_string_may_be_given_bare():
    assert SamplingParams(stop="x").stop == ("x",)


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**64 - 1])
def test_any_64_bit_seed_is_taken(seed):
    assert SamplingParams(seed=seed).seed == seed
