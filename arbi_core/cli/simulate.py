"""``arbi simulate``: the scheduler over a cost model instead of a device, in virtual time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbi_core.config.tree import CacheConfig, SchedulerConfig

if TYPE_CHECKING:
    from arbi_core.simulator import CostModel, EngineKnobs, Policies, Preset, TraceRequest

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    from arbi_core.simulator import PRESETS, WORKLOADS
    from arbi_core.simulator.policies import CHOICES
    from arbi_core.simulator.report import LONG_PROMPT

    parser.description = (
        "Run the scheduler and its pools over a trace, with a cost model instead of a device, in virtual time: "
        "thousands of requests in seconds. See docs/simulations.md for the file format."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "workloads:\n" + "\n".join(f"  {name:<10} {w.help}" for name, w in WORKLOADS.items())
    parser.add_argument("trace", metavar="WORKLOAD|FILE", help="a workload's name, or a trace file (JSON lines)")
    trace = parser.add_argument_group("workload")
    trace.add_argument("--requests", type=int, default=1000, metavar="N", help="requests of a workload (default: 1000)")
    trace.add_argument("--rate", type=float, metavar="R", help="requests per second (default: the workload's)")
    trace.add_argument("--seed", type=int, default=0, help="seed of a workload (default: 0)")
    trace.add_argument("--write-trace", type=Path, metavar="FILE", help="write the trace to a file and stop")
    _add_engine_flags(parser, list(PRESETS))
    policies = parser.add_argument_group("policies (the first is the scheduler's own, the others are for comparison)")
    for name, choices in CHOICES.items():
        policies.add_argument(_flag(name), choices=choices, default=choices[0], help=f"(default: {choices[0]})")
    policies.add_argument("--compare", choices=list(CHOICES), help="run every choice of a policy, side by side")
    out = parser.add_argument_group("output")
    out.add_argument(
        "--long-prompt",
        type=int,
        default=LONG_PROMPT,
        metavar="N",
        help=f"long from N tokens on (default: {LONG_PROMPT})",
    )
    out.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def _add_engine_flags(parser: argparse.ArgumentParser, presets: list[str]) -> None:
    from arbi_core.scheduler import SchedulerLimits

    scheduler, cache = SchedulerConfig(), CacheConfig()
    share = SchedulerLimits(
        max_num_seqs=1, max_num_batched_tokens=1, max_prefill_chunk=1, max_model_len=1
    ).batch_prefill_share
    engine = parser.add_argument_group("engine")
    engine.add_argument("--cost", choices=presets, default=presets[0], help=f"cost model (default: {presets[0]})")
    engine.add_argument(
        "--cost-term", action="append", default=[], metavar="NAME=SECONDS", help="change one term of it (repeatable)"
    )
    engine.add_argument("--num-pages", type=int, help="pages of the pool (default: what the cost model's machine has)")
    engine.add_argument("--depth", type=int, help="steps ahead of the host (default: the cost model's)")
    engine.add_argument(
        "--max-prefill-chunk", type=int, help="most tokens of one prompt in one step (default: the budget)"
    )
    engine.add_argument("--no-prefix-caching", action="store_true", help="share no prefixes")
    engine.add_argument(
        "--tenant-limits", action="append", default=[], metavar="NAME:KEY=VALUE", help="as of arbi serve (repeatable)"
    )
    for flag, kind, default, text in (
        ("--page-size", int, cache.page_size, "tokens per page"),
        ("--max-num-seqs", int, scheduler.max_num_seqs, "most requests in one step"),
        ("--max-num-batched-tokens", int, scheduler.max_num_batched_tokens, "most tokens in one step"),
        ("--batch-prefill-share", float, share, "share of a step's prefill for batch work beside interactive"),
    ):
        engine.add_argument(flag, type=kind, default=default, help=f"{text} (default: {default})")


def _flag(policy: str) -> str:
    return "--" + policy.replace("_", "-")


def run(args: argparse.Namespace) -> int:
    """Print a table, one column per run."""
    from arbi_core.errors import ConfigError
    from arbi_core.simulator import PRESETS, Policies, make_workload, read_trace, summarise, write_trace
    from arbi_core.simulator.cost import override
    from arbi_core.simulator.policies import CHOICES

    path = Path(args.trace)
    trace = read_trace(path) if path.is_file() else make_workload(args.trace, args.requests, args.rate, args.seed)
    if args.write_trace is not None:
        try:
            write_trace(args.write_trace, trace)
        except OSError as exc:
            raise ConfigError("--write-trace", f"{args.write_trace} cannot be written: {exc.strerror}") from None
        return 0
    preset = PRESETS[args.cost]
    cost, knobs = override(preset.cost, args.cost_term), _knobs(args, preset)
    chosen = {name: getattr(args, name) for name in CHOICES}
    values = CHOICES[args.compare] if args.compare else ("result",)
    results: dict[str, dict[str, Any]] = {}
    for value in values:
        policies = Policies(**chosen | ({args.compare: value} if args.compare else {}))
        outcome = _simulate(trace, knobs, cost, policies, f"{args.trace} {value}")
        results[value] = summarise(outcome, knobs, cost, args.long_prompt)
    if args.json:
        print(json.dumps(results if args.compare else results["result"]))  # noqa: T201
    else:
        _table(results, f"{args.trace}: {len(trace)} requests on {args.cost}, {knobs.num_pages} pages")
    return 0


def _knobs(args: argparse.Namespace, preset: Preset) -> EngineKnobs:
    from arbi_core.errors import ConfigError
    from arbi_core.scheduler import parse_tenant_limits
    from arbi_core.simulator import EngineKnobs

    for name in (
        "page_size",
        "num_pages",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_prefill_chunk",
        "long_prompt",
    ):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(_flag(name), f"{value} is too small", "at least 1")
    if args.depth is not None and args.depth < 0:
        raise ConfigError("--depth", f"{args.depth} is too small", "at least 0")
    if not 0 <= args.batch_prefill_share <= 1:
        raise ConfigError("--batch-prefill-share", f"{args.batch_prefill_share} does not lie in [0, 1]")
    return EngineKnobs(
        num_pages=args.num_pages or preset.pool_tokens // args.page_size,
        page_size=args.page_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_prefill_chunk=args.max_prefill_chunk or args.max_num_batched_tokens,
        batch_prefill_share=args.batch_prefill_share,
        depth=preset.depth if args.depth is None else args.depth,
        prefix_caching=not args.no_prefix_caching,
        tenant_limits=parse_tenant_limits(args.tenant_limits),
    )


def _simulate(trace: list[TraceRequest], knobs: EngineKnobs, cost: CostModel, policies: Policies, title: str) -> Any:
    """Run with a progress bar on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    from arbi_core.simulator import simulate

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(title, total=len(trace))
        return simulate(trace, knobs, cost, policies, progress=lambda n: bar.advance(task, n))


SPREADS = (("ttft_s", "first token"), ("itl_s", "between tokens"), ("queue_s", "queue"), ("total_s", "whole request"))
NUMBERS = (
    ("duration_s", "duration, s", "{:.1f}"),
    ("steps", "steps", "{:,}"),
    ("busy", "device busy", "{:.1%}"),
    ("rows_mean", "rows in a step, mean", "{:.1f}"),
    ("output_tok_s", "generated tokens per s", "{:,.0f}"),
    ("prompt_tok_s", "prompt tokens per s", "{:,.0f}"),
    ("hit_rate", "prompt tokens from the cache", "{:.1%}"),
    ("prefill_tokens", "prefill tokens computed", "{:,}"),
    ("recomputed_tokens", "computed again", "{:,}"),
    ("preemptions", "preemptions", "{:,}"),
    ("evictions", "pages evicted", "{:,}"),
    ("jain_progress", "fairness (Jain)", "{:.3f}"),
    ("max_lag_tokens", "furthest behind fair share, tokens", "{:,.0f}"),
    ("ttft_slowdown_long_by_short", "slowdown of long / short prompts", "{:.2f}"),
)
GROUPS = ("lengths", "classes", "tenants")
MAX_GROUPS = 12


def _table(results: Mapping[str, Mapping[str, Any]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")

    def row(label: str, cells: list[str]) -> None:
        table.add_row(label, *cells)

    first = next(iter(results.values()))
    row("finished", [", ".join(f"{n} {r}" for r, n in x["finished"].items()) for x in results.values()])
    for key, label, form in NUMBERS:
        row(label, ["-" if x[key] is None else form.format(x[key]) for x in results.values()])
    table.add_section()
    for key, label in SPREADS:
        row(f"{label}: p50/p90/p99/max", [_spread(x[key]) for x in results.values()])
    for kind in GROUPS:
        if len(first[kind]) < 2:
            continue
        table.add_section()
        for name in list(first[kind])[:MAX_GROUPS]:
            for key, label in SPREADS[:3]:
                row(f"{name or '(no name)'}, {label}", [_spread(x[kind][name][key]) for x in results.values()])
            cells = [x[kind][name]["ttft_slowdown"] for x in results.values()]
            row(
                f"{name or '(no name)'}, slowdown p50/max",
                ["-" if s is None else f"{s['p50']:.1f} / {s['max']:.1f}" for s in cells],
            )
    Console(width=None if sys.stdout.isatty() else 60 + 40 * len(results)).print(table)


def _spread(s: Mapping[str, float] | None) -> str:
    return "-" if s is None else " / ".join(_time(s[k]) for k in ("p50", "p90", "p99", "max"))


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
