"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from arbi_core.engine.client import EngineClient

__all__ = ["Metrics"]


class Metrics(Collector):
    """Reads the engine when it is scraped.

    Args:
        engine: whose counters.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """One family per figure; see docs/operators.md for the table."""
        s = self._engine.stats()
        for name, text, value in (
            ("arbi:requests_waiting", "Queued requests.", s.waiting),
            ("arbi:requests_running", "Requests that hold pages.", s.running),
            ("arbi:kv_pages", "Pages of the KV pool.", s.pages_total),
            ("arbi:kv_pages_free", "Pages that are free or evictable.", s.pages_free),
            ("arbi:kv_page_tokens", "Tokens per page.", s.page_size),
        ):
            yield GaugeMetricFamily(name, text, value)
        for name, text, value in (
            ("arbi:prompt_tokens", "Prompt tokens computed.", s.prompt_tokens),
            ("arbi:generated_tokens", "Tokens generated.", s.generated_tokens),
            ("arbi:cached_tokens", "Prompt tokens taken from the prefix cache.", s.cached_tokens),
            ("arbi:preemptions", "Requests that lost their pages for a while.", s.preemptions),
            ("arbi:steps", "Engine steps.", s.steps),
        ):
            yield CounterMetricFamily(name, text, value)
        finished = CounterMetricFamily("arbi:requests_finished", "Ended requests by reason.", labels=["reason"])
        for reason, count in s.finished.items():
            finished.add_metric([str(reason)], count)
        yield finished
        ready = GaugeMetricFamily("arbi:health", "1 for the current state.", labels=["state"])
        ready.add_metric([str(self._engine.health().state)], 1)
        yield ready
