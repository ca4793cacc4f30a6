"""Builds an engine from a configuration: plugins, model, pools, scheduler, runner."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, frozen

from arbi_core.backend.base import BackendContext
from arbi_core.backend.binding import LayerBinding
from arbi_core.backend.select import select_backends
from arbi_core.distributed.group import ProcessGroup, SingleProcessGroup
from arbi_core.engine.client import ModelInfo
from arbi_core.engine.core import EngineCore
from arbi_core.engine.memory import plan_pages
from arbi_core.errors import ConfigError
from arbi_core.loader.base import WeightContext
from arbi_core.loader.generation import default_sampling, end_token_ids
from arbi_core.loader.load import load_dummy, load_weights
from arbi_core.loader.progress import NoProgress, Progress
from arbi_core.loader.resolve import LoadedConfig, display_name, prepare
from arbi_core.model.base import BuildContext
from arbi_core.plugins import Registry, load_registry
from arbi_core.pool import PagePool, PageTable, RowPool
from arbi_core.runner.runner import ModelRunner
from arbi_core.sampler.sampler import Sampler
from arbi_core.scheduler import Scheduler, SchedulerLimits
from arbi_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from arbi_core.config.tree import ServerConfig

__all__ = ["BootReport", "BuiltEngine", "build_engine"]

log = logging.getLogger("arbi.boot")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


def build_engine(
    config: ServerConfig, registry: Registry | None = None, progress: Progress | None = None
) -> BuiltEngine:
    """Build everything that serves one model.

    Args:
        config: the resolved tree.
        registry: installed plugins; None discovers them as the configuration says.
        progress: shows the loading of weights.

    Raises:
        ArbiError: any of its kinds: what cannot be found, read, understood or fitted is named.
    """
    start = time.monotonic()
    registry = registry or load_registry(config.plugins_policy)
    device = _device(config.model.device)
    loaded = prepare(config.model, registry)
    dtype = DTYPES[loaded.spec.dtype if config.model.dtype == "auto" and device.type != "cpu" else _cpu_dtype(config)]
    max_model_len = _max_model_len(config, loaded)
    group = SingleProcessGroup()
    model, held = _load(loaded, config, registry, device, dtype, group, max_model_len, progress or NoProgress())

    ctx = BackendContext(
        device=device,
        dtype=dtype,
        page_size=config.cache.page_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=max_model_len,
        parallel=group.spec,
        options=config.plugins,
    )
    spec = loaded.spec
    backends = select_backends(
        spec.layers, registry.attention_backends, config.cache.kv_dtype, config.cache.backends, device
    )
    binding = LayerBinding(spec.layers, model, backends, ctx)
    pages = plan_pages(config, binding, ctx, explicit_len=config.model.max_model_len is not None)
    binding.allocate(pages.num_pages, ctx.max_num_seqs + 1)
    sampler = Sampler(registry.logits_processors)
    runner = ModelRunner(model, binding, sampler, ctx)

    table = PageTable(PagePool(pages.num_pages, config.cache.page_size), enabled=config.cache.enable_prefix_caching)
    limits = SchedulerLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_prefill_chunk=config.scheduler.max_prefill_chunk or config.scheduler.max_num_batched_tokens,
        max_model_len=pages.max_model_len,
    )
    rows = RowPool(ctx.max_num_seqs) if binding.needs_rows else None
    scheduler = Scheduler(limits, table, rows, on_finished=registry.request_finished)
    info = ModelInfo(
        name=config.server.served_model_name or display_name(config.model.path),
        architecture=spec.architecture,
        max_model_len=pages.max_model_len,
        vocab_size=spec.dims.vocab_size,
        default_sampling=default_sampling(loaded.generation_config),
        kv_capacity_tokens=(pages.num_pages - 1) * config.cache.page_size,
        kv_backend={kind: backend.name for kind, backend in backends.items()},
    )
    core = EngineCore(
        scheduler,
        _executor(config, registry, runner),
        info,
        max_queue=config.scheduler.max_queue,
        default_timeout_s=config.scheduler.default_timeout_s,
        seed=config.model.seed,
        processors=registry.logits_processors,
    )
    tokenizer = None if loaded.tokenizer is None else Tokenizer(loaded.tokenizer)
    report = _report(info, (("weights", held), *pages.rows), dtype, device, time.monotonic() - start)
    for label, value in report.rows:
        log.info("%s: %s", label, value)
    built = BuiltEngine(
        core, registry, tokenizer, end_token_ids(spec, loaded.generation_config, loaded.tokenizer), report
    )
    registry.engine_built(core)
    return built


def _executor(config: ServerConfig, registry: Registry, runner: ModelRunner) -> Any:
    factory = registry.pick("executor", registry.executors, config.scheduler.executor)
    return factory.start(lambda: runner)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigError("model.device", f"{name!r} is not a device", "cpu, cuda or cuda:N") from exc
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device", f"{name!r} was asked for, but torch sees no CUDA device", "use cpu")
    return device


def _cpu_dtype(config: ServerConfig) -> str:
    return "float32" if config.model.dtype == "auto" else config.model.dtype


def _max_model_len(config: ServerConfig, loaded: LoadedConfig) -> int:
    trained = loaded.spec.dims.max_position_embeddings
    asked = config.model.max_model_len
    if asked is not None and asked > trained:
        raise ConfigError(
            "model.max_model_len", f"{asked} is longer than the {trained} tokens that the model was trained for",
            f"at most {trained}",
        )  # fmt: skip
    return asked or trained


def _load(
    loaded: LoadedConfig,
    config: ServerConfig,
    registry: Registry,
    device: torch.device,
    dtype: torch.dtype,
    group: ProcessGroup,
    max_model_len: int,
    progress: Progress,
) -> tuple[Any, str]:
    """Build on the meta device and fill; says how the linears are held."""
    with torch.device("meta"):
        model = loaded.family.build(loaded.spec, BuildContext(dtype, group, max_model_len))
    weight_map = loaded.family.weight_map(loaded.spec)
    held = "random"
    if config.model.load_format == "dummy":
        load_dummy(model, weight_map, device=device, dtype=dtype, seed=config.model.seed, progress=progress)
    else:
        report = load_weights(
            model,
            weight_map,
            loaded.checkpoint.tensors(),
            ctx=WeightContext(device, dtype, group.spec, config.plugins),
            weight_formats=registry.weight_formats,
            progress=progress,
        )
        loaded.checkpoint.close()
        held = ", ".join(f"{name} x {count}" for name, count in sorted(report.linears.items()))
    return model.eval(), held


def _report(
    info: ModelInfo,
    details: tuple[tuple[str, str], ...],
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
) -> BootReport:
    backends = ", ".join(f"{kind}:{name}" for kind, name in info.kv_backend.items()) or "none"
    return BootReport(
        (
            ("model", f"{info.name} ({info.architecture}), {str(dtype).removeprefix('torch.')} on {device}"),
            ("attention", backends),
            *details,
            ("context", f"{info.max_model_len} tokens"),
            ("KV capacity", f"{info.kv_capacity_tokens} tokens"),
            ("ready after", f"{seconds:.1f} s"),
        )
    )
