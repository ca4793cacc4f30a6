"""The demo model: real weights, against transformers loading the same file."""

import pytest
import torch

from arbi_core import LLM, SamplingParams
from arbi_core.loader.resolve import demo_path
from support.recorder import LogitRecorder

PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):\n", "Water boils at", "1 + 1 =",
    "The three primary colours are", "Dear Sir or Madam,", "In the year 1969,", "A list of fruits:\n-", "E = mc",
]  # fmt: skip
CHAT = [
    "What is the capital of France?", "Tell me a joke.", "Écris « bonjour » en anglais.", "1234567890 🙂 東京", "  spaces  \n\n",
    "print('hello')\n\tif x:\n", "don't stop", "ALL CAPS and MixedCase", "tabs\t\tand\r\nwindows", "…—“”",
]  # fmt: skip

PROSE = (
    "It was the best of times in the small harbour town, or so the older fishermen said whenever the winter storms "
    "had passed and the first warm wind came over the bay. The boats lay in a long row along the quay, their paint "
    "peeling, their nets drying in the sun. A boy of about ten years walked from one to the next and asked each man "
    "whether he could come along the next morning. Most of them laughed; one gave him an apple. "
) * 3


@pytest.fixture(scope="module")
def reference():
    import transformers

    path = demo_path()
    options = {"gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options).eval()
    return model, transformers.AutoTokenizer.from_pretrained(path.parent, **options)


@pytest.fixture(scope="module")
def exact():
    with LLM("demo", plugins={"gguf": {"packed": "off"}}, cpu_kv_gib=0.25) as llm:
        yield llm


@pytest.mark.oracle
def test_token_ids_equal_those_of_transformers(reference, exact):
    _, theirs = reference
    ours = exact.get_tokenizer()
    for text in [*PROMPTS, *CHAT]:
        assert ours.encode(text) == theirs(text).input_ids, text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text).input_ids)


@pytest.mark.oracle
def test_chat_prompts_equal_those_of_transformers(reference, exact):
    from arbi_core.text.chat import render_chat

    _, theirs = reference
    for text in CHAT:
        for messages in (
            [{"role": "user", "content": text}],
            [{"role": "system", "content": "s"}, {"role": "user", "content": text}],
        ):
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert render_chat(exact.get_tokenizer(), messages) == expected


@pytest.mark.oracle
def test_greedy_text_equals_that_of_transformers_for_ten_prompts(reference, exact):
    model, _ = reference
    count = 48
    outputs = exact.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), use_tqdm=False)
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        with torch.no_grad():
            theirs = model.generate(
                ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert output.outputs[0].token_ids == theirs[0, ids.shape[1] :].tolist(), output.prompt


def mean_kl(exact, chunk, ids):
    """Mean KL of the packed model to the exact one, in nats, with `chunk` tokens a step."""
    params = SamplingParams(temperature=0, max_tokens=1)
    logits = []
    options = {"max_num_batched_tokens": chunk, "max_num_seqs": 2, "enable_prefix_caching": False}
    with LLM("demo", cpu_kv_gib=0.25, **options) as packed:
        for llm in (exact, packed):
            recorder = LogitRecorder(llm)
            llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
            llm._built.core._executor.model = recorder.inner
            ((_, rows),) = recorder.logits.items()
            logits.append(torch.stack([rows[p] for p in range(len(ids))]).double().log_softmax(-1))
    return (logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean().item()


@pytest.mark.oracle
@pytest.mark.parametrize(("chunk", "limit"), [(2, 1e-3), (32, 1e-5)], ids=["4-bit", "half"])
def test_packed_weights_keep_the_quality(chunk, limit):
    """Over 256 positions of prose, by the 4-bit kernel (two rows a step) and in half precision (32 rows)."""
    with LLM("demo", plugins={"gguf": {"packed": "off"}}, cpu_kv_gib=0.25, enable_prefix_caching=False) as exact:
        ids = exact.get_tokenizer().encode(PROSE)[:256]
        kl = mean_kl(exact, chunk, ids)
    print(f"{chunk} rows a step: mean KL {kl:.2e} nats")
    assert kl < limit


@pytest.mark.oracle
def test_demo_model_knows_the_capital_of_france():
    with LLM("demo", cpu_kv_gib=0.25) as llm:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        (answer,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
        assert "Paris" in answer.outputs[0].text
        assert answer.outputs[0].finish_reason == "stop"
