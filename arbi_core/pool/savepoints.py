"""Savepoints: saved states of recurrent rows, so that models with recurrent layers can use the prefix cache too.

A prefix hit gives pages; a recurrent layer needs its state after exactly those tokens as well. A savepoint is that
state at a token count that is a multiple of the page size and of the kernels' fold grid, named by the digest of the
pages that it belongs to. A hit counts only as far as a savepoint covers it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator

from attrs import frozen

from arbi_core.pool.cache import Prefix
from arbi_core.pool.transfers import Transfer, TransferOp

__all__ = ["Savepoint", "SavepointStore"]


@frozen
class Savepoint:
    """One saved row.

    Attributes:
        handle: where every rank keeps it.
        tenant: whose.
        tokens: how many tokens its state has seen.
    """

    handle: int
    tenant: str
    tokens: int


class SavepointStore:
    """Which states are saved; the least recently used go first.

    Args:
        row_bytes: bytes of one savepoint on one rank.
        max_bytes: most bytes of all savepoints on one rank.
        page_size: tokens per page.
        grid: the kernels' fold grid in tokens: a prefill cut there gives the same bits as one that is not cut.
        handles: source of fresh handles.

    Raises:
        ValueError: not one savepoint fits.
    """

    def __init__(self, *, row_bytes: int, max_bytes: int, page_size: int, grid: int, handles: Iterator[int]) -> None:
        if row_bytes > max_bytes:
            raise ValueError(f"one savepoint takes {row_bytes} bytes, more than the {max_bytes} allowed")
        self.emit: Callable[[Transfer], None] = lambda _: None
        self.grid = math.lcm(page_size, grid)
        self.capacity = max_bytes // max(1, row_bytes)
        self.hits = self.misses = self.evictions = 0
        self._page_size = page_size
        self._row_bytes = row_bytes
        self._handles = handles
        self._stored: OrderedDict[bytes, Savepoint] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def nbytes(self) -> int:
        """Bytes in use on one rank."""
        return len(self._stored) * self._row_bytes

    def boundary(self, before: int, after: int, known: int) -> int | None:
        """Where a step that computes tokens ``before..after`` should end to leave a savepoint, or None.

        It is the last grid point of the known tokens if the step reaches it, provided that something is left to
        compute after it: a hit must leave a token to draw from.
        """
        point = (known - 1) // self.grid * self.grid
        return point if before < point <= after else None

    def take(self, prefix: Prefix, tokens: int) -> int | None:
        """Handle under which to save the state after `tokens` tokens of a prefix; None if it is saved already.

        Raises:
            ValueError: the count is not on the grid: such a state would resume in the middle of a page.
        """
        if tokens <= 0 or tokens % self.grid:
            raise ValueError(f"a savepoint after {tokens} tokens is not on the grid of {self.grid}")
        digest = prefix.digest(tokens // self._page_size)
        if digest in self._stored:
            self._stored.move_to_end(digest)
            return None
        while len(self._stored) >= self.capacity:
            _, oldest = self._stored.popitem(last=False)
            self.evictions += 1
            self.emit(Transfer(TransferOp.DROP, oldest.handle))
        handle = next(self._handles)
        self._stored[digest] = Savepoint(handle, prefix.namespace.tenant, tokens)
        return handle

    def find(self, prefix: Prefix, pages: int) -> Savepoint | None:
        """The longest savepoint within the first `pages` pages of a prefix; it becomes the most recently used."""
        step = self.grid // self._page_size
        for depth in range(pages // step * step, 0, -step):
            found = self._stored.get(prefix.digest(depth))
            if found is not None:
                self._stored.move_to_end(prefix.digest(depth))
                self.hits += 1
                return found
        self.misses += 1
        return None

    def drop(self, digest: bytes) -> None:
        """The page that ends the prefix is gone: its savepoint is of no use."""
        found = self._stored.pop(digest, None)
        if found is not None:
            self.emit(Transfer(TransferOp.DROP, found.handle))

    def flush(self, tenant: str | None = None) -> None:
        """Forget one tenant's savepoints, or all."""
        for digest, point in list(self._stored.items()):
            if tenant in {None, point.tenant}:
                self.drop(digest)
