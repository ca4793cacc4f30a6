"""Host time of a step in the scheduler, at 256 and 512 running rows over 100,000 cached pages.

Usage: python benchmarks/scheduler_host.py [--profile]

A step is `schedule`, `dispatched` and `commit`; nothing is computed. Three mixes: every row decodes and none ends; each
step one request ends and one with a new prompt of 2,000 tokens starts; the same with prompts whose first 1,904 tokens
are cached. Everything but the scheduler (making a request, queueing it) is outside the measurement; `add` is shown by
itself. Times are the processor time of the thread, so that a busy machine disturbs them little; garbage collection is
in them. With --profile, the functions that take most of it, by own time.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import random
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from arbi_core.engine.messages import SubmitMsg
from arbi_core.pool import PagePool, PageTable
from arbi_core.sampler.params import SamplingParams
from arbi_core.scheduler import Request, Scheduler, SchedulerLimits, StepOutput, StepPlan

PAGE, CACHED, PROMPT, BUDGET, STEPS = 16, 100_000, 2000, 8192, 1500
CACHED_TOKENS = 119 * PAGE


class Bench:
    """A scheduler with a full cache, one step ahead of its outputs as on a GPU."""

    def __init__(self, rows: int, profile: cProfile.Profile | None) -> None:
        self.rng = random.Random(0)
        self.rows = rows
        self.profile = profile
        self.table = PageTable(PagePool(CACHED + rows * 200, PAGE))
        limits = SchedulerLimits(
            max_num_seqs=rows,
            max_num_batched_tokens=BUDGET,
            max_prefill_chunk=BUDGET,
            max_model_len=8192,
        )
        self.scheduler = Scheduler(limits, self.table)
        self.flights: deque[tuple[StepPlan, StepOutput]] = deque()
        self.serial = 0
        self.cached = [self.ids(PROMPT) for _ in range(-(-CACHED // (PROMPT // PAGE)))]
        for i, ids in enumerate(self.cached):
            self.table.add(f"f{i}", ids)
            self.table.extend(f"f{i}", len(ids))
            self.table.release(f"f{i}", ids)

    def ids(self, count: int) -> list[int]:
        """A prompt that nobody else has."""
        return [self.rng.randrange(100_000) for _ in range(count)]

    def request(self, *, output: int, hit: bool) -> Request:
        """A request that is not queued yet."""
        self.serial += 1
        ids = self.ids(PROMPT)
        if hit:
            ids[:CACHED_TOKENS] = self.rng.choice(self.cached)[:CACHED_TOKENS]
        msg = SubmitMsg(
            request_id=f"r{self.serial}",
            prompt_token_ids=tuple(ids),
            sampling=SamplingParams(max_tokens=output, ignore_eos=True),
            arrival=float(self.serial),
        )
        return Request(msg, base_seed=0, limit=PROMPT + output)

    def start(self, output: Iterator[int], *, hit: bool) -> None:
        """Fill every row and let it reach its decode phase."""
        for _ in range(self.rows):
            self.scheduler.add(self.request(output=next(output), hit=hit), 0.0)
        while self.scheduler.waiting or self.scheduler.running.prefilling():
            self.step()

    def step(self) -> tuple[float, float, float]:
        """One step; seconds of its three parts."""
        clock = time.thread_time
        if self.profile is not None:
            self.profile.enable()
        t0 = clock()
        plan = self.scheduler.schedule(0.0)
        t1 = clock()
        self.scheduler.dispatched(plan)
        t2 = clock()
        if self.profile is not None:
            self.profile.disable()
        self.flights.append((plan, StepOutput(np.full(plan.num_draws, 7, dtype=np.int64))))
        t3 = t4 = 0.0
        if len(self.flights) > 1:
            plan, output = self.flights.popleft()
            if self.profile is not None:
                self.profile.enable()
            t3 = clock()
            self.scheduler.commit(plan, output, 0.0)
            self.scheduler.take_finished()
            t4 = clock()
            if self.profile is not None:
                self.profile.disable()
        return t1 - t0, t2 - t1, t4 - t3


def report(label: str, parts: list[tuple[float, float, float]]) -> None:
    """Print milliseconds of the parts and of their sum."""
    ms = np.array(parts) * 1e3
    total = ms.sum(axis=1)
    schedule, dispatched, commit = ms.mean(axis=0)
    print(
        f"{label:<40} mean {total.mean():6.3f} median {np.median(total):6.3f} p99 {np.percentile(total, 99):7.3f} "
        f"max {total.max():7.3f}   means: schedule {schedule:.3f} dispatched {dispatched:.3f} commit {commit:.3f}"
    )


def decode(rows: int, profile: cProfile.Profile | None) -> None:
    """Every row decodes."""
    bench = Bench(rows, profile)
    bench.start(iter([4 * STEPS] * rows), hit=False)
    report(f"{rows} rows decode", [bench.step() for _ in range(STEPS)])


def turnover(rows: int, profile: cProfile.Profile | None, *, hit: bool) -> None:
    """A request ends and one starts in each step."""
    bench = Bench(rows, profile)
    bench.start(iter(range(2, 2 * rows + 2, 2)), hit=hit)
    parts, adds, began = [], [], bench.scheduler.counters.prompt_tokens
    for _ in range(STEPS):
        for _ in range(rows - len(bench.scheduler.running) - len(bench.scheduler.waiting)):
            request = bench.request(output=rows, hit=hit)
            start = time.thread_time()
            bench.scheduler.add(request, 0.0)
            adds.append(time.thread_time() - start)
        parts.append(bench.step())
    tokens = (bench.scheduler.counters.prompt_tokens - began) / STEPS
    kind = "cached" if hit else "new"
    report(f"{rows} rows, {len(adds) / STEPS:.2f} {kind} prompts a step", parts)
    print(f"    {tokens:.0f} prompt tokens computed a step; add {np.mean(adds) * 1e3:.3f} ms")


def main() -> None:
    """Run every mix at both sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true", help="show where the time goes; slows everything down")
    args = parser.parse_args()
    print("milliseconds a step")
    for rows in (256, 512):
        for hit in (None, False, True):
            profile = cProfile.Profile() if args.profile else None
            if hit is None:
                decode(rows, profile)
            else:
                turnover(rows, profile, hit=hit)
            if profile is not None:
                pstats.Stats(profile).sort_stats("tottime").print_stats(14)
            gc.collect()


if __name__ == "__main__":
    main()
