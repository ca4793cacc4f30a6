"""Builds the `ForwardBatch` of a step in persistent buffers."""

from __future__ import annotations

import numpy as np
import torch

from arbi_core.runner.batch import ForwardBatch
from arbi_core.runner.rows import Row, RowTable
from arbi_core.scheduler.plan import PlanRow

__all__ = ["BatchBuilder"]


class _Buffer:
    """A host array and its device tensor at stable addresses; on the CPU they share memory."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._shared = device.type == "cpu"
        host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.host: np.ndarray = host.numpy()
        self._host = host
        self._device = host if self._shared else torch.zeros(shape, dtype=dtype, device=device)

    def upload(self, n: int, width: int | None = None) -> torch.Tensor:
        """Copy the first `n` entries (and `width` columns) to the device and return the view."""
        index = (slice(0, n),) if width is None else (slice(0, n), slice(0, width))
        view = self._device[index]
        if not self._shared:
            view.copy_(self._host[index], non_blocking=True)
        return view


class BatchBuilder:
    """Turns plan rows into device tensors; decode rows by vectorised indexing, prefill chunks one by one.

    Args:
        table: the runner's rows.
        max_num_seqs: most rows of a step.
        max_num_tokens: most tokens of a step.
        page_size: tokens per page.
        device: where the tensors live.
    """

    def __init__(
        self, table: RowTable, max_num_seqs: int, max_num_tokens: int, page_size: int, device: torch.device
    ) -> None:
        self._table = table
        self._page_size = page_size
        self._ids = _Buffer((max_num_tokens,), torch.int64, device)
        self._positions = _Buffer((max_num_tokens,), torch.int64, device)
        self._slots = _Buffer((max_num_tokens,), torch.int64, device)
        self._cu = _Buffer((max_num_seqs + 1,), torch.int32, device)
        self._lens = _Buffer((max_num_seqs,), torch.int32, device)
        self._state_rows = _Buffer((max_num_seqs,), torch.int64, device)
        self._logit_rows = _Buffer((max_num_seqs,), torch.int64, device)
        self._blocks = _Buffer((max_num_seqs, table.block_table.shape[1]), torch.int32, device)

    def build(self, plan_rows: tuple[PlanRow, ...], rows: list[Row]) -> ForwardBatch:
        """Return the step's batch; its tensors are valid until the next call."""
        table, size, count = self._table, self._page_size, len(rows)
        slots = np.fromiter((r.slot for r in rows), dtype=np.int64, count=count)
        lens = np.fromiter((p.num_tokens for p in plan_rows), dtype=np.int64, count=count)
        start = table.computed[slots]
        ends = start + lens
        cu = self._cu.host[: count + 1]
        np.cumsum(lens, out=cu[1:])
        total = int(cu[count])
        self._lens.host[:count] = ends
        self._state_rows.host[:count] = table.state_row[slots]

        row_of = np.repeat(np.arange(count), lens)
        positions = np.arange(total) - cu[row_of] + start[row_of]
        self._positions.host[:total] = positions
        pages = table.block_table[slots[row_of], positions // size]
        self._slots.host[:total] = pages.astype(np.int64) * size + positions % size
        self._fill_ids(plan_rows, rows, slots, lens, cu)

        width = max(1, -(-int(ends.max()) // size))
        self._blocks.host[:count, :width] = table.block_table[slots, :width]
        samples = np.fromiter((p.samples for p in plan_rows), dtype=bool, count=count)
        logit_rows = (cu[1:] - 1)[samples]
        self._logit_rows.host[: len(logit_rows)] = logit_rows
        return ForwardBatch(
            input_ids=self._ids.upload(total),
            positions=self._positions.upload(total),
            cu_seqlens_q=self._cu.upload(count + 1),
            seq_lens=self._lens.upload(count),
            slot_mapping=self._slots.upload(total),
            block_table=self._blocks.upload(count, width),
            state_rows=self._state_rows.upload(count),
            logit_rows=self._logit_rows.upload(len(logit_rows)),
            cu_seqlens_q_host=cu,
            seq_lens_host=self._lens.host[:count],
            block_table_host=self._blocks.host[:count, :width],
            state_rows_host=self._state_rows.host[:count],
            page_size=size,
            num_tokens=total,
            max_query_len=int(lens.max()),
            max_seq_len=int(ends.max()),
            is_decode=total == count,
        )

    def _fill_ids(
        self,
        plan_rows: tuple[PlanRow, ...],
        rows: list[Row],
        slots: np.ndarray,
        lens: np.ndarray,
        cu: np.ndarray,
    ) -> None:
        """Decode rows take their last token in one gather; a chunk is copied from its row."""
        ids = self._ids.host
        single = lens == 1
        ids[cu[:-1][single]] = self._table.last_token[slots[single]]
        for i in np.flatnonzero(~single):
            row, n = rows[i], plan_rows[i].num_tokens
            ids[cu[i] : cu[i] + n] = row.tokens[row.computed : row.computed + n]
        for i in np.flatnonzero(single):
            row = rows[i]
            if row.computed + 1 < row.length:
                ids[cu[i]] = row.tokens[row.computed]
