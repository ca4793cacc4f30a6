"""Page tables of the running requests, and the radix prefix cache that lets them share pages.

The cache is a forest: one tree per namespace (tenant, adapter), one node per full page of tokens. A request holds
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

from attrs import define

from arbi_core.pool.digest import pack_tokens, page_digest
from arbi_core.pool.pages import PagePool
from arbi_core.pool.tree import Node, Tree, check_tree, expect

__all__ = ["PageTable", "PoolExhausted"]

_HEAP_SLACK = 8
"""Outdated offers of leaves that are kept before the queue is swept, beside one for every evictable page."""


class PoolExhausted(Exception):  # noqa: N818  # a condition of the pool, not an error of the caller
    """There are not enough free or evictable pages; nothing was changed."""


@define(eq=False)
class _Entry:
    """One running request.

    `nodes` is the path it references, one node for each of its first pages. A page that is not the one of its node, or
    that has no node yet, is private. `tree` is None where the cache is neither read nor written: caching is off for the
    request, or its namespace was flushed.
    """

    namespace: str
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
        self.queries = self.hits = self.evictions = 0
        self._entries: dict[str, _Entry] = {}
        self._trees: dict[str, Tree] = {}
        self._evictable = 0
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []
        self._ticket = 0
        self._serial = 0

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
        tree: Tree | None = None
        path: list[Node] = []
        if cache_enabled and self.enabled:
            path = self._match(token_ids, namespace, max_match)
            tree = self._tree(namespace)
            tree.writers += 1
            self.queries += 1
            self.hits += bool(path)
        for node in path:
            self._reference(node)
        matched = len(path) * self.page_size
        self._entries[request_id] = _Entry(namespace, tree, [n.page for n in path], matched, path)
        return matched

    def extend(self, request_id: str, num_tokens: int) -> list[int]:
        """Make room for `num_tokens` more tokens and count them as written; returns the ids of the new pages.

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
            self._evict(need - self.pool.available)
            pages = self.pool.alloc(need) or []
            entry.pages.extend(pages)
        entry.length = length
        return pages

    def commit(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Put the request's full pages into the cache. Idempotent; costs only the pages that are new.

        Args:
            request_id: whose.
            token_ids: its sequence from the start; tokens beyond the written length are not looked at.
        """
        entry = self._entries[request_id]
        full = min(entry.length, len(token_ids)) // self.page_size
        if entry.tree is None or full <= len(entry.nodes):
            return
        node = entry.nodes[-1] if entry.nodes else entry.tree.root
        for index in range(len(entry.nodes), full):
            start = index * self.page_size
            packed = pack_tokens(token_ids[start : start + self.page_size])
            node = self._commit_page(entry.tree, node, packed, entry.pages[index])
            entry.nodes.append(node)

    def release(self, request_id: str, token_ids: Sequence[int] | None = None) -> None:
        """End a request: commit its full pages if `token_ids` is given, then let go of everything it holds."""
        if token_ids is not None:
            self.commit(request_id, token_ids)
        entry = self._entries.pop(request_id)
        self._clock += 1
        private = entry.private_pages()
        for node in entry.nodes:
            self._dereference(node)
        self.pool.free(private)
        if entry.tree is not None:
            entry.tree.writers -= 1
            self._drop_if_unused(entry.tree)

    def flush(self, namespace: str | None = None) -> int:
        """Forget the cache of one namespace, or of all; returns the pages freed at once.

        Pages that running requests hold stay theirs, but nobody new can match them.
        """
        freed: list[int] = []
        for name in [namespace] if namespace is not None else list(self._trees):
            tree = self._trees.pop(name, None)
            if tree is None:
                continue
            for entry in self._entries.values():
                if entry.tree is tree:
                    entry.tree = None
            for node in tree.nodes.values():
                node.alive = False
            freed += [n.page for n in tree.nodes.values() if not n.refs]
            tree.nodes.clear()
        self._evictable -= len(freed)
        self.pool.free(freed)
        self._compact_leaves()
        return len(freed)

    # -- the tree ---------------------------------------------------------------------------------------------------

    def _tree(self, namespace: str) -> Tree:
        tree = self._trees.get(namespace)
        if tree is None:
            tree = self._trees[namespace] = Tree(namespace)
        return tree

    def _drop_if_unused(self, tree: Tree) -> None:
        """Forget an empty tree that no request can add to: namespaces may be many and short-lived."""
        if not tree.writers and not tree.nodes and self._trees.get(tree.namespace) is tree:
            del self._trees[tree.namespace]

    def _match(self, token_ids: Sequence[int], namespace: str, max_match: int | None) -> list[Node]:
        tree = self._trees.get(namespace)
        path: list[Node] = []
        if tree is None:
            return path
        node, size = tree.root, self.page_size
        limit = len(token_ids) if max_match is None else min(len(token_ids), max_match)
        for start in range(0, limit - size + 1, size):
            child = tree.child(node, pack_tokens(token_ids[start : start + size]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _commit_page(self, tree: Tree, parent: Node, packed: bytes, page: int) -> Node:
        """Turn a request's page into a node, or reference the equal node that exists already."""
        node = tree.child(parent, packed)
        if node is not None:
            self._reference(node)
            return node
        self._serial += 1
        serial, key = self._serial.to_bytes(8, "little"), parent.serial + packed
        node = Node(tree, parent, serial, key, page, page_digest(parent.digest, packed), refs=1)
        parent.children += 1
        tree.nodes[key] = node
        return node

    def _reference(self, node: Node) -> None:
        if node.refs == 0:
            self._evictable -= 1
        node.refs += 1

    def _dereference(self, node: Node) -> None:
        node.refs -= 1
        node.last_used = self._clock
        if node.refs:
            return
        if node.alive:
            self._evictable += 1
            if not node.children:
                self._offer_leaf(node)
        else:
            self.pool.free([node.page])

    def _offer_leaf(self, node: Node) -> None:
        """Queue a leaf that nobody references for eviction."""
        self._ticket += 1
        heapq.heappush(self._leaves, (node.last_used, self._ticket, node))
        if len(self._leaves) > 2 * self._evictable + _HEAP_SLACK:
            self._compact_leaves()

    def _compact_leaves(self) -> None:
        """Drop the offers that later use has outdated; without pressure nothing else would ever remove them."""
        self._leaves = [offer for offer in self._leaves if _stands(offer)]
        heapq.heapify(self._leaves)

    def _evict(self, count: int) -> None:
        """Free `count` cached pages, least recently used leaves first."""
        freed: list[int] = []
        while len(freed) < count:
            offer = heapq.heappop(self._leaves)
            if not _stands(offer):
                continue
            node = offer[2]
            parent = node.parent
            assert parent is not None  # noqa: S101  # roots are never offered
            del node.tree.nodes[node.key]
            node.alive = False
            parent.children -= 1
            self._evictable -= 1
            self.evictions += 1
            freed.append(node.page)
            if parent is node.tree.root:
                self._drop_if_unused(node.tree)
            elif not parent.refs and not parent.children:
                self._offer_leaf(parent)
        self.pool.free(freed)

    # -- proof ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify every invariant; O(everything), for tests. Raises `AssertionError`."""
        owners: dict[int, int] = {}
        private: list[int] = []
        nodes: dict[int, Node] = {}
        for entry in self._entries.values():
            private += entry.private_pages()
            for node in entry.nodes:
                owners[id(node)] = owners.get(id(node), 0) + 1
                nodes[id(node)] = node
            expect(len(entry.pages) * self.page_size >= entry.length, "a request has fewer pages than tokens")
            expect(len(entry.nodes) * self.page_size <= entry.length, "a page was committed before it was written")
        for name, tree in self._trees.items():
            writers = sum(e.tree is tree for e in self._entries.values())
            expect(tree.namespace == name and tree.writers == writers, "a tree miscounts its requests")
            expect(bool(writers or tree.nodes), "an unused tree was kept")
            check_tree(tree)
            nodes |= {id(n): n for n in tree.nodes.values()}
        for key, node in nodes.items():
            expect(node.refs == owners.get(key, 0), "a reference count differs from the number of owners")
            expect(node.alive or node.refs > 0, "a dead node that nobody references was kept")
        expect(self._evictable == sum(n.refs == 0 for n in nodes.values()), "the evictable count is off")
        standing = sorted(id(offer[2]) for offer in self._leaves if _stands(offer))
        idle = sorted(key for key, n in nodes.items() if n.alive and not n.refs and not n.children)
        expect(standing == idle, "the queue of evictable leaves is off")
        expect(len(self._leaves) <= 2 * self.total_pages + _HEAP_SLACK, "outdated offers of leaves pile up")
        everything = private + [n.page for n in nodes.values()]
        expect(len(set(everything)) == len(everything), "a page has two owners")
        expect(len(everything) + self.pool.available == self.total_pages, "pages were lost or made up")


def _stands(offer: tuple[int, int, Node]) -> bool:
    """Whether an offered node is still an idle leaf, unused since the offer."""
    last_used, _, node = offer
    return node.alive and not node.refs and not node.children and node.last_used == last_used
