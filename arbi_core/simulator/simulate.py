"""The loop of the engine in virtual time: arrivals, `schedule`, a device that only takes time, `commit`."""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from attrs import define, field, frozen

from arbi_core.engine.messages import FinishReason, SubmitMsg
from arbi_core.errors import ConfigError
from arbi_core.pool import PagePool, PageTable
from arbi_core.sampler.params import SamplingParams
from arbi_core.scheduler import Request, Scheduler, SchedulerLimits, StepOutput, StepPlan, TenantLimits, Tenants
from arbi_core.scheduler.tenants import OUTPUT_COST
from arbi_core.simulator.cost import CostModel
from arbi_core.simulator.device import Device
from arbi_core.simulator.fairness import FairShares, Service
from arbi_core.simulator.policies import Policies, make_scheduler
from arbi_core.simulator.trace import Stream, TraceRequest

__all__ = ["EngineKnobs", "Outcome", "RequestLog", "SimulationStuckError", "simulate"]


class SimulationStuckError(RuntimeError):
    """Requests are left and nothing will ever move them: a fault of the scheduler."""


@frozen(kw_only=True)
class EngineKnobs:
    """The settings of an engine that decide what its scheduler does; see `SchedulerLimits`.

    Attributes:
        num_pages: pages that requests can use.
        page_size: tokens per page.
        depth: steps that are dispatched before the output of the oldest is seen; 0 is synchronous.
        prefix_caching: whether prefixes are shared.
        tenant_limits: by tenant name.
    """

    num_pages: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int
    batch_prefill_share: float
    depth: int = 0
    prefix_caching: bool = True
    tenant_limits: Mapping[str, TenantLimits] = field(factory=dict)


@define
class RequestLog:
    """What happened to one request. Times are virtual seconds; None where the phase was not reached.

    Attributes:
        trace: the request.
        arrival: when it arrived.
        token_times: when the host saw each token.
        cached_tokens: prompt tokens that its first admission took from the prefix cache.
    """

    trace: TraceRequest
    arrival: float
    first_scheduled: float | None = None
    token_times: array[float] = field(factory=lambda: array("d"))
    finished: float | None = None
    reason: FinishReason | None = None
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return self.token_times[0] - self.arrival if self.token_times else None


@define
class Outcome:
    """Everything a simulation saw.

    Attributes:
        duration_s: when the last request ended.
        busy_s: seconds in which the device worked.
        steps: steps with rows.
        rows: rows of all steps together.
        prefill_tokens: prompt pieces computed, those of preempted requests again included.
        recomputed_tokens: tokens computed a second time after a preemption.
        services: by tenant.
    """

    logs: list[RequestLog]
    duration_s: float = 0.0
    busy_s: float = 0.0
    steps: int = 0
    rows: int = 0
    max_rows: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    evictions: int = 0
    prefix_waits: int = 0
    quota_waits: int = 0
    services: dict[str, Service] = field(factory=dict)


class _Simulation:
    def __init__(self, trace: Sequence[TraceRequest], knobs: EngineKnobs, cost: CostModel, policies: Policies) -> None:
        self.knobs = knobs
        self.limits = SchedulerLimits(
            max_num_seqs=knobs.max_num_seqs,
            max_num_batched_tokens=knobs.max_num_batched_tokens,
            max_prefill_chunk=knobs.max_prefill_chunk,
            max_model_len=max(r.total_tokens for r in trace),
            batch_prefill_share=knobs.batch_prefill_share,
        )
        pool = PagePool(knobs.num_pages + 1, knobs.page_size)
        self.table = PageTable(pool, enabled=knobs.prefix_caching)
        tenants = Tenants(knobs.tenant_limits)
        self.scheduler: Scheduler = make_scheduler(self.limits, self.table, tenants, policies)
        self.device = Device(self.limits.max_rows, cost)
        self.stream = Stream()
        self.now = 0.0
        self.logs: dict[str, RequestLog] = {}
        self.live: dict[str, Request] = {}
        self.shares = FairShares({t: tenants.limits(t).weight for t in sorted({r.tenant for r in trace})})
        self.outcome = Outcome([], services=self.shares.services)
        self.flights: deque[tuple[StepPlan, StepOutput, float]] = deque()
        self.events: list[tuple[float, int, TraceRequest, bool]] = []
        self.serial = 0
        self.followers: dict[str, list[TraceRequest]] = {}
        for r in trace:
            if r.after is None:
                self.event(r.arrival_s, r)
            else:
                self.followers.setdefault(r.after, []).append(r)

    def event(self, at: float, request: TraceRequest, *, leaves: bool = False) -> None:
        """Remember that a request arrives, or that its client goes away."""
        self.serial += 1
        heapq.heappush(self.events, (at, self.serial, request, leaves))

    def take_events(self) -> None:
        while self.events and self.events[0][0] <= self.now:
            at, _, request, leaves = heapq.heappop(self.events)
            if leaves:
                self.scheduler.cancel(request.id)
            else:
                self.submit(request, at)

    def submit(self, r: TraceRequest, at: float) -> None:
        sampling = SamplingParams(max_tokens=r.output_tokens, ignore_eos=True)
        msg = SubmitMsg(
            request_id=r.id,
            prompt_token_ids=self.stream.prompt(r),
            sampling=sampling,
            tenant=r.tenant,
            priority=r.priority,
            timeout_s=r.timeout_s,
            arrival=at,
        )
        request = Request(msg, base_seed=0, limit=r.total_tokens)
        self.logs[r.id], self.live[r.id] = RequestLog(r, at), request
        self.scheduler.add(request, at)
        self.shares.ask(r.tenant, r.prompt_tokens + OUTPUT_COST * r.output_tokens)
        if r.cancel_after_s is not None:
            self.event(at + r.cancel_after_s, r, leaves=True)

    def run(self, progress: Callable[[int], None] | None) -> Outcome:
        while self.events or self.scheduler.has_work or self.scheduler.has_finished:
            self.take_events()
            ended = self.step()
            if ended and progress is not None:
                progress(ended)
        return self.sum_up()

    def step(self) -> int:
        """As `EngineCore.step`; returns how many requests ended."""
        plan = self.scheduler.schedule(self.now)
        if not plan.empty:
            self.dispatch(plan)
        collected = self.collect(0 if plan.empty else self.knobs.depth)
        ended = self.take_finished()
        if plan.empty and not (collected or ended):
            self.sleep()
        return ended

    def dispatch(self, plan: StepPlan) -> None:
        self.device.admit(plan, lambda name: self.stream.own(self.logs[name].trace))
        seconds, drawn = self.device.execute(plan)
        start = max(self.now + self.device.cost.host_s, self.device.free_at)
        self.serve(plan, start + seconds - max(self.now, self.device.free_at))
        self.device.free_at = start + seconds
        self.scheduler.dispatched(plan)
        self.flights.append((plan, StepOutput(drawn), self.device.free_at))
        out = self.outcome
        out.busy_s += seconds
        out.steps += plan.num_rows > 0
        out.rows += plan.num_rows
        out.max_rows = max(out.max_rows, plan.num_rows)
        out.prefill_tokens += sum(c.num_tokens for c in plan.chunks)

    def serve(self, plan: StepPlan, seconds: float) -> None:
        """Note what each tenant gets from a step."""
        got: dict[str, float] = {}
        work = [(slot, OUTPUT_COST) for slot in plan.decode.tolist()]
        work += [(c.slot, c.num_tokens + OUTPUT_COST * c.samples) for c in plan.chunks]
        for slot, tokens in work:
            tenant = self.logs[self.device.owner[slot]].trace.tenant
            got[tenant] = got.get(tenant, 0.0) + tokens
        self.shares.step(got, seconds)

    def collect(self, keep: int) -> int:
        """Commit the oldest steps until only `keep` are on the way; returns how many."""
        collected = 0
        while len(self.flights) > keep:
            plan, output, at = self.flights.popleft()
            self.now = max(self.now, at)
            for token in self.scheduler.commit(plan, output, self.now):
                self.logs[token.request_id].token_times.append(self.now)
            collected += 1
        return collected

    def take_finished(self) -> int:
        finished = self.scheduler.take_finished()
        for end in finished:
            log, request = self.logs[end.request_id], self.live.pop(end.request_id)
            log.finished, log.reason, log.cached_tokens = self.now, end.reason, end.cached_tokens
            log.first_scheduled, log.preemptions = request.first_scheduled, request.preemptions
            unused = log.cached_tokens + OUTPUT_COST * (log.trace.output_tokens - end.completion_tokens)
            self.shares.ask(log.trace.tenant, -unused)
            for follower in self.followers.pop(end.request_id, ()):
                self.event(self.now + follower.arrival_s, follower)
        return len(finished)

    def sleep(self) -> None:
        """Nothing can run now: go on at the next event."""
        times = [self.events[0][0]] if self.events else []
        due = self.scheduler.next_event(self.now)
        if due is not None:
            times.append(max(due, self.now + 1e-6))
        if not times:
            if self.scheduler.has_work:
                raise SimulationStuckError(f"{len(self.live)} requests are left and nothing moves at {self.now:.3f} s")
            return
        self.now = max(self.now, min(times))

    def sum_up(self) -> Outcome:
        out, counters = self.outcome, self.scheduler.counters
        out.logs = list(self.logs.values())
        out.duration_s = max(log.finished or 0.0 for log in out.logs)
        out.recomputed_tokens = self.device.recomputed
        out.preemptions = counters.preemptions
        out.evictions = self.table.evictions
        out.prefix_waits, out.quota_waits = counters.deferred_by_prefix, counters.deferred_by_quota
        return out


def simulate(
    trace: Sequence[TraceRequest],
    knobs: EngineKnobs,
    cost: CostModel,
    policies: Policies | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Run a trace to its end.

    Args:
        trace: as `check_trace` accepts it.
        knobs: the engine.
        cost: the device.
        policies: alternatives to the scheduler's own.
        progress: called with the number of requests that ended since the last call.

    Raises:
        ConfigError: a request that the pool could never hold.
        SimulationStuckError: the scheduler left requests behind.
    """
    room = knobs.num_pages * knobs.page_size
    for r in trace:
        if -(-r.total_tokens // knobs.page_size) > knobs.num_pages:
            raise ConfigError(
                "--num-pages", f"request {r.id!r} needs {r.total_tokens} tokens and the pool holds {room}"
            )
        if r.total_tokens > Stream.SPAN:
            raise ConfigError(
                "trace", f"request {r.id!r} has {r.total_tokens} tokens; at most {Stream.SPAN} can be told apart"
            )
    return _Simulation(trace, knobs, cost, policies or Policies()).run(progress)
