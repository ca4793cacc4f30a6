"""Tenants, priorities, the prefix cache and jobs, as HTTP clients reach them."""

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
