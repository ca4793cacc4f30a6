"""Builds what every rank has: the model's slice, its state tensors, its runner."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from arbi_core.backend.base import BackendContext
from arbi_core.backend.binding import LayerBinding
from arbi_core.backend.select import select_backends
from arbi_core.distributed.fit import check_fit
from arbi_core.engine.memory import PagePlan, plan_pages
from arbi_core.errors import ConfigError
from arbi_core.loader.base import WeightContext
from arbi_core.loader.load import load_dummy, load_weights
from arbi_core.loader.progress import NoProgress, Progress
from arbi_core.loader.resolve import LoadedConfig, prepare
from arbi_core.model.base import BuildContext
from arbi_core.runner.blob_files import BlobFiles
from arbi_core.runner.graphs import CudaRecorder
from arbi_core.runner.host_store import HostStore
from arbi_core.runner.runner import ModelRunner
from arbi_core.sampler.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from arbi_core.backend.base import AttentionBackend
    from arbi_core.config.tree import CacheConfig, ServerConfig
    from arbi_core.offers import Ranks
    from arbi_core.plugins import Registry
    from arbi_core.spec import StateKind

__all__ = ["BuiltRank", "build_rank"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@frozen(eq=False)
class BuiltRank:
    """One rank, ready to carry out plans.

    Attributes:
        runner: carries them out.
        loaded: what is known of the model.
        ctx: sizes and device.
        backends: the backend of every state kind.
        pages: size of the KV pool, the same on every rank.
        held: how the linears are held, for people.
        seconds: how long it took.
    """

    runner: ModelRunner
    loaded: LoadedConfig
    ctx: BackendContext
    backends: Mapping[StateKind, AttentionBackend]
    pages: PagePlan
    held: str
    seconds: float


def build_rank(config: ServerConfig, registry: Registry, ranks: Ranks, progress: Progress | None = None) -> BuiltRank:
    """Load this rank's slice and allocate its state. All ranks do it together.

    Args:
        config: the resolved tree, the same on every rank.
        registry: installed plugins.
        ranks: this rank's place.
        progress: shows the loading of weights.

    Raises:
        ArbiError: any of its kinds: what cannot be found, read, understood or fitted is named.
    """
    start = time.monotonic()
    device = choose_device(config.model.device, ranks)
    loaded = prepare(config.model, registry)
    check_fit(loaded.spec, ranks.size)
    dtype = DTYPES[loaded.spec.dtype if config.model.dtype == "auto" and device.type != "cpu" else _cpu_dtype(config)]
    max_model_len = _max_model_len(config, loaded)
    model, held = _load(loaded, config, registry, device, dtype, ranks, max_model_len, progress or NoProgress())
    ctx = BackendContext(
        device=device,
        dtype=dtype,
        page_size=config.cache.page_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=max_model_len,
        parallel=ranks.group.spec,
        options=config.plugins,
    )
    layers = loaded.spec.layers
    backends = select_backends(
        layers, registry.attention_backends, config.cache.kv_dtype, config.cache.backends, device
    )
    binding = LayerBinding(layers, model, backends, ctx)
    pages = plan_pages(
        config, binding, ctx, explicit_len=config.model.max_model_len is not None, agree_min=ranks.agree_min
    )
    binding.allocate(pages.num_pages, ctx.max_num_seqs + 1)
    graphs = device.type == "cuda" and binding.capturable and not config.model.enforce_eager
    runner = ModelRunner(
        model,
        binding,
        Sampler(registry.logits_processors),
        ctx,
        _store(config.cache, binding),
        CudaRecorder() if graphs else None,
    )
    runner.record_graphs()
    return BuiltRank(runner, loaded, ctx, backends, pages, held, time.monotonic() - start)


def choose_device(name: str, ranks: Ranks) -> torch.device:
    """The device of this rank: ``cuda`` is the one with the rank's index on its host.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigError("model.device", f"{name!r} is not a device", "cpu, cuda or cuda:N") from exc
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ConfigError("model.device", f"{name!r} was asked for, but torch sees no CUDA device", "use cpu")
    if ranks.size > 1:
        index = ranks.device_index
        if ":" in name:
            raise ConfigError("model.device", f"{name!r} names one device for {ranks.size} ranks", "use cuda")
        if index >= torch.cuda.device_count():
            raise ConfigError(
                "scheduler.tensor_parallel_size",
                f"rank {ranks.rank} needs device cuda:{index}, but this host has {torch.cuda.device_count()}",
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def _store(cache: CacheConfig, binding: LayerBinding) -> HostStore | None:
    """Where this rank keeps bytes on its host, if anything ever is."""
    tiers = cache.host_tier_gib > 0
    if not tiers and not (binding.needs_rows and cache.savepoint_gib > 0 and cache.enable_prefix_caching):
        return None
    files = None
    if tiers and cache.disk_tier_dir:
        files = BlobFiles(cache.disk_tier_dir, encrypt=cache.disk_tier_encrypt)
    return HostStore(files, allocate=partial(torch.empty, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))


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
    ranks: Ranks,
    max_model_len: int,
    progress: Progress,
) -> tuple[Any, str]:
    """Build on the meta device and fill; says how the linears are held."""
    with torch.device("meta"):
        try:
            model = loaded.family.build(loaded.spec, BuildContext(dtype, ranks.group, max_model_len))
        except ValueError as exc:
            if ranks.size == 1:
                raise
            raise ConfigError("scheduler.tensor_parallel_size", str(exc)) from exc
    weight_map = loaded.family.weight_map(loaded.spec)
    held = "random"
    if config.model.load_format == "dummy":
        load_dummy(model, weight_map, device=device, dtype=dtype, seed=config.model.seed, progress=progress)
    else:
        report = load_weights(
            model,
            weight_map,
            loaded.checkpoint.tensors(),
            ctx=WeightContext(device, dtype, ranks.group.spec, config.plugins),
            weight_formats=registry.weight_formats,
            progress=progress,
        )
        loaded.checkpoint.close()
        held = ", ".join(f"{name} x {count}" for name, count in sorted(report.linears.items()))
    return model.eval(), held
