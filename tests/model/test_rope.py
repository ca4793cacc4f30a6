"""Rotary tables against transformers' own, and the rotation itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arbi_core.builtin.dense_config import parse_dense
from arbi_core.model.rope import RopeSpec, RotaryEmbedding, inverse_frequencies, rotate

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def theirs(parameters):
    """Inverse frequencies and magnitude in transformers."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "architectures"}, rope_parameters=dict(parameters))
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))


def ours(parameters):
    spec = parse_dense("LlamaForCausalLM", {**LLAMA, "rope_parameters": parameters}).config.rope
    return inverse_frequencies(16, spec), spec.magnitude


thetas = st.sampled_from([100.0, 10000.0, 1e6])
factors = st.sampled_from([1.0, 1.5, 8.0, 40.0])
linear = st.fixed_dictionaries({"rope_type": st.just("linear"), "rope_theta": thetas, "factor": factors})
llama3 = st.fixed_dictionaries(
    {
        "rope_type": st.just("llama3"),
        "rope_theta": thetas,
        "factor": factors,
        "low_freq_factor": st.sampled_from([0.5, 1.0]),
        "high_freq_factor": st.sampled_from([2.0, 4.0]),
        "original_max_position_embeddings": st.sampled_from([16, 64, 256]),
    }
)
yarn = st.fixed_dictionaries(
    {
        "rope_type": st.just("yarn"),
        "rope_theta": thetas,
        "factor": factors,
        "original_max_position_embeddings": st.sampled_from([16, 64, 256, 4096]),
    },
    optional={
        "beta_fast": st.sampled_from([16.0, 32.0]),
        "beta_slow": st.sampled_from([1.0, 2.0]),
        "attention_factor": st.sampled_from([0.7, 1.0]),
        "mscale": st.sampled_from([0.707, 1.0]),
        "mscale_all_dim": st.sampled_from([0.5, 1.0]),
        "truncate": st.booleans(),
    },
)


@settings(max_examples=80, deadline=None)
@given(st.one_of(linear, llama3, yarn))
def test_frequencies_and_magnitude_are_those_of_transformers(parameters):
    expected, magnitude = theirs(parameters)
    got, own_magnitude = ours(parameters)
    assert torch.allclose(got, expected, rtol=2e-6, atol=0)
    assert own_magnitude == pytest.approx(magnitude)


def test_rotation_is_that_of_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    spec = RopeSpec(theta=500.0)
    table = RotaryEmbedding(16, 100, spec, torch.device("cpu"))
    positions = torch.tensor([0, 99, 3, 50])
    q, k = torch.randn(4, 6, 16), torch.randn(4, 2, 16)
    cos, sin = table.at(positions, torch.float32)
    angles = torch.outer(positions.float(), inverse_frequencies(16, spec)).repeat(1, 2)
    expected_q, expected_k = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin(), unsqueeze_dim=1)
    assert torch.allclose(rotate(q, cos, sin), expected_q, atol=1e-6)
    assert torch.allclose(rotate(k, cos, sin), expected_k, atol=1e-6)


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    table = RotaryEmbedding(8, 64, RopeSpec(theta=100.0), torch.device("cpu"))
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def at(x, position):
        return rotate(x, *table.at(torch.tensor([position]), torch.float32))

    assert at(q, 17).norm() == pytest.approx(q.norm().item(), rel=1e-5)
    assert (at(q, 9) * at(k, 4)).sum() == pytest.approx((at(q, 47) * at(k, 42)).sum().item(), rel=1e-4, abs=1e-5)


def test_dimensions_past_the_table_pass_through():
    table = RotaryEmbedding(4, 16, RopeSpec(), torch.device("cpu"))
    x = torch.randn(3, 2, 10)
    cos, sin = table.at(torch.tensor([1, 5, 9]), torch.float32)
    rotated = rotate(x, cos, sin)
    assert torch.equal(rotated[..., 4:], x[..., 4:])
    assert torch.equal(rotated[..., :4], rotate(x[..., :4], cos, sin))


def test_tables_are_float32_until_asked_for_in_another_dtype():
    table = RotaryEmbedding(4, 4096, RopeSpec(), torch.device("cpu"))
    position = torch.tensor([4001])
    exact = (4001.0 * inverse_frequencies(4, RopeSpec())).cos().repeat(2)
    cos, _ = table.at(position, torch.bfloat16)
    assert cos.dtype == torch.bfloat16
    assert torch.equal(cos.flatten(), exact.bfloat16())
