"""Executes one step: build the batch, run the model, draw the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from arbi_core.runner.builder import BatchBuilder
from arbi_core.runner.rows import RowTable
from arbi_core.sampler.sampler import Sampler
from arbi_core.scheduler.plan import StepOutput, StepPlan

if TYPE_CHECKING:
    from arbi_core.backend.base import BackendContext
    from arbi_core.backend.binding import LayerBinding
    from arbi_core.engine.messages import TokenLogprobs
    from arbi_core.model.base import Model

__all__ = ["ModelRunner"]


class ModelRunner:
    """Owns the model, its state tensors and the running rows of one rank.

    Args:
        model: a loaded model.
        binding: its layers bound to backends, state allocated.
        sampler: draws the tokens.
        ctx: sizes and device.
    """

    def __init__(self, model: Model, binding: LayerBinding, sampler: Sampler, ctx: BackendContext) -> None:
        self.model = model
        self.binding = binding
        self.sampler = sampler
        max_pages = -(-ctx.max_model_len // ctx.page_size)
        self._rows = RowTable(ctx.max_num_seqs, max_pages)
        self._builder = BatchBuilder(self._rows, ctx.max_num_seqs, ctx.max_num_tokens, ctx.page_size, ctx.device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step. After an exception the caller must drop the plan's requests in the next plan."""
        table = self._rows
        table.apply(plan)
        if not plan.rows:
            return StepOutput({})
        fresh = [a.state_row for a in plan.admitted if a.state_row]
        if fresh:
            self.binding.zero_rows(fresh)
        rows = [table.rows[p.request_id] for p in plan.rows]
        batch = self._builder.build(plan.rows, rows)
        self.binding.begin_step(batch)
        hidden = self.model.forward(batch, self.binding.calls)

        drawing = [(p.request_id, r) for p, r in zip(plan.rows, rows, strict=True) if p.samples]
        if not drawing:
            for planned, row in zip(plan.rows, rows, strict=True):
                table.advance(row, planned.num_tokens, None)
            return StepOutput({})
        if len(drawing) < batch.num_tokens:
            hidden = hidden.index_select(0, batch.logit_rows)
        logits = self.model.compute_logits(hidden)
        sampled = self.sampler.sample(logits, [row.sampler for _, row in drawing])
        drawn = dict(zip((rid for rid, _ in drawing), cast("list[int]", sampled.token_ids.tolist()), strict=True))
        for planned, row in zip(plan.rows, rows, strict=True):
            table.advance(row, planned.num_tokens, drawn.get(planned.request_id))
        logprobs: dict[str, TokenLogprobs] = {
            rid: entry for (rid, _), entry in zip(drawing, sampled.logprobs, strict=True) if entry is not None
        }
        errors = {rid: error for (rid, _), error in zip(drawing, sampled.errors, strict=True) if error is not None}
        return StepOutput(drawn, logprobs, errors)
