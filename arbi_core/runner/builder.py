"""Builds the `ForwardBatch` of a step in persistent buffers."""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen

from arbi_core.runner.batch import ForwardBatch
from arbi_core.runner.rows import RowTable
from arbi_core.scheduler.plan import StepPlan

__all__ = ["BatchBuilder", "BuiltStep"]


class _Buffer:
    """A host array and its device tensor at stable addresses; on the CPU they share memory.

    On a GPU a step may still be read from the host array while the next is built, so there are as many host arrays as
    steps may be on the way, used in turn.
    """

    DEPTH = 3

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._shared = device.type == "cpu"
        count = 1 if self._shared else self.DEPTH
        self._hosts = [torch.zeros(shape, dtype=dtype, pin_memory=not self._shared) for _ in range(count)]
        self._arrays = [h.numpy() for h in self._hosts]
        self._turn = 0
        self.device = self._hosts[0] if self._shared else torch.zeros(shape, dtype=dtype, device=device)

    @property
    def host(self) -> np.ndarray:
        """The host array of the step being built."""
        return self._arrays[self._turn]

    def advance(self) -> None:
        """Begin another step."""
        self._turn = (self._turn + 1) % len(self._hosts)

    def upload(self, end: int, start: int = 0) -> torch.Tensor:
        """Copy entries ``start..end`` to the device; returns the view of the first `end`."""
        if not self._shared and end > start:
            self.device[start:end].copy_(self._hosts[self._turn][start:end], non_blocking=True)
        return self.device[:end]


@frozen(eq=False)
class BuiltStep:
    """A batch and where its draws belong.

    Attributes:
        batch: the step for the device.
        draw_slots: ``(R,)`` int64 slots of the drawing rows, on the host.
        draw_slots_device: the same on the device.
    """

    batch: ForwardBatch
    draw_slots: np.ndarray
    draw_slots_device: torch.Tensor


class BatchBuilder:
    """Turns plans into device tensors, by array operations over the row table.

    Args:
        table: the runner's rows.
        max_num_seqs: most rows of a step.
        max_num_tokens: most tokens of a step.
        page_size: tokens per page.
        device: where the tensors live.
        host_tables: fill ``block_table_host`` in decode steps too; only kinds that are not capturable read it there.
    """

    def __init__(
        self,
        table: RowTable,
        max_num_seqs: int,
        max_num_tokens: int,
        page_size: int,
        device: torch.device,
        *,
        host_tables: bool = True,
    ) -> None:
        max_num_tokens = max(max_num_tokens, max_num_seqs)
        self._table = table
        self._page_size = page_size
        self._shared = device.type == "cpu"
        self._host_tables = host_tables or self._shared
        self._ids = _Buffer((max_num_tokens,), torch.int64, device)
        self._positions = _Buffer((max_num_tokens,), torch.int64, device)
        self._slots = _Buffer((max_num_tokens,), torch.int64, device)
        self._cu = _Buffer((max_num_seqs + 1,), torch.int32, device)
        self._lens = _Buffer((max_num_seqs,), torch.int32, device)
        self._state_rows = _Buffer((max_num_seqs,), torch.int64, device)
        self._logit_rows = _Buffer((max_num_seqs,), torch.int64, device)
        self._rows = _Buffer((max_num_seqs,), torch.int64, device)
        self._draws = _Buffer((max_num_seqs,), torch.int64, device)
        self._blocks = _Buffer((max_num_seqs, table.block_table.shape[1]), torch.int32, device)
        self._all = [v for v in vars(self).values() if isinstance(v, _Buffer)]

    def padding(self, rows: int) -> ForwardBatch:
        """A decode step of nothing but padding rows, as long as any may become: what a graph is recorded from."""
        batch = self.build(StepPlan(index=0), rows).batch
        batch.max_seq_len = batch.block_table.shape[1] * self._page_size
        return batch

    def build(self, plan: StepPlan, padded: int | None = None) -> BuiltStep:
        """Return the step's batch; its tensors are valid until the next call.

        Args:
            plan: the step.
            padded: rows that a step of decoding rows alone is filled up to. Its block table then has its full width,
                so that every tensor of the batch lies where it lay before.
        """
        for buffer in self._all:
            buffer.advance()
        table, size = self._table, self._page_size
        decoding, chunks = len(plan.decode), plan.chunks
        slots = plan.decode
        if chunks:
            slots = np.concatenate((slots, [c.slot for c in chunks]))
        drawing = len(slots)
        if padded is not None:
            slots = np.concatenate((slots, np.full(padded - drawing, table.padding)))
            decoding = padded
        count = len(slots)
        lens = np.ones(count, dtype=np.int64)
        lens[decoding:] = [c.num_tokens for c in chunks]
        start = table.computed[slots]
        ends = start + lens
        cu = self._cu.host[: count + 1]
        np.cumsum(lens, out=cu[1:])
        total = int(cu[count])
        self._lens.host[:count] = ends
        self._state_rows.host[:count] = table.state_row[slots]

        row_of = np.repeat(np.arange(count), lens) if chunks else np.arange(count)
        positions = np.arange(total) - cu[row_of] + start[row_of]
        self._positions.host[:total] = positions
        pages = table.block_table[slots[row_of], positions // size]
        self._slots.host[:total] = pages.astype(np.int64) * size + positions % size
        self._rows.host[:count] = slots
        rows = self._rows.upload(count)
        ids = self._fill_ids(plan, cu, total, decoding, rows)

        width = max(1, -(-int(ends.max()) // size)) if padded is None else table.block_table.shape[1]
        block_table, block_table_host = self._block_table(slots, rows, width, needed=bool(chunks))
        draws = np.ones(count, dtype=bool)
        draws[decoding:] = [c.samples for c in chunks]
        draws[drawing:] = False
        logit_rows = (cu[1:] - 1)[draws]
        self._logit_rows.host[: len(logit_rows)] = logit_rows
        draw_slots = slots[draws]
        self._draws.host[: len(draw_slots)] = draw_slots
        batch = ForwardBatch(
            input_ids=ids,
            positions=self._positions.upload(total),
            cu_seqlens_q=self._cu.upload(count + 1),
            seq_lens=self._lens.upload(count),
            slot_mapping=self._slots.upload(total),
            block_table=block_table,
            state_rows=self._state_rows.upload(count),
            logit_rows=self._logit_rows.upload(len(logit_rows)),
            cu_seqlens_q_host=cu,
            seq_lens_host=self._lens.host[:count],
            block_table_host=block_table_host,
            state_rows_host=self._state_rows.host[:count],
            page_size=size,
            num_tokens=total,
            max_query_len=int(lens.max()),
            max_seq_len=int(ends.max()),
            is_decode=total == count,
        )
        table.computed[slots[:drawing]] = ends[:drawing]
        return BuiltStep(batch, draw_slots, self._draws.upload(len(draw_slots)))

    def _block_table(
        self, slots: np.ndarray, rows: torch.Tensor, width: int, *, needed: bool
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Rows of the block table on the device, and their host twin where somebody reads it."""
        count = len(slots)
        host = self._blocks.host[: count if needed or self._host_tables else 0, :width]
        if len(host):
            host[:] = self._table.block_table[slots, :width]
        device = self._blocks.device[:count]
        if not self._shared:
            torch.index_select(self._table.device_blocks, 0, rows, out=device)
        return device[:, :width], host

    def _fill_ids(self, plan: StepPlan, cu: np.ndarray, total: int, decoding: int, rows: torch.Tensor) -> torch.Tensor:
        """Decode rows take their newest token on the device; chunks are copied from what the host knows."""
        for i, chunk in enumerate(plan.chunks, start=decoding):
            first = int(self._table.computed[chunk.slot])
            self._ids.host[cu[i] : cu[i + 1]] = self._table.row(chunk.slot).tokens[first : first + chunk.num_tokens]
        ids = self._ids.upload(total, start=decoding)
        if decoding:
            torch.index_select(self._table.last_token, 0, rows[:decoding], out=ids[:decoding])
        return ids
