"""The dense families against transformers: every logit, every way to cut a prompt, and the same greedy text."""

import pytest
import torch

from arbi_core import LLM, SamplingParams
from support.recorder import LogitRecorder
from support.tiny import TINY, reference_model

TOLERANCE = 1e-4
LENGTHS = (61, 7, 33, 1, 48)


def prompts(lengths=LENGTHS):
    g = torch.Generator().manual_seed(7)
    return [torch.randint(3, 320, (n,), generator=g).tolist() for n in lengths]


def open_llm(path, **overrides):
    options = {
        "max_model_len": 256,
        "page_size": 8,
        "num_pages": 160,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
    }
    return LLM(str(path), skip_tokenizer_init=True, **{**options, **overrides})


def greedy(llm, ids_list, count):
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in ids_list], params, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outputs]


def reference_logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def compare(recorder, sequences, model):
    """Every recorded position of every sequence equals the reference's."""
    assert len(recorder.logits) == len(sequences)
    unmatched = dict(recorder.logits)
    for ids in sequences:
        expected = reference_logits(model, ids)
        key = min(
            unmatched, key=lambda k: (unmatched[k][0] - expected[0]).abs().max() + 1e3 * (len(unmatched[k]) != len(ids))
        )
        got = unmatched.pop(key)
        assert sorted(got) == list(range(len(ids)))
        worst = max((got[p] - expected[p]).abs().max().item() for p in got)
        assert worst < TOLERANCE, f"{len(ids)} tokens: {worst}"


def check(path, budget, lengths=LENGTHS, count=6):
    model = reference_model(path)
    with open_llm(path, max_num_batched_tokens=budget) as llm:
        recorder = LogitRecorder(llm)
        ids_list = prompts(lengths)
        outputs = greedy(llm, ids_list, count)
        compare(recorder, [ids + out[:-1] for ids, out in zip(ids_list, outputs, strict=True)], model)
        assert llm.stats.pages_free == llm.stats.pages_total


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_mixed_batch_with_chunked_prefill_matches_transformers(tiny_dir, variant):
    check(tiny_dir(variant), budget=24)


@pytest.mark.oracle
@pytest.mark.parametrize("budget", [8, 17, 32, 256])
@pytest.mark.parametrize("variant", list(TINY))
def test_logits_match_transformers_at_every_chunk_size(tiny_dir, variant, budget):
    check(tiny_dir(variant), budget=budget)


@pytest.mark.oracle
@pytest.mark.parametrize("variant", list(TINY))
def test_single_stream_prefill_and_decode_match_transformers(tiny_dir, variant):
    check(tiny_dir(variant), budget=256, lengths=(57,), count=20)


@pytest.mark.oracle
@pytest.mark.parametrize("variant", list(TINY))
def test_greedy_text_of_64_tokens_is_identical(tiny_dir, variant):
    path = tiny_dir(variant)
    model = reference_model(path)
    ids_list = prompts((40, 11))
    with open_llm(path, max_num_batched_tokens=16) as llm:
        outputs = greedy(llm, ids_list, 64)
    for ids, out in zip(ids_list, outputs, strict=True):
        with torch.no_grad():
            expected = model.generate(
                torch.tensor([ids]),
                max_new_tokens=64,
                min_new_tokens=64,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(ids) :].tolist()
        assert out == expected


def test_preempted_requests_give_the_same_text(tiny_dir):
    """Eight requests that cannot all fit: some lose their pages and come back."""
    path = tiny_dir("llama")
    ids_list = prompts((30, 28, 33, 25, 31, 29, 27, 32))
    with open_llm(path, num_pages=200) as roomy:
        expected = greedy(roomy, ids_list, 40)
    for caching in (False, True):
        with open_llm(path, num_pages=34, enable_prefix_caching=caching) as tight:
            assert greedy(tight, ids_list, 40) == expected
            assert tight.stats.preemptions > 0
            assert tight.stats.pages_free == tight.stats.pages_total


def test_prefix_cache_hit_gives_the_same_logits(tiny_dir):
    path = tiny_dir("qwen3")
    model = reference_model(path)
    shared = prompts((50,))[0]
    with open_llm(path, enable_prefix_caching=True) as llm:
        first = greedy(llm, [shared], 10)[0]
        follow_up = shared + first + prompts((9,))[0]
        recorder = LogitRecorder(llm)
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
        output = llm.generate([{"prompt_token_ids": follow_up}], params, use_tqdm=False)[0]
        assert output.num_cached_tokens == 56, "the pages of the prompt and of the answer are reused"
        expected = reference_logits(model, follow_up + output.outputs[0].token_ids[:-1])
        ((_, got),) = recorder.logits.items()
        assert min(got) == 56
        assert max((got[p] - expected[p]).abs().max().item() for p in got) < TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close_to_float32(tiny_dir, dtype):
    path = tiny_dir("llama")
    model = reference_model(path)
    ids = prompts((40,))[0]
    with open_llm(path, dtype=dtype) as llm:
        recorder = LogitRecorder(llm)
        greedy(llm, [ids], 1)
        ((_, got),) = recorder.logits.items()
        expected = reference_logits(model, ids)
        error = torch.stack([got[p] - expected[p] for p in range(40)]).pow(2).mean().sqrt()
        assert error / expected.std() < (0.05 if dtype == "bfloat16" else 0.01)


@pytest.mark.parametrize("kv", ["fp32", "bf16", "fp16"])
def test_cache_dtype_is_chosen_by_name(tiny_dir, kv):
    with open_llm(tiny_dir("llama"), kv_cache_dtype=kv) as llm:
        assert llm.info.kv_backend == {"paged_kv": f"reference-{kv}"}
        assert len(greedy(llm, prompts((20,)), 4)[0]) == 4
