"""Tenants: what each has been served, what it may use, and who is next.

Fairness follows the virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a
tenant's counter grows with the tokens computed for it, divided by its weight, and the waiting tenant with the smallest
counter is admitted next. A tenant that comes back after a pause is lifted to the smallest counter among the active
ones, so that silence saves up no credit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from attrs import define, evolve, fields, frozen

from arbi_core.engine.messages import Priority
from arbi_core.errors import ConfigError

__all__ = ["Tenant", "TenantLimits", "Tenants", "parse_tenant_limits"]

OUTPUT_COST = 2.0
"""A generated token costs this many prompt tokens, as in the paper."""


@frozen(kw_only=True)
class TenantLimits:
    """What one tenant may use. None does not limit.

    Attributes:
        weight: share of the machine relative to other tenants.
        max_running: requests that run at a time; more wait.
        max_waiting: requests that wait; one more is refused.
        max_prompt_tokens: longest prompt; a longer one is refused.
        tokens_per_second: prompt and generated tokens computed per second, averaged: a tenant above it starts nothing
            new until its average has come down.
        priority: class of its requests that name none; a request may name a lower one, never a higher one.
    """

    weight: float = 1.0
    max_running: int | None = None
    max_waiting: int | None = None
    max_prompt_tokens: int | None = None
    tokens_per_second: float | None = None
    priority: Priority = Priority.INTERACTIVE


@define(eq=False)
class Tenant:
    """What is known of an active tenant.

    Attributes:
        name: its name.
        limits: what it may use.
        index: its place in arrays.
        counter: weighted tokens served.
        running: requests that run.
        waiting: requests that wait.
        level: tokens that its rate still allows now; below 0 it is in debt.
        filled: when `level` was last brought up to date.
    """

    name: str
    limits: TenantLimits
    index: int
    counter: float = 0.0
    running: int = 0
    waiting: int = 0
    level: float = 0.0
    filled: float = 0.0

    def refill(self, now: float) -> None:
        """Let the rate's bucket fill; it holds one second's worth."""
        rate = self.limits.tokens_per_second
        if rate is not None:
            self.level = min(rate, self.level + (now - self.filled) * rate)
            self.filled = now

    def may_start(self, now: float) -> bool:
        """Whether its limits allow one more running request."""
        limits = self.limits
        if limits.max_running is not None and self.running >= limits.max_running:
            return False
        if limits.tokens_per_second is None:
            return True
        self.refill(now)
        return self.level > 0

    def next_start(self, now: float) -> float | None:
        """When its rate allows the next start; None if something else is in the way, or nothing."""
        rate = self.limits.tokens_per_second
        if rate is None or self.level > 0:
            return None
        return now - self.level / rate + 1e-3


class Tenants:
    """All tenants that have requests, or whose rate is in debt.

    Args:
        limits: by tenant name; ``"*"`` is for those not named.
    """

    def __init__(self, limits: Mapping[str, TenantLimits] | None = None) -> None:
        self._limits = dict(limits or {})
        self._default = self._limits.pop("*", TenantLimits())
        self._tenants: dict[str, Tenant] = {}
        self._by_index: list[Tenant | None] = []
        self._free: list[int] = []

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def limits(self, name: str) -> TenantLimits:
        """What a tenant may use."""
        return self._limits.get(name, self._default)

    def find(self, name: str) -> Tenant | None:
        """The tenant, if it is active."""
        return self._tenants.get(name)

    def enter(self, name: str, now: float) -> Tenant:
        """The tenant, made active if it was not."""
        tenant = self._tenants.get(name)
        if tenant is None:
            index = self._free.pop() if self._free else len(self._by_index)
            limits = self.limits(name)
            tenant = Tenant(name, limits, index, level=limits.tokens_per_second or 0.0, filled=now)
            self._tenants[name] = tenant
            if index == len(self._by_index):
                self._by_index.append(tenant)
            else:
                self._by_index[index] = tenant
        if not (tenant.running or tenant.waiting):
            active = [t.counter for t in self if t is not tenant and (t.running or t.waiting)]
            tenant.counter = max(tenant.counter, min(active, default=tenant.counter))
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """Forget a tenant that has nothing left, unless its rate is in debt or its counter is ahead of others'.

        What it was served is remembered while others are active that were served less: leaving and coming back must
        not win anything.
        """
        if tenant.running or tenant.waiting:
            return
        rate = tenant.limits.tokens_per_second
        others = [t.counter for t in self if t.running or t.waiting]
        if (rate is not None and tenant.level < 0) or tenant.counter > min(others, default=float("inf")):
            return
        self._forget(tenant)

    def sweep(self, now: float) -> None:
        """Forget what `leave` had to keep and nobody needs any more."""
        for tenant in list(self):
            tenant.refill(now)
            self.leave(tenant)

    def _forget(self, tenant: Tenant) -> None:
        del self._tenants[tenant.name]
        self._by_index[tenant.index] = None
        self._free.append(tenant.index)

    # -- what was served ----------------------------------------------------------------------------------------------

    def charge(self, tenant: Tenant, tokens: int, cost: float = 1.0) -> None:
        """Account for tokens computed for a tenant."""
        tenant.counter += tokens * cost / tenant.limits.weight
        tenant.level -= tokens

    def charge_decode(self, indices: np.ndarray) -> None:
        """Account for one generated token of each row. Args: ``(D,)`` int64 tenant index of each decoding row."""
        if len(self._tenants) == 1:
            (tenant,) = self._tenants.values()
            self.charge(tenant, len(indices), OUTPUT_COST)
            return
        counts = np.bincount(indices)
        for index in np.flatnonzero(counts).tolist():
            tenant_ = self._by_index[index]
            if tenant_ is not None:
                self.charge(tenant_, int(counts[index]), OUTPUT_COST)


def parse_tenant_limits(entries: Iterable[str]) -> dict[str, TenantLimits]:
    """Read ``NAME:key=value:key=value`` entries; the name ``*`` stands for all tenants that are not named.

    Raises:
        ConfigError: a malformed entry, an unknown key or a bad value.
    """
    where = "scheduler.tenant_limits"
    keys = [f.name for f in fields(TenantLimits)]
    parsed: dict[str, TenantLimits] = {}
    for entry in entries:
        parts = entry.split(":")
        first = next((i for i, part in enumerate(parts) if "=" in part), len(parts))
        name = ":".join(parts[:first])
        if not name or first == len(parts):
            raise ConfigError(where, f"{entry!r} is no NAME:key=value", "for example team-a:weight=2:max_running=8")
        if name in parsed:
            raise ConfigError(where, f"tenant {name!r} is named twice", "put all its limits into one entry")
        limits = TenantLimits()
        given: set[str] = set()
        for part in parts[first:]:
            key, equals, value = part.partition("=")
            if not equals or key not in keys:
                raise ConfigError(where, f"{part!r} of {entry!r} is no limit", "one of: " + ", ".join(keys))
            if key in given:
                raise ConfigError(where, f"{key} is given twice in {entry!r}")
            given.add(key)
            limits = evolve(limits, **{key: _value(where, entry, key, value)})
        parsed[name] = limits
    return parsed


def _value(where: str, entry: str, key: str, text: str) -> Any:
    """One limit, checked."""
    try:
        if key == "priority":
            return Priority(text)
        number = float(text) if key in {"weight", "tokens_per_second"} else int(text)
    except ValueError:
        raise ConfigError(where, f"{text!r} is no value for {key} in {entry!r}") from None
    if not 0 < number < float("inf"):
        raise ConfigError(where, f"{key} must be greater than 0 in {entry!r}")
    return number
