"""Carries out a plan's transfers on one rank: between pages, rows and the host store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from arbi_core.pool.transfers import Transfer, TransferOp, TransferResult

if TYPE_CHECKING:
    from arbi_core.backend.binding import LayerBinding
    from arbi_core.runner.host_store import HostStore

__all__ = ["Transfers"]


class Transfers:
    """Runs transfers in order; neighbours of one kind are one copy.

    Args:
        binding: the layers whose pages and rows are moved.
        store: where bytes are kept on the host; None where nothing ever is.
    """

    def __init__(self, binding: LayerBinding, store: HostStore | None) -> None:
        self._binding = binding
        self._store = store

    def run(self, transfers: Sequence[Transfer]) -> None:
        """Carry out `transfers`. Raises `RuntimeError` if bytes are to be kept and there is no store."""
        for op, group in groupby(transfers, key=lambda t: t.op):
            self._run(op, list(group))

    def poll(self) -> tuple[TransferResult, ...]:
        """Background transfers that ended since the last call."""
        return () if self._store is None else self._store.poll()

    def close(self) -> None:
        """Forget everything that is kept."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _run(self, op: TransferOp, group: list[Transfer]) -> None:
        where = [t.where for t in group]
        if op is TransferOp.CLEAR_ROW:
            self._binding.zero_rows(where)
            return
        store = self._store
        if store is None:
            raise RuntimeError(f"{op.name} was planned on a rank that keeps nothing on its host")
        if op in {TransferOp.SAVE_PAGE, TransferOp.SAVE_ROW}:
            save = self._binding.save_pages if op is TransferOp.SAVE_PAGE else self._binding.save_rows
            host, event = _to_host(save(where))
            for transfer, data in zip(group, host, strict=True):
                store.put(transfer.handle, data, event)
        elif op in {TransferOp.LOAD_PAGE, TransferOp.LOAD_ROW}:
            load = self._binding.load_pages if op is TransferOp.LOAD_PAGE else self._binding.load_rows
            for part in _distinct(group):
                load([t.where for t in part], torch.stack([store.get(t.handle) for t in part]))
        else:
            act = {TransferOp.SPILL: store.spill, TransferOp.FETCH: store.fetch, TransferOp.DROP: store.drop}[op]
            for transfer in group:
                act(transfer.handle)


def _distinct(group: list[Transfer]) -> Iterator[list[Transfer]]:
    """Pieces of a group in which no destination occurs twice: later loads must win."""
    part: dict[int, Transfer] = {}
    for transfer in group:
        if transfer.where in part:
            yield list(part.values())
            part = {}
        part[transfer.where] = transfer
    yield list(part.values())


def _to_host(data: torch.Tensor) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
    """Rows of a ``(n, bytes)`` uint8 tensor on the host, each with memory of its own, and when they are filled."""
    if data.device.type != "cuda":
        return [row.clone() for row in data], None
    rows = [torch.empty(data.shape[1], dtype=torch.uint8, pin_memory=True) for _ in range(len(data))]
    for row, source in zip(rows, data, strict=True):
        row.copy_(source, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return rows, event
