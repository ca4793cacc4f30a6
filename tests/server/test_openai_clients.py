"""The server over real sockets, driven by the openai client."""

import asyncio

import openai
import pytest

from support.server import CHAT, GREEDY, Server


@pytest.fixture(scope="module")
def server(tiny_text_dir):
    running = Server(tiny_text_dir)
    yield running
    running.wait_idle()
    running.close()


def test_chat_answer_has_text_reason_and_usage(server):
    answer = server.client.chat.completions.create(model="tiny", messages=CHAT, **GREEDY)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer.id.startswith("chatcmpl-")


def test_stream_joins_to_the_whole_answer(server):
    options = {"model": "tiny", "messages": CHAT, **GREEDY}
    whole = server.client.chat.completions.create(**options)
    chunks = list(server.client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({c.id for c in chunks}) == 1


def test_completions_stream_and_do_not(server):
    options = {"model": "tiny", "prompt": "abc", **GREEDY}
    whole = server.client.completions.create(**options).choices[0].text
    assert "".join(c.choices[0].text for c in server.client.completions.create(**options, stream=True)) == whole


def test_several_prompts_and_several_choices_keep_their_order(server):
    answer = server.client.completions.create(
        model="tiny", prompt=["abc", "xyz"], n=2, seed=3, temperature=1, max_tokens=5
    )
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    alone = server.client.completions.create(model="tiny", prompt="xyz", n=2, seed=3, temperature=1, max_tokens=5)
    assert [c.text for c in answer.choices[2:]] == [c.text for c in alone.choices]
    assert answer.usage.completion_tokens == sum(1 for _ in range(4)) * 5 or answer.usage.completion_tokens <= 20


def test_token_id_prompts_equal_their_text(server):
    text = "The quick brown fox"
    ids = server.engine.tokenizer.encode(text)
    options = {"model": "tiny", **GREEDY}
    expected = server.client.completions.create(prompt=text, **options).choices[0].text
    assert server.client.completions.create(prompt=ids, **options).choices[0].text == expected
    both = server.client.completions.create(prompt=[ids, ids], **options)
    assert [c.text for c in both.choices] == [expected, expected]


def test_echo_repeats_the_prompt(server):
    options = {"model": "tiny", "prompt": "abc", **GREEDY}
    plain = server.client.completions.create(**options).choices[0].text
    assert server.client.completions.create(**options, echo=True).choices[0].text == "abc" + plain
    stream = server.client.completions.create(**options, echo=True, stream=True)
    assert "".join(c.choices[0].text for c in stream) == "abc" + plain


def test_same_seed_same_text(server):
    def ask(seed):
        options = {"model": "tiny", "messages": CHAT, "temperature": 1.0, "max_tokens": 12, "seed": seed}
        return server.client.chat.completions.create(**options).choices[0].message.content

    assert ask(1) == ask(1)
    assert len({ask(s) for s in range(6)}) > 1


def test_stop_string_is_honoured(server):
    text = server.client.completions.create(model="tiny", prompt="abc", temperature=0, max_tokens=20).choices[0].text
    stop = text[4:6]
    answer = server.client.completions.create(model="tiny", prompt="abc", temperature=0, max_tokens=20, stop=[stop])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    server.wait_idle()


def test_chat_logprobs_have_bytes_and_alternatives(server):
    answer = server.client.chat.completions.create(model="tiny", messages=CHAT, logprobs=True, top_logprobs=3, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(e.top_logprobs) == 3 and e.logprob <= 0 for e in content)
    assert all(e.token == e.top_logprobs[0].token for e in content), "greedy takes the best"
    stream = server.client.chat.completions.create(model="tiny", messages=CHAT, logprobs=True, stream=True, **GREEDY)
    streamed = [e.token for c in stream if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert streamed == [e.token for e in content]


def test_completion_logprobs_have_offsets(server):
    answer = server.client.completions.create(model="tiny", prompt="abc", logprobs=2, **GREEDY)
    scores = answer.choices[0].logprobs
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == len(scores.text_offset)
    assert scores.text_offset[0] == 0


def test_async_client_streams(server):
    async def go():
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
        stream = await client.chat.completions.create(model="tiny", messages=CHAT, stream=True, **GREEDY)
        return [c async for c in stream]

    assert len(asyncio.run(go())) > 2


def test_models_are_listed(server):
    assert [m.id for m in server.client.models.list()] == ["tiny"]
    assert server.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="this server serves 'tiny'"):
        server.client.models.retrieve("other")


def test_openai_clients_raise_their_own_errors(server):
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' is not served"):
        server.client.chat.completions.create(model="gpt", messages=CHAT)
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.chat.completions.create(model="tiny", messages=[])
    assert caught.value.param == "messages"
