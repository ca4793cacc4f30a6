"""Padded decode steps give the logits and the text of unpadded ones; recorded graphs are tested on the device."""

import pytest

from arbi_core import LLM, SamplingParams
from arbi_core.runner.graphs import DecodeGraphs, EagerRecorder, buckets
from support.recorder import LogitRecorder


def test_buckets_are_few_and_close():
    for most in (1, 2, 3, 7, 16, 100, 256, 1024):
        sizes = buckets(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        for rows in range(16, most + 1):
            assert min(s for s in sizes if s >= rows) <= rows * 1.5
    assert len(buckets(256)) <= 22


@pytest.mark.parametrize("variant", ["llama", "qwen3", "mistral"])
def test_padding_changes_no_text(tiny_dir, variant):
    prompts = [{"prompt_token_ids": [5 + i, 9, 40 + i, 7] * (2 + i)} for i in range(5)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=6 + 5 * i, ignore_eos=True) for i in range(5)]
    texts, sizes = [], []
    for padded in (False, True):
        with LLM(str(tiny_dir(variant)), skip_tokenizer_init=True, max_num_seqs=8, page_size=4, num_pages=90) as llm:
            runner = llm._core._executor
            if padded:
                runner.graphs = DecodeGraphs(runner._builder, runner._forward_logits, 8, EagerRecorder())
                runner.record_graphs()
                recorder = LogitRecorder(llm)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            texts.append([o.outputs[0].token_ids for o in outputs])
            if padded:
                sizes = {rows for rows, tokens in recorder.steps if rows == tokens}
    assert texts[0] == texts[1]
    assert sizes >= {1, 2, 4, 8}, "5 rows are padded to 8"
    assert not sizes & {3, 5, 6, 7}
