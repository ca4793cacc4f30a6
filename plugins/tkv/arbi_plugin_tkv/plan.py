"""What one step's batch means to the ops: slots to write, rows to attend, and the step's own keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field

from arbi_core.api import ForwardBatch, LayerSpec, StepMasks

__all__ = ["Plan", "PlanBuilder", "RowPlan"]


@define(eq=False)
class RowPlan:
    """One row of the step.

    Attributes:
        start: its first flat token.
        count: its tokens in this step.
        before: tokens of its context that earlier steps stored.
        first_page: its first page where its pages are consecutive, else -1.
        pages: ``(n,)`` its page ids.
    """

    start: int
    count: int
    before: int
    first_page: int
    pages: torch.Tensor


@define(eq=False)
class Plan:
    """A step.

    Attributes:
        slots: ``(N,)`` where each token is written.
        positions: ``(N,)`` of each token in its sequence.
        rows: one plan per row.
        sources: layers whose cache other layers read.
        fresh: this step's keys and values of those, by layer index.
        masks: of the step.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    rows: list[RowPlan]
    sources: frozenset[int] = frozenset()
    fresh: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(factory=dict)
    masks: StepMasks = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.masks = StepMasks(
            max((r.count for r in self.rows), default=0), max((r.before + r.count for r in self.rows), default=0)
        )


class PlanBuilder:
    """Makes the plan from the batch's host twins; no device reads.

    Args:
        layers: those it serves.
    """

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        self._sources = frozenset(la.kv_source_layer for la in layers if la.kv_source_layer is not None)

    def build(self, batch: ForwardBatch) -> Plan:
        """One `RowPlan` per row that has tokens in this step."""
        rows = []
        bounds, lengths = batch.cu_seqlens_q_host.tolist(), batch.seq_lens_host.tolist()
        for i, length in enumerate(lengths):
            count = bounds[i + 1] - bounds[i]
            if not count:
                continue
            used = -(-length // batch.page_size)
            ids = batch.block_table_host[i, :used]
            consecutive = bool(((ids[1:] - ids[:-1]) == 1).all())
            first = int(ids[0]) if consecutive else -1
            rows.append(RowPlan(bounds[i], count, length - count, first, batch.block_table[i, :used]))
        return Plan(batch.slot_mapping, batch.positions, rows, self._sources)
