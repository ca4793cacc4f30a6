"""Worlds that several tests begin with."""

from __future__ import annotations

import itertools

from arbi_core.pool.tiers import HostTier, TierSettings
from support.toy_ranks import World


def small_tier(ram=8, disk=0):
    """A host tier of so many pages of 4 tokens."""
    settings = TierSettings(page_bytes=1, row_bytes=1, page_size=4, ram_bytes=ram, disk_bytes=disk)
    return HostTier(settings, itertools.count(1))


def begun(depth, steps=3, **options):
    """A world whose one request has been through some steps, `depth` of them not yet committed."""
    w = World(depth=depth, **options)
    w.add("a", [5, 6], max_tokens=20)
    for _ in range(steps):
        w.step()
    assert len(w.flights) == depth
    return w
