"""The simulator: virtual time, the trace's terms, and the policies that the scheduler promises."""

import subprocess
import sys

import pytest

from arbi_core.engine.messages import FinishReason, Priority
from arbi_core.errors import ConfigError
from arbi_core.scheduler import TenantLimits
from arbi_core.simulator import CostModel, EngineKnobs, Policies, TraceRequest, make_workload, simulate, summarise

FLAT = CostModel(step_s=0.010, prompt_token_s=0.0001, row_s=0.001, context_s=0.0)


def knobs(**changes):
    base = {
        "num_pages": 4000,
        "page_size": 16,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "max_prefill_chunk": 512,
        "batch_prefill_share": 0.25,
    }
    return EngineKnobs(**base | changes)


def ask(name, at=0.0, prompt=64, output=4, **fields):
    return TraceRequest(id=name, arrival_s=at, prompt_tokens=prompt, output_tokens=output, **fields)


def logs_of(trace, policies=None, cost=FLAT, **changes):
    outcome = simulate(trace, knobs(**changes), cost, policies)
    return {log.trace.id: log for log in outcome.logs}, outcome


def test_lone_request_takes_what_the_cost_model_says():
    logs, outcome = logs_of([ask("a", at=2.0, prompt=1000, output=3)])
    log = logs["a"]
    assert log.ttft == pytest.approx(2 * 0.010 + 1000 * 0.0001)
    gaps = [b - a for a, b in zip(log.token_times, log.token_times[1:], strict=False)]
    assert gaps == pytest.approx([0.011, 0.011])
    assert log.reason is FinishReason.LENGTH
    assert outcome.duration_s == log.finished == log.token_times[-1]
    assert outcome.busy_s == pytest.approx(2 * 0.010 + 0.1 + 2 * 0.011)


def test_context_and_attention_are_paid_for():
    cost = CostModel(step_s=0.0, prompt_token_s=0.0, row_s=0.0, context_s=1.0, prompt_context_s=1.0)
    logs, _ = logs_of([ask("a", prompt=4, output=3)], cost=cost)
    assert list(logs["a"].token_times) == pytest.approx([10.0, 10.0 + 5.0, 10.0 + 5.0 + 6.0])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_running_ahead_hides_the_host(depth):
    cost = CostModel(step_s=0.010, prompt_token_s=0.0, row_s=0.0, context_s=0.0, host_s=0.005)
    logs, outcome = logs_of([ask("a", output=101)], cost=cost, depth=depth)
    assert len(logs["a"].token_times) == 101
    per_token = (logs["a"].token_times[-1] - logs["a"].token_times[0]) / 100
    assert per_token == pytest.approx(0.015 if depth == 0 else 0.010, rel=0.01)
    assert outcome.steps == 101


@pytest.mark.parametrize("depth", [0, 1])
def test_every_request_of_every_workload_ends_with_all_its_tokens(depth):
    for name in ("chat", "mixed", "batch", "hog", "documents", "essays"):
        trace = make_workload(name, 60, seed=3)
        logs, outcome = logs_of(trace, num_pages=6000, max_num_seqs=16, depth=depth)
        assert len(logs) == len(trace)
        for log in logs.values():
            assert log.reason is FinishReason.LENGTH
            assert len(log.token_times) == log.trace.output_tokens
            assert log.first_scheduled >= log.arrival
        cached = sum(log.cached_tokens for log in logs.values())
        prompts = sum(r.prompt_tokens for r in trace)
        # the token that a preempted row had drawn last is computed with its prompt when it comes back
        drawn = outcome.prefill_tokens - outcome.recomputed_tokens - (prompts - cached)
        assert 0 <= drawn <= outcome.preemptions


def test_same_trace_gives_the_same_result():
    results = [summarise(simulate(make_workload("hog", 80, seed=1), knobs(), FLAT), knobs(), FLAT) for _ in range(2)]
    assert results[0] == results[1]


def test_next_turn_waits_for_the_one_before_and_finds_prompt_and_answer_in_the_cache():
    first = ask("a", prompt=64, output=33, stream="talk")
    second = ask("b", at=1.0, prompt=200, stream="talk", after="a")
    logs, _ = logs_of([first, second])
    assert logs["b"].arrival == pytest.approx(logs["a"].finished + 1.0)
    assert logs["b"].cached_tokens == 96


def test_named_prefixes_are_shared_within_a_tenant_only():
    document = (("document", 320),)
    trace = [
        ask("a", prompt=400, prefix=document, tenant="one"),
        ask("b", at=5.0, prompt=400, prefix=document, tenant="one"),
        ask("c", at=5.0, prompt=400, prefix=document, tenant="two"),
        ask("d", at=5.0, prompt=400, tenant="one"),
    ]
    logs, _ = logs_of(trace)
    assert [logs[n].cached_tokens for n in "abcd"] == [0, 320, 0, 0]
    logs, _ = logs_of(trace, prefix_caching=False)
    assert logs["b"].cached_tokens == 0


def test_client_that_leaves_and_timeout_end_requests():
    trace = [ask("a", output=1000, cancel_after_s=0.5), ask("b", output=1000, timeout_s=0.3), ask("c", output=40)]
    logs, _ = logs_of(trace)
    assert {n: log.reason for n, log in logs.items()} == {
        "a": FinishReason.CANCELLED,
        "b": FinishReason.TIMEOUT,
        "c": FinishReason.LENGTH,
    }
    assert logs["a"].finished == pytest.approx(0.5, abs=0.02)
    assert logs["b"].finished == pytest.approx(0.3, abs=0.02)


def test_rate_limited_tenant_waits_in_virtual_time():
    limits = {"slow": TenantLimits(tokens_per_second=100.0)}
    trace = [ask(f"r{i}", prompt=200, output=10, tenant="slow") for i in range(4)]
    logs, _ = logs_of(trace, tenant_limits=limits)
    assert max(log.finished for log in logs.values()) > 4.0


def test_request_that_never_fits_is_refused():
    with pytest.raises(ConfigError, match="needs 70000 tokens and the pool holds 64000"):
        simulate([ask("a", prompt=69_000, output=1000)], knobs(), FLAT)


def test_preempted_tokens_are_counted_as_computed_again():
    trace = [ask(f"r{i}", prompt=100, output=300) for i in range(12)]
    _, outcome = logs_of(trace, num_pages=100)
    assert outcome.preemptions > 0
    assert 0 < outcome.recomputed_tokens < outcome.prefill_tokens


# -- the scheduler's promises -----------------------------------------------------------------------------------------


def flood(count=300, long=8000):
    """Short prompts that fill every step by themselves, and a long one among them."""
    shorts = [ask(f"s{i}", at=i * 0.02, prompt=200, output=2) for i in range(count)]
    return [*shorts[:20], ask("long", at=0.4, prompt=long, output=2), *shorts[20:]]


def test_short_prompts_cannot_starve_a_long_one():
    trace = flood()
    own, _ = logs_of(trace)
    starved, _ = logs_of(trace, Policies(prefill_share="shortest"))
    last = max(log.ttft for name, log in own.items() if name != "long")
    assert starved["long"].token_times[0] >= max(log.finished for n, log in starved.items() if n != "long") - 0.5
    assert own["long"].ttft < 0.6 * starved["long"].ttft
    assert own["long"].ttft < 40 * last


def test_long_prompt_does_not_hold_up_short_ones():
    trace = [ask("long", prompt=20_000), *(ask(f"s{i}", at=0.05 + i * 0.3, prompt=100) for i in range(8))]
    own, _ = logs_of(trace)
    behind, _ = logs_of(trace, Policies(prefill_share="fcfs"))
    assert max(log.ttft for n, log in own.items() if n != "long") < 0.25
    assert max(log.ttft for n, log in behind.items() if n != "long") > 1.0
    assert own["long"].ttft < 1.3 * behind["long"].ttft


def test_hog_delays_itself_and_not_the_small_tenant():
    trace = [ask(f"hog{i}", prompt=400, output=20, tenant="hog") for i in range(200)]
    trace += [ask(f"small{i}", at=0.5 + i, prompt=100, output=5, tenant="small") for i in range(5)]
    fair, outcome = logs_of(trace)
    fcfs, unfair = logs_of(trace, Policies(tenant_order="arrival"))
    assert max(log.ttft for n, log in fair.items() if n.startswith("small")) < 0.6
    assert max(log.ttft for n, log in fcfs.items() if n.startswith("small")) > 3.0
    assert outcome.services["small"].max_lag < unfair.services["small"].max_lag / 2


def test_batch_work_waits_for_interactive_work():
    trace = [ask(f"job{i}", prompt=2000, output=50, priority=Priority.BATCH) for i in range(40)]
    trace += [ask(f"chat{i}", at=1 + 0.5 * i, prompt=100, output=10) for i in range(10)]
    logs, _ = logs_of(trace)
    assert max(log.ttft for n, log in logs.items() if n.startswith("chat")) < 0.3


def test_prefix_that_is_being_computed_is_computed_once():
    trace = [ask(f"q{i}", prompt=4000, prefix=(("document", 3984),)) for i in range(6)]
    _, once = logs_of(trace)
    _, often = logs_of(trace, Policies(prefix_wait="off", prefill_share="equal"))  # all at once, or the first is ahead
    assert once.prefill_tokens == 3984 + 6 * 16
    assert often.prefill_tokens > 1.2 * once.prefill_tokens


def test_simulator_does_not_import_torch():
    code = "import sys, arbi_core.simulator, arbi_core.cli.simulate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
