"""What each tenant was served, against what a fluid server that shares at every instant would have served it."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define

__all__ = ["FairShares", "Service", "jain"]


@define
class Service:
    """Service of one tenant, in tokens: prompt tokens computed, plus generated ones at the scheduler's `OUTPUT_COST`.

    Attributes:
        weight: its share relative to others.
        demand: what its requests asked for so far.
        served: what it got so far.
        fair: what it would have got so far by weighted processor sharing (max-min fair at every instant) at the
            throughput that the scheduler had.
        max_lag: the most that it was behind its fair service at any time.
        served_area: `served` over time, token-seconds, while it had demand left in either.
        fair_area: `fair` over the same time.
    """

    weight: float = 1.0
    demand: float = 0.0
    served: float = 0.0
    fair: float = 0.0
    max_lag: float = 0.0
    served_area: float = 0.0
    fair_area: float = 0.0

    @property
    def progress(self) -> float | None:
        """How early it was served: 1 is exactly its fair share, less is later than that; None if it asked nothing."""
        return self.served_area / self.fair_area if self.fair_area else None


class FairShares:
    """Keeps the account of every tenant.

    Args:
        weights: by tenant.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.services = {tenant: Service(weight) for tenant, weight in weights.items()}

    def ask(self, tenant: str, tokens: float) -> None:
        """A request of so much service arrives; a negative number takes back what turned out not to be needed."""
        self.services[tenant].demand += tokens

    def step(self, got: Mapping[str, float], seconds: float) -> None:
        """Account for a step that served so much to each tenant."""
        self._share(sum(got.values()))
        for tenant, service in self.services.items():
            service.served += got.get(tenant, 0.0)
            if min(service.served, service.fair) < service.demand:
                service.max_lag = max(service.max_lag, service.fair - service.served)
                service.served_area += service.served * seconds
                service.fair_area += service.fair * seconds

    def _share(self, capacity: float) -> None:
        """Fill every backlog at the rate of its weight until the capacity is used."""
        backlogged = [s for s in self.services.values() if s.fair < s.demand]
        backlogged.sort(key=lambda s: (s.demand - s.fair) / s.weight)
        weights = sum(s.weight for s in backlogged)
        for service in backlogged:
            part = min(service.demand - service.fair, capacity * service.weight / weights)
            service.fair += part
            capacity -= part
            weights -= service.weight


def jain(values: list[float]) -> float | None:
    """Jain's index of fairness: 1 where all values are equal, 1/n where one has everything; None for fewer than two.

    (Jain, Chiu, Hawe: "A Quantitative Measure of Fairness and Discrimination", 1984.)
    """
    if len(values) < 2 or not any(values):
        return None
    return sum(values) ** 2 / (len(values) * sum(v * v for v in values))
