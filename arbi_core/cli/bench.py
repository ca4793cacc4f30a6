"""``arbi bench``: time a model in this process."""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

from arbi_core.cli.options import add_config_flags, resolve_args

if TYPE_CHECKING:
    from arbi_core.engine.core import EngineCore

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = (
        "Time prefill and decode with random prompts: time to first token, time per output token, throughput."
    )
    add_config_flags(parser, sections=("model", "cache", "scheduler", "plugins_policy"))
    parser.add_argument("--batch", default="1,8", help="concurrent requests, a list (default: 1,8)")
    parser.add_argument("--input-len", type=int, default=512, help="prompt tokens (default: 512)")
    parser.add_argument("--output-len", type=int, default=64, help="generated tokens (default: 64)")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line per batch size."""
    from attrs import evolve

    from arbi_core.engine.boot import build_engine
    from arbi_core.errors import ConfigError

    try:
        sizes = [int(b) for b in args.batch.split(",")]
    except ValueError:
        raise ConfigError("--batch", f"{args.batch!r} is not a list of whole numbers", "for example 1,8") from None
    if min(sizes, default=0) < 1 or args.input_len < 1 or args.output_len < 2:
        raise ConfigError("bench", "batch sizes and lengths must be positive, --output-len at least 2")
    resolved, registry = resolve_args(args)
    logging.basicConfig(level="WARNING")
    start = time.perf_counter()
    config = evolve(resolved.config, cache=evolve(resolved.config.cache, enable_prefix_caching=False))
    built = build_engine(config, registry)
    boot = time.perf_counter() - start
    _measure(built.core, 1, min(32, args.input_len), 4, "warm")
    results = [_measure(built.core, n, args.input_len, args.output_len, f"b{n}") for n in sizes]
    built.core.close()
    if args.json:
        info = built.core.info
        print(json.dumps({"model": info.name, "backend": dict(info.kv_backend), "boot_s": boot, "results": results}))  # noqa: T201
    else:
        _table(results, boot, built.core.info.name)
    return 0


def _measure(core: EngineCore, count: int, input_len: int, output_len: int, tag: str) -> dict[str, Any]:
    """Run `count` requests together and time each one's tokens."""
    from arbi_core.engine.messages import FinishReason, SubmitMsg
    from arbi_core.errors import EngineFailedError
    from arbi_core.sampler.params import SamplingParams

    rng = random.Random(0)  # noqa: S311  # workload, not secrets
    sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    start = time.perf_counter()
    for i in range(count):
        ids = tuple(rng.randrange(core.info.vocab_size) for _ in range(input_len))
        core.submit(
            SubmitMsg(request_id=f"{tag}-{i}", prompt_token_ids=ids, sampling=sampling, arrival=time.monotonic()),
            bounded=False,
        )
    times: dict[str, list[float]] = {}
    while core.has_work:
        batch = core.step()
        now = time.perf_counter() - start
        for out in batch.tokens:
            times.setdefault(out.request_id, []).extend([now] * len(out.token_ids))
        for end in batch.finished:
            if end.reason is FinishReason.ERROR:
                raise EngineFailedError(end.detail)
    total = time.perf_counter() - start
    first = [t[0] for t in times.values()]
    gaps = [(t[-1] - t[0]) / (len(t) - 1) for t in times.values() if len(t) > 1]
    decode_time = max(t[-1] for t in times.values()) - max(first)
    return {
        "batch": count,
        "input_len": input_len,
        "output_len": output_len,
        "ttft_ms": 1e3 * statistics.median(first),
        "tpot_ms": 1e3 * statistics.median(gaps) if gaps else None,
        "prefill_tok_s": count * input_len / max(first),
        "decode_tok_s": count * (output_len - 1) / decode_time if decode_time > 0 else None,
        "total_tok_s": count * (input_len + output_len) / total,
    }


def _table(results: list[dict[str, Any]], boot: float, model: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{model}: ready after {boot:.1f} s", title_justify="left")
    columns = {
        "batch": "batch",
        "input_len": "in",
        "output_len": "out",
        "ttft_ms": "first token ms",
        "tpot_ms": "ms per token",
        "prefill_tok_s": "prefill tok/s",
        "decode_tok_s": "decode tok/s",
        "total_tok_s": "all tok/s",
    }
    for title in columns.values():
        table.add_column(title, justify="right")
    for r in results:
        table.add_row(*("-" if (v := r[k]) is None else str(v) if isinstance(v, int) else f"{v:.1f}" for k in columns))
    Console().print(table)
