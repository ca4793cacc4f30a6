"""What a simulation comes to: latencies, throughput, cache, fairness. Plain dictionaries, ready for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arbi_core.simulator.cost import CostModel
from arbi_core.simulator.fairness import Service, jain
from arbi_core.simulator.simulate import EngineKnobs, Outcome, RequestLog

__all__ = ["LONG_PROMPT", "summarise"]

LONG_PROMPT = 4096
"""Prompts of at least so many tokens count as long."""


def summarise(outcome: Outcome, knobs: EngineKnobs, cost: CostModel, long_prompt: int = LONG_PROMPT) -> dict[str, Any]:
    """Sum up a simulation.

    Args:
        outcome: what happened.
        knobs: the engine.
        cost: the device.
        long_prompt: prompts of at least so many tokens count as long.

    Returns:
        Keys end in their unit: ``_s`` seconds, ``_tok_s`` tokens per second, ``_tokens`` tokens.
    """
    logs, duration = outcome.logs, max(outcome.duration_s, 1e-9)
    prompt = sum(log.trace.prompt_tokens for log in logs)
    output = sum(len(log.token_times) for log in logs)
    cached = sum(log.cached_tokens for log in logs)
    per_step = min(knobs.max_num_batched_tokens, knobs.max_prefill_chunk)

    def slowdown(log: RequestLog) -> float | None:
        if log.ttft is None:
            return None
        tokens = log.trace.prompt_tokens - log.cached_tokens
        return log.ttft / cost.prompt_alone(tokens, per_step, log.cached_tokens)

    def group(members: Sequence[RequestLog]) -> dict[str, Any]:
        return {"requests": len(members), **_latencies(members, slowdown)}

    lengths = {
        "short": [log for log in logs if log.trace.prompt_tokens < long_prompt],
        "long": [log for log in logs if log.trace.prompt_tokens >= long_prompt],
    }
    tenants = _by(logs, lambda log: log.trace.tenant)
    return {
        "requests": len(logs),
        "finished": dict(sorted(Counter(str(log.reason) for log in logs).items())),
        "duration_s": outcome.duration_s,
        "steps": outcome.steps,
        "busy": outcome.busy_s / duration,
        "rows_mean": outcome.rows / max(1, outcome.steps),
        "rows_max": outcome.max_rows,
        "output_tok_s": output / duration,
        "prompt_tok_s": prompt / duration,
        "requests_per_s": len(logs) / duration,
        **_latencies(logs, slowdown),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "hit_rate": cached / max(1, prompt),
        "prefill_tokens": outcome.prefill_tokens,
        "recomputed_tokens": outcome.recomputed_tokens,
        "preemptions": outcome.preemptions,
        "evictions": outcome.evictions,
        "prefix_waits": outcome.prefix_waits,
        "quota_waits": outcome.quota_waits,
        "jain_progress": jain([s.progress for s in outcome.services.values() if s.progress is not None]),
        "max_lag_tokens": max(s.max_lag for s in outcome.services.values()),
        "ttft_slowdown_long_by_short": _ratio(lengths, slowdown),
        "lengths": {name: group(members) for name, members in lengths.items() if members},
        "classes": {name: group(m) for name, m in _by(logs, lambda log: log.trace.priority.value).items()},
        "tenants": {name: {**group(m), **_service(outcome.services[name])} for name, m in tenants.items()},
    }


def _service(service: Service) -> dict[str, float | None]:
    return {"service_tokens": service.served, "max_lag_tokens": service.max_lag, "progress": service.progress}


def _by(logs: Sequence[RequestLog], key: Callable[[RequestLog], str]) -> dict[str, list[RequestLog]]:
    groups: dict[str, list[RequestLog]] = {}
    for log in logs:
        groups.setdefault(key(log), []).append(log)
    return dict(sorted(groups.items()))


def _latencies(logs: Sequence[RequestLog], slowdown: Callable[[RequestLog], float | None]) -> dict[str, Any]:
    """Percentiles over the requests that reached each phase; inter-token times over all gaps between tokens.

    ``ttft_slowdown`` is the time to first token relative to a device that serves nobody else.
    """
    times = [np.frombuffer(log.token_times) for log in logs if len(log.token_times) > 1]
    gaps = np.concatenate([np.diff(t) for t in times]) if times else np.empty(0)
    return {
        "ttft_s": _spread([log.ttft for log in logs]),
        "itl_s": _spread(gaps),
        "queue_s": _spread(
            [None if log.first_scheduled is None else log.first_scheduled - log.arrival for log in logs]
        ),
        "total_s": _spread([None if log.finished is None else log.finished - log.arrival for log in logs]),
        "ttft_slowdown": _spread([slowdown(log) for log in logs]),
    }


def _spread(values: Sequence[float | None] | np.ndarray) -> dict[str, float] | None:
    known = values if isinstance(values, np.ndarray) else np.array([v for v in values if v is not None])
    if not len(known):
        return None
    p50, p90, p99 = np.percentile(known, [50, 90, 99]).tolist()
    return {"mean": float(known.mean()), "p50": p50, "p90": p90, "p99": p99, "max": float(known.max())}


def _ratio(lengths: dict[str, list[RequestLog]], slowdown: Callable[[RequestLog], float | None]) -> float | None:
    """How much worse the mean long prompt fares than the mean short one: 1 is neither, above 1 the long ones wait."""
    short, long = (_spread([slowdown(log) for log in lengths[name]]) for name in ("short", "long"))
    return None if short is None or long is None else long["mean"] / short["mean"]
