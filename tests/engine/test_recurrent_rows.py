"""The row seam, end to end: a toy recurrent model whose state is the running sum of its tokens' embeddings.

Its logits depend on every token before, so a row that is not cleared, shared or lost shows at once.
"""

import json
import types

import pytest
import torch
from attrs import frozen
from torch import nn

from arbi_core import SamplingParams
from arbi_core.api import (
    HFConfig,
    LayerSpec,
    ModelDims,
    ModelSpec,
    ParallelLMHead,
    StateKind,
    StorageSpec,
    TensorSpec,
    VocabParallelEmbedding,
    WeightMap,
    WeightShardSpec,
    hookimpl,
)
from arbi_core.config.load import from_values
from arbi_core.engine.boot import build_engine
from arbi_core.engine.messages import SubmitMsg
from arbi_core.plugins import load_registry

HIDDEN, VOCAB = 16, 64
SUM = StateKind("running_sum")


class SumModel(nn.Module):
    def __init__(self, ctx):
        super().__init__()
        self.embed = VocabParallelEmbedding(VOCAB, HIDDEN, group=ctx.group, dtype=ctx.dtype)
        self.head = ParallelLMHead(HIDDEN, VOCAB, tied=None, group=ctx.group, dtype=ctx.dtype)

    def forward(self, batch, layers):
        x = self.embed(batch.input_ids)
        for layer in layers:
            x = layer(x.unsqueeze(1), None, None).squeeze(1)
        return x

    def compute_logits(self, hidden):
        return self.head(hidden)

    def attention_sinks(self, layer):
        return None


class SumFamily:
    architectures = ("SumForCausalLM",)

    def parse_config(self, hf):
        c = HFConfig(hf)
        layers = c.get("num_hidden_layers", int)
        c.finish()
        specs = tuple(
            LayerSpec(index=i, state_kind=SUM, num_heads=1, num_kv_heads=1, head_dim=HIDDEN) for i in range(layers)
        )
        return ModelSpec("SumForCausalLM", ModelDims(layers, HIDDEN, VOCAB, 64), specs, dtype="float32")

    def build(self, spec, ctx):
        return SumModel(ctx)

    def weight_map(self, spec):
        return WeightMap(
            (WeightShardSpec("embed.weight", "embed.weight", 0), WeightShardSpec("head.weight", "head.weight", 0))
        )


@frozen
class SumBackend:
    name: str = "sum"
    state_kind: str = SUM

    def supports(self, layer, device):
        return None

    def storage(self, layer, ctx):
        return StorageSpec(rows=(TensorSpec("sum", (HIDDEN,), "float32"),))

    def metadata_builder(self, layers, ctx):
        return types.SimpleNamespace(build=lambda batch: batch)

    def attn_op(self, layer, ctx, sinks=None):
        return types.SimpleNamespace(forward=self._forward)

    def _forward(self, q, k, v, state, batch, out):
        for i in range(batch.num_rows):
            first, last = int(batch.cu_seqlens_q_host[i]), int(batch.cu_seqlens_q_host[i + 1])
            row = int(batch.state_rows_host[i])
            assert row > 0
            sums = state["sum"][row] + q[first:last, 0].cumsum(0)
            state["sum"][row] = sums[-1]
            out[first:last, 0] = sums
        assert not state["sum"][0].any(), "the sentinel row stays zero"
        return out


def plugin():
    module = types.ModuleType("sum_plugin")
    module.arbi_api_version = 1
    module.arbi_model_families = hookimpl(lambda: [SumFamily()])
    module.arbi_attention_backends = hookimpl(lambda: [SumBackend()])
    return module


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["SumForCausalLM"], "num_hidden_layers": 2}))
    return tmp_path


def run(path, prompts, **settings):
    values = {"model.path": str(path), "model.load_format": "dummy", "model.skip_tokenizer_init": True}
    built = build_engine(from_values({**values, **settings}), load_registry(extra=[plugin()]))
    core = built.core
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0, max_tokens=10)
        core.submit(SubmitMsg(request_id=f"r{i}", prompt_token_ids=tuple(prompt), sampling=sampling, arrival=float(i)))
    texts = {f"r{i}": [] for i in range(len(prompts))}
    while core.has_work:
        for out in core.step().tokens:
            texts[out.request_id] += out.token_ids
    weights = core._executor.model
    preemptions = core.stats().preemptions
    result = list(texts.values()), weights.embed.weight.clone(), weights.head.weight.clone(), preemptions
    core.close()
    return result


def expected(prompt, embed, head):
    ids = list(prompt)
    for _ in range(10):
        x = embed[torch.tensor(ids)]
        for _ in range(2):
            x = x.cumsum(0)
        ids.append(int((x[-1] @ head.T).argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduler.max_num_seqs": 8},
        {"scheduler.max_num_seqs": 2},
        {"scheduler.max_num_seqs": 4, "scheduler.max_num_batched_tokens": 5},
        {"scheduler.max_num_seqs": 4, "cache.num_pages": 9, "cache.page_size": 4, "model.max_model_len": 32},
    ],
    ids=["all at once", "rows reused", "chunked", "preempted"],
)
def test_rows_are_clear_for_each_owner_and_never_shared(model, settings):
    prompts = [[(7 * i + j) % VOCAB for j in range(1 + 3 * (i % 4))] for i in range(9)]
    texts, embed, head, preemptions = run(model, prompts, **settings)
    assert texts == [expected(p, embed, head) for p in prompts]
    assert (preemptions > 0) == ("cache.num_pages" in settings)
