"""The engine on a CUDA device: the same logits and the same text as transformers in float32 on the CPU."""

import pytest
import torch

from arbi_core import LLM, SamplingParams
from support.recorder import LogitRecorder
from support.tiny import TINY, reference_model

pytestmark = pytest.mark.gpu


def prompts():
    g = torch.Generator().manual_seed(7)
    return [torch.randint(3, 320, (n,), generator=g).tolist() for n in (61, 7, 33, 1, 48)]


@pytest.fixture(autouse=True)
def exact_float32():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("variant", list(TINY))
def test_logits_on_the_device_match_transformers(tiny_dir, variant):
    path = tiny_dir(variant)
    model = reference_model(path)
    options = {
        "max_model_len": 256,
        "page_size": 8,
        "num_pages": 160,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
    }
    with LLM(
        str(path), device="cuda", dtype="float32", skip_tokenizer_init=True, max_num_batched_tokens=24, **options
    ) as llm:
        recorder = LogitRecorder(llm)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
        rows = list(recorder.logits.values())
        for output in outputs:
            ids = output.prompt_token_ids + output.outputs[0].token_ids[:-1]
            with torch.no_grad():
                expected = model(torch.tensor([ids])).logits[0]
            errors = [
                max((row[p].cpu() - expected[p]).abs().max().item() for p in row)
                for row in rows
                if len(row) == len(ids)
            ]
            assert min(errors) < 1e-3
        assert llm.stats.pages_free == llm.stats.pages_total


def test_preemption_on_the_device_changes_no_text(tiny_dir):
    path = tiny_dir("llama")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    texts = []
    for pages in (200, 34):
        options = {"max_model_len": 256, "page_size": 8, "num_pages": pages, "max_num_seqs": 8}
        with LLM(str(path), device="cuda", dtype="float32", skip_tokenizer_init=True, **options) as llm:
            outputs = llm.generate([{"prompt_token_ids": p * 3} for p in prompts()], params, use_tqdm=False)
            texts.append([o.outputs[0].token_ids for o in outputs])
            assert (llm.stats.preemptions > 0) == (pages == 34)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_generates_on_the_device(tiny_dir, dtype):
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=16, seed=3, ignore_eos=True, detokenize=False)
    # Without the prefix cache: a hit computes in other shapes, and half precision then rounds otherwise.
    options = {"skip_tokenizer_init": True, "num_pages": 200, "enable_prefix_caching": False}
    with LLM(str(tiny_dir("qwen3")), device="cuda", dtype=dtype, **options) as llm:
        runs = [llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False) for _ in range(2)]
    ids = [[o.outputs[0].token_ids for o in run] for run in runs]
    assert ids[0] == ids[1], "the same seed draws the same text"


def test_pool_takes_what_the_memory_setting_leaves(tiny_dir):
    """The pool is sized by the device's memory, capped by what the running set can use."""
    with LLM(str(tiny_dir("llama")), device="cuda", skip_tokenizer_init=True, gpu_memory_utilization=0.5) as llm:
        assert llm.kv_capacity_tokens == 256 * 512
