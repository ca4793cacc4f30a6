"""The host tier: which pages that left the device are kept in RAM or on disk, and for how long.

This is the index, on the scheduler's side. It moves no bytes: it emits `Transfer`s, which every rank carries out in the
order of the plan (`arbi_core.runner.host_store`).
"""

from __future__ import annotations

import enum
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import takewhile

from attrs import define, frozen

from arbi_core.pool.cache import Prefix
from arbi_core.pool.transfers import Transfer, TransferOp, TransferResult
from arbi_core.pool.tree import Node

__all__ = ["HostTier", "TierSettings", "TierTail"]

log = logging.getLogger("arbi.tiers")

TOO_SLOW = "disk is too slow"
"""How the store says that it let one spill go; any other failed spill ends the disk tier."""


@frozen(kw_only=True)
class TierSettings:
    """Sizes and gates, for one rank.

    Attributes:
        page_bytes: bytes of a page over all layers.
        row_bytes: bytes of a recurrent row over all layers.
        page_size: tokens per page.
        ram_bytes: most bytes in RAM.
        disk_bytes: most bytes on disk; 0 has no disk tier.
        ttl_s: seconds after which an unused page is forgotten; None never.
        ram_min_tokens: shorter prefixes are not worth the copy: computing them again is as fast.
        disk_min_tokens: the same for the disk.
    """

    page_bytes: int
    row_bytes: int = 0
    page_size: int
    ram_bytes: int
    disk_bytes: int = 0
    ttl_s: float | None = None
    ram_min_tokens: int = 0
    disk_min_tokens: int = 0


class _Place(enum.Enum):
    RAM = 0
    DISK = 1
    FETCHING = 2


@define(eq=False)
class _Blob:
    """One page on the host; `tokens` is the length of the prefix that it was kept for."""

    handle: int
    digest: bytes
    tenant: str
    tokens: int
    place: _Place
    used: float


@frozen
class TierTail:
    """Pages on the host that continue a prefix.

    Attributes:
        pages: packed tokens of each page.
        handles: their handles, all in RAM.
        fetching: more of them are on their way from disk: ask again later.
    """

    pages: tuple[bytes, ...] = ()
    handles: tuple[int, ...] = ()
    fetching: bool = False


NOTHING = TierTail()


class HostTier:
    """Keeps evicted pages and what preempted requests leave, within a budget; the least recently used go first.

    Args:
        settings: sizes and gates.
        handles: source of fresh handles.
        clock: seconds.
    """

    def __init__(
        self, settings: TierSettings, handles: Iterator[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self.emit: Callable[[Transfer], None] = lambda _: None
        self.saved = self.restored = self.spilled = self.fetched = self.dropped = 0
        self.disk_error: str | None = None
        self._handles = handles
        self._clock = clock
        self._ram: OrderedDict[bytes, _Blob] = OrderedDict()
        self._disk: OrderedDict[bytes, _Blob] = OrderedDict()
        self._by_handle: dict[int, _Blob] = {}
        self._kept: dict[int, int] = {}
        self._pinned: set[int] = set()

    # -- sizes ------------------------------------------------------------------------------------------------------

    @property
    def ram_bytes(self) -> int:
        """Bytes in RAM on one rank."""
        return len(self._ram) * self.settings.page_bytes + sum(self._kept.values())

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk, or on the way there or back, on one rank."""
        return len(self._disk) * self.settings.page_bytes

    @property
    def fetching(self) -> bool:
        """Whether pages are on their way from disk."""
        return any(b.place is _Place.FETCHING for b in self._disk.values())

    # -- pages of the prefix cache ----------------------------------------------------------------------------------

    def keep_node(self, node: Node) -> bool:
        """A cached page is about to be evicted: save it if that pays; returns whether the host has it now.

        Leaves go first, so a page near the root is judged by the length of the prefix that once went on from it: the
        pages behind it are of no use without it.
        """
        reach = node.reach = max(node.reach, node.depth)
        if node.parent is not None:
            node.parent.reach = max(node.parent.reach, reach)
        digest = node.digest
        blob = self._ram.get(digest) or self._disk.get(digest)
        if blob is not None:
            self._touch(blob)
            return True
        tokens = reach * self.settings.page_size
        if tokens < self.settings.ram_min_tokens or not self._make_room(self.settings.page_bytes):
            return False
        blob = _Blob(next(self._handles), digest, node.tree.namespace.tenant, tokens, _Place.RAM, self._clock())
        self._ram[digest] = blob
        self._by_handle[blob.handle] = blob
        self.saved += 1
        self.emit(Transfer(TransferOp.SAVE_PAGE, blob.handle, node.page))
        return True

    def find(self, prefix: Prefix, *, send: bool = True) -> TierTail:
        """Pages that continue ``prefix.nodes``, no more than RAM can hold.

        With `send`, those on disk are sent for; the answer then says to wait for them. Without, it ends before them.
        """
        if not (self._ram or self._disk):
            return NOTHING
        found: list[_Blob] = []
        for depth in range(len(prefix.nodes) + 1, prefix.num_pages + 1):
            digest = prefix.digest(depth)
            blob = self._ram.get(digest) or self._disk.get(digest)
            if blob is None:
                break
            found.append(blob)
        size, first = self.settings.page_size, len(prefix.nodes)
        while found and (first + len(found)) * size < self._least(found[-1]):
            found.pop()
        del found[self._room // self.settings.page_bytes :]
        for blob in reversed(found):  # the root end is used last, so that nothing loses the pages before it
            self._touch(blob)
        for blob in found:
            if send and blob.place is _Place.DISK:
                blob.place = _Place.FETCHING
                self.emit(Transfer(TransferOp.FETCH, blob.handle))
        if any(b.place is _Place.FETCHING for b in found):
            return TierTail(fetching=True)
        here = list(takewhile(lambda b: b.place is _Place.RAM, found))
        return TierTail(tuple(prefix.page(first + i) for i in range(len(here))), tuple(b.handle for b in here))

    def pin(self, tail: TierTail) -> None:
        """Keep the pages of a tail in RAM until `unpin`, whatever room others need."""
        for handle in tail.handles:
            self._pinned.add(handle)
            self._touch(self._by_handle[handle])

    def unpin(self) -> None:
        """End `pin`."""
        self._pinned.clear()

    def load(self, handle: int, page: int) -> None:
        """Copy a page of a tail back to the device; the host keeps its copy."""
        self.restored += 1
        self.emit(Transfer(TransferOp.LOAD_PAGE, handle, page))

    # -- what preempted requests leave ------------------------------------------------------------------------------

    def keep_page(self, page: int) -> int:
        """Save a page that is filled in part; returns its handle, 0 if there is no room."""
        return self._keep(TransferOp.SAVE_PAGE, page, self.settings.page_bytes)

    def keep_row(self, row: int) -> int:
        """Save a recurrent row; returns its handle, 0 if there is no room."""
        return self._keep(TransferOp.SAVE_ROW, row, self.settings.row_bytes)

    def release(self, handle: int) -> None:
        """Forget what was kept under a handle; 0 is ignored."""
        if self._kept.pop(handle, None) is not None:
            self.emit(Transfer(TransferOp.DROP, handle))

    def _keep(self, op: TransferOp, where: int, nbytes: int) -> int:
        if not self._make_room(nbytes):
            return 0
        handle = next(self._handles)
        self._kept[handle] = nbytes
        self.emit(Transfer(op, handle, where))
        return handle

    # -- upkeep -------------------------------------------------------------------------------------------------------

    def settle(self, results: Sequence[TransferResult]) -> None:
        """Take in how background transfers ended."""
        for result in results:
            blob = self._by_handle.get(result.handle)
            if blob is None:
                continue
            if not result.ok:
                self._forget(blob)
                if result.op is TransferOp.SPILL and not result.error.startswith(TOO_SLOW):
                    self._lose_disk(result.error)
            elif result.op is TransferOp.FETCH:
                self.fetched += 1
                del self._disk[blob.digest]
                blob.place = _Place.RAM
                self._ram[blob.digest] = blob
                self._pinned.add(blob.handle)
                fits = self._make_room(0)
                self._pinned.discard(blob.handle)
                if not fits:
                    self._make_room(0)

    def lose(self, handles: Set[int]) -> None:
        """A step failed: forget what it was to move, and what is on its way from disk: that answer may be lost too."""
        for blob in list(self._by_handle.values()):
            if blob.handle in handles or blob.place is _Place.FETCHING:
                self._drop(blob)

    def sweep(self) -> None:
        """Forget pages that nobody used for longer than the TTL."""
        ttl = self.settings.ttl_s
        if ttl is None:
            return
        oldest = self._clock() - ttl
        for blobs in (self._ram, self._disk):
            while blobs and (first := next(iter(blobs.values()))).used < oldest and first.place is not _Place.FETCHING:
                self._drop(first)

    def flush(self, tenant: str | None = None) -> None:
        """Forget the pages of one tenant, or of all. What preempted requests left stays theirs."""
        for blob in list(self._by_handle.values()):
            if tenant in {None, blob.tenant}:
                self._drop(blob)

    @property
    def _room(self) -> int:
        """Bytes of RAM that pages of the prefix cache may take beside what preempted requests left."""
        return self.settings.ram_bytes - sum(self._kept.values())

    def _least(self, blob: _Blob) -> int:
        return self.settings.ram_min_tokens if blob.place is _Place.RAM else self.settings.disk_min_tokens

    def _touch(self, blob: _Blob) -> None:
        blob.used = self._clock()
        (self._ram if blob.place is _Place.RAM else self._disk).move_to_end(blob.digest)

    def _make_room(self, nbytes: int) -> bool:
        """Spill or drop until `nbytes` more fit into RAM; False if they never do."""
        if nbytes > self._room:
            return False
        while self.ram_bytes + nbytes > self.settings.ram_bytes:
            victim = next((b for b in self._ram.values() if b.handle not in self._pinned), None)
            if victim is None:
                return False
            if victim.tokens >= self.settings.disk_min_tokens and self._room_on_disk():
                self.spilled += 1
                del self._ram[victim.digest]
                victim.place = _Place.DISK
                self._disk[victim.digest] = victim
                self.emit(Transfer(TransferOp.SPILL, victim.handle))
            else:
                self._drop(victim)
        return True

    def _room_on_disk(self) -> bool:
        limit = self.settings.disk_bytes
        if self.disk_error is not None or limit < self.settings.page_bytes:
            return False
        while self.disk_bytes + self.settings.page_bytes > limit:
            victim = next((b for b in self._disk.values() if b.place is not _Place.FETCHING), None)
            if victim is None:
                return False
            self._drop(victim)
        return True

    def _drop(self, blob: _Blob) -> None:
        self._forget(blob)
        self.dropped += 1
        self.emit(Transfer(TransferOp.DROP, blob.handle))

    def _forget(self, blob: _Blob) -> None:
        (self._ram if blob.place is _Place.RAM else self._disk).pop(blob.digest, None)
        self._by_handle.pop(blob.handle, None)

    def _lose_disk(self, error: str) -> None:
        if self.disk_error is None:
            self.disk_error = error
            log.warning("the disk tier is off from now on, pages go no further than RAM: %s", error)
