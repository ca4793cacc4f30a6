"""Whole models: the same logits on one rank and on two, and what one forward leaves behind."""

import pytest
import torch

from arbi_core.backend.base import BackendContext
from arbi_core.backend.binding import LayerBinding
from arbi_core.builtin.dense import DenseFamily
from arbi_core.builtin.reference_attention import ReferenceBackend
from arbi_core.distributed.group import SingleProcessGroup
from arbi_core.loader.load import load_dummy
from arbi_core.model.base import BuildContext
from arbi_core.spec import PAGED_KV
from support.paged import Sequence, make_batch
from support.ranks import on_ranks

CPU = torch.device("cpu")
BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CASES = {
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True},
    "MistralForCausalLM": {"sliding_window": 5, "head_dim": 6},
    "Qwen2ForCausalLM": {"tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"head_dim": 12},
    "SmolLM3ForCausalLM": {},
}
IDS = [3, 96, 50, 7, 7, 21, 80, 0, 33, 12, 64]


def spec_of(architecture):
    return DenseFamily().parse_config({**BASE, **CASES[architecture], "architectures": [architecture]})


def run(spec, group, dtype=torch.float32, chunks=(4, 1, 6)):
    """Logits of all tokens, computed in chunks, with dummy weights."""
    family = DenseFamily()
    with torch.device("meta"):
        model = family.build(spec, BuildContext(dtype, group, 64))
    load_dummy(model, family.weight_map(spec), device=CPU, dtype=dtype, seed=5)
    ctx = BackendContext(CPU, dtype, 4, 4, 64, 64, group.spec)
    binding = LayerBinding(spec.layers, model, {PAGED_KV: ReferenceBackend()}, ctx)
    binding.allocate(8, 0)
    sequence, logits = Sequence([2, 5, 4]), []
    with torch.inference_mode():
        for n in chunks:
            ids = IDS[sequence.computed : sequence.computed + n]
            batch = make_batch([(sequence, n)], 4, ids=ids)
            binding.begin_step(batch)
            logits.append(model.compute_logits(model.forward(batch, binding.calls)))
            sequence.computed += n
    return torch.cat(logits)


@pytest.mark.parametrize("architecture", list(CASES))
def test_two_ranks_give_the_logits_of_one(architecture):
    spec = spec_of(architecture)
    alone = run(spec, SingleProcessGroup())
    assert alone.shape == (len(IDS), 97)
    assert alone.std() > 1e-3
    for logits in on_ranks(2, lambda group: run(spec, group)):
        assert torch.allclose(logits, alone, atol=1e-5)


def test_more_ranks_than_key_heads_are_refused_by_name():
    with pytest.raises(ValueError, match=r"num_key_value_heads \(2\) cannot be divided over 4"):
        on_ranks(
            4, lambda group: DenseFamily().build(spec_of("LlamaForCausalLM"), BuildContext(torch.float32, group, 64))
        )


def test_every_parameter_is_in_the_weight_map_and_every_entry_has_a_parameter():
    for architecture in CASES:
        spec = spec_of(architecture)
        with torch.device("meta"):
            model = DenseFamily().build(spec, BuildContext(torch.float32, SingleProcessGroup(), 64))
        mapped = {e.param for e in DenseFamily().weight_map(spec)}
        if spec.config.tied:
            mapped.remove("lm_head.weight")
        assert mapped == {name for name, _ in model.named_parameters()}


def test_adapters_find_linears_by_their_place():
    with torch.device("meta"):
        model = DenseFamily().build(spec_of("LlamaForCausalLM"), BuildContext(torch.float32, SingleProcessGroup(), 64))
    assert model.layers[1].attn.qkv.adapter_key == "layers.1.attn.qkv"
    assert model.lm_head.adapter_key == "lm_head"
