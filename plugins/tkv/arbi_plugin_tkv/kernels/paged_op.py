"""The op of ``paged_kv:tkv-bypass`` on a GPU: store, then attend with the kernel that fits each part of the step.

A step's rows come in three runs: rows of one token (decode kernel), rows of up to 16 tokens (the same kernel, ragged),
longer chunks (prefill kernel, or torch's own where every chunk begins its sequence). Any of them may be empty.

A backend uses it in three lines::

    storage:          StorageSpec(pages=page_tensors(layer, kv_heads, ctx.page_size, dtype))
    metadata_builder: PagedBypassBuilder(layers, ctx)
    attn_op:          PagedBypass(layer, heads, kv_heads, sinks)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import frozen

from arbi_core.api import LayerSpec, TensorSpec
from arbi_plugin_tkv.kernels import paged_twin
from arbi_plugin_tkv.kernels.paged_fresh import attend_fresh, can_attend_fresh
from arbi_plugin_tkv.kernels.paged_splits import (
    MAX_QUERIES,
    DecodePlan,
    bucket,
    decode_plan,
    next_power_of_2,
    prefill_tile,
)

if TYPE_CHECKING:
    from arbi_core.api import BackendContext, ForwardBatch, LayerState
    from arbi_plugin_tkv.kernels.paged_decode import Workspace

__all__ = ["PagedBypass", "PagedBypassBuilder", "PagedStep", "page_tensors"]

DEFAULT_SMS = 132
"""Multiprocessors that launches are shaped for where there is no GPU to ask."""


def page_tensors(layer: LayerSpec, kv_heads: int, page_size: int, dtype: str) -> tuple[TensorSpec, TensorSpec]:
    """The tensors ``k`` and ``v`` of one page; see `arbi_plugin_tkv.kernels.paged_store` for the layout."""
    return (
        TensorSpec("k", (kv_heads, page_size, layer.head_dim), dtype),
        TensorSpec("v", (kv_heads, page_size, layer.value_dim), dtype),
    )


@frozen(eq=False)
class Rows:
    """A run of rows for one kernel.

    Attributes:
        table: ``(n, W)`` their page ids.
        lengths: ``(n,)`` their contexts.
        starts: ``(n + 1,)`` where they begin in the step's flat tokens.
        queries: most tokens of one of them.
    """

    table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    queries: int


@frozen(eq=False)
class PagedStep:
    """A step.

    Attributes:
        slots: ``(N,)`` where each token is written.
        everything: all rows.
        decode: the rows of one token that lead the step, or None.
        verify: the rows of up to `MAX_QUERIES` tokens that follow, or None.
        chunks: the others, or None.
        tiles: `query_tiles` of the chunks by tokens of a tile, on the device.
        fresh_from: the first flat token of the chunks where each of them begins its sequence, else -1.
        fresh_starts: ``(n + 1,)`` where chunks begin, counted from there.
        sms: multiprocessors that launches are shaped for.
        bound: tokens of the longest context that a row may ever have.
        workspace: memory of the decode kernel, or None.
    """

    slots: torch.Tensor
    everything: Rows
    decode: Rows | None
    verify: Rows | None
    chunks: Rows | None
    tiles: Mapping[int, torch.Tensor]
    fresh_from: int
    fresh_starts: torch.Tensor | None
    sms: int
    bound: int
    workspace: Workspace | None


@frozen
class Geometry:
    """What the kernels' launches depend on in a layer.

    Attributes:
        heads: query heads of this rank.
        kv_heads: key heads of this rank.
        dim: width of a key.
        value_dim: width of a value.
        window: of the layer.
    """

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    window: int | None

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.kv_heads

    def plan(self, rows: int, itemsize: int, bound: int, sms: int, queries: int = 1, room: int = 0) -> DecodePlan:
        """The decode kernel's plan for a batch."""
        if self.window is not None:
            bound = min(bound, self.window + queries)
        width = max(self.dim, self.value_dim)
        return decode_plan(rows, self.kv_heads, self.group, width, itemsize, bound, sms, queries, room)

    def tile_tokens(self, itemsize: int) -> int:
        """Query tokens of a prefill tile."""
        return prefill_tile(max(self.dim, self.value_dim), self.group, itemsize).rows // self.group


class PagedBypassBuilder:
    """Makes a `PagedStep` from a batch's host twins; never reads the device, and allocates only for chunks.

    Args:
        layers: all layers that share the step.
        ctx: sizes and device. Launches are shaped for ``ctx.max_model_len``, not for the contexts of a step, so that
            a captured graph and an eager step share rows out alike and give the same bits.
        kernels: use the Triton kernels; None: on a CUDA device.
        fresh_flash: let torch's own flash attention do chunks that begin their sequences.

    Attributes:
        capturable: decode steps may be recorded as CUDA graphs.
    """

    capturable = True

    def __init__(
        self, layers: Sequence[LayerSpec], ctx: BackendContext, *, kernels: bool | None = None, fresh_flash: bool = True
    ) -> None:
        cuda = ctx.device.type == "cuda"
        self._device = ctx.device
        self._bound = ctx.max_model_len
        self._itemsize = ctx.dtype.itemsize
        self._fresh = fresh_flash and cuda
        self._sms = torch.cuda.get_device_properties(ctx.device).multi_processor_count if cuda else DEFAULT_SMS
        shapes = {
            Geometry(
                ctx.parallel.divide(la.num_heads, "num_attention_heads"),
                ctx.parallel.divide(la.num_kv_heads, "num_key_value_heads"),
                la.head_dim,
                la.value_dim,
                la.window,
            )
            for la in layers
        }
        self._kernels = cuda if kernels is None else kernels
        self._tokens = sorted({g.tile_tokens(self._itemsize) for g in shapes})
        self._workspace = self._allocate(shapes, ctx.max_num_seqs) if self._kernels else None

    def _allocate(self, shapes: set[Geometry], max_rows: int) -> Workspace:
        """Memory for the partial sums of any batch of decode rows."""
        from arbi_plugin_tkv.kernels.paged_decode import Workspace

        most = 1
        for shape in shapes:
            for power in range(bucket(max_rows).bit_length()):
                rows = min(1 << power, bucket(max_rows))
                splits = shape.plan(rows, self._itemsize, self._bound, self._sms).splits
                most = max(most, rows * shape.heads * splits if splits > 1 else 0)
        return Workspace.allocate(most, max((g.value_dim for g in shapes), default=1), self._device)

    def build(self, batch: ForwardBatch) -> PagedStep:
        """Cut the rows into runs and the chunks into tiles."""
        rows = batch.num_rows
        starts = batch.cu_seqlens_q_host[: rows + 1]
        counts = np.diff(starts)
        decode = rows if batch.is_decode else _run(counts == 1)
        verify = decode + _run(counts[decode:] <= MAX_QUERIES)
        tiles: dict[int, torch.Tensor] = {}
        fresh_from, fresh_starts = -1, None
        if verify < rows and self._kernels:
            tiles = self._tiles(starts[verify:], batch.seq_lens_host[verify:rows])
            if self._fresh and bool((batch.seq_lens_host[verify:rows] == counts[verify:]).all()):
                fresh_from = int(starts[verify])
                fresh_starts = batch.cu_seqlens_q[verify : rows + 1] - fresh_from
        return PagedStep(
            batch.slot_mapping,
            _rows(batch, 0, rows, counts),
            _rows(batch, 0, decode, counts) if decode else None,
            _rows(batch, decode, verify, counts) if verify > decode else None,
            _rows(batch, verify, rows, counts) if rows > verify else None,
            tiles,
            fresh_from,
            fresh_starts,
            self._sms,
            self._bound,
            self._workspace,
        )

    def _tiles(self, starts: np.ndarray, lengths: np.ndarray) -> dict[int, torch.Tensor]:
        from arbi_plugin_tkv.kernels.paged_prefill import query_tiles

        tiles = {}
        for tokens in self._tokens:
            host = torch.from_numpy(query_tiles(starts, lengths, tokens))
            if self._device.type == "cuda":
                # Pinned, or the copy would wait for the device.
                host = host.pin_memory().to(self._device, non_blocking=True)
            tiles[tokens] = host
        return tiles


def _run(flags: np.ndarray) -> int:
    """How many flags are set before the first that is not."""
    return len(flags) if bool(flags.all()) else int(flags.argmin())


def _rows(batch: ForwardBatch, first: int, last: int, counts: np.ndarray) -> Rows:
    part = slice(first, last)
    starts = batch.cu_seqlens_q[first : last + 1]
    return Rows(batch.block_table[part], batch.seq_lens[part], starts, int(counts[part].max()))


class PagedBypass:
    """The op of one layer; see `arbi_core.api.AttnOp`. State: `page_tensors`, of the dtype of activations on a GPU.

    Args:
        layer: window, scale, soft cap, widths.
        heads: query heads of this rank.
        kv_heads: key heads of this rank.
        sinks: ``(heads,)`` extra softmax logits, or None.
        kernels: use the Triton kernels; None: where the queries are on a CUDA device. As the builder's.
    """

    def __init__(
        self,
        layer: LayerSpec,
        heads: int,
        kv_heads: int,
        sinks: torch.Tensor | None = None,
        *,
        kernels: bool | None = None,
    ) -> None:
        self._shape = Geometry(heads, kv_heads, layer.head_dim, layer.value_dim, layer.window)
        sinks = None if sinks is None else sinks.float().contiguous()
        self._options: dict[str, Any] = {
            "scale": layer.softmax_scale,
            "window": layer.window,
            "soft_cap": layer.soft_cap,
            "sinks": sinks,
        }
        self._kernels = kernels
        self._can_be_fresh: bool | None = None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        state: LayerState,
        meta: Any,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Write, then attend; shapes as in the protocol."""
        step: PagedStep = meta
        pages = state["k"], state["v"]
        if not (q.is_cuda if self._kernels is None else self._kernels):
            if k is not None and v is not None:
                paged_twin.store(k, v, step.slots, *pages)
            rows = step.everything
            return paged_twin.attend(q, *pages, rows.table, rows.lengths, rows.starts, out, **self._options)
        if k is not None and v is not None:
            from arbi_plugin_tkv.kernels.paged_store import store

            store(k, v, step.slots, *pages)
        for run in (step.decode, step.verify):
            if run is not None:
                self._decode(q, pages, run, step, out)
        if step.chunks is not None:
            if step.fresh_from >= 0 and k is not None and v is not None and self._fresh(q):
                self._attend_fresh(q, k, v, step, step.chunks.queries, out)
            else:
                self._prefill(q, pages, step.chunks, step, out)
        return out

    def _decode(
        self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], rows: Rows, step: PagedStep, out: torch.Tensor
    ) -> None:
        from arbi_plugin_tkv.kernels.paged_decode import decode

        queries = rows.queries
        count, size = rows.lengths.shape[0], q.element_size()
        if queries == 1 and rows is step.decode:
            plan = self._shape.plan(count, size, step.bound, step.sms)
            starts = None
        else:
            queries = next_power_of_2(queries)
            room = 0 if step.workspace is None else step.workspace.logs.numel()
            plan = self._shape.plan(count, size, step.bound, step.sms, queries, room)
            starts = rows.starts
        decode(
            q, *pages, rows.table, rows.lengths, out, plan,
            starts=starts, queries=queries, workspace=step.workspace, **self._options,
        )  # fmt: skip

    def _prefill(
        self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], rows: Rows, step: PagedStep, out: torch.Tensor
    ) -> None:
        from arbi_plugin_tkv.kernels.paged_prefill import prefill

        size = q.element_size()
        tile = prefill_tile(max(self._shape.dim, self._shape.value_dim), self._shape.group, size)
        tiles = step.tiles[tile.rows // self._shape.group]
        prefill(q, *pages, rows.table, rows.lengths, rows.starts, tiles, out, tile, **self._options)

    def _fresh(self, q: torch.Tensor) -> bool:
        if self._can_be_fresh is None:
            shape, options = self._shape, self._options
            self._can_be_fresh = can_attend_fresh(
                q.device, q.dtype, shape.dim, shape.value_dim,
                soft_cap=options["soft_cap"], sinks=options["sinks"] is not None,
            )  # fmt: skip
        return self._can_be_fresh

    def _attend_fresh(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: PagedStep, longest: int, out: torch.Tensor
    ) -> None:
        begin = step.fresh_from
        starts = step.fresh_starts
        if starts is None:
            raise RuntimeError("a step of fresh chunks has no starts")
        attend_fresh(
            q[begin:], k[begin:], v[begin:], starts, longest, out[begin:],
            scale=self._options["scale"], window=self._options["window"],
        )  # fmt: skip
