"""Tenants, priorities, the prefix cache and jobs, as HTTP clients reach them."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from support.server import CHAT, GREEDY, Server

LONG = [{"role": "user", "content": "a long story about the sea " * 4}]


@pytest.fixture(scope="module")
def server(tiny_text_dir, tmp_path_factory):
    limits = ("night:priority=batch", "small:max_prompt_tokens=40:max_running=1")
    jobs = str(tmp_path_factory.mktemp("jobs") / "d")
    made = Server(tiny_text_dir, **{"scheduler.tenant_limits": limits, "scheduler.jobs_dir": jobs})
    yield made
    made.close()


def ask(server, tenant=None, messages=LONG, **fields):
    headers = {} if tenant is None else {"X-Cache-Tenant": tenant}
    body = {"messages": messages, **GREEDY, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def cached(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def flush(server, **params):
    return httpx.post(f"{server.url}/v1/admin/cache/flush", params=params, timeout=60)


def test_tenants_share_no_prefix(server):
    assert cached(ask(server, "a")) == 0
    assert cached(ask(server, "b")) == 0
    assert cached(ask(server)) == 0
    assert cached(ask(server, "a")) > 0
    assert cached(ask(server, "a", cache_enabled=False)) == 0


def test_the_cache_of_a_tenant_can_be_flushed_alone(server):
    for tenant in ("c", "d"):
        ask(server, tenant)
        assert cached(ask(server, tenant)) > 0
    assert flush(server, tenant="c").json()["freed_pages"] > 0
    assert cached(ask(server, "c")) == 0
    assert cached(ask(server, "d")) > 0
    assert flush(server).json()["freed_pages"] > 0
    assert server.engine.stats().pages_cached == 0 or cached(ask(server, "d")) == 0
    assert flush(server, tennant="c").status_code == 400


def test_flushing_is_for_callers_on_this_machine(server):
    answer = httpx.post(f"{server.url}/v1/admin/cache/flush", headers={"X-Forwarded-For": "8.8.8.8"})
    assert answer.status_code == 403
    assert answer.json()["error"]["type"] == "permission_error"


def test_a_request_may_lower_its_priority_and_not_raise_it(server):
    assert ask(server, "a", priority="batch").status_code == 200
    assert ask(server, "a", priority="interactive").status_code == 200
    assert ask(server, "night").status_code == 200
    refused = ask(server, "night", priority="interactive")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"


def test_a_tenants_limit_is_named(server):
    refused = ask(server, "small")
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "quota_exceeded"
    assert "at most 40" in refused.json()["error"]["message"]


def test_a_tenant_that_is_no_name_is_refused(server):
    assert ask(server, "x" * 300).json()["error"]["param"] == "X-Cache-Tenant"


def test_jobs(server):
    whole = ask(server, job_id="j1", messages=CHAT).json()["choices"][0]["message"]["content"]
    assert whole == ask(server, messages=CHAT).json()["choices"][0]["message"]["content"]
    assert ask(server, job_id="j2", n=2).json()["error"]["param"] == "n"
    body = {"prompt": ["a", "b"], "job_id": "j3"}
    assert server.post("/v1/completions", **body).json()["error"]["param"] == "job_id"


def test_metrics_name_what_the_scheduler_did(server):
    ask(server, "m")
    ask(server, "m")
    text = httpx.get(f"{server.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["arbi:cached_tokens_total"]) > 0
    for name in ("arbi:tier_ram_bytes", "arbi:savepoints", "arbi:evictions_total", "arbi:quota_waits_total"):
        assert float(values[name]) >= 0


def test_a_tenant_in_debt_takes_no_places_from_others(tiny_text_dir):
    limits = ("t2:tokens_per_second=2",)
    server = Server(tiny_text_dir, **{"scheduler.max_queue": 2, "scheduler.tenant_limits": limits})
    try:
        first = ask(server, "t2")
        assert first.status_code == 200
        with ThreadPoolExecutor(4) as pool:
            held = [pool.submit(ask, server, "t2", timeout_s=4) for _ in range(2)]
            deadline = time.monotonic() + 3
            while server.engine.stats().waiting < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert ask(server, "t1").status_code == 200
            refused = ask(server, "t2")
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 10, "the debt is paid at two tokens a second"
            assert {h.result().status_code for h in held} == {408}
    finally:
        server.close()


def test_more_completions_than_can_ever_wait_are_refused_for_good(tiny_text_dir):
    server = Server(tiny_text_dir, **{"scheduler.max_queue": 2, "scheduler.max_num_seqs": 3})
    try:
        assert len(ask(server, n=5, max_tokens=1).json()["choices"]) == 5, "three run and two wait"
        for answer in (ask(server, n=6), server.post("/v1/completions", prompt=["a", "b"], n=3)):
            assert answer.status_code == 400
            assert "at most 5" in answer.json()["error"]["message"]
    finally:
        server.close()


@pytest.mark.parametrize("fields", [{"timeout_s": 0}, {"timeout_s": -1}, {"job_id": " "}])
def test_values_that_mean_nothing_are_refused(server, fields):
    answer = ask(server, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in fields


def test_one_tenant_is_flushed_at_a_time(server):
    assert httpx.post(f"{server.url}/v1/admin/cache/flush?tenant=a&tenant=b").status_code == 400
