"""Requests that cannot be served as written: each gets its status, its field and its reason."""

import contextlib

import httpx
import pytest

from support.server import CHAT, Server


@pytest.fixture(scope="module")
def server(tiny_text_dir):
    running = Server(tiny_text_dir)
    yield running
    running.wait_idle()
    running.close()


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
        (b'{"n": ' + b"9" * 5000 + b"}", 400, "too many digits"),
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
