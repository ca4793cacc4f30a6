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
    """The running rows, and one slot behind them, `padding`, that is always empty: null pages, token 0 at position 0.

    Args:
        max_num_seqs: slots.
        max_pages: widest block table, in pages.
        device: where `last_token` lives.

    Attributes:
        block_table: ``(slots, max_pages)`` int32, null page where unused.
        num_pages: ``(slots,)`` int64, filled entries of the block table.
        computed: ``(slots,)`` int64, tokens whose state is written once the steps dispatched so far have run.
        state_row: ``(slots,)`` int64.
        device_blocks: ``(slots, max_pages)`` int32 on the device: the block table, kept up with by what plans change;
            entries beyond a row's pages are stale. On the CPU it shares the block table's memory.
        last_token: ``(slots,)`` int64 on the device, the newest draw; it never has to come to the host to be fed back.
    """

    def __init__(self, max_num_seqs: int, max_pages: int, device: torch.device) -> None:
        self.padding = max_num_seqs
        slots = max_num_seqs + 1
        self.rows: list[Row | None] = [None] * slots
        self.block_table = np.zeros((slots, max_pages), dtype=np.int32)
        self.num_pages = np.zeros(slots, dtype=np.int64)
        self.computed = np.zeros(slots, dtype=np.int64)
        self.state_row = np.zeros(slots, dtype=np.int64)
        self.last_token = torch.zeros(slots, dtype=torch.int64, device=device)
        table = torch.from_numpy(self.block_table)
        self.device_blocks = table if device.type == "cpu" else table.to(device)

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
        if self.device_blocks.device.type != "cpu" and (plan.admitted or plan.new_pages):
            self._upload(plan)

    def _upload(self, plan: StepPlan) -> None:
        """Write what the plan changes into the device's table, in one small copy."""
        width = self.block_table.shape[1]
        places = [np.arange(a.slot * width, a.slot * width + len(a.pages)) for a in plan.admitted]
        grown: dict[int, int] = {}
        for slot, _ in plan.new_pages:
            grown[slot] = grown.get(slot, 0) + 1
        for slot, count in grown.items():
            end = slot * width + int(self.num_pages[slot])
            places.append(np.arange(end - count, end))
        index = np.concatenate(places)
        both = torch.from_numpy(np.stack((index, self.block_table.reshape(-1)[index]))).pin_memory()
        sent = both.to(self.device_blocks.device, non_blocking=True)
        self.device_blocks.view(-1).index_copy_(0, sent[0], sent[1].to(torch.int32))

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
