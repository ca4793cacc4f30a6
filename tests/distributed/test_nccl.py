"""NCCL: on one GPU the group of one, which shows that the calls are right; on two, what two ranks generate."""

import pytest
import torch

from arbi_core import LLM, SamplingParams
from arbi_core.distributed.torch_group import open_group
from arbi_core.spec import ParallelSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def group(tmp_path):
    import torch.distributed as dist

    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    made = open_group(store, ParallelSpec(0, 1), "cuda", connect_timeout_s=60, timeout_s=60, one_host=True)
    yield made
    made.abort()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collectives_run_on_the_current_stream_and_are_captured(group, dtype):
    x = torch.arange(12, device="cuda").view(3, 4).to(dtype)
    with torch.inference_mode():
        assert torch.equal(group.all_reduce(x.clone()), x)
        assert torch.equal(group.all_gather(x), x)
        assert torch.equal(group.all_gather(x, 0), x)
        static = x.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = group.all_gather(group.all_reduce(static) + 1)
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(y, x + 1)


def test_aborting_twice_does_no_harm(group):
    group.all_reduce(torch.ones(3, device="cuda"))
    group.abort()
    group.abort()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_generate_what_one_does(tiny_dir):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [5 + i] * 30} for i in range(6)]
    found = []
    for ranks in (1, 2):
        options = {"dtype": "float32", "num_pages": 24, "max_model_len": 128, "skip_tokenizer_init": True}
        with LLM(str(tiny_dir("llama")), tensor_parallel_size=ranks, device="cuda", **options) as engine:
            found.append([o.outputs[0].token_ids for o in engine.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]
