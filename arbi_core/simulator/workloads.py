"""Synthetic traces by name. Lengths are in tokens; the same name, count, rate and seed give the same trace."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from attrs import field, frozen

from arbi_core.engine.messages import Priority
from arbi_core.errors import ConfigError
from arbi_core.simulator.trace import TraceRequest, check_trace

__all__ = ["WORKLOADS", "Workload", "make_workload"]


@frozen
class _Draw:
    """Random times and lengths."""

    rng: random.Random
    rate: float = field()

    def arrivals(self, count: int, rate: float | None = None) -> Iterator[float]:
        """Times of a Poisson process, seconds."""
        at = 0.0
        for _ in range(count):
            at += self.rng.expovariate(rate or self.rate)
            yield at

    def length(self, median: float, spread: float, low: int, high: int) -> int:
        """A log-normal length."""
        return max(low, min(high, round(median * self.rng.lognormvariate(0.0, spread))))

    def output(self, median: float = 150) -> int:
        """Length of an answer."""
        return self.length(median, 0.7, 4, int(8 * median))


def _chat(draw: _Draw, count: int) -> Iterator[TraceRequest]:
    """Conversations of 1 to 8 turns over one of four system prompts; each turn repeats what was said before."""
    made = talk = 0
    starts = draw.arrivals(count)
    while made < count:
        start, name, known = next(starts), f"talk{talk}", 600
        system, before = (f"system{draw.rng.randrange(4)}", 600), None
        for turn in range(min(draw.rng.randint(1, 8), count - made)):
            prompt, output = known + draw.length(60, 0.8, 5, 2000), draw.output(200)
            request = TraceRequest(
                id=f"{name}-{turn}",
                arrival_s=start if before is None else draw.rng.expovariate(1 / 5),
                prompt_tokens=prompt,
                output_tokens=output,
                prefix=(system,),
                stream=name,
                after=before,
            )
            yield request
            before, known, made = request.id, request.total_tokens, made + 1
        talk += 1


def _mixed(draw: _Draw, count: int) -> Iterator[TraceRequest]:
    """Nine short prompts (median 200) for one long (8,000 to 64,000)."""
    for i, at in enumerate(draw.arrivals(count)):
        long = draw.rng.random() < 0.1
        prompt = draw.rng.randint(8_000, 64_000) if long else draw.length(200, 0.7, 10, 2000)
        yield TraceRequest(id=str(i), arrival_s=at, prompt_tokens=prompt, output_tokens=draw.output())


def _flood(draw: _Draw, count: int) -> Iterator[TraceRequest]:
    """Short prompts (200 to 1,500) that fill every step by themselves, and one of 32,000 among each hundred."""
    for i, at in enumerate(draw.arrivals(count)):
        prompt = 32_000 if i % 100 == 50 else draw.rng.randint(200, 1500)
        yield TraceRequest(id=str(i), arrival_s=at, prompt_tokens=prompt, output_tokens=draw.output(30))


def _bursts(draw: _Draw, count: int) -> Iterator[TraceRequest]:
    """Half of the requests at a steady rate, half in bursts of 64 that arrive within 0.1 s."""
    steady = list(draw.arrivals(count - count // 2, draw.rate / 2))
    bursts = max(1, count // 2 // 64)
    sudden = [steady[-1] * (i % bursts + 0.5) / bursts + draw.rng.random() * 0.1 for i in range(count // 2)]
    for i, at in enumerate(sorted(steady + sudden)):
        prompt = draw.length(700, 0.8, 20, 8000)
        yield TraceRequest(id=str(i), arrival_s=at, prompt_tokens=prompt, output_tokens=draw.output())


def _batch(draw: _Draw, count: int) -> Iterator[TraceRequest]:
    """A third of the requests is batch work that is all there at the start; the others are interactive."""
    for i in range(count // 3):
        yield TraceRequest(
            id=f"batch{i}",
            arrival_s=0.0,
            prompt_tokens=draw.length(4000, 0.5, 200, 30_000),
            output_tokens=draw.output(300),
            priority=Priority.BATCH,
            tenant="jobs",
        )
    for i, at in enumerate(draw.arrivals(count - count // 3)):
        prompt = draw.length(400, 0.8, 10, 4000)
        yield TraceRequest(
            id=f"chat{i}", arrival_s=at, prompt_tokens=prompt, output_tokens=draw.output(), tenant="chat"
        )


def _hog(draw: _Draw, count: int) -> Iterator[TraceRequest]:
    """One tenant sends two thirds of all requests within a second, eight others a few at a time."""
    for i in range(2 * count // 3):
        yield TraceRequest(
            id=f"hog{i}",
            arrival_s=draw.rng.random(),
            prompt_tokens=draw.length(1500, 0.5, 100, 8000),
            output_tokens=draw.output(),
            tenant="hog",
        )
    for i, at in enumerate(draw.arrivals(count - 2 * count // 3)):
        prompt = draw.length(400, 0.7, 10, 4000)
        yield TraceRequest(
            id=f"small{i}", arrival_s=at, prompt_tokens=prompt, output_tokens=draw.output(), tenant=f"small{i % 8}"
        )


def _tenants(draw: _Draw, count: int) -> Iterator[TraceRequest]:
    """Four tenants that each want more than their share: many small requests, or few large ones."""
    shapes = [(200, 60), (800, 250), (2500, 80), (6000, 500)]
    rates = [draw.rate * share for share in (0.55, 0.2, 0.17, 0.08)]
    for t, ((prompt, output), rate) in enumerate(zip(shapes, rates, strict=True)):
        for i, at in enumerate(draw.arrivals(max(1, round(count * rate / draw.rate)), rate)):
            yield TraceRequest(
                id=f"t{t}-{i}",
                arrival_s=at,
                prompt_tokens=draw.length(prompt, 0.4, 10, 4 * prompt),
                output_tokens=draw.output(output),
                tenant=f"prompts-of-{prompt}",
            )


def _documents(draw: _Draw, count: int) -> Iterator[TraceRequest]:
    """Eight questions about one document of 4,000 to 20,000 tokens, all within 0.2 s; then the next document."""
    for d, at in enumerate(draw.arrivals(-(-count // 8), draw.rate / 8)):
        document = (f"document{d}", draw.rng.randint(4_000, 20_000))
        for q in range(min(8, count - 8 * d)):
            yield TraceRequest(
                id=f"d{d}q{q}",
                arrival_s=at + draw.rng.random() * 0.2,
                prompt_tokens=document[1] + draw.length(60, 0.5, 5, 400),
                output_tokens=draw.output(80),
                prefix=(document,),
            )


def _essays(draw: _Draw, count: int) -> Iterator[TraceRequest]:
    """Short prompts with long answers (median 1,200): the pool fills while they run."""
    for i, at in enumerate(draw.arrivals(count)):
        yield TraceRequest(
            id=str(i),
            arrival_s=at,
            prompt_tokens=draw.length(500, 0.8, 20, 6000),
            output_tokens=draw.length(1200, 0.5, 100, 5000),
        )


@frozen
class Workload:
    """A named generator.

    Attributes:
        make: draws the requests.
        rate: requests per second (conversations for ``chat``) where none is asked for; meant for ``h200-8b``.
    """

    make: Callable[[_Draw, int], Iterator[TraceRequest]]
    rate: float

    @property
    def help(self) -> str:
        """What it is."""
        return self.make.__doc__ or ""


WORKLOADS = {
    "chat": Workload(_chat, 8.0),
    "mixed": Workload(_mixed, 3.0),
    "flood": Workload(_flood, 27.0),
    "bursts": Workload(_bursts, 16.0),
    "batch": Workload(_batch, 10.0),
    "hog": Workload(_hog, 8.0),
    "tenants": Workload(_tenants, 60.0),
    "documents": Workload(_documents, 8.0),
    "essays": Workload(_essays, 6.0),
}
"""By name of `arbi simulate`."""


def make_workload(name: str, count: int, rate: float | None = None, seed: int = 0) -> list[TraceRequest]:
    """Draw a synthetic trace.

    Args:
        name: a key of `WORKLOADS`.
        count: requests.
        rate: requests per second; None takes the workload's own.
        seed: of the random lengths and times.

    Raises:
        ConfigError: an unknown name, or a count or rate that is not positive.
    """
    workload = WORKLOADS.get(name)
    if workload is None:
        raise ConfigError("workload", f"{name!r} is neither a workload nor a file", "one of: " + ", ".join(WORKLOADS))
    if count < 1 or (rate is not None and not 0 < rate < float("inf")):
        raise ConfigError("workload", "the number of requests and the rate must be positive")
    draw = _Draw(random.Random(seed), workload.rate if rate is None else rate)  # noqa: S311  # workload, not secrets
    trace = list(workload.make(draw, count))
    check_trace(trace, name)
    return trace
