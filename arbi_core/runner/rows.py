"""The runner's own copy of every running request, and the persistent arrays that steps are built from."""

from __future__ import annotations

import numpy as np
from attrs import define

from arbi_core.sampler.sampler import SamplerRow
from arbi_core.scheduler.plan import AdmitRow, StepPlan

__all__ = ["Row", "RowTable"]


@define(eq=False)
class Row:
    """One running request.

    Attributes:
        slot: index into the table's arrays.
        tokens: ``(capacity,)`` int64; the first `length` are known.
        length: known tokens.
        computed: tokens whose state is written.
        num_pages: filled entries of the block table.
        sampler: what the sampler keeps for the request.
    """

    slot: int
    tokens: np.ndarray
    length: int
    computed: int
    num_pages: int
    sampler: SamplerRow

    def append(self, token: int) -> None:
        """Add a drawn token."""
        if self.length == len(self.tokens):
            grown = np.empty(2 * self.length, dtype=np.int64)
            grown[: self.length] = self.tokens
            self.tokens = grown
        self.tokens[self.length] = token
        self.length += 1
        self.sampler.output_token_ids.append(token)


class RowTable:
    """Rows by request id, with block tables in one array so that a step is built by indexing, not by loops.

    Args:
        max_num_seqs: most rows at a time.
        max_pages: widest block table, in pages.
    """

    def __init__(self, max_num_seqs: int, max_pages: int) -> None:
        self.rows: dict[str, Row] = {}
        self.block_table = np.zeros((max_num_seqs, max_pages), dtype=np.int32)
        self.computed = np.zeros(max_num_seqs, dtype=np.int64)
        self.last_token = np.zeros(max_num_seqs, dtype=np.int64)
        self.state_row = np.zeros(max_num_seqs, dtype=np.int64)
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def apply(self, plan: StepPlan) -> None:
        """Bring the table to the state that the plan assumes."""
        for request_id in plan.dropped:
            row = self.rows.pop(request_id, None)
            if row is not None:
                self.block_table[row.slot, : row.num_pages] = 0
                self._free.append(row.slot)
        for admitted in plan.admitted:
            self._admit(admitted)
        for planned in plan.rows:
            if planned.new_pages:
                row = self.rows[planned.request_id]
                end = row.num_pages + len(planned.new_pages)
                self.block_table[row.slot, row.num_pages : end] = planned.new_pages
                row.num_pages = end

    def advance(self, row: Row, num_tokens: int, token: int | None) -> None:
        """Account for a computed step and the token it drew."""
        row.computed += num_tokens
        self.computed[row.slot] = row.computed
        if token is not None:
            row.append(token)
            self.last_token[row.slot] = token

    def _admit(self, admitted: AdmitRow) -> None:
        slot = self._free.pop()
        tokens = np.empty(len(admitted.token_ids) + 64, dtype=np.int64)
        tokens[: len(admitted.token_ids)] = admitted.token_ids
        sampler = SamplerRow(
            params=admitted.sampling,
            prompt_token_ids=admitted.token_ids[: admitted.num_prompt],
            output_token_ids=list(admitted.token_ids[admitted.num_prompt :]),
            base_seed=admitted.base_seed,
            stop_token_ids=admitted.stop_token_ids,
        )
        row = Row(slot, tokens, len(admitted.token_ids), admitted.computed, len(admitted.pages), sampler)
        self.block_table[slot, : row.num_pages] = admitted.pages
        self.computed[slot] = row.computed
        self.last_token[slot] = admitted.token_ids[-1]
        self.state_row[slot] = admitted.state_row
        self.rows[admitted.request_id] = row
