"""Builds an engine from a configuration: plugins, ranks, pools, scheduler."""

from __future__ import annotations

import itertools
import logging
import time
from typing import TYPE_CHECKING

from attrs import define, frozen

from arbi_core.engine.client import ModelInfo
from arbi_core.engine.core import EngineCore
from arbi_core.engine.jobs import JobStore
from arbi_core.engine.memory import GIB
from arbi_core.engine.rank import BuiltRank, build_rank
from arbi_core.errors import ConfigError
from arbi_core.loader.generation import default_sampling, end_token_ids
from arbi_core.loader.resolve import display_name
from arbi_core.plugins import Registry, load_registry
from arbi_core.pool import PagePool, PageTable, RowPool
from arbi_core.pool.savepoints import SavepointStore
from arbi_core.pool.tiers import HostTier, TierSettings
from arbi_core.scheduler import Scheduler, SchedulerLimits, Tenants, parse_tenant_limits
from arbi_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from arbi_core.config.tree import ServerConfig
    from arbi_core.loader.progress import Progress
    from arbi_core.offers import Ranks

__all__ = ["BootReport", "BuiltEngine", "build_engine", "follows", "open_ranks"]

log = logging.getLogger("arbi.boot")


@frozen
class BootReport:
    """What boot decided, for people: shown by ``arbi serve`` and in the log.

    Attributes:
        rows: label and value.
    """

    rows: tuple[tuple[str, str], ...]


@define(eq=False)
class BuiltEngine:
    """An engine and what its front ends need beside it."""

    core: EngineCore
    registry: Registry
    tokenizer: Tokenizer | None
    stop_token_ids: frozenset[int]
    report: BootReport


def follows(config: ServerConfig) -> bool:
    """Whether torchrun made this process a rank that follows: it runs `run_follower` instead of an engine."""
    if config.scheduler.tensor_parallel_size == 1:
        return False
    from arbi_core.distributed.launch import torchrun_place

    place = torchrun_place()
    return place is not None and place.rank > 0


def open_ranks(config: ServerConfig, registry: Registry) -> Ranks:
    """Start or join the ranks that the configuration asks for.

    Raises:
        UnknownNameError: no installed plugin offers the executor.
        ConfigError: the executor cannot run that many ranks.
    """
    name = config.scheduler.executor
    _check_launch(config.scheduler.tensor_parallel_size)
    if name == "auto":
        name = "local" if config.scheduler.tensor_parallel_size == 1 else "distributed"
    elif name == "local" and config.scheduler.tensor_parallel_size > 1:
        raise ConfigError("scheduler.executor", "'local' is one rank", "use auto or distributed with --tp")
    return registry.pick("executor", registry.executors, name).open(config)


def _check_launch(ranks: int) -> None:
    """Under torchrun without ``--tp`` every process would be a server of its own."""
    from arbi_core.distributed.launch import torchrun_place

    place = torchrun_place() if ranks == 1 else None
    if place is not None and place.size > 1:
        raise ConfigError(
            "scheduler.tensor_parallel_size",
            f"torchrun started {place.size} processes for one rank",
            f"--tp {place.size}",
        )


def build_engine(
    config: ServerConfig,
    registry: Registry | None = None,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> BuiltEngine:
    """Build everything that serves one model.

    Args:
        config: the resolved tree.
        registry: installed plugins; None discovers them as the configuration says.
        progress: shows the loading of weights.
        ranks: this process's place, which must be rank 0; None opens what the configuration says.

    Raises:
        ArbiError: any of its kinds: what cannot be found, read, understood or fitted is named.
    """
    start = time.monotonic()
    registry = registry or load_registry(config.plugins_policy)
    tenants = Tenants(parse_tenant_limits(config.scheduler.tenant_limits))
    _check_tiers(config)
    ranks = ranks or open_ranks(config, registry)
    try:
        if ranks.rank:
            raise ConfigError("scheduler.executor", f"this process is rank {ranks.rank}, which follows", "run_follower")
        rank = build_rank(config, registry, ranks, progress)
    except BaseException:
        ranks.close()
        raise
    info = _info(config, rank)
    asynchronous = config.scheduler.async_output
    depth = int(asynchronous == "on" or (asynchronous == "auto" and rank.ctx.device.type == "cuda"))
    core = EngineCore(
        _scheduler(config, registry, rank, tenants),
        ranks.drive(rank.runner),
        info,
        max_queue=config.scheduler.max_queue,
        default_timeout_s=config.scheduler.default_timeout_s,
        seed=config.model.seed,
        processors=registry.logits_processors,
        depth=depth,
        jobs=_jobs(config, info),
        on_close=ranks.close,
    )
    loaded = rank.loaded
    tokenizer = None if loaded.tokenizer is None else Tokenizer(loaded.tokenizer)
    report = _report(config, info, rank, ranks, time.monotonic() - start)
    for label, value in report.rows:
        log.info("%s: %s", label, value)
    end_ids = end_token_ids(loaded.spec, loaded.generation_config, loaded.tokenizer)
    built = BuiltEngine(core, registry, tokenizer, end_ids, report)
    registry.engine_built(core)
    return built


def _scheduler(config: ServerConfig, registry: Registry, rank: BuiltRank, tenants: Tenants) -> Scheduler:
    """Pools and scheduler for a rank's sizes."""
    cache, settings, binding = config.cache, config.scheduler, rank.runner.binding
    table = PageTable(PagePool(rank.pages.num_pages, cache.page_size), enabled=cache.enable_prefix_caching)
    rows = RowPool(rank.ctx.max_num_seqs) if binding.needs_rows else None
    handles = itertools.count(1)
    tier = savepoints = None
    if cache.host_tier_gib > 0:
        tier = HostTier(
            TierSettings(
                page_bytes=binding.page_bytes,
                row_bytes=binding.row_bytes,
                page_size=cache.page_size,
                ram_bytes=int(cache.host_tier_gib * GIB),
                disk_bytes=int(cache.disk_tier_gib * GIB) if cache.disk_tier_dir else 0,
                ttl_s=cache.tier_ttl_s,
                ram_min_tokens=cache.tier_min_tokens,
                disk_min_tokens=cache.disk_tier_min_tokens,
            ),
            handles,
        )
    if rows is not None and cache.savepoint_gib > 0 and cache.enable_prefix_caching:
        budget = int(cache.savepoint_gib * GIB)
        if budget < binding.row_bytes:
            raise ConfigError(
                "cache.savepoint_gib",
                f"one savepoint takes {binding.row_bytes / GIB:.3f} GiB, more than {cache.savepoint_gib:g}",
                f"at least {binding.row_bytes / GIB:.3f}, or 0 for no prefix cache on this model",
            )
        savepoints = SavepointStore(
            row_bytes=binding.row_bytes,
            max_bytes=budget,
            page_size=cache.page_size,
            grid=binding.fold_grid,
            handles=handles,
        )
    limits = SchedulerLimits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_prefill_chunk=settings.max_prefill_chunk or settings.max_num_batched_tokens,
        max_model_len=rank.pages.max_model_len,
        batch_prefill_share=settings.batch_prefill_share,
    )
    return Scheduler(
        limits,
        table,
        rows,
        tenants=tenants,
        tier=tier,
        savepoints=savepoints,
        on_finished=registry.request_finished,
    )


def _jobs(config: ServerConfig, info: ModelInfo) -> JobStore | None:
    directory = config.scheduler.jobs_dir
    if directory is None:
        return None
    return JobStore(directory, f"{display_name(config.model.path)} {info.architecture} {info.vocab_size}")


def _check_tiers(config: ServerConfig) -> None:
    cache = config.cache
    if cache.disk_tier_dir and not cache.host_tier_gib:
        raise ConfigError(
            "cache.disk_tier_dir", "the disk tier is fed by the RAM tier, which is off", "set --host-tier-gib"
        )
    if cache.disk_tier_encrypt and not cache.disk_tier_dir:
        raise ConfigError("cache.disk_tier_encrypt", "there is no disk tier to encrypt", "set --disk-tier-dir")
    if cache.host_tier_gib and not cache.enable_prefix_caching:
        raise ConfigError(
            "cache.host_tier_gib",
            "the tiers keep pages of the prefix cache, which is off",
            "enable prefix caching or leave the tiers off",
        )
    if cache.disk_tier_dir and config.scheduler.tensor_parallel_size > 1:
        raise ConfigError("cache.disk_tier_dir", "the disk tier serves one rank only", "use --host-tier-gib alone")


def _info(config: ServerConfig, rank: BuiltRank) -> ModelInfo:
    spec = rank.loaded.spec
    return ModelInfo(
        name=config.server.served_model_name or display_name(config.model.path),
        architecture=spec.architecture,
        max_model_len=rank.pages.max_model_len,
        vocab_size=spec.dims.vocab_size,
        default_sampling=default_sampling(rank.loaded.generation_config),
        kv_capacity_tokens=(rank.pages.num_pages - 1) * config.cache.page_size,
        kv_backend={kind: backend.name for kind, backend in rank.backends.items()},
        max_pending=config.scheduler.max_queue
        + min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens),
    )


def _report(config: ServerConfig, info: ModelInfo, rank: BuiltRank, ranks: Ranks, seconds: float) -> BootReport:
    backends = ", ".join(f"{kind}:{name}" for kind, name in info.kv_backend.items()) or "none"
    dtype = str(rank.ctx.dtype).removeprefix("torch.")
    rows = [
        ("model", f"{info.name} ({info.architecture}), {dtype} on {rank.ctx.device}"),
        ("attention", backends),
        ("weights", rank.held),
        *rank.pages.rows,
        ("context", f"{info.max_model_len} tokens"),
        ("KV capacity", f"{info.kv_capacity_tokens} tokens"),
    ]
    if ranks.size > 1:
        rows.insert(1, ("ranks", f"{ranks.size}, tensor parallel"))
    if config.cache.host_tier_gib:
        disk = f", then {config.cache.disk_tier_gib:g} GiB in {config.cache.disk_tier_dir}"
        ram = f"{config.cache.host_tier_gib:g} GiB of RAM"
        rows.append(("host tier", ram + disk if config.cache.disk_tier_dir else ram))
    rows.append(("ready after", f"{seconds:.1f} s"))
    return BootReport(tuple(rows))
