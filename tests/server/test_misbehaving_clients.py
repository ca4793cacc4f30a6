"""Clients that hang up, read slowly or come all at once, and an engine that fails."""

import concurrent.futures
import json
import socket
import time

import httpx
import pytest

from arbi_core.config.tree import HttpConfig
from arbi_core.errors import ConfigError
from arbi_core.server.serve import bind
from support.server import CHAT, GREEDY, Server


@pytest.fixture(scope="module")
def server(tiny_text_dir):
    running = Server(tiny_text_dir)
    yield running
    running.wait_idle()
    running.close()


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
        held = [open_request(server)]
        answer = server.post("/v1/completions", prompt=["one", "two"], max_tokens=1)  # one more than fits
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
        runner = server.engine._core._executor
        good = runner.dispatch

        def bad(plan):
            if plan.num_rows:
                raise RuntimeError("device on fire")
            return good(plan)

        runner.dispatch = bad
        answer = server.post(messages=CHAT)
        assert answer.status_code == 500
        assert "device on fire" in answer.json()["error"]["message"]
        assert httpx.get(f"{server.url}/health/ready").json()["status"] == "degraded"
        runner.dispatch = good
        assert server.post(messages=CHAT, **GREEDY).status_code == 200
        assert httpx.get(f"{server.url}/health/ready").json()["status"] == "ready"
        runner.dispatch = bad
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
