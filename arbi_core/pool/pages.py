"""The free list of pages. Page 0 is the null page: padding points at it, nobody owns it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

__all__ = ["PagePool"]


class PagePool:
    """Hands out page ids, lowest first, so that a lone request gets consecutive pages (attention then reads views).

    Args:
        num_pages: pages of the pool, the null page included; ids run from 1 to ``num_pages - 1``.
        page_size: tokens per page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs the null page and at least one more, not {num_pages} pages")
        self.num_pages = num_pages
        self.page_size = page_size
        self._fresh = 1
        self._returned: list[int] = []
        self._is_free = bytearray(b"\x01") * num_pages
        self._is_free[0] = 0

    @property
    def available(self) -> int:
        """Free pages."""
        return self.num_pages - self._fresh + len(self._returned)

    def alloc(self, n: int) -> list[int] | None:
        """Take the `n` lowest free pages, ascending; None, and nothing taken, if there are fewer."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if n > self.available:
            return None
        pages = [heapq.heappop(self._returned) for _ in range(min(n, len(self._returned)))]
        fresh = n - len(pages)
        pages.extend(range(self._fresh, self._fresh + fresh))
        self._fresh += fresh
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back. Raises `ValueError` for the null page, unknown ids and pages that are free already."""
        for page in pages:
            if not 0 < page < self.num_pages or self._is_free[page]:
                raise ValueError(f"page {page} is not allocated")
            self._is_free[page] = 1
            heapq.heappush(self._returned, page)
