"""Random histories of requests over toy ranks: what can be done to them, and what must hold after every act.

A history is a `Setup` and a list of acts; both are plain data, so that a failing one can be cut down and printed.
"""

from __future__ import annotations

import itertools
from collections import Counter

from attrs import asdict, field, frozen

from arbi_core.pool.savepoints import SavepointStore
from arbi_core.pool.tiers import HostTier, TierSettings
from arbi_core.scheduler import RequestState, TenantLimits, Tenants
from support.toy_ranks import EMPTY, FinishReason, StepFailed, World, alone

PAGE_BYTES, ROW_BYTES = 100, 30
TENANTS = ("", "one", "two", "three")
ADAPTERS = ("", "adapter")


@frozen(kw_only=True)
class Setup:
    """Sizes of a world. `ram`, `disk`: pages that the host keeps, 0 has no tier; `savepoints`: rows that it keeps.

    `rows` 0 has no recurrent state; `grid` is in pages; `delay` is in steps of a disk; `limits` are keyword arguments by tenant.
    """

    pages: int
    size: int
    max_len: int
    seqs: int = 4
    budget: int = 16
    chunk: int = 16
    depth: int = 0
    lookahead: int = 0
    cache: bool = True
    rows: int = 0
    savepoints: int = 0
    grid: int = 1
    ram: int = 0
    disk: int = 0
    ram_min: int = 0
    disk_min: int = 0
    ttl: float | None = None
    delay: int = 0
    growth: int = 8
    limits: dict = field(factory=dict)


class History(World):
    """A world with everything in it, checked after every act. `covered` counts what happened."""

    def __init__(self, setup):
        self.setup, self.covered = setup, Counter()
        self.now = 0.0
        handles = itertools.count(1)
        stores = {"tenants": Tenants({name: TenantLimits(**v) for name, v in setup.limits.items()})}
        if setup.ram:
            settings = TierSettings(
                page_bytes=PAGE_BYTES,
                row_bytes=ROW_BYTES,
                page_size=setup.size,
                ram_bytes=setup.ram * PAGE_BYTES,
                disk_bytes=setup.disk * PAGE_BYTES,
                ttl_s=setup.ttl,
                ram_min_tokens=setup.ram_min,
                disk_min_tokens=setup.disk_min,
            )
            stores["tier"] = HostTier(settings, handles, clock=lambda: self.now)
        if setup.savepoints:
            stores["savepoints"] = SavepointStore(
                row_bytes=ROW_BYTES,
                max_bytes=setup.savepoints * ROW_BYTES,
                page_size=setup.size,
                grid=setup.grid * setup.size,
                handles=handles,
            )
        sizes = {
            k: v
            for k, v in asdict(setup).items()
            if k in {"pages", "size", "seqs", "budget", "chunk", "max_len", "growth"}
        }
        super().__init__(
            **sizes, depth=setup.depth, lookahead=setup.lookahead, cache=setup.cache, rows=setup.rows or None, **stores
        )
        self.asked, self.texts, self.may_fail = {}, {}, set()
        self.ranks.delay = setup.delay
        self.crashed = False

    # -- acts ---------------------------------------------------------------------------------------------------------

    def act(self, name, *arguments):
        """Carry out one act and check everything."""
        if self.crashed:
            return
        getattr(self, name)(*arguments)
        if not self.crashed:
            self.check()

    def submit(self, name, prompt, max_tokens, options):
        options = dict(options)
        seed = self.seed(options.get("tenant", ""), options.get("adapter", ""))
        self.ranks.seeds[name] = seed
        stops, least = options.get("stop_token_ids", ()), options.get("min_tokens", 0)
        want = alone(prompt, max_tokens, self.setup.max_len, stops, least, seed)
        self.asked[name] = self.add(name, prompt, max_tokens, **options)
        self.texts[name] = [*prompt, *want]
        self.covered["submitted"] += 1

    def cancel(self, name):
        request = self.scheduler.requests.get(name)
        if request is None:
            return
        flying = any(request in f.requests for f in self.scheduler._in_flight)
        phase = "preempted" if request.preemptions and not request.running else request.state.value
        self.covered[f"cancel while {phase}"] += 1
        self.covered["cancel with a step in flight"] += flying
        self.scheduler.cancel(name)

    def turn(self, fault=None, nan=(), collect=None):
        """One step, as it is or with a failure."""
        before = self.counts()
        waits = {name: r.running for name, r in self.scheduler.requests.items()}
        plan = self.step(collect, fault, nan)
        for key, value in self.counts().items():
            self.covered[key] += value - before[key]
        for a in plan.admitted:
            self.covered["readmitted" if self.asked[a.request_id].preemptions else "admitted"] += 1
            self.covered["resumed amid a page"] += a.computed % self.size > 0
        for end in [e for name, e in self.ends.items() if name in waits and e.reason is FinishReason.TIMEOUT]:
            self.covered["timeout while " + ("running" if waits[end.request_id] else "waiting")] += 1
        self.covered["steps"] += 1
        self.covered["empty steps"] += plan.empty
        self.covered[f"steps at depth {self.setup.depth}"] += 1
        return plan

    def flush(self, tenant):
        self.covered["flush of all" if tenant is None else "flush of a tenant"] += 1
        freed, free = self.scheduler.flush(tenant), self.table.pool.available
        assert 0 <= freed <= free
        self.check_flushed(tenant)

    def disk(self, fail_spills, fail_fetches, delay):
        self.ranks.fail_spills, self.ranks.fail_fetches, self.ranks.delay = fail_spills, fail_fetches, delay

    def sleep(self, seconds):
        self.now += seconds

    def crash(self):
        """The ranks are gone: everything ends with an error, nothing is left."""
        self.covered["void pipelines"] += 1
        self.covered["void pipelines with steps in flight"] += bool(self.flights)
        self.flights.clear()
        self.scheduler.void_in_flight()
        for name in list(self.scheduler.requests):
            self.may_fail.add(name)
            self.scheduler.cancel(name, FinishReason.ERROR, "gone")
        self.take_ends()
        self.at_rest()
        self.crashed = True

    def idle(self):
        """Run until nothing is left. Everything ends within a bounded number of steps, and everything is given back."""
        self.covered["runs to the end"] += 1
        live = len(self.scheduler.requests)
        patience = 60 + live * (4 * self.setup.max_len + 6 * (1 + self.ranks.delay))
        while self.scheduler.has_work or self.scheduler.has_finished:
            patience -= 1
            assert patience > 0, "nothing ends: the requests hinder each other for ever"
            before = len(self.ends), sum(map(len, self.outputs.values()))
            plan = self.turn()
            progress = before != (len(self.ends), sum(map(len, self.outputs.values())))
            if plan.empty and not progress and self.scheduler.has_work:
                event = self.scheduler.next_event(self.now)
                assert event is not None, "work is left, nothing is done, and nothing will change by waiting"
                self.now = max(self.now, event)
            self.check()
        self.at_rest()
        self.check_bytes()

    # -- what must hold -----------------------------------------------------------------------------------------------

    def counts(self):
        s, tier, points = self.scheduler, self.scheduler.tier, self.scheduler.savepoints
        found = {
            "preemptions": s.counters.preemptions,
            "tokens resumed from the host": s.counters.resumed_tokens,
            "tokens from the cache": s.counters.cached_tokens,
            "waits for a prefix": s.counters.deferred_by_prefix,
            "waits for a quota": s.counters.deferred_by_quota,
            "evictions": self.table.evictions,
        }
        found |= {f"pages lost by a failed {op.name}": n for op, n in self.ranks.failures.items()}
        if tier is not None:
            found |= {f"pages {k}": getattr(tier, k) for k in ("saved", "restored", "spilled", "fetched", "dropped")}
        if points is not None:
            found |= {"savepoint hits": points.hits, "savepoint evictions": points.evictions}
        return found

    def seed(self, tenant, adapter):
        return EMPTY + 1000 * (1 + 2 * TENANTS.index(tenant) + ADAPTERS.index(adapter))

    def failed(self, plan, failure):
        flight = self.scheduler._in_flight[0]
        self.covered[f"failed steps ({failure})"] += 1
        self.covered["void steps"] += len(self.scheduler._in_flight) - 1
        self.may_fail |= {r.id for r in flight.requests}
        super().failed(plan, failure)
        assert not any(r.running for r in flight.requests)

    def commit(self, plan, output):
        flight = self.scheduler._in_flight[0]
        tokens = super().commit(plan, output)
        for i in output.errors if not flight.void else ():
            self.covered["rows that failed alone"] += 1
            self.check_flushed(flight.drawing[i].msg.tenant)
        return tokens

    def check_flushed(self, tenant):
        """Nothing of a tenant can be found, nor will be left by those of its requests that run."""
        s, mine = self.scheduler, None if tenant is None else {tenant}
        assert not any(mine is None or n.tenant in mine for n, tree in self.table.cache.trees.items() if tree.nodes)
        assert s.tier is None or not any(mine is None or b.tenant in mine for b in s.tier._by_handle.values())
        assert s.savepoints is None or not any(mine is None or p.tenant in mine for p in s.savepoints._stored.values())
        for r in s.running.rows:
            if mine is None or r.msg.tenant in mine:
                assert r.prefix is None
                assert r.leads is None
                assert self.table._entries[r.id].tree is None

    def take_ends(self):
        known = set(self.ends)
        super().take_ends()
        for name in self.ends.keys() - known:
            self.check_end(name)

    def check_end(self, name):
        end, request = self.ends[name], self.asked[name]
        got, prompt = self.outputs[name], list(request.msg.prompt_token_ids)
        want = self.texts[name][len(prompt) :]
        self.covered[f"ended: {end.reason.value}"] += 1
        assert (end.prompt_tokens, end.completion_tokens) == (len(prompt), len(got))
        if end.reason in {FinishReason.STOP, FinishReason.LENGTH}:
            assert got == want, "the output is not that of the request alone"
            stopped = want[-1] in request.stops and len(want) > request.msg.sampling.min_tokens
            assert end.reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert end.stop_token_id == (want[-1] if stopped else None)
        else:
            assert got == want[: len(got)]
            assert end.stop_token_id is None
        if end.reason is FinishReason.ERROR:
            assert name in self.may_fail | self.ranks.nans, "a request failed that nothing had happened to"
        if end.reason is FinishReason.TIMEOUT:
            assert request.deadline <= self.now
        self.check_cached(request, prompt, end.cached_tokens)

    def check_cached(self, request, prompt, cached):
        assert 0 <= cached < len(prompt)
        assert cached % self.size == 0
        if cached:
            assert self.setup.cache
            assert request.msg.cache_enabled
            others = (
                t for n, t in self.texts.items() if n != request.id and self.asked[n].namespace == request.namespace
            )
            assert any(text[:cached] == prompt[:cached] for text in others), "cached tokens that nobody computed"

    def check(self):
        s = self.scheduler
        assert self.asked.keys() - self.ends.keys() == s.requests.keys() | {f.request_id for f in s._finished}
        running, waiting = s.running.rows, list(s.waiting)
        assert {r.id for r in running} | {r.id for r in waiting} == s.requests.keys()
        assert len(running) + len(waiting) == len(s.requests), "a request in two places"
        assert all(r.running for r in running)
        assert all(r.state is RequestState.WAITING and not r.state_row for r in waiting)
        assert running == sorted(running, key=lambda r: r.order)
        assert len({r.slot for r in running}) == len(running) <= s.limits.max_rows
        assert s._with_history == sum(r.needs_history for r in running)
        assert {r.leads: r for r in running if r.leads} == s._leaders
        for tenant in s.tenants:
            mine = [sum(r.msg.tenant == tenant.name for r in rows) for rows in (running, waiting)]
            assert [tenant.running, tenant.waiting] == mine, "a tenant miscounts its requests"
            most = tenant.limits.max_running
            assert most is None or tenant.running <= most
        self.table.check()
        self.check_pages(running)
        self.check_rows(running)
        self.check_slots(running)
        self.check_stores(waiting)

    def check_pages(self, running):
        owners = Counter(page for r in running for page in self.table.pages(r.id))
        cached = {n.page for tree in self.table.cache.trees.values() for n in tree.nodes.values()}
        assert self.table._entries.keys() == {r.id for r in running}
        for r in running:
            first = self.scheduler._written(r) // self.size
            for page in self.table.pages(r.id)[first:]:
                assert owners[page] == 1, "two requests could write one page"
                assert page not in cached, "a cached page could be written"

    def check_rows(self, running):
        if self.rows is None:
            assert not any(r.state_row for r in running)
            return
        owned = [r.state_row for r in running]
        assert all(owned)
        assert len(set(owned)) == len(owned)
        assert self.rows.available + len(owned) == self.rows.num_rows

    def check_slots(self, running):
        """The ranks have exactly the running rows, and those that the next plan drops."""
        held = {r.slot: r.id for r in running}
        for slot, row in self.ranks.rows.items():
            assert held.get(slot) == row.name or slot in self.scheduler._dropped, "the ranks keep a row of nobody"
        assert held.keys() <= self.ranks.rows.keys(), "the ranks know nothing of a running row"

    def moving(self):
        """Handles whose bytes are on the way, or of which the scheduler has not heard the last."""
        results = [r for _, o in self.flights if not isinstance(o, StepFailed) for r in o.transfers]
        handles = [r.handle for r in results + self.ranks.results] + [m[2] for m in self.ranks.moving]
        return {t.handle for t in self.scheduler._transfers} | set(handles) | self.ranks.lost

    def check_stores(self, waiting):
        tier, points, ranks = self.scheduler.tier, self.scheduler.savepoints, self.ranks
        kept = {h for r in waiting if r.kept for h in (r.kept.page, r.kept.row) if h}
        in_ram = {p.handle for p in points._stored.values()} if points else set()
        on_disk = set()
        if tier is not None:
            assert tier._kept.keys() == kept, "what is kept of preempted requests is not theirs"
            assert tier.ram_bytes <= tier.settings.ram_bytes
            assert tier.disk_bytes <= tier.settings.disk_bytes
            assert not tier._pinned
            in_ram |= kept | {b.handle for b in tier._ram.values()}
            on_disk = {b.handle for b in tier._disk.values()}
            assert tier._by_handle.keys() == in_ram - kept - self.savepoint_handles() | on_disk
        if points is not None:
            assert len(points) <= points.capacity
        moving = self.moving()
        assert in_ram - moving == ranks.host.keys() - moving, "RAM of the ranks is not what the scheduler thinks"
        assert on_disk - moving == ranks.disk.keys() - moving, "disk of the ranks is not what the scheduler thinks"

    def savepoint_handles(self):
        points = self.scheduler.savepoints
        return {p.handle for p in points._stored.values()} if points else set()

    def at_rest(self):
        """Nothing runs: everything is free or can be had, and the host holds what the indices say, to the byte."""
        s = self.scheduler
        assert not s.requests
        assert not s.running.rows
        assert not s._leaders
        assert self.ends.keys() == self.asked.keys()
        assert self.table.available == self.table.total_pages
        assert self.rows is None or self.rows.available == self.rows.num_rows
        assert len(self.records) == len(self.ends)
        assert Counter(r.request_id for r in self.records) == Counter(list(self.ends))
        self.table.check()
        assert s.tier is None or not s.tier._kept

    def check_bytes(self):
        if self.moving():
            return
        s, points = self.scheduler, self.savepoint_handles()
        ram = sum(
            ROW_BYTES if h in points or not isinstance(v, list) else PAGE_BYTES for h, v in self.ranks.host.items()
        )
        assert ram == (s.tier.ram_bytes if s.tier else 0) + (s.savepoints.nbytes if s.savepoints else 0)
        assert len(self.ranks.disk) * PAGE_BYTES == (s.tier.disk_bytes if s.tier else 0)


__all__ = ["ADAPTERS", "TENANTS", "History", "Setup"]
