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
            ("arbi:kv_pages_cached", "Cached pages that no running request uses.", s.pages_cached),
            ("arbi:tier_ram_bytes", "Bytes kept in the RAM tier of one rank.", s.tier_ram_bytes),
            ("arbi:tier_disk_bytes", "Bytes kept in the disk tier.", s.tier_disk_bytes),
            ("arbi:tier_disk_failed", "1 if the disk tier is switched off by an error.", int(bool(s.tier_disk_error))),
            ("arbi:savepoints", "Saved recurrent states.", s.savepoints),
            ("arbi:savepoint_bytes", "Bytes of saved recurrent states of one rank.", s.savepoint_bytes),
        ):
            yield GaugeMetricFamily(name, text, value)
        for name, text, value in (
            ("arbi:prompt_tokens", "Prompt tokens computed.", s.prompt_tokens),
            ("arbi:generated_tokens", "Tokens generated.", s.generated_tokens),
            ("arbi:cached_tokens", "Prompt tokens taken from the prefix cache.", s.cached_tokens),
            ("arbi:preemptions", "Requests that lost their pages for a while.", s.preemptions),
            ("arbi:resumed_tokens", "Tokens of preempted requests brought back from the host.", s.resumed_tokens),
            ("arbi:evictions", "Cached pages that had to go.", s.evictions),
            ("arbi:prefix_waits", "Steps that requests waited for a prefix being computed.", s.prefix_waits),
            ("arbi:quota_waits", "Steps that requests waited for their tenant's quota.", s.quota_waits),
            ("arbi:tier_saved_pages", "Pages that went to the host tiers.", s.tier_saved),
            ("arbi:tier_restored_pages", "Pages that came back from the host tiers.", s.tier_restored),
            ("arbi:savepoint_hits", "Prefix hits that found a saved recurrent state.", s.savepoint_hits),
            ("arbi:savepoint_misses", "Prefix hits that found none.", s.savepoint_misses),
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
