"""How many pages the KV pool gets, and what to say when too few fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from arbi_core.errors import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from arbi_core.backend.base import BackendContext
    from arbi_core.backend.binding import LayerBinding
    from arbi_core.config.tree import ServerConfig

__all__ = ["PagePlan", "plan_pages"]

GIB = 1 << 30


@frozen
class PagePlan:
    """The decision.

    Attributes:
        num_pages: pages to allocate, the null page included.
        max_model_len: longest context that one request can hold in them.
        rows: label and value for the boot table.
    """

    num_pages: int
    max_model_len: int
    rows: tuple[tuple[str, str], ...]


def plan_pages(
    config: ServerConfig,
    binding: LayerBinding,
    ctx: BackendContext,
    *,
    explicit_len: bool,
    agree_min: Callable[[int], int] = int,
) -> PagePlan:
    """Size the pool.

    ``cache.num_pages`` decides if set; otherwise what the device's memory setting leaves, and on the CPU no more than
    every running request could use. `agree_min` gives the smallest of all ranks' counts: a page id means the same page
    on every rank.

    Raises:
        OutOfMemoryError: an explicitly asked context does not fit; names the one that does. A context that was only
            the model's default is shortened instead.
    """
    size, per_page = ctx.page_size, max(1, binding.page_bytes)
    if config.cache.num_pages is not None:
        pages = config.cache.num_pages
    else:
        useful = ctx.max_num_seqs * -(-ctx.max_model_len // size) + 1
        pages = min(useful, _budget(config, ctx, binding) // per_page)
    pages = agree_min(pages)
    capacity = (pages - 1) * size
    if capacity < 1:
        raise OutOfMemoryError(
            f"the KV pool gets {pages} pages of {per_page} bytes, which hold no token; {_fix(ctx)} must allow at least "
            f"{2 * per_page / GIB:.4f} GiB"
        )
    length = ctx.max_model_len
    if capacity < length:
        if explicit_len:
            raise OutOfMemoryError(
                f"the KV pool holds {capacity} tokens ({pages} pages of {size}), fewer than max_model_len = {length}; "
                f"set --max-model-len {capacity}, or allow {length * per_page / size / GIB:.2f} GiB with {_fix(ctx)}"
            )
        length = capacity
    rows: tuple[tuple[str, str], ...] = (
        ("KV pool", f"{pages * per_page / GIB:.2f} GiB in {pages} pages of {size} tokens"),
    )
    if length < ctx.max_model_len:
        rows = (
            *rows,
            ("context cut", f"from {ctx.max_model_len} to {length} tokens, which is what the KV pool holds"),
        )
    return PagePlan(pages, length, rows)


def _fix(ctx: BackendContext) -> str:
    return "--cpu-kv-gib" if ctx.device.type == "cpu" else "--gpu-memory-utilization"


def _budget(config: ServerConfig, ctx: BackendContext, binding: LayerBinding) -> int:
    """Bytes for pages."""
    rows = binding.row_bytes * (ctx.max_num_seqs + 1)
    if ctx.device.type == "cpu":
        return int(config.cache.cpu_kv_gib * GIB) - rows
    torch.cuda.synchronize(ctx.device)
    free, total = torch.cuda.mem_get_info(ctx.device)
    return int(config.cache.gpu_memory_utilization * total) - (total - free) - rows
