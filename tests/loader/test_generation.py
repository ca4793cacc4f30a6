"""End tokens and sampling defaults of a checkpoint."""

import pytest

from arbi_core.errors import CheckpointError, UnsupportedModelError
from arbi_core.loader.base import TokenizerParts
from arbi_core.loader.generation import default_sampling, end_token_ids
from arbi_core.spec import ModelDims, ModelSpec
from support.tokenizers import byte_level


def spec(*eos, vocab=320):
    return ModelSpec("X", ModelDims(1, 8, vocab, 64), (), eos_token_ids=eos)


def test_end_tokens_of_all_three_places_count():
    parts = TokenizerParts(byte_level(), eos_token="<|end|>")
    assert end_token_ids(spec(10), {"eos_token_id": [11, 12]}, parts) == {10, 11, 12, 3}
    assert end_token_ids(spec(), {"eos_token_id": 11}, None) == {11}
    assert end_token_ids(spec(), {}, TokenizerParts(byte_level(), eos_token="<nowhere>")) == frozenset()
    assert end_token_ids(spec(), {}, TokenizerParts(byte_level())) == frozenset()


def test_end_tokens_outside_of_the_vocabulary_are_left_out():
    assert end_token_ids(spec(-1, 320, 319), {"eos_token_id": [-1]}, None) == {319}


@pytest.mark.parametrize("value", ["2", 2.5, [2, None], True])
def test_end_token_that_is_no_id_is_refused(value):
    with pytest.raises(UnsupportedModelError, match="eos_token_id must be"):
        end_token_ids(spec(), {"eos_token_id": value}, None)


def test_sampling_defaults_are_what_the_author_wrote():
    config = {
        "temperature": 0.6, "top_k": 20.0, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.05, "do_sample": False,
        "max_new_tokens": 99, "transformers_version": "5",
    }  # fmt: skip
    chosen = default_sampling(config)
    assert chosen == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.05}
    assert isinstance(chosen["top_k"], int)
    assert default_sampling({}) == {}
    assert default_sampling({"temperature": None, "top_p": None}) == {}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"temperature": -1.0}, "temperature must lie in"),
        ({"temperature": float("nan")}, "temperature must lie in"),
        ({"temperature": True}, "temperature must be a number, not True"),
        ({"top_p": "0.9"}, "top_p must be a number, not '0.9'"),
        ({"top_k": 2.5}, "top_k must be a whole number, not 2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must lie in"),
    ],
)
def test_defaults_that_no_request_could_have_are_refused_at_boot(config, says):
    with pytest.raises(CheckpointError, match=f"generation_config.json .*{says}"):
        default_sampling(config)
