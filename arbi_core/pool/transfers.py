"""Moves of bytes between the device's pages and rows and the host of every rank. Plain data."""

from __future__ import annotations

import enum

from attrs import frozen

__all__ = ["Transfer", "TransferOp", "TransferResult"]


class TransferOp(enum.IntEnum):
    """What to do with pages, recurrent rows and the bytes that every rank keeps under handles on its host."""

    SAVE_PAGE = 0
    """Copy page `where` of every layer to the host."""
    LOAD_PAGE = 1
    """Copy the handle's bytes into page `where`; they are in RAM."""
    SAVE_ROW = 2
    """Copy recurrent row `where` to the host."""
    LOAD_ROW = 3
    """Copy the handle's bytes into recurrent row `where`; they are in RAM."""
    SPILL = 4
    """Move from RAM to disk, in the background."""
    FETCH = 5
    """Bring from disk to RAM, in the background; answered by a `TransferResult`."""
    DROP = 6
    """Forget the handle's bytes, wherever they are."""
    CLEAR_ROW = 7
    """Zero recurrent row `where` for a new owner."""


@frozen
class Transfer:
    """One move of bytes.

    Attributes:
        op: what to do.
        handle: names the bytes on the host; never reused. 0 for `CLEAR_ROW`.
        where: page or row; 0 where the operation needs none.
    """

    op: TransferOp
    handle: int
    where: int = 0


@frozen
class TransferResult:
    """How a background transfer went.

    Attributes:
        op: ``SPILL`` or ``FETCH``.
        handle: whose.
        ok: False: the bytes are lost.
        error: what happened, where it failed.
    """

    op: TransferOp
    handle: int
    ok: bool
    error: str = ""
