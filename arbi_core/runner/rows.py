"""The runner's own copy of every running request, in arrays addressed by slot: steps are built by indexing."""

from __future__ import annotations

import numpy as np
import torch
from attrs import define

from arbi_core.sampler.sampler import SamplerRow
from arbi_core.scheduler.plan import AdmitRow, StepPlan

__all__ = ["Row", "RowTable"]


@define(eq=False)
class Row:
    """What has no place in an array.

    Attributes:
        tokens: ``(length,)`` int64, what was known at admission; chunks are taken from it.
        sampler: what the sampler keeps for the request.
    """

    tokens: np.ndarray
    sampler: SamplerRow


class RowTable:
    """The running rows.

    Args:
        max_num_seqs: slots.
        max_pages: widest block table, in pages.
        device: where `last_token` lives.

    Attributes:
        block_table: ``(slots, max_pages)`` int32, null page where unused.
        num_pages: ``(slots,)`` int64, filled entries of the block table.
        computed: ``(slots,)`` int64, tokens whose state is written once the steps dispatched so far have run.
        state_row: ``(slots,)`` int64.
        last_token: ``(slots,)`` int64 on the device, the newest draw; it never has to come to the host to be fed back.
    """

    def __init__(self, max_num_seqs: int, max_pages: int, device: torch.device) -> None:
        self.rows: list[Row | None] = [None] * max_num_seqs
        self.block_table = np.zeros((max_num_seqs, max_pages), dtype=np.int32)
        self.num_pages = np.zeros(max_num_seqs, dtype=np.int64)
        self.computed = np.zeros(max_num_seqs, dtype=np.int64)
        self.state_row = np.zeros(max_num_seqs, dtype=np.int64)
        self.last_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def row(self, slot: int) -> Row:
        """The row in a slot. Raises `KeyError` for an empty one."""
        row = self.rows[slot]
        if row is None:
            raise KeyError(f"slot {slot} holds no row")
        return row

    def apply(self, plan: StepPlan) -> None:
        """Bring the table to the state that the plan's rows assume."""
        for slot in plan.dropped:
            self.rows[slot] = None
            self.block_table[slot, : self.num_pages[slot]] = 0
            self.num_pages[slot] = 0
        for admitted in plan.admitted:
            self._admit(admitted)
        for slot, page in plan.new_pages:
            self.block_table[slot, self.num_pages[slot]] = page
            self.num_pages[slot] += 1

    def _admit(self, admitted: AdmitRow) -> None:
        slot, count = admitted.slot, len(admitted.pages)
        sampler = SamplerRow(
            params=admitted.sampling,
            prompt_token_ids=admitted.token_ids[: admitted.num_prompt],
            output_token_ids=list(admitted.token_ids[admitted.num_prompt :]),
            base_seed=admitted.base_seed,
            stop_token_ids=admitted.stop_token_ids,
        )
        self.rows[slot] = Row(np.asarray(admitted.token_ids, dtype=np.int64), sampler)
        self.block_table[slot, :count] = admitted.pages
        self.num_pages[slot] = count
        self.computed[slot] = admitted.computed
        self.state_row[slot] = admitted.state_row
