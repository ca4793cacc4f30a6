"""``tkv-bypass`` on a CUDA device: logits of every dense model, graphs against eager launches, preemption, prefix hits."""

import pytest
import torch

from arbi_core import LLM, SamplingParams
from support.recorder import LogitRecorder
from support.tiny import TINY, reference_model

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)


def prompts(scale=1):
    g = torch.Generator().manual_seed(7)
    return [{"prompt_token_ids": torch.randint(3, 320, (n * scale,), generator=g).tolist()} for n in (61, 7, 33, 1, 48)]


@pytest.fixture(autouse=True)
def exact_float32():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def open_llm(path, **options):
    sizes = {"max_model_len": 256, "page_size": 16, "num_pages": 160, "max_num_seqs": 8, "dtype": "float32"}
    return LLM(str(path), device="cuda", kv_cache_dtype="tkv-bypass", skip_tokenizer_init=True, **{**sizes, **options})


@pytest.mark.parametrize("variant", list(TINY))
def test_logits_match_transformers(tiny_dir, variant):
    path = tiny_dir(variant)
    model = reference_model(path)
    with open_llm(path, max_num_batched_tokens=40, enforce_eager=True, enable_prefix_caching=False) as llm:
        recorder = LogitRecorder(llm)
        outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
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
            assert min(errors) < 2e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["llama", "qwen3", "mistral"])
def test_graphs_give_the_text_of_eager_launches(tiny_dir, variant, dtype):
    texts = []
    for eager in (True, False):
        with open_llm(tiny_dir(variant), enforce_eager=eager, dtype=dtype, enable_prefix_caching=False) as llm:
            assert (llm._core._executor.graphs is None) == eager
            params = [
                SamplingParams(temperature=i % 2, seed=i, max_tokens=9 + 4 * i, ignore_eos=True) for i in range(5)
            ]
            texts.append([o.outputs[0].token_ids for o in llm.generate(prompts(), params, use_tqdm=False)])
    assert texts[0] == texts[1]


def test_preemption_and_prefix_hits_change_no_text(tiny_dir):
    texts = []
    for pages in (160, 20):
        with open_llm(tiny_dir("llama"), num_pages=pages, max_model_len=240) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts(3), GREEDY, use_tqdm=False)
            texts.append([o.outputs[0].token_ids for o in outputs])
            stats = llm.stats
            assert stats.pages_free == stats.pages_total
            assert (stats.cached_tokens > 0) == (pages == 160)
            assert (stats.preemptions > 0) == (pages == 20)
    assert texts[0] == texts[1]
