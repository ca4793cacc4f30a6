"""Ranks without a model: they carry out plans on toy memory and check everything that a plan lets them read.

What a slot of a page holds is a hash of the whole token sequence up to it, seeded by the namespace, so that state of
another request, of another tenant, or of a sequence that went on differently is seen at once. A recurrent row holds the
hash after the last token. The next token depends on the whole sequence.

Steps can fail: before or amid their transfers, before they compute, or after (then what they wrote is garbage, and
what the steps behind them read is not checked). A row can fail alone: what it writes is NaN from then on, and whoever
reads a NaN becomes one.
"""

from __future__ import annotations

from attrs import define, field

from arbi_core.engine.messages import FinishReason, SubmitMsg
from arbi_core.pool import PagePool, PageTable, RowPool
from arbi_core.pool.transfers import Transfer, TransferOp, TransferResult
from arbi_core.sampler.params import SamplingParams
from arbi_core.scheduler import Request, Scheduler, SchedulerLimits, StepOutput

MODULUS = (1 << 61) - 1
EMPTY = 7
CLEARED = 0
GARBAGE = MODULUS + 1


def after(state, tokens):
    """Hash of a sequence that continues another. NaNs are negative and stay."""
    if state < 0:
        return state
    for t in tokens:
        state = (state * 1_000_003 + t + 1) % MODULUS
    return state


def draw(state):
    """Deterministic model: the next token depends on everything before it."""
    return state % 23 + 3


def next_token(ids, seed=EMPTY):
    """Next token of a sequence."""
    return draw(after(seed, ids))


def alone(prompt, max_tokens, max_len=64, stops=(), min_tokens=0, seed=EMPTY):
    """What a request gives by itself, with an unlimited pool and no cache."""
    state, length, out = after(seed, prompt), len(prompt), []
    for n in range(1, max_tokens + 1):
        out.append(draw(state))
        state = after(state, out[-1:])
        if length + n >= max_len or (out[-1] in stops and n > min_tokens):
            break
    return out


class StepFailed(Exception):
    """A step could not be executed."""


@define
class Row:
    """`states[i]` is what must be stored once `i` tokens are computed; `states[0]` is the namespace's seed."""

    name: str
    ids: list
    computed: int
    pages: list
    state_row: int
    states: list

    def append(self, token):
        self.ids.append(token)
        self.states.append(after(self.states[-1], (token,)))


@define
class ToyRanks:
    """Carries out plans in order, as a device does.

    `delay` steps pass before a background transfer ends. `trusted` is False from a failed step until the host has
    seen the failure; `lost` has the handles of transfers whose answer went with a failed step.
    """

    size: int
    seeds: dict = field(factory=dict)
    rows: dict = field(factory=dict)
    memory: dict = field(factory=dict)
    state: dict = field(factory=dict)
    host: dict = field(factory=dict)
    disk: dict = field(factory=dict)
    results: list = field(factory=list)
    moving: list = field(factory=list)
    nans: set = field(factory=set)
    doubtful: set = field(factory=set)
    lost: set = field(factory=set)
    failures: dict = field(factory=lambda: {TransferOp.SPILL: 0, TransferOp.FETCH: 0})
    delay: int = 0
    fail_spills: bool = False
    fail_fetches: bool = False
    trusted: bool = True
    last_index: int = 0

    def execute(self, plan, fault=None, nan=()):
        """Carry out a plan; `fault` is the number of transfers after which it fails, "compute" or "result"."""
        assert plan.index > self.last_index, "plans out of order"
        self.last_index = plan.index
        if fault is not None:
            self.doubtful |= {*plan.dropped, *(a.slot for a in plan.admitted)}
        self.transfers(plan.transfers, fault)
        self.apply(plan)
        if fault is None and self.trusted:
            self.doubtful -= set(plan.dropped)
        work = [(int(s), 1, True) for s in plan.decode] + [(c.slot, c.num_tokens, c.samples) for c in plan.chunks]
        assert len({w[0] for w in work}) == len(work), "a row twice in one step"
        if fault == "compute":
            raise StepFailed("compute")
        if fault == "result":
            self.trusted = False
        drawn, errors, broken = [], {}, set(nan)
        starts = [self.read(self.rows[slot]) for slot, _, _ in work]
        writes = {}
        for i, (slot, n, samples) in enumerate(work):
            row = self.rows[slot]
            assert n > 0
            assert row.computed + n <= len(row.ids), "tokens that are not known"
            assert samples == (row.computed + n == len(row.ids))
            pages, rec = starts[i]
            if i in broken:
                pages = rec = -row.states[0]
            if fault == "result":
                pages = rec = GARBAGE
            for p in range(row.computed, row.computed + n):
                pages, rec = after(pages, row.ids[p : p + 1]), after(rec, row.ids[p : p + 1])
                where = row.pages[p // self.size], p % self.size
                assert where[0] > 0, "the null page is written"
                assert where not in writes, "two rows write one slot"
                writes[where] = pages
            row.computed += n
            if row.state_row:
                self.state[row.state_row] = rec
            if min(pages, rec) < 0:
                self.nans.add(row.name)
                if samples:
                    errors[len(drawn)] = "NaN"
            if samples:
                drawn.append(draw(max(pages, 0)))
                row.append(drawn[-1])
        self.memory |= writes
        for t in plan.snapshots:
            assert t.op is TransferOp.SAVE_ROW
            self.transfer(t)
        self.settle()
        done, self.results = self.results, []
        if fault == "result":
            self.lost |= {r.handle for r in done}
            return StepFailed("result")
        return StepOutput(drawn, errors=errors, transfers=tuple(done))

    def apply(self, plan):
        """Bring the rows to what the plan's rows assume."""
        for slot in plan.dropped:
            assert slot in self.rows or slot in self.doubtful, "a row is dropped that is not there"
            self.rows.pop(slot, None)
        for a in plan.admitted:
            assert a.slot not in self.rows, "two requests in one slot"
            states = [self.seeds.get(a.request_id, EMPTY)]
            for t in a.token_ids:
                states.append(after(states[-1], (t,)))
            pages = list(a.pages)
            self.rows[a.slot] = Row(a.request_id, list(a.token_ids), a.computed, pages, a.state_row, states)
        for slot, page in plan.new_pages:
            self.rows[slot].pages.append(page)

    def read(self, row):
        """The states that a row goes on from: the one in its pages and the one in its recurrent row."""
        memory, size, seed = self.memory, self.size, row.states[0]
        values = [memory.get((row.pages[p // size], p % size)) for p in range(row.computed)]
        rec = self.state.get(row.state_row, CLEARED) if row.state_row else row.states[row.computed]
        rec = seed if rec == CLEARED else rec
        if not self.trusted:
            return (values[-1] or GARBAGE if values else seed), rec
        if -seed in values or rec == -seed:  # its own namespace's NaN: allowed, and it spreads
            return -seed, -seed
        for p, value in enumerate(values):
            where = row.pages[p // size], p % size
            assert value == row.states[p + 1], f"slot {where} does not hold the state of its own prefix"
        assert rec == row.states[row.computed], "the recurrent row is another's, or at another token"
        return row.states[row.computed], rec

    def transfers(self, transfers, fault=None):
        for i, t in enumerate(transfers):
            if i == fault:
                break
            self.transfer(t)
        if isinstance(fault, int):
            raise StepFailed("transfers")

    def transfer(self, t: Transfer):
        op, handle, where = t.op, t.handle, t.where
        if op in {TransferOp.LOAD_PAGE, TransferOp.LOAD_ROW} and handle not in self.host and not self.trusted:
            raise StepFailed(f"the bytes of handle {handle} are not kept here")
        if op is TransferOp.SAVE_PAGE:
            assert handle not in self.host
            self.host[handle] = [self.memory.get((where, o)) for o in range(self.size)]
        elif op is TransferOp.LOAD_PAGE:
            assert handle in self.host, "a page is loaded that is not in RAM"
            for o, value in enumerate(self.host[handle]):
                self.memory[where, o] = value
        elif op is TransferOp.SAVE_ROW:
            assert handle not in self.host
            self.host[handle] = self.state.get(where, CLEARED)
        elif op is TransferOp.LOAD_ROW:
            assert handle in self.host, "a row is loaded that is not in RAM"
            self.state[where] = self.host[handle]
        elif op is TransferOp.SPILL:
            if handle in self.host:
                self.disk[handle] = self.host.pop(handle)
            self.moving.append([self.delay, op, handle])
        elif op is TransferOp.FETCH:
            self.moving.append([self.delay, op, handle])
        elif op is TransferOp.DROP:
            self.host.pop(handle, None)
            self.disk.pop(handle, None)
            self.lost.discard(handle)
            self.moving = [m for m in self.moving if m[2] != handle]
            self.results = [r for r in self.results if r.handle != handle]
        elif op is TransferOp.CLEAR_ROW:
            self.state[where] = CLEARED

    def settle(self):
        """One step of time for the background transfers; those of one handle end in order."""
        still = []
        for remaining, op, handle in self.moving:
            if remaining or any(m[2] == handle for m in still):
                still.append([max(0, remaining - 1), op, handle])
                continue
            failed = self.fail_spills if op is TransferOp.SPILL else self.fail_fetches
            if failed or (handle not in self.disk and handle not in self.host):
                self.disk.pop(handle, None)
                self.host.pop(handle, None)
                self.failures[op] += 1
                self.results.append(TransferResult(op, handle, ok=False, error=f"{op.name} failed"))
                continue
            if op is TransferOp.FETCH and handle in self.disk:
                self.host[handle] = self.disk.pop(handle)
            self.results.append(TransferResult(op, handle, ok=True))
        self.moving = still


class World:
    """A scheduler over toy ranks, `depth` steps ahead of the host (0: synchronous)."""

    def __init__(
        self,
        pages=17,
        size=4,
        seqs=4,
        budget=16,
        chunk=None,
        rows=None,
        cache=True,
        max_len=64,
        depth=0,
        lookahead=0,
        growth=1,
        **stores,
    ):
        self.table = PageTable(PagePool(pages, size), enabled=cache)
        self.records = []
        self.rows = RowPool(rows) if rows else None
        self.limits = SchedulerLimits(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_prefill_chunk=chunk or budget,
            max_model_len=max_len,
            lookahead=lookahead,
            growth_pages=growth,
        )
        self.scheduler = Scheduler(self.limits, self.table, self.rows, on_finished=self.records.append, **stores)
        self.ranks = ToyRanks(size)
        self.size, self.depth = size, depth
        self.outputs, self.ends, self.names = {}, {}, {}
        self.now = 0.0
        self.plans, self.flights = [], []

    def add(self, name, prompt, max_tokens=5, min_tokens=0, history=False, **options):
        """Submit a request; `history` makes its draws depend on the tokens that the host has seen."""
        sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, presence_penalty=0.5 * history)
        self.now += 1e-6
        msg = SubmitMsg(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, arrival=self.now, **options)
        request = Request(msg, base_seed=0, limit=min(len(prompt) + max_tokens, self.limits.max_model_len))
        self.outputs[name] = []
        self.scheduler.add(request, self.now)
        return request

    def step(self, collect=None, fault=None, nan=()):
        """Decide and carry out one step; commit those that are more than `depth` old, or `collect` says.

        `fault` and `nan` make the step, or rows of it, fail: see `ToyRanks.execute`.
        """
        self.now += 0.001
        if self.flights and self.scheduler.draws_need_history:
            self.collect(0)
        plan = self.scheduler.schedule(self.now)
        self.plans.append(plan)
        self.check_plan(plan)
        if not plan.empty:
            self.dispatch(plan, fault, nan)
        keep = self.depth if not plan.empty else 0
        if collect is not None:
            keep = collect
        self.collect(keep)
        self.table.check()
        return plan

    def dispatch(self, plan, fault=None, nan=()):
        try:
            output = self.ranks.execute(plan, fault, nan)
        except StepFailed as failure:
            self.collect(0)
            self.failed(plan, failure)
            return
        self.scheduler.dispatched(plan)
        self.flights.append((plan, output))

    def failed(self, plan, failure):
        self.scheduler.fail(plan, str(failure))
        self.ranks.trusted = True

    def collect(self, keep=0):
        while len(self.flights) > keep:
            plan, output = self.flights.pop(0)
            if isinstance(output, StepFailed):
                self.failed(plan, output)
                continue
            for out in self.commit(plan, output):
                assert out.request_id not in self.ends, "a token after the end"
                self.outputs[out.request_id] += out.token_ids
        self.take_ends()

    def commit(self, plan, output):
        return self.scheduler.commit(plan, output, self.now)

    def take_ends(self):
        for end in self.scheduler.take_finished():
            assert end.request_id not in self.ends, "a request ended twice"
            self.ends[end.request_id] = end

    def check_plan(self, plan):
        assert plan.num_rows <= self.limits.max_num_seqs
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        for a in plan.admitted:
            self.names[a.slot] = a.request_id

    def rows_of(self, plan):
        """``(name, tokens)`` of each row."""
        return [(self.names[int(s)], 1) for s in plan.decode] + [
            (self.names[c.slot], c.num_tokens) for c in plan.chunks
        ]

    def run(self, limit=5000):
        for _ in range(limit):
            if not (self.scheduler.has_work or self.scheduler.has_finished):
                break
            self.step()
        assert not self.scheduler.has_work, "work is left: something waits for ever"
        self.take_ends()
        assert self.table.available == self.table.total_pages
        if self.rows:
            assert self.rows.available == self.rows.num_rows
        assert len(self.scheduler.running) == 0
        assert not self.scheduler._leaders
        return self

    def reason(self, name):
        """How a request ended; None if it lives."""
        return self.ends[name].reason if name in self.ends else None


__all__ = ["FinishReason", "StepFailed", "ToyRanks", "World", "after", "alone", "next_token"]
