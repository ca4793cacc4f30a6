"""The server over real sockets: the openai client, raw HTTP for what it would never send, and clients that misbehave."""

import asyncio
import concurrent.futures
import contextlib
import json
import socket
import threading
import time

import httpx
import openai
import pytest

from arbi_core.config.load import from_values
from arbi_core.config.tree import HttpConfig
from arbi_core.engine.async_engine import AsyncEngine
from arbi_core.engine.boot import build_engine
from arbi_core.errors import ConfigError
from arbi_core.server.serve import bind, serve

GREEDY = {"temperature": 0, "max_tokens": 8}
CHAT = [{"role": "user", "content": "hello there"}]


class Server:
    """A server on a thread, with its engine at hand."""

    def __init__(self, path, http=None, **values):
        settings = {"model.path": str(path), "cache.num_pages": 200, "scheduler.max_num_batched_tokens": 64}
        settings |= {"server.served_model_name": "tiny", **values}
        self.engine = AsyncEngine(build_engine(from_values(settings)))
        self.config = HttpConfig(port=0, served_model_name="tiny", **(http or {}))
        self.sock = bind(self.config)
        started = threading.Event()

        def ready(url):
            self.url = url
            started.set()

        async def main():
            self.task = asyncio.current_task()
            self.loop = asyncio.get_running_loop()
            with contextlib.suppress(asyncio.CancelledError):
                await serve(self.engine, self.config, self.sock, registry=self.engine.registry, ready=ready)

        self.thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
        self.thread.start()
        assert started.wait(30)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path="/v1/chat/completions", **body):
        return httpx.post(self.url + path, json=body, timeout=60)

    def wait_idle(self):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            stats = self.engine.stats()
            if not stats.running and not stats.waiting and stats.pages_free == stats.pages_total:
                return
            time.sleep(0.02)
        raise AssertionError(f"pages or requests are left: {self.engine.stats()}")

    def close(self):
        self.loop.call_soon_threadsafe(self.task.cancel)
        self.thread.join(20)
        self.engine.close()
        self.sock.close()


@pytest.fixture(scope="module")
def server(tiny_text_dir):
    running = Server(tiny_text_dir)
    yield running
    running.wait_idle()
    running.close()


# -- the openai client ------------------------------------------------------------------------------------------------


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


# -- requests that cannot be served as written --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        ({"messages": []}, 400, "messages", "messages is empty"),
        ({}, 400, "messages", "messages is missing"),
        ({"messages": CHAT, "max_tokens": -1}, 400, "max_tokens", "at least 1, not -1"),
        ({"messages": CHAT, "max_tokens": 1.5}, 400, "max_tokens", "must be a whole number"),
        ({"messages": CHAT, "temperature": "hot"}, 400, "temperature", "must be a number"),
        ({"messages": CHAT, "temperature": -1}, 400, "temperature", r"[0, 100]"),
        ({"messages": CHAT, "top_p": 0}, 400, "top_p", "(0, 1]"),
        ({"messages": CHAT, "stream": "yes"}, 400, "stream", "must be true or false"),
        ({"messages": CHAT, "temprature": 1}, 400, "temprature", "did you mean 'temperature'"),
        ({"messages": CHAT, "tools": [{"type": "function"}]}, 400, "tools", "tools is not supported"),
        ({"messages": CHAT, "response_format": {"type": "json_object"}}, 400, "response_format", "not supported"),
        ({"messages": CHAT, "top_logprobs": 2}, 400, "top_logprobs", "needs logprobs"),
        ({"messages": CHAT, "stream_options": {"include_usage": True}}, 400, "stream_options", "needs stream"),
        ({"messages": CHAT, "stop": [""]}, 400, "stop", "non-empty"),
        ({"messages": CHAT, "logit_bias": {"x": 1}}, 400, "logit_bias", "keys are token ids"),
        ({"messages": CHAT, "logit_bias": {"99999": 1}}, 400, None, "outside the vocabulary"),
        ({"messages": CHAT, "logits_processors": ["nope"]}, 400, "logits_processors", "'nope'"),
        ({"messages": CHAT, "model": "other"}, 404, "model", "is not served"),
        (
            {"messages": [{"role": "user", "content": "x " * 2000}]},
            400,
            "prompt",
            "context of this model is 512 tokens",
        ),
    ],
)
def test_bad_requests_name_field_and_problem(server, body, status, param, says):
    answer = server.post(**body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert says in error["message"]
    assert error["type"]
    assert error["code"]


def test_harmless_fields_and_nulls_are_accepted(server):
    answer = server.post(
        messages=CHAT, user="u", metadata={"a": "b"}, store=False, tools=None, stop=None, top_p=None, max_tokens=2
    )
    assert answer.status_code == 200


def raw_post(server, body, **headers):
    headers = {"content-type": "application/json", **headers}
    return httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=headers, timeout=60)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "not valid JSON"),
        (b"[]", 400, "must be a JSON object"),
        (b'{"messages": [], "temperature": NaN}', 400, "NaN"),
        (b'\xff\xfe{"a": 1}', 400, "not valid UTF-8"),
        (b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "nested"),
        (b'{"messages": ' + b"[" * 100000 + b"]" * 100000 + b"}", 400, "nested"),
        (b'{"messages": "' + b"x" * (10 << 20) + b'"}', 413, "larger than 4194304 bytes"),
    ],
)
def test_bad_bodies_are_refused(server, body, status, says):
    answer = raw_post(server, body)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


def test_chunked_body_is_cut_off_at_the_limit(server):
    def chunks():
        for _ in range(200):
            yield b"x" * 65536

    with contextlib.suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        assert httpx.post(f"{server.url}/v1/completions", content=chunks(), timeout=60).status_code == 413


def test_lone_surrogates_are_refused(server):
    answer = raw_post(server, b'{"messages": [{"role": "user", "content": "\\ud800"}]}')
    assert answer.status_code == 400
    assert "surrogate" in answer.json()["error"]["message"]


def test_unknown_routes_and_methods_have_the_error_shape(server):
    missing = httpx.get(f"{server.url}/v1/nothing")
    assert missing.status_code == 404
    assert "no route GET /v1/nothing" in missing.json()["error"]["message"]
    wrong = httpx.get(f"{server.url}/v1/chat/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert "error" in wrong.json()


def test_request_ids_come_back(server):
    assert httpx.get(f"{server.url}/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(httpx.get(f"{server.url}/health", headers={"x-request-id": "bad id!"}).headers["x-request-id"]) == 32


def test_health_version_metrics_and_document(server):
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{server.url}/health/ready").json() == {"status": "ready", "reason": ""}
    assert httpx.get(f"{server.url}/version").json()["version"]
    metrics = httpx.get(f"{server.url}/metrics").text
    assert "arbi:generated_tokens_total" in metrics
    assert 'arbi:health{state="ready"} 1.0' in metrics
    assert httpx.get(f"{server.url}/openapi.json").json()["openapi"] == "3.1.0"


# -- clients that misbehave -----------------------------------------------------------------------------------------------


def open_request(server, **body):
    """A raw connection that has sent a request and read nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    payload = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 400, "ignore_eos": True, **body}).encode()
    sock = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    sock.sendall(head.encode() + payload)
    return sock


def cancelled(server):
    return server.engine.stats().finished.get("cancelled", 0)


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_hangs_up_frees_its_pages_at_once(server, stream):
    before = cancelled(server)
    sock = open_request(server, stream=stream)
    deadline = time.monotonic() + 10
    while not server.engine.stats().running and time.monotonic() < deadline:
        time.sleep(0.005)
    sock.close()
    server.wait_idle()
    assert cancelled(server) == before + 1


def test_slow_reader_does_not_hold_up_others(server):
    slow = open_request(server, stream=True)
    for _ in range(3):
        assert server.post(messages=CHAT, **GREEDY).status_code == 200
    slow.close()
    server.wait_idle()


def test_timeout_is_408(server):
    answer = server.post(messages=CHAT, max_tokens=400, ignore_eos=True, timeout_s=0.02)
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "timeout"


def test_two_hundred_requests_on_a_tiny_pool_all_get_their_turn(tiny_text_dir):
    values = {"cache.num_pages": 12, "cache.page_size": 8, "scheduler.max_num_seqs": 8}
    server = Server(tiny_text_dir, **values)
    try:

        def ask(i):
            return server.post("/v1/completions", prompt=f"request {i}", temperature=0, max_tokens=12, ignore_eos=True)

        with concurrent.futures.ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(ask, range(200)))
        assert {a.status_code for a in answers} == {200}
        assert {a.json()["usage"]["completion_tokens"] for a in answers} == {12}
        alone = ask(7).json()["choices"][0]["text"]
        assert answers[7].json()["choices"][0]["text"] == alone
        server.wait_idle()
    finally:
        server.close()


def test_full_queue_is_429_with_retry_after(tiny_text_dir):
    server = Server(tiny_text_dir, **{"scheduler.max_queue": 1, "scheduler.max_num_seqs": 1})
    try:
        held = [open_request(server) for _ in range(6)]
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            answer = server.post(messages=CHAT, **GREEDY)
            if answer.status_code == 429:
                break
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert "scheduler.max_queue is 1" in answer.json()["error"]["message"]
        for sock in held:
            sock.close()
        server.wait_idle()
    finally:
        server.close()


def test_port_in_use_names_the_port_and_the_fix():
    first = bind(HttpConfig(port=0))
    port = first.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is in use .*--port"):
        bind(HttpConfig(port=port))
    first.close()


def test_closed_engine_is_not_ready_and_refuses(tiny_text_dir):
    server = Server(tiny_text_dir)
    try:
        server.engine.close()
        assert httpx.get(f"{server.url}/health/ready").status_code == 503
        answer = server.post(messages=CHAT)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_closed"
    finally:
        server.close()


def test_failing_steps_end_their_requests_and_then_the_engine(tiny_text_dir):
    server = Server(tiny_text_dir)
    try:
        runner = server.engine._core._executor._runner
        good = runner.execute

        def bad(plan):
            if plan.rows:
                raise RuntimeError("device on fire")
            return good(plan)

        runner.execute = bad
        answer = server.post(messages=CHAT)
        assert answer.status_code == 500
        assert "device on fire" in answer.json()["error"]["message"]
        assert httpx.get(f"{server.url}/health/ready").json()["status"] == "degraded"
        runner.execute = good
        assert server.post(messages=CHAT, **GREEDY).status_code == 200
        assert httpx.get(f"{server.url}/health/ready").json()["status"] == "ready"
        runner.execute = bad
        for _ in range(3):
            server.post(messages=CHAT)
        assert httpx.get(f"{server.url}/health/ready").status_code == 503
        assert server.post(messages=CHAT).status_code == 500
    finally:
        server.close()


def test_thinking_is_split_from_the_answer(tiny_text_dir):
    """The prompt opens the thinking part, which the tiny model never closes."""
    server = Server(tiny_text_dir, http={"reasoning_parser": "think"})
    try:
        options = {"messages": CHAT, **GREEDY}
        plain = server.post(**options).json()["choices"][0]["message"]
        assert "reasoning_content" not in plain
        opened = {**options, "chat_template": "{{ messages[0]['content'] }}<think>"}
        message = server.post(**opened).json()["choices"][0]["message"]
        assert message["content"] == ""
        assert message["reasoning_content"]
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json={**opened, "stream": True}, timeout=60
        ) as answer:
            chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        pieces = [c["choices"][0]["delta"].get("reasoning_content", "") for c in chunks]
        assert "".join(pieces) == message["reasoning_content"]
    finally:
        server.close()
