"""Page tables of the running requests, and the radix prefix cache that lets them share pages.

The cache is a forest: one root per namespace (tenant, adapter), one node per full page of tokens. A request holds
references to the nodes of its matched prefix, and owns its other pages privately until `PageTable.commit` turns the
full ones into nodes. A node that nobody references stays, evictable, until its page is needed: then leaves go first,
least recently used first.

A page that is committed while an equal node already exists stays private to its request, because its id is already in
the request's block table on the device; the request references the equal node all the same, so that its later pages
become children of it and are found by whoever shares the whole prefix.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from attrs import define, field

from arbi_core.pool.digest import namespace_seed, page_digest
from arbi_core.pool.pages import PagePool

__all__ = ["PageTable", "PoolExhausted"]


class PoolExhausted(Exception):  # noqa: N818  # a condition of the pool, not an error of the caller
    """There are not enough free or evictable pages; nothing was changed."""


@define(eq=False)
class _Node:
    """One cached page. `page` is 0 for a root."""

    parent: _Node | None
    key: tuple[int, ...]
    page: int
    digest: bytes
    children: dict[tuple[int, ...], _Node] = field(factory=dict)
    refs: int = 0
    last_used: int = 0
    alive: bool = True


@define(eq=False)
class _Entry:
    """One running request. `nodes` is the path it references; a page of it that belongs to no node is private."""

    namespace: str
    cache: bool
    pages: list[int]
    node: _Node
    length: int
    committed: int
    nodes: list[_Node]
    detached: bool = False


class PageTable:
    """Maps requests to pages.

    Args:
        pool: where pages come from.
        enabled: False turns the prefix cache off for every request.
    """

    def __init__(self, pool: PagePool, *, enabled: bool = True) -> None:
        self.pool = pool
        self.page_size = pool.page_size
        self.enabled = enabled
        self.queries = self.hits = self.evictions = 0
        self._entries: dict[str, _Entry] = {}
        self._roots: dict[str, _Node] = {}
        self._evictable = 0
        self._clock = 0
        self._leaves: list[tuple[int, int, _Node]] = []
        self._ticket = 0

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def total_pages(self) -> int:
        """Pages that requests can use at most."""
        return self.pool.num_pages - 1

    @property
    def available(self) -> int:
        """Pages that can be had now: free ones and cached ones that nobody references."""
        return self.pool.available + self._evictable

    @property
    def cached_pages(self) -> int:
        """Cached pages that nobody references."""
        return self._evictable

    def pages(self, request_id: str) -> Sequence[int]:
        """Page ids of a request, in token order. Raises `KeyError` for an unknown id, as all of these do."""
        return self._entries[request_id].pages

    def length(self, request_id: str) -> int:
        """Tokens whose state is written, or will be by the step being planned."""
        return self._entries[request_id].length

    def namespace(self, request_id: str) -> str:
        """Namespace in which the request reads and writes the cache."""
        return self._entries[request_id].namespace

    def pages_needed(self, request_id: str, num_tokens: int) -> int:
        """New pages that `num_tokens` more tokens take."""
        entry = self._entries[request_id]
        return max(0, -(-(entry.length + num_tokens) // self.page_size) - len(entry.pages))

    def peek(self, token_ids: Sequence[int], namespace: str = "", max_match: int | None = None) -> int:
        """Tokens that `add` would match now; claims nothing."""
        return len(self._match(token_ids, namespace, max_match)) * self.page_size

    # -- a request's life -------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        namespace: str = "",
        cache_enabled: bool = True,
        max_match: int | None = None,
    ) -> int:
        """Register a request and claim the cached pages of its prefix.

        Args:
            request_id: unique among registered requests.
            token_ids: what is known of its sequence.
            namespace: only prefixes committed in the same namespace match.
            cache_enabled: False neither reads nor writes the cache.
            max_match: most tokens to match.

        Returns:
            Tokens matched: a multiple of the page size.
        """
        if request_id in self._entries:
            raise ValueError(f"request {request_id!r} is already registered")
        cache = cache_enabled and self.enabled
        path = self._match(token_ids, namespace, max_match) if cache else []
        if cache:
            self.queries += 1
            self.hits += bool(path)
        self._clock += 1
        for node in path:
            self._reference(node)
        matched = len(path) * self.page_size
        node = path[-1] if path else self._root(namespace)
        self._entries[request_id] = _Entry(namespace, cache, [n.page for n in path], node, matched, matched, path)
        return matched

    def extend(self, request_id: str, num_tokens: int) -> list[int]:
        """Make room for `num_tokens` more tokens and count them as written; returns the ids of the new pages.

        Raises:
            PoolExhausted: not enough pages even after evicting all that can be; nothing was changed.
        """
        entry = self._entries[request_id]
        need = self.pages_needed(request_id, num_tokens)
        pages: list[int] = []
        if need:
            if need > self.available:
                raise PoolExhausted(f"{need} pages are needed and {self.available} are available")
            self._evict(need - self.pool.available)
            pages = self.pool.alloc(need) or []
            entry.pages.extend(pages)
        entry.length += num_tokens
        return pages

    def commit(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Put the request's full pages into the cache. Idempotent; costs only the pages that are new.

        Args:
            request_id: whose.
            token_ids: its sequence from the start; tokens beyond the written length are not looked at.
        """
        entry = self._entries[request_id]
        size = self.page_size
        full = min(entry.length, len(token_ids)) // size
        if not entry.cache or entry.detached or full * size <= entry.committed:
            return
        self._clock += 1
        while entry.committed < full * size:
            index = entry.committed // size
            key = tuple(token_ids[entry.committed : entry.committed + size])
            self._commit_page(entry, index, key)
            entry.committed += size

    def release(self, request_id: str, token_ids: Sequence[int] | None = None) -> None:
        """End a request: commit its full pages if `token_ids` is given, then let go of everything it holds."""
        if token_ids is not None:
            self.commit(request_id, token_ids)
        entry = self._entries.pop(request_id)
        self._clock += 1
        owned = {n.page for n in entry.nodes}
        for node in reversed(entry.nodes):
            self._dereference(node)
        self.pool.free(p for p in entry.pages if p not in owned)

    def flush(self, namespace: str | None = None) -> int:
        """Forget the cache of one namespace, or of all; returns the pages freed at once.

        Pages that running requests hold stay theirs, but nobody new can match them.
        """
        freed = 0
        for name in [namespace] if namespace is not None else list(self._roots):
            root = self._roots.pop(name, None)
            if root is None:
                continue
            stack = [root]
            while stack:
                node = stack.pop()
                stack.extend(node.children.values())
                node.alive = False
                if node.page and node.refs == 0:
                    self._evictable -= 1
                    self.pool.free([node.page])
                    freed += 1
            for entry in self._entries.values():
                if entry.namespace == name:
                    entry.detached = True
        return freed

    # -- the tree ---------------------------------------------------------------------------------------------------

    def _root(self, namespace: str) -> _Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = _Node(None, (), 0, namespace_seed(namespace))
        return root

    def _match(self, token_ids: Sequence[int], namespace: str, max_match: int | None) -> list[_Node]:
        node = self._roots.get(namespace)
        size = self.page_size
        limit = len(token_ids) if max_match is None else min(len(token_ids), max_match)
        path: list[_Node] = []
        for start in range(0, limit - size + 1, size):
            node = node.children.get(tuple(token_ids[start : start + size])) if node is not None else None
            if node is None:
                break
            path.append(node)
        return path

    def _commit_page(self, entry: _Entry, index: int, key: tuple[int, ...]) -> None:
        """Turn the request's page `index` into a node, or reference the equal node that exists already."""
        parent = entry.node
        node = parent.children.get(key)
        if node is None:
            node = _Node(parent, key, entry.pages[index], page_digest(parent.digest, key), last_used=self._clock)
            node.refs = 1
            parent.children[key] = node
        else:
            self._reference(node)
        entry.nodes.append(node)
        entry.node = node

    def _reference(self, node: _Node) -> None:
        if node.refs == 0:
            self._evictable -= 1
        node.refs += 1
        node.last_used = self._clock

    def _dereference(self, node: _Node) -> None:
        node.refs -= 1
        node.last_used = self._clock
        if node.refs:
            return
        if node.alive:
            self._evictable += 1
            self._offer_leaf(node)
        else:
            self.pool.free([node.page])

    def _offer_leaf(self, node: _Node) -> None:
        if node.alive and node.page and node.refs == 0 and not node.children:
            self._ticket += 1
            heapq.heappush(self._leaves, (node.last_used, self._ticket, node))

    def _evict(self, count: int) -> None:
        """Free `count` cached pages, least recently used leaves first."""
        freed: list[int] = []
        while len(freed) < count:
            last_used, _, node = heapq.heappop(self._leaves)
            if not node.alive or node.refs or node.children or node.last_used != last_used:
                continue
            parent = node.parent
            assert parent is not None  # noqa: S101  # roots are never offered
            del parent.children[node.key]
            node.alive = False
            self._evictable -= 1
            self.evictions += 1
            freed.append(node.page)
            self._offer_leaf(parent)
        self.pool.free(freed)

    # -- proof ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify every invariant; O(everything), for tests. Raises `AssertionError`."""
        refs: dict[int, int] = {}
        private: list[int] = []
        for entry in self._entries.values():
            owned = {n.page for n in entry.nodes}
            private.extend(p for p in entry.pages if p not in owned)
            for node in entry.nodes:
                refs[id(node)] = refs.get(id(node), 0) + 1
            _expect(len(entry.pages) * self.page_size >= entry.length, "a request has fewer pages than tokens")
        nodes = [n for e in self._entries.values() for n in e.nodes if not n.alive]
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.page:
                nodes.append(node)
                _expect(
                    node.parent is not None and (node.refs == 0 or node.parent.page == 0 or node.parent.refs > 0),
                    "a referenced node has an unreferenced parent",
                )
        unique = {id(n): n for n in nodes}
        for key, node in unique.items():
            _expect(node.refs == refs.get(key, 0), "a reference count differs from the number of owners")
        cached = [n.page for n in unique.values()]
        _expect(self._evictable == sum(n.refs == 0 for n in unique.values()), "the evictable count is off")
        everything = private + cached
        _expect(len(set(everything)) == len(everything), "a page has two owners")
        _expect(len(everything) + self.pool.available == self.total_pages, "pages were lost or made up")


def _expect(condition: bool, message: str) -> None:  # noqa: FBT001
    if not condition:
        raise AssertionError(message)
