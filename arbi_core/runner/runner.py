"""Executes steps: build the batch, run the model, draw the tokens, feed them back on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from arbi_core.runner.builder import BatchBuilder
from arbi_core.runner.graphs import DecodeGraphs, Recorder
from arbi_core.runner.rows import RowTable
from arbi_core.runner.transfers import Transfers
from arbi_core.sampler.sampler import Sampler, SamplerOutput, SamplerRow
from arbi_core.scheduler.plan import StepOutput, StepPlan

if TYPE_CHECKING:
    from arbi_core.backend.base import BackendContext
    from arbi_core.backend.binding import LayerBinding
    from arbi_core.model.base import Model
    from arbi_core.runner.batch import ForwardBatch
    from arbi_core.runner.host_store import HostStore

__all__ = ["ModelRunner", "PendingStep"]


class PendingStep:
    """A step that the device has been given; `result` waits for what it drew."""

    def __init__(self, transfers: Transfers, sampled: SamplerOutput | None, rows: list[SamplerRow]) -> None:
        self._transfers = transfers
        self._sampled = sampled
        self._rows = rows

    def result(self) -> StepOutput:
        """The step's output. Call it once, in the order of dispatch."""
        if self._sampled is None:
            return StepOutput(transfers=self._transfers.poll())
        drawn = self._sampled.to_host()
        for row, token in zip(self._rows, drawn.token_ids.tolist(), strict=True):
            row.output_token_ids.append(token)
        return StepOutput(drawn.token_ids, drawn.logprobs, drawn.errors, self._transfers.poll())


class ModelRunner:
    """Owns the model, its state tensors and the running rows of one rank.

    Args:
        model: a loaded model.
        binding: its layers bound to backends, state allocated.
        sampler: draws the tokens.
        ctx: sizes and device.
        store: keeps bytes on the host, where tiers or savepoints are on.
        recorder: records decode steps as graphs; None runs every step eagerly.
    """

    failure: str | None = None

    def __init__(
        self,
        model: Model,
        binding: LayerBinding,
        sampler: Sampler,
        ctx: BackendContext,
        store: HostStore | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.model = model
        self.binding = binding
        self.sampler = sampler
        max_pages = -(-ctx.max_model_len // ctx.page_size) + 1
        self._rows = RowTable(ctx.max_num_seqs, max_pages, ctx.device)
        self._builder = BatchBuilder(
            self._rows,
            ctx.max_num_seqs,
            ctx.max_num_tokens,
            ctx.page_size,
            ctx.device,
            host_tables=not binding.capturable,
        )
        self._transfers = Transfers(binding, store)
        self.graphs: DecodeGraphs | None = None
        if recorder is not None:
            self.graphs = DecodeGraphs(self._builder, self._forward_logits, ctx.max_num_seqs, recorder)

    @torch.inference_mode()
    def record_graphs(self) -> None:
        """Record the decode graphs, if there are any to be."""
        if self.graphs is not None:
            self.graphs.record_all()

    def _forward_logits(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits of every row of a decode step."""
        return self.model.compute_logits(self._forward(batch))

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.binding.begin_step(batch)
        return self.model.forward(batch, self.binding.calls)

    @torch.inference_mode()
    def dispatch(self, plan: StepPlan) -> PendingStep:
        """Give the device one step. After an exception the caller must drop the plan's requests in the next plan."""
        table = self._rows
        self._transfers.run(plan.transfers)
        table.apply(plan)
        if not plan.num_rows:
            return PendingStep(self._transfers, None, [])
        if self.graphs is not None and not plan.chunks:
            step = self._builder.build(plan, self.graphs.bucket(plan.num_rows))
            logits = self.graphs.run(step.batch, plan.num_rows)
        else:
            step = self._builder.build(plan)
            hidden = self._forward(step.batch)
            if plan.snapshots:
                self._transfers.run(plan.snapshots)
            if not plan.num_draws:
                return PendingStep(self._transfers, None, [])
            if plan.num_draws < step.batch.num_tokens:
                hidden = hidden.index_select(0, step.batch.logit_rows)
            logits = self.model.compute_logits(hidden)
        rows = [table.row(slot).sampler for slot in step.draw_slots.tolist()]
        sampled = self.sampler.sample(logits, rows)
        table.last_token.index_copy_(0, step.draw_slots_device, sampled.token_ids)
        for row in rows:
            row.position += 1
        return PendingStep(self._transfers, sampled, rows)

    def close(self) -> None:
        """Release the state of all rows and what the host keeps. Idempotent."""
        self._transfers.close()
        if self.graphs is not None:
            self.graphs.close()
        self.binding.release()
