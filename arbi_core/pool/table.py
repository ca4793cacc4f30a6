"""Page tables of the running requests, over the pool and the prefix cache that lets them share pages.

A request holds references to the nodes of its matched prefix, and owns its other pages privately until
`PageTable.commit` turns the full ones into nodes.

A page that is committed while an equal node already exists stays private to its request, because its id is already in
the request's block table on the device; the request references the equal node all the same, so that its later pages
become children of it and are found by whoever shares the whole prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import define

from arbi_core.pool.cache import Prefix, PrefixCache
from arbi_core.pool.digest import pack_tokens
from arbi_core.pool.pages import PagePool
from arbi_core.pool.tree import Namespace, Node, Tree, expect

__all__ = ["PageTable", "PoolExhausted"]

SHARED = Namespace()


class PoolExhausted(Exception):  # noqa: N818  # a condition of the pool, not an error of the caller
    """There are not enough free or evictable pages; nothing was changed."""


@define(eq=False)
class _Entry:
    """One running request.

    `nodes` is the path it references, one node for each of its first pages. A page that is not the one of its node, or
    that has no node yet, is private. `tree` is None where the cache is neither read nor written: caching is off for the
    request, or its namespace was flushed.
    """

    namespace: Namespace
    tree: Tree | None
    pages: list[int]
    length: int
    nodes: list[Node]

    def private_pages(self) -> list[int]:
        """Pages that only this request holds."""
        twins = [p for p, n in zip(self.pages, self.nodes, strict=False) if p != n.page]
        return twins + self.pages[len(self.nodes) :]


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
        self.cache = PrefixCache(pool)
        self.queries = self.hits = 0
        self._entries: dict[str, _Entry] = {}

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def total_pages(self) -> int:
        """Pages that requests can use at most."""
        return self.pool.num_pages - 1

    @property
    def available(self) -> int:
        """Pages that can be had now: free ones and cached ones that nobody references."""
        return self.pool.available + self.cache.evictable

    @property
    def cached_pages(self) -> int:
        """Cached pages that nobody references."""
        return self.cache.evictable

    @property
    def evictions(self) -> int:
        """Cached pages that had to go since start."""
        return self.cache.evictions

    def pages(self, request_id: str) -> Sequence[int]:
        """Page ids of a request, in token order. Raises `KeyError` for an unknown id, as all of these do."""
        return self._entries[request_id].pages

    def length(self, request_id: str) -> int:
        """Tokens that room was made for."""
        return self._entries[request_id].length

    def namespace(self, request_id: str) -> Namespace:
        """Namespace in which the request reads and writes the cache."""
        return self._entries[request_id].namespace

    def shared_pages(self, request_id: str) -> int:
        """Leading pages that other requests hold too: they stay when this one loses its own."""
        nodes = self._entries[request_id].nodes
        return next((i for i, n in enumerate(nodes) if n.refs == 1), len(nodes))

    def committed_pages(self, request_id: str) -> int:
        """Leading pages that are in the cache, or equal to one that is."""
        return len(self._entries[request_id].nodes)

    def pages_needed(self, request_id: str, num_tokens: int) -> int:
        """New pages that `num_tokens` more tokens take."""
        entry = self._entries[request_id]
        return max(0, -(-(entry.length + num_tokens) // self.page_size) - len(entry.pages))

    def peek(self, token_ids: Sequence[int], namespace: Namespace = SHARED, max_match: int | None = None) -> int:
        """Tokens that `add` would match now; claims nothing."""
        return self.cache.match(Prefix.of(token_ids, self.page_size, namespace, max_match)) * self.page_size

    # -- a request's life -------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        namespace: Namespace = SHARED,
        cache_enabled: bool = True,
        max_match: int | None = None,
        prefix: Prefix | None = None,
    ) -> int:
        """Register a request and claim the cached pages of its prefix.

        Args:
            request_id: unique among registered requests.
            token_ids: what is known of its sequence.
            namespace: only prefixes committed in the same namespace match.
            cache_enabled: False neither reads nor writes the cache.
            max_match: most tokens to match.
            prefix: the same sequence as `PrefixCache.match` has just walked it; spares another walk.

        Returns:
            Tokens matched: a multiple of the page size.
        """
        if request_id in self._entries:
            raise ValueError(f"request {request_id!r} is already registered")
        tree: Tree | None = None
        path: list[Node] = []
        if cache_enabled and self.enabled:
            if prefix is None:
                prefix = Prefix.of(token_ids, self.page_size, namespace, max_match)
                self.cache.match(prefix)
            path = list(prefix.nodes if max_match is None else prefix.nodes[: max_match // self.page_size])
            tree = self.cache.tree(namespace)
            tree.writers += 1
            self.queries += 1
            self.hits += bool(path)
        for node in path:
            self.cache.reference(node)
        matched = len(path) * self.page_size
        self._entries[request_id] = _Entry(namespace, tree, [n.page for n in path], matched, path)
        return matched

    def extend(self, request_id: str, num_tokens: int) -> list[int]:
        """Make room for `num_tokens` more tokens; returns the ids of the new pages, in token order.

        Raises:
            PoolExhausted: not enough pages even after evicting all that can be; nothing was changed.
            ValueError: `num_tokens` is negative.
        """
        if num_tokens < 0:
            raise ValueError(f"request {request_id!r} cannot be extended by {num_tokens} tokens")
        entry = self._entries[request_id]
        length = entry.length + num_tokens
        need = -(-length // self.page_size) - len(entry.pages)
        pages: list[int] = []
        if need > 0:
            if need > self.available:
                raise PoolExhausted(f"{need} pages are needed and {self.available} are available")
            self.cache.evict(need - self.pool.available)
            pages = self.pool.alloc(need) or []
            entry.pages.extend(pages)
        entry.length = length
        return pages

    def trim(self, request_id: str, length: int) -> int:
        """Give back the room beyond `length` tokens (a verify step's rejected drafts); returns the pages freed.

        Raises:
            ValueError: `length` lies within the committed pages or beyond the room there is.
        """
        entry = self._entries[request_id]
        if not len(entry.nodes) * self.page_size <= length <= entry.length:
            raise ValueError(f"request {request_id!r} cannot be trimmed to {length} tokens")
        keep = -(-length // self.page_size)
        freed = entry.pages[keep:]
        del entry.pages[keep:]
        entry.length = length
        self.pool.free(freed)
        return len(freed)

    def restore(self, request_id: str, packed: Sequence[bytes], load: Callable[[int, int], None]) -> int:
        """Continue the matched prefix with pages whose bytes wait on the host.

        Call it between `add` and `extend`. The pages become nodes at once: whoever matches them runs after the load.

        Args:
            request_id: whose.
            packed: tokens of each page, 8 bytes a token, directly after the matched prefix.
            load: called with position and page id for each page, in order.

        Returns:
            Tokens restored.

        Raises:
            PoolExhausted: not enough pages; nothing was changed.
        """
        entry = self._entries[request_id]
        if entry.tree is None:
            return 0
        pages = self.extend(request_id, len(packed) * self.page_size)
        node = entry.nodes[-1] if entry.nodes else entry.tree.root
        for i, (page, tokens) in enumerate(zip(pages, packed, strict=True)):
            node = self.cache.insert(entry.tree, node, tokens, page)
            entry.nodes.append(node)
            load(i, page)
        return len(packed) * self.page_size

    def commit(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Put the request's full pages into the cache. Idempotent; costs only the pages that are new.

        Args:
            request_id: whose.
            token_ids: the tokens whose state is written, from the start; those beyond the request's room are not
                looked at.
        """
        entry = self._entries[request_id]
        full = min(entry.length, len(token_ids)) // self.page_size
        if entry.tree is None or full <= len(entry.nodes):
            return
        node = entry.nodes[-1] if entry.nodes else entry.tree.root
        first = len(entry.nodes)
        packed = pack_tokens(token_ids[first * self.page_size : full * self.page_size])
        width = len(packed) // (full - first)
        for index, page in enumerate(entry.pages[first:full]):
            node = self.cache.insert(entry.tree, node, packed[index * width : (index + 1) * width], page)
            entry.nodes.append(node)

    def next_key(self, request_id: str, token_ids: Sequence[int]) -> tuple[Namespace, bytes] | None:
        """Names the first full page of `token_ids` that the request has not committed; see `PrefixCache.next_key`."""
        entry = self._entries[request_id]
        start = len(entry.nodes) * self.page_size
        if entry.tree is None or start + self.page_size > len(token_ids):
            return None
        serial = entry.nodes[-1].serial if entry.nodes else bytes(8)
        return entry.namespace, serial + pack_tokens(token_ids[start : start + self.page_size])

    def release(self, request_id: str, token_ids: Sequence[int] | None = None) -> None:
        """End a request: commit its full pages if `token_ids` is given, then let go of everything it holds."""
        if token_ids is not None:
            self.commit(request_id, token_ids)
        entry = self._entries.pop(request_id)
        self.cache.clock += 1
        private = entry.private_pages()
        for node in entry.nodes:
            self.cache.dereference(node)
        self.pool.free(private)
        if entry.tree is not None:
            entry.tree.writers -= 1
            self.cache.drop_if_unused(entry.tree)

    def flush(self, tenant: str | None = None) -> int:
        """Forget the cache of one tenant (with all its adapters), or of all; returns the pages freed at once.

        Pages that running requests hold stay theirs, but nobody new can match them.
        """
        freed = 0
        for tree in list(self.cache.trees.values()):
            if tenant is not None and tree.namespace.tenant != tenant:
                continue
            for entry in self._entries.values():
                if entry.tree is tree:
                    entry.tree = None
            freed += self.cache.flush(tree)
        return freed

    # -- proof ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify every invariant; O(everything), for tests. Raises `AssertionError`."""
        private: list[int] = []
        for entry in self._entries.values():
            private += entry.private_pages()
            expect(len(entry.pages) * self.page_size >= entry.length, "a request has fewer pages than tokens")
            expect(len(entry.nodes) * self.page_size <= entry.length, "a page was committed without room")
        for namespace, tree in self.cache.trees.items():
            writers = sum(e.tree is tree for e in self._entries.values())
            expect(tree.namespace == namespace and tree.writers == writers, "a tree miscounts its requests")
        held = [n for e in self._entries.values() for n in e.nodes]
        nodes = self.cache.check(held, self.total_pages)
        everything = private + [n.page for n in nodes.values()]
        expect(len(set(everything)) == len(everything), "a page has two owners")
        expect(len(everything) + self.pool.available == self.total_pages, "pages were lost or made up")
