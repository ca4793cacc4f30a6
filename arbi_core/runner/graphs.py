"""Decode steps as CUDA graphs: one launch instead of hundreds.

A graph is recorded for every bucket of rows, over the builder's persistent buffers. A step of fewer rows is padded: a
padding row has one token, reads and writes the null page, and its logits are dropped. What a graph computes may depend
on nothing but device tensors at fixed addresses, which every metadata builder must promise by its attribute
``capturable``.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from arbi_core.runner.batch import ForwardBatch
    from arbi_core.runner.builder import BatchBuilder

__all__ = ["CudaRecorder", "DecodeGraphs", "EagerRecorder", "Recorder", "buckets"]

log = logging.getLogger("arbi.runner")

Forward = Callable[["ForwardBatch"], torch.Tensor]


class Recorder(Protocol):
    """Turns a forward pass into something that can be run again."""

    def record(self, forward: Forward, batch: ForwardBatch) -> Callable[[ForwardBatch], torch.Tensor]:
        """Return what runs `forward` on the buffers that `batch` views; each run returns the same output tensor."""
        ...


class CudaRecorder:
    """Records CUDA graphs that share one memory pool; the largest comes first, so that the others fit into it."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, forward: Forward, batch: ForwardBatch) -> Callable[[ForwardBatch], torch.Tensor]:
        """Run once to compile and to let libraries make their handles, then record."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward(batch)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = forward(batch)

        def replay(_: ForwardBatch) -> torch.Tensor:
            graph.replay()
            return output

        return replay


class EagerRecorder:
    """Records nothing and runs the padded batch: the same arithmetic on any device, for tests."""

    def record(self, forward: Forward, batch: ForwardBatch) -> Callable[[ForwardBatch], torch.Tensor]:  # noqa: ARG002
        """`forward` itself."""
        return forward


class DecodeGraphs:
    """The recorded decode steps of one rank.

    Args:
        builder: owns the buffers.
        forward: from a batch to the logits of all its rows.
        max_rows: most rows of a step.
        recorder: how they are recorded.
    """

    def __init__(self, builder: BatchBuilder, forward: Forward, max_rows: int, recorder: Recorder) -> None:
        self._builder = builder
        self._forward = forward
        self._recorder = recorder
        self._buckets = buckets(max_rows)
        self._graphs: dict[int, Callable[[ForwardBatch], torch.Tensor]] = {}

    def record_all(self) -> None:
        """Record every bucket, the largest first."""
        start = time.monotonic()
        for size in reversed(self._buckets):
            self._graphs[size] = self._recorder.record(self._forward, self._builder.padding(size))
        log.info("recorded %d decode graphs in %.1f s", len(self._graphs), time.monotonic() - start)

    def bucket(self, rows: int) -> int:
        """Rows that a step of `rows` rows is padded to."""
        return self._buckets[bisect.bisect_left(self._buckets, rows)]

    def run(self, batch: ForwardBatch, rows: int) -> torch.Tensor:
        """Logits ``(rows, V)`` of a step whose batch is padded to a bucket; valid until the next step."""
        return self._graphs[batch.num_rows](batch)[:rows]

    def close(self) -> None:
        """Let go of the graphs and their memory."""
        self._graphs.clear()


def buckets(max_rows: int) -> list[int]:
    """Sizes, ascending, the last of them `max_rows`: from 16 rows on at most a third of a step is padding."""
    sizes = [1, 2, 4, 8]
    step, size = 8, 16
    while size < max_rows:
        sizes.append(size)
        if size >= 8 * step:
            step *= 2
        size += step
    return [s for s in sizes if s < max_rows] + [max_rows]
