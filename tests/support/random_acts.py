"""Random sizes, moods and acts for `support.histories`, from any source of random numbers."""

from __future__ import annotations

from attrs import frozen

from arbi_core.engine.messages import Priority
from support.histories import ADAPTERS, TENANTS, Setup

TOKENS = (5, 6)


def random_setup(rng, **fixed):
    """Sizes that a real engine could have: a request of the longest length fits into the pool."""
    size, usable = rng.choice((1, 2, 3, 4)), rng.choice((1, 2, 3, 4, 6, 6, 9, 9, 14))
    cache = rng.random() < 0.85
    seqs, budget = rng.randint(1, 6), rng.randint(1, 20)
    rows = rng.choice((0, 0, 1, seqs))
    tiers = cache and rng.random() < 0.6
    limits = {}
    if rng.random() < 0.5:
        limits["one"] = {"max_running": rng.randint(1, 2), "weight": rng.choice((0.5, 3.0))}
    if rng.random() < 0.3:
        limits["two"] = {"tokens_per_second": rng.choice((300.0, 3000.0))}
    values = dict(
        pages=usable + 1,
        size=size,
        max_len=rng.randint(max(2, min(8, usable * size)), max(2, min(32, usable * size))),
        seqs=seqs,
        budget=budget,
        chunk=rng.randint(1, budget),
        depth=rng.choice((0, 1, 2)),
        lookahead=rng.choice((0, 0, 0, 2)),
        cache=cache,
        rows=rows,
        savepoints=rng.choice((0, 1, 2, 5)) if rows and cache else 0,
        grid=rng.choice((1, 1, 2)),
        ram=rng.choice((1, 2, 3, 6, 30)) if tiers else 0,
        disk=rng.choice((0, 2, 4, 30)) if tiers else 0,
        ram_min=rng.choice((0, 0, 2 * size)),
        disk_min=rng.choice((0, 0, 2 * size)),
        ttl=rng.choice((None, None, 0.05)),
        delay=rng.choice((0, 0, 1, 4)),
        growth=rng.choice((0, 0, 1, 8)),
        limits=limits,
    )
    values |= fixed
    values["max_len"] = max(2, min(values["max_len"], (values["pages"] - 1) * values["size"]))
    return Setup(**values)


@frozen
class Mood:
    """How a history goes: how many tenants there are, and how often something arrives, is cancelled, or fails."""

    tenants: int = 4
    arrivals: float = 0.25
    cancels: float = 0.04
    failures: float = 0.03


def random_mood(rng):
    return Mood(
        rng.choice((1, 1, 2, 4)),
        rng.choice((0.1, 0.25, 0.5)),
        rng.choice((0, 0.02, 0.1)),
        rng.choice((0, 0, 0.02, 0.1)),
    )


def random_request(rng, history, name, mood=Mood()):
    """A request whose prompt may share a prefix with others, or go on from an answer."""
    most = history.setup.max_len - 1
    prompt = [rng.choice(TOKENS)] * rng.randint(1, most)
    tenant, adapter = rng.choice(TENANTS[: mood.tenants]), rng.choice((*ADAPTERS[:1] * 4, ADAPTERS[1]))
    kind = rng.random()
    if kind < 0.3:
        prompt = [rng.choice(TOKENS) for _ in prompt]
    elif kind < 0.6 and history.texts:
        earlier = rng.choice(sorted(history.texts)[-20:])
        msg = history.asked[earlier].msg
        tenant, adapter = msg.tenant, msg.adapter
        prompt = [*history.texts[earlier], rng.choice(TOKENS)][: rng.randint(1, most)]
    options, max_tokens = {"tenant": tenant, "adapter": adapter}, rng.randint(1, 20)
    if rng.random() < 0.3:
        options["priority"] = rng.choice(list(Priority))
    if rng.random() < 0.15:
        options["cache_enabled"] = False
    if rng.random() < 0.3:
        options["stop_token_ids"] = frozenset(range(3, 3 + rng.randint(1, 12)))
    if rng.random() < 0.2:
        options["min_tokens"] = rng.randint(1, max_tokens)
    if rng.random() < 0.15:
        options["timeout_s"] = rng.choice((0.002, 0.01, 0.05))
    if rng.random() < 0.1:
        options["history"] = True
    return "submit", name, prompt, max_tokens, options


def random_act(rng, history, number, mood=Mood()):
    """The next act: mostly steps, now and then everything else."""
    live = len(history.scheduler.requests)
    if rng.random() < (mood.arrivals if live else 0.7) and live < 14:
        return random_request(rng, history, f"r{number:06}", mood)
    if live and rng.random() < mood.cancels:
        return "cancel", rng.choice(sorted(history.scheduler.requests))
    if rng.random() < mood.failures:
        return rng.choice(
            (
                ("turn", rng.choice((0, 1, 2, 3)), (), None),
                ("turn", rng.choice(("compute", "result")), (), None),
                ("turn", None, (rng.randint(0, 3),), None),
                ("disk", rng.random() < 0.2, rng.random() < 0.4, rng.choice((0, 1, 4))),
            )
        )
    kind = rng.random()
    if kind < 0.01:
        return "flush", rng.choice((None, *TENANTS))
    if kind < 0.02:
        return "disk", False, False, rng.choice((0, 0, 1, 2, 6))
    if kind < 0.03:
        return "sleep", rng.choice((0.01, 0.1))
    if kind < 0.035:
        return ("idle",)
    if kind < 0.036:
        return ("crash",)
    return "turn", None, (), rng.choice((0, 1)) if kind < 0.1 else None


__all__ = ["Mood", "random_act", "random_mood", "random_request", "random_setup"]
