"""The offline API on a tiny model: shapes, reproducibility, errors that disturb nothing else."""

import pytest

from arbi_core import LLM, SamplingParams
from arbi_core.errors import ConfigError, EngineClosedError, EngineFailedError, OutOfMemoryError, RequestError
from arbi_core.plugins import load_registry


@pytest.fixture(scope="module")
def llm(tiny_text_dir):
    with LLM(str(tiny_text_dir), num_pages=128, max_num_seqs=16) as opened:
        yield opened


def texts(outputs):
    return [o.outputs[0].text for o in outputs]


def test_one_prompt_or_many_text_or_ids(llm):
    params = SamplingParams(temperature=0, max_tokens=6)
    (one,) = llm.generate("hello", params, use_tqdm=False)
    ids = llm.get_tokenizer().encode("hello")
    many = llm.generate(["hello", {"prompt": "hello"}, {"prompt_token_ids": ids}], params, use_tqdm=False)
    assert {o.outputs[0].text for o in many} == {one.outputs[0].text}
    assert one.prompt == "hello"
    assert one.prompt_token_ids == ids
    assert one.finished
    assert one.outputs[0].finish_reason in {"length", "stop"}


def test_parameters_may_differ_per_prompt(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 4, 9)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 4, 9]
    with pytest.raises(RequestError, match="3 prompts came with 2 sampling parameters"):
        llm.generate(["a", "b", "c"], params[:2], use_tqdm=False)


def test_seeded_text_does_not_depend_on_the_batch(llm):
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=12, seed=11, ignore_eos=True)
    noise = SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True)
    alone = texts(llm.generate("seeded", params, use_tqdm=False))[0]
    for _ in range(3):
        mixed = llm.generate(["x", "seeded", "yy", "zzz"], [noise, params, noise, noise], use_tqdm=False)
        assert mixed[1].outputs[0].text == alone


def test_n_completions_are_distinct_and_reproducible(llm):
    params = SamplingParams(n=4, temperature=1.0, max_tokens=10, seed=3, ignore_eos=True)
    first, second = (llm.generate("branch", params, use_tqdm=False)[0] for _ in range(2))
    assert [o.index for o in first.outputs] == [0, 1, 2, 3]
    assert [o.text for o in first.outputs] == [o.text for o in second.outputs]
    assert len({o.text for o in first.outputs}) > 1


def test_logprobs_add_up(llm):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True)
    output = llm.generate("score me", params, use_tqdm=False)[0].outputs[0]
    assert [e.token_id for e in output.logprobs] == output.token_ids
    assert output.cumulative_logprob == pytest.approx(sum(e.logprob for e in output.logprobs))


def test_min_tokens_and_stop_token_ids(llm):
    free = llm.generate("stop", SamplingParams(temperature=0, max_tokens=10, ignore_eos=True), use_tqdm=False)[
        0
    ].outputs[0]
    stop = free.token_ids[2]
    first = free.token_ids.index(stop) + 1
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, stop_token_ids=[stop])
    output = llm.generate("stop", params, use_tqdm=False)[0].outputs[0]
    assert (output.finish_reason, output.stop_reason, len(output.token_ids)) == ("stop", stop, first)


def test_generation_ends_at_the_context(tiny_text_dir):
    with LLM(str(tiny_text_dir), max_model_len=32, num_pages=16) as small:
        output = small.generate(
            {"prompt_token_ids": [5] * 30}, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False
        )
        assert (len(output[0].outputs[0].token_ids), output[0].outputs[0].finish_reason) == (2, "length")
        with pytest.raises(RequestError, match="the prompt has 40 tokens, but the context of this model is 32"):
            small.generate({"prompt_token_ids": [5] * 40}, use_tqdm=False)


def test_chat_uses_the_template(llm):
    params = SamplingParams(temperature=0, max_tokens=4)
    chats = [[{"role": "user", "content": c}] for c in ("hi", "ho")]
    both = llm.chat(chats, params, use_tqdm=False)
    one = llm.chat(chats[1], params, use_tqdm=False)
    assert texts(both)[1] == texts(one)[0]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": [99999]}, "token id 99999 is outside the vocabulary"),
        ({"prompt_token_ids": [-1]}, "token id -1 is outside"),
        ({"prompt": "a", "temperature": 1}, "unknown keys: temperature"),
        ({}, "needs 'prompt' or 'prompt_token_ids'"),
    ],
)
def test_one_bad_prompt_refuses_the_call_and_leaves_nothing_behind(llm, prompt, says):
    with pytest.raises(RequestError, match=says):
        llm.generate(["fine", prompt], SamplingParams(max_tokens=2), use_tqdm=False)
    assert llm.stats.running == llm.stats.waiting == 0
    assert llm.stats.pages_free == llm.stats.pages_total
    assert llm.generate("fine", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_nan_ends_one_request_and_spares_the_others(llm):
    runner = llm._built.core._executor
    compute = runner.model.compute_logits

    def poisoned(hidden):
        logits = compute(hidden)
        if logits.shape[0] == 3:
            logits[1, 7] = float("nan")
        return logits

    runner.model.compute_logits = poisoned
    try:
        outputs = llm.generate(
            ["a", "b", "c"], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False
        )
    finally:
        runner.model.compute_logits = compute
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert "NaN" in outputs[1].outputs[0].error
    assert llm.stats.pages_free == llm.stats.pages_total


def test_logits_processor_of_a_plugin_is_reached_by_name(llm):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logits_processors=["no-repeat-ngram-3"])
    output = llm.generate("aaa bbb aaa bbb", params, use_tqdm=False)[0]
    tokens = output.prompt_token_ids + output.outputs[0].token_ids
    grams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    start = len(output.prompt_token_ids) - 2
    assert len(set(grams[start:])) == len(grams[start:])
    assert not set(grams[start:]) & set(grams[:start])


def test_interrupted_generation_frees_everything(llm, monkeypatch):
    core = llm._core
    step, count = core.step, 0

    def interrupt():
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(core, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)
    monkeypatch.undo()
    assert llm.stats.pages_free == llm.stats.pages_total
    assert not core.has_work


def test_unknown_arguments_are_refused_by_name(tiny_text_dir):
    with pytest.raises(ConfigError, match="unknown arguments: kv_dtype"):
        LLM(str(tiny_text_dir), kv_dtype="x")


def test_context_that_does_not_fit_names_the_one_that_does(tiny_text_dir):
    with pytest.raises(OutOfMemoryError, match="set --max-model-len 112"):
        LLM(str(tiny_text_dir), num_pages=8, max_model_len=200)
    with LLM(str(tiny_text_dir), num_pages=8) as small:
        assert small.info.max_model_len == 112, "a context that nobody asked for is shortened instead"
    with pytest.raises(OutOfMemoryError, match="--cpu-kv-gib must allow at least"):
        LLM(str(tiny_text_dir), cpu_kv_gib=0.001, page_size=1024)


def test_closed_engine_refuses(tiny_text_dir):
    opened = LLM(str(tiny_text_dir), num_pages=64)
    opened.close()
    opened.close()
    with pytest.raises((EngineClosedError, EngineFailedError), match="closed"):
        opened.generate("x", use_tqdm=False)


def test_plugins_hear_of_the_engine_and_of_every_request(tiny_text_dir):
    import types

    from arbi_core.api import hookimpl
    from arbi_core.config.load import from_values
    from arbi_core.engine.boot import build_engine
    from arbi_core.engine.messages import SubmitMsg

    heard = []
    plugin = types.ModuleType("listener")
    plugin.arbi_api_version = 1
    plugin.arbi_engine_built = hookimpl(lambda engine: heard.append("built"))
    plugin.arbi_request_finished = hookimpl(lambda record: heard.append(record))
    values = {"model.path": str(tiny_text_dir), "cache.num_pages": 64}
    core = build_engine(from_values(values), load_registry(extra=[plugin])).core
    core.submit(
        SubmitMsg(request_id="r", prompt_token_ids=(5, 6), sampling=SamplingParams(max_tokens=3, ignore_eos=True))
    )
    while core.has_work:
        core.step()
    core.close()
    assert heard[0] == "built"
    (record,) = heard[1:]
    assert (record.prompt_tokens, record.completion_tokens, record.reason) == (2, 3, "length")
    assert record.arrival <= record.first_scheduled <= record.first_token <= record.finished


def test_a_pool_that_no_machine_holds_is_refused_with_its_size(tiny_text_dir):
    with pytest.raises(OutOfMemoryError, match=r"99999999999 pages .* GiB.*--num-pages"):
        LLM(str(tiny_text_dir), num_pages=99_999_999_999)
