"""Rows of recurrent state: one per running request. Row 0 is the zero sentinel: padding reads it, nobody owns it."""

from __future__ import annotations

__all__ = ["RowPool"]


class RowPool:
    """Hands out rows, the most recently freed first.

    A row still holds what its last owner left. The runner clears it at the beginning of the step that admits its new
    owner (`AdmitRow.state_row`), in the order of the device's work: after every step that could read the old state and
    before any that reads the new.

    Args:
        num_rows: rows that requests can own; the tensors have one more, row 0.
    """

    def __init__(self, num_rows: int) -> None:
        if num_rows < 1:
            raise ValueError(f"a row pool needs at least one row beside the sentinel, not {num_rows}")
        self.num_rows = num_rows
        self._free = list(range(num_rows, 0, -1))
        self._rows: dict[str, int] = {}

    @property
    def available(self) -> int:
        """Free rows."""
        return len(self._free)

    def alloc(self, request_id: str) -> int | None:
        """Row of a request, taken now if it has none; None when all are taken."""
        row = self._rows.get(request_id)
        if row is None and self._free:
            row = self._rows[request_id] = self._free.pop()
        return row

    def free(self, request_id: str) -> None:
        """Give a request's row back; unknown ids are ignored."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def row_for(self, request_id: str) -> int:
        """Row of a request. Raises `KeyError` naming the id: no caller may fall back to another row."""
        try:
            return self._rows[request_id]
        except KeyError:
            raise KeyError(f"request {request_id!r} owns no state row") from None
