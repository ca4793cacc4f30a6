"""The scheduler: `schedule()` decides a step. What requests hold and how they end is in `ledger`.

Policy (docs/scheduling.md compares it with other engines and gives the reasons)
- Every decoding row runs in every step. What is left of the token budget goes to prompts: a quarter to the first in
  order, the rest to whoever has least left (`shares`).
- Order is precedence: interactive before batch, then arrival. Between tenants the least served is first (`tenants`).
- A request starts when it would get tokens in this step and its whole prompt fits, beside a few pages for every running
  row; its pages are taken at once. Nobody passes a request that waits for pages. Requests pass one that waits for its
  quota, for prefill tokens, or for a prefix that a running request is about to compute.
- A decoding row that finds no page takes those of a row of lower precedence: of the lowest class among them, the one
  that loses least work, the latest among equals. It waits again and goes on from what the cache kept. The first in
  order can therefore always go on: nothing livelocks.
- An interactive request that finds no place preempts batch work, never other interactive work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from arbi_core.pool import Prefix
from arbi_core.pool.savepoints import Savepoint
from arbi_core.pool.tiers import NOTHING, TierTail
from arbi_core.pool.transfers import Transfer, TransferOp
from arbi_core.scheduler.flight import InFlight
from arbi_core.scheduler.ledger import Ledger
from arbi_core.scheduler.plan import AdmitRow, Chunk, StepPlan
from arbi_core.scheduler.request import Kept, Request, RequestState
from arbi_core.scheduler.shares import share_prefill

__all__ = ["Scheduler"]

WINDOW = 64
"""Waiting requests that are looked at in one step."""

POLL_EVERY_S = 0.002
"""Seconds between two looks at background transfers that requests wait for, while there is no other work."""

SWEEP_EVERY = 256
"""Steps between two looks for what has expired."""

BATCH = 1
"""`Request.rank` of batch work."""


class _Start(NamedTuple):
    """From where a waiting request would go on."""

    prefix: Prefix | None
    pages: int
    tail: TierTail
    savepoint: Savepoint | None
    resumes: bool


class Scheduler(Ledger):
    """Decides steps; see `Ledger` for the arguments."""

    _index = 0
    divide = staticmethod(share_prefill)
    """How a step's prefill tokens are divided; the simulator tries others."""
    _poll_at = 0.0

    # -- the decision ---------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Decide one step. Takes the pages that its rows need; computes nothing."""
        self._news = False
        self._expire(now)
        self._grow_decoding()
        budget = self.limits.max_num_batched_tokens - len(self.running.decoding()[0])
        admitted = self._admit_waiting(budget, now)
        drawing, decode = self._decode()
        prompts = self.running.prefilling()
        transfers, polls = tuple(self._transfers), self._polls(now)
        self._transfers.clear()  # room that is made for snapshots is made after them: by the next plan
        chunked, chunks, snapshots = self._chunks(prompts, budget)
        self._index += 1
        plan = StepPlan(
            index=self._index,
            dropped=tuple(self._dropped),
            transfers=transfers,
            admitted=tuple(admitted),
            new_pages=tuple(self._new_pages),
            decode=decode,
            chunks=tuple(chunks),
            snapshots=tuple(snapshots),
            polls=polls,
        )
        self._dropped.clear()
        self._new_pages.clear()
        if not plan.empty:
            drawing = drawing + [r for r in chunked if r.state is not RequestState.PREFILL]
            self._in_flight.append(InFlight(plan, drawing, chunked, [self.requests[a.request_id] for a in admitted]))
        if self._index % SWEEP_EVERY == 0:
            self._sweep(now)
        return plan

    def _polls(self, now: float) -> bool:
        """Whether it is time to hear of pages on their way from disk."""
        due = self.tier is not None and self.tier.fetching and now >= self._poll_at
        if due:
            self._poll_at = now + POLL_EVERY_S
        return due

    def _grow_decoding(self) -> None:
        """Find room for the next tokens of every decoding row; only rows that have filled their last page cost time."""
        running = self.running
        requests, slots = running.decoding()
        wanted = np.minimum(1 + self.limits.lookahead, running.left[slots])
        short = np.flatnonzero(running.room[slots] < wanted).tolist()
        for i in short:
            while requests[i].state is RequestState.DECODE and running.room[requests[i].slot] < wanted[i]:
                self._grow(requests[i])

    def _grow(self, request: Request) -> None:
        """Append a page to a decoding row, preempting others if need be; without a page it is preempted itself."""
        while not self.table.available:
            victim = self._victim(request)
            self._preempt(victim or request)
            if victim is None:
                return
        (page,) = self.table.extend(request.id, self.table.page_size)
        self._new_pages.append((request.slot, page))
        self.running.room[request.slot] += self.table.page_size

    def _decode(self) -> tuple[list[Request], np.ndarray]:
        """Every decoding row computes its newest token and draws the next."""
        running = self.running
        requests, slots = running.decoding()
        if len(slots):
            running.room[slots] -= 1
            running.left[slots] -= 1
            self.tenants.charge_decode(running.tenant[slots])
            for i in np.flatnonzero(running.left[slots] == 0).tolist():
                running.close(requests[i])
        return requests, slots

    def _victim(self, request: Request) -> Request | None:
        """The row of lower precedence that should lose its place to `request`."""
        below = [r for r in self.running.rows if r.order > request.order]
        return max(below, key=lambda r: (r.rank, -self._loss(r), r.order), default=None)

    def _loss(self, request: Request) -> int:
        """Pages that would have to be computed again; those shared with others stay anyway."""
        return self._written(request) // self.table.page_size - self.table.shared_pages(request.id)

    # -- prompts ------------------------------------------------------------------------------------------------------

    def _share(self, prompts: Sequence[Request], budget: int) -> dict[Request, int]:
        """Tokens of this step for each prompt."""
        if not prompts:
            return {}
        ordered = sorted(prompts, key=self._turn)
        interactive = any(r.rank != BATCH for r in self.running.rows)
        shares = self.divide(
            [r.remaining for r in ordered],
            budget,
            self.limits.max_prefill_chunk,
            batch=[r.rank == BATCH for r in ordered],
            batch_budget=max(1, int(budget * self.limits.batch_prefill_share)) if interactive else None,
        )
        return dict(zip(ordered, shares, strict=True))

    def _turn(self, request: Request) -> tuple[int, float, tuple[int, float, str]]:
        """Order among prompts: the least served tenant's first, as at admission, or a tenant's burst is in the way."""
        return request.rank, self._tenant(request).counter, request.order

    def _chunks(self, prompts: Sequence[Request], budget: int) -> tuple[list[Request], list[Chunk], list[Transfer]]:
        """Give each prompt its tokens of this step: whose, the pieces, and the row states to save after it."""
        chunked: list[Request] = []
        chunks: list[Chunk] = []
        snapshots: list[Transfer] = []
        for request, share in self._share(prompts, budget).items():
            n = self._cut(request, share)
            if not n:
                continue
            before, request.computed = request.computed, request.computed + n
            self.counters.prompt_tokens += max(0, min(request.computed, request.num_prompt) - before)
            if self.savepoints is not None and request.prefix is not None:
                point = self.savepoints.boundary(before, request.computed, len(request.token_ids))
                handle = self.savepoints.take(request.prefix, point) if point == request.computed else None
                if handle is not None:
                    snapshots.append(Transfer(TransferOp.SAVE_ROW, handle, request.state_row))
            samples = request.remaining == 0
            chunked.append(request)
            chunks.append(Chunk(request.slot, n, samples))
            if samples:
                known = len(request.token_ids)
                room = len(self.table.pages(request.id)) * self.table.page_size - known
                self.running.start_decoding(request, room=room, left=request.limit - known - 1)
        return chunked, chunks, snapshots

    def _cut(self, request: Request, share: int) -> int:
        """End a chunk where a recurrent state may be saved or resumed, where there is such a point in it."""
        if self.savepoints is None or not share:
            return share
        end, known = request.computed + share, len(request.token_ids)
        point = self.savepoints.boundary(request.computed, end, known)
        if point is None and end < known:
            point = end // self.savepoints.grid * self.savepoints.grid
        return point - request.computed if point is not None and point > request.computed else share

    # -- admission ------------------------------------------------------------------------------------------------

    def _admit_waiting(self, budget: int, now: float) -> list[AdmitRow]:
        """Start waiting requests, in order, while they would get tokens and find their pages."""
        admitted: list[AdmitRow] = []
        prompts = self.running.prefilling()
        self.waiting.blocked.clear()
        for rank in (0, BATCH):
            for request in self.waiting.candidates(rank, WINDOW):
                if not self._gets_tokens(request, prompts, budget):
                    continue
                if not self._may_start(request, now):
                    self.waiting.blocked.add(request.msg.tenant)
                    continue
                start = self._plan_start(request)
                if start is None:
                    continue
                if not self._start(request, start, admitted, now):
                    return admitted
                prompts = self.running.prefilling()
        return admitted

    def _gets_tokens(self, request: Request, prompts: Sequence[Request], budget: int) -> bool:
        """Whether it would get tokens in this step: else starting it only takes pages from others."""
        if request.owed or budget <= 0:
            return False
        if not prompts:
            return True
        return self._share([*prompts, request], budget)[request] > 0

    def _may_start(self, request: Request, now: float) -> bool:
        allowed = self._tenant(request).may_start(now)
        self.counters.deferred_by_quota += not allowed
        return allowed

    def _plan_start(self, request: Request) -> _Start | None:
        """What of its tokens need not be computed. None: wait for pages that are on their way."""
        if not self._caches(request):
            return _Start(None, 0, NOTHING, None, resumes=False)
        if request.prefix is None:
            ids = request.token_ids
            request.prefix = Prefix.of(ids, self.table.page_size, request.namespace, len(ids) - 1)
        prefix = request.prefix
        pages = self.table.cache.match(prefix)
        key = self.table.cache.next_key(prefix)
        leader = None if key is None else self._leaders.get(key)
        if leader is not None and leader.rank <= request.rank:
            self.counters.deferred_by_prefix += 1
            return None
        tail = NOTHING if self.tier is None else self.tier.find(prefix, send=not request.fetched)
        if tail.fetching:
            request.fetched = True
            return None
        covered = pages + len(tail.pages)
        kept, point = request.kept, None
        resumes = kept is not None and self._can_resume(kept, covered)
        if kept is not None and resumes:
            covered = kept.written // self.table.page_size
        elif self.savepoints is not None:
            point = self.savepoints.find(prefix, covered)
            covered = 0 if point is None else point.tokens // self.table.page_size
        cut = max(0, covered - pages)
        tail = TierTail(tail.pages[:cut], tail.handles[:cut])
        return _Start(prefix, min(pages, covered), tail, point, resumes)

    def _can_resume(self, kept: Kept, covered: int) -> bool:
        """Whether all full pages below the kept state are there, and the cache holds nothing that is further on."""
        full = kept.written // self.table.page_size
        return covered == full or (covered > full and kept.row != 0)

    def _start(self, request: Request, start: _Start, admitted: list[AdmitRow], now: float) -> bool:
        """Admit a request if there is a place for it, or one can be made."""
        if self.tier is not None:
            self.tier.pin(start.tail)  # whoever is preempted, or evicted, for it wants room on the host as well
        placed = self._make_place(request, start, admitted)
        if placed:
            admitted.append(self._admit(request, start, now))
        if self.tier is not None:
            self.tier.unpin()
        return placed

    def _make_place(self, request: Request, start: _Start, admitted: Sequence[AdmitRow]) -> bool:
        """Whether slot, row and pages are there; an interactive request may take them from batch work."""
        fresh = {a.request_id for a in admitted}
        while not self._fits(request, start):
            batch = [r for r in self.running.rows if r.rank == BATCH and r.id not in fresh]
            if request.rank == BATCH or not batch or self._hopeless(request, start, batch):
                return False
            self._preempt(max(batch, key=lambda r: (-self._loss(r), r.order)))
        return True

    def _fits(self, request: Request, start: _Start) -> bool:
        running = self.running
        if running.full or (self.row_pool is not None and not self.row_pool.available):
            return False
        growth = running.growth(self.table.page_size, self.limits.growth_pages)
        return self._need(request, start) + growth <= self.table.available

    def _hopeless(self, request: Request, start: _Start, leaving: Sequence[Request]) -> bool:
        """Whether it would not fit even if the rows `leaving` were gone and shared no page with those that stay."""
        gain = sum(len(self.table.pages(r.id)) for r in leaving)
        growth = self.running.growth(self.table.page_size, self.limits.growth_pages, without=leaving)
        return self._need(request, start) + growth > self.table.available + gain

    def _need(self, request: Request, start: _Start) -> int:
        """Pages that starting it takes from those that can be had."""
        nodes = start.prefix.nodes[: start.pages] if start.prefix is not None else []
        return -(-len(request.token_ids) // self.table.page_size) - len(nodes) + self.table.cache.idle(nodes)

    def _admit(self, request: Request, start: _Start, now: float) -> AdmitRow:
        """Move a request into the running set: claim its prefix, take its pages and its row."""
        table, ids = self.table, request.token_ids
        tenant = self._tenant(request)
        self.waiting.remove(request)
        tenant.waiting -= 1
        tenant.running += 1
        self.running.add(request, tenant.index)
        self._with_history += request.needs_history
        if self.row_pool is not None:
            request.state_row = self.row_pool.alloc(request.id) or 0
            self._transfers.append(Transfer(TransferOp.CLEAR_ROW, 0, request.state_row))
        computed = table.add(
            request.id,
            ids,
            namespace=request.namespace,
            cache_enabled=start.prefix is not None,
            max_match=start.pages * table.page_size,
            prefix=start.prefix,
        )
        computed += self._load_tail(request, start.tail)
        table.extend(request.id, -(-len(ids) // table.page_size) * table.page_size - computed)
        computed = self._load_rest(request, start, computed)
        request.computed = computed
        if request.cached_tokens is None:
            request.cached_tokens = min(computed, request.num_prompt)
            request.first_scheduled = now
            self.counters.cached_tokens += request.cached_tokens
        self.tenants.charge(tenant, max(0, len(ids) - max(computed, request.charged)))
        request.charged = len(ids)
        if self.savepoints is None:
            request.prefix = None
        self._lead(request)
        return AdmitRow(
            slot=request.slot,
            request_id=request.id,
            token_ids=tuple(ids),
            num_prompt=request.num_prompt,
            computed=computed,
            pages=tuple(table.pages(request.id)),
            sampling=request.msg.sampling,
            base_seed=request.base_seed,
            stop_token_ids=request.stops,
            state_row=request.state_row,
        )

    def _load_tail(self, request: Request, tail: TierTail) -> int:
        """Bring pages of its prefix back from the host."""
        if self.tier is None or not tail.pages:
            return 0
        load = self.tier.load
        return self.table.restore(request.id, tail.pages, lambda i, page: load(tail.handles[i], page))

    def _load_rest(self, request: Request, start: _Start, computed: int) -> int:
        """Bring back what the prefix cache cannot hold; returns the tokens whose state is then complete."""
        kept = request.kept
        if kept is not None and start.resumes:
            if kept.page:
                page = self.table.pages(request.id)[kept.written // self.table.page_size]
                self._transfers.append(Transfer(TransferOp.LOAD_PAGE, kept.page, page))
            if kept.row:
                self._transfers.append(Transfer(TransferOp.LOAD_ROW, kept.row, request.state_row))
            computed = kept.written
            self.counters.resumed_tokens += kept.written
        elif start.savepoint is not None:
            self._transfers.append(Transfer(TransferOp.LOAD_ROW, start.savepoint.handle, request.state_row))
        self._forget_kept(request)
        return computed

    def _sweep(self, now: float) -> None:
        self.tenants.sweep(now)
        if self.tier is not None:
            self.tier.sweep()

    def next_event(self, now: float) -> float | None:
        """When a step may be worth deciding although nothing new arrives; None if nothing waits for time to pass."""
        if self._news:
            return now
        times = [t for t in (tenant.next_start(now) for tenant in self.tenants if tenant.waiting) if t is not None]
        if self._deadlines:
            times.append(self._deadlines[0][0])
        if self.tier is not None and self.tier.fetching:
            times.append(self._poll_at)
        return min(times, default=None)
