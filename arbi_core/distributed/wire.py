"""A `StepPlan` as bytes, and back.

A step of 256 decoding rows is about 1 KB and takes some microseconds to write: whatever occurs in every step travels as
int32 arrays. Only the settings of newly admitted rows, which occur once per request, travel as JSON. Nothing that is
read can run code.

Layout, little-endian: `HEADER`, then the arrays in the order of its counts, then one record per admitted row.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
from attrs import evolve, frozen
from cattrs.preconf.json import make_converter

from arbi_core.pool.transfers import Transfer, TransferOp
from arbi_core.scheduler.plan import AdmitRow, Chunk, StepPlan

__all__ = ["WIRE_VERSION", "PlanFrame", "decode_plan", "encode_plan"]

WIRE_VERSION = 1
"""Ranks whose versions differ refuse each other at the start."""

HEADER = struct.Struct("<Bqq?7I")
"""Version, index, collected, polls; counts of dropped, new pages, decode, chunks, transfers, snapshots, admitted."""

RECORD = struct.Struct("<3I")
"""Of an admitted row: bytes of JSON, tokens, pages; these follow it."""

INT32 = np.dtype("<i4")
TRANSFER = np.dtype([("op", "u1"), ("handle", "<i8"), ("where", "<i4")])

_rows = make_converter(omit_if_default=True, detailed_validation=False)


@frozen
class PlanFrame:
    """A step as it is sent.

    Attributes:
        plan: the step.
        collected: index of the last step whose output rank 0 has taken before it dispatched this one. Other ranks take
            theirs at the same point, so that every draw sees the same history.
    """

    plan: StepPlan
    collected: int


def encode_plan(plan: StepPlan, collected: int) -> bytes:
    """Bytes of a step."""
    parts = [
        HEADER.pack(
            WIRE_VERSION,
            plan.index,
            collected,
            plan.polls,
            len(plan.dropped),
            len(plan.new_pages),
            len(plan.decode),
            len(plan.chunks),
            len(plan.transfers),
            len(plan.snapshots),
            len(plan.admitted),
        )
    ]
    if plan.dropped:
        parts.append(_ints(plan.dropped))
    if plan.new_pages:
        parts.append(_ints(plan.new_pages))
    if len(plan.decode):
        parts.append(_ints(plan.decode))
    if plan.chunks:
        parts.append(_ints([(c.slot, c.num_tokens, c.samples) for c in plan.chunks]))
    for transfers in (plan.transfers, plan.snapshots):
        if transfers:
            parts.append(np.array([(t.op, t.handle, t.where) for t in transfers], dtype=TRANSFER).tobytes())
    for row in plan.admitted:
        parts += _encode_row(row)
    return b"".join(parts)


def decode_plan(data: bytes) -> PlanFrame:
    """The step that `encode_plan` wrote.

    Raises:
        ValueError: it is of another version, or damaged.
    """
    reader = _Reader(data)
    version, index, collected, polls, *counts = HEADER.unpack(reader.take(HEADER.size))
    if version != WIRE_VERSION:
        raise ValueError(f"a step came in wire format {version}; this rank reads {WIRE_VERSION}")
    dropped, new_pages, decode, chunks, transfers, snapshots, admitted = counts
    plan = StepPlan(
        index=index,
        dropped=tuple(reader.ints(dropped).tolist()),
        new_pages=tuple(map(tuple, reader.ints(new_pages, 2).tolist())),
        decode=reader.ints(decode),
        chunks=tuple(Chunk(slot, count, bool(samples)) for slot, count, samples in reader.ints(chunks, 3).tolist()),
        transfers=reader.transfers(transfers),
        snapshots=reader.transfers(snapshots),
        admitted=tuple(_decode_row(reader) for _ in range(admitted)),
        polls=polls,
    )
    if reader.left:
        raise ValueError(f"a step has {reader.left} bytes too many")
    return PlanFrame(plan, collected)


def _ints(values: Any) -> bytes:
    return np.asarray(values, dtype=INT32).tobytes()


def _encode_row(row: AdmitRow) -> list[bytes]:
    """The long fields as arrays, whatever else there is as JSON."""
    settings = _rows.unstructure(evolve(row, token_ids=(), pages=()))
    text = json.dumps(settings, separators=(",", ":")).encode()
    return [RECORD.pack(len(text), len(row.token_ids), len(row.pages)), text, _ints(row.token_ids), _ints(row.pages)]


def _decode_row(reader: _Reader) -> AdmitRow:
    size, tokens, pages = RECORD.unpack(reader.take(RECORD.size))
    row = _rows.structure(json.loads(reader.take(size)), AdmitRow)
    return evolve(row, token_ids=tuple(reader.ints(tokens).tolist()), pages=tuple(reader.ints(pages).tolist()))


class _Reader:
    """Takes a frame apart from its front."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise ValueError(f"a step ends {size - self.left} bytes too early")
        start, self._at = self._at, self._at + size
        return self._data[start : self._at]

    def ints(self, count: int, width: int = 1) -> np.ndarray:
        flat = np.frombuffer(self.take(count * width * INT32.itemsize), dtype=INT32)
        return flat if width == 1 else flat.reshape(count, width)

    def transfers(self, count: int) -> tuple[Transfer, ...]:
        items = np.frombuffer(self.take(count * TRANSFER.itemsize), dtype=TRANSFER).tolist()
        return tuple(Transfer(TransferOp(op), handle, where) for op, handle, where in items)
