"""The radix prefix cache: a forest of pages that requests share.

One tree per namespace (tenant, adapter), one node per full page of tokens. A node that nobody references stays,
evictable, until its page is needed: then leaves go first, least recently used first.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from attrs import define, field

from arbi_core.pool.digest import pack_tokens, page_digest
from arbi_core.pool.pages import PagePool
from arbi_core.pool.tree import Namespace, Node, Tree, check_tree, expect

__all__ = ["Prefix", "PrefixCache"]

_HEAP_SLACK = 8
"""Outdated offers of leaves that are kept before the queue is swept, beside one for every evictable page."""


@define(eq=False)
class Prefix:
    """A token sequence and how far the cache holds it; remembers the walk, so that asking again costs what is new.

    Attributes:
        namespace: where to look.
        packed: full pages that may match, 8 bytes a token.
        page_bytes: bytes of `packed` that make a page.
        nodes: the path found by the last `PrefixCache.match`; not referenced.
    """

    namespace: Namespace
    packed: bytes
    page_bytes: int
    nodes: list[Node] = field(factory=list)
    _digests: list[bytes] = field(factory=list)

    @classmethod
    def of(cls, token_ids: Sequence[int], page_size: int, namespace: Namespace, max_match: int | None = None) -> Prefix:
        """Prefix of a sequence; at most `max_match` tokens of it, cut to full pages."""
        limit = len(token_ids) if max_match is None else min(len(token_ids), max_match)
        full = max(0, limit) // page_size * page_size
        return cls(namespace, pack_tokens(token_ids[:full]), 8 * page_size)

    @property
    def num_pages(self) -> int:
        """Full pages that may match."""
        return len(self.packed) // self.page_bytes

    def page(self, index: int) -> bytes:
        """Packed tokens of one page, counted from 0."""
        return self.packed[index * self.page_bytes : (index + 1) * self.page_bytes]

    def digest(self, pages: int) -> bytes:
        """Digest of the first `pages` pages; equals `Node.digest` of the node that ends there. Remembered."""
        chain = self._digests
        if not chain:
            chain.append(self.namespace.seed)
        while len(chain) <= pages:
            chain.append(page_digest(chain[-1], self.page(len(chain) - 1)))
        return chain[pages]


class PrefixCache:
    """Trees, references, eviction. `PageTable` is its only user.

    Args:
        pool: where evicted pages go back to.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.trees: dict[Namespace, Tree] = {}
        self.evictable = 0
        self.evictions = 0
        self.clock = 0
        self.on_evict: Callable[[Node], None] | None = None
        self._page_bytes = 8 * pool.page_size
        self._leaves: list[tuple[int, int, Node]] = []
        self._ticket = 0
        self._serial = 0

    # -- matching ---------------------------------------------------------------------------------------------------

    def match(self, prefix: Prefix) -> int:
        """Bring `prefix.nodes` up to date; returns its length in pages. Claims nothing."""
        nodes = prefix.nodes
        while nodes and not nodes[-1].alive:  # a node outlives none of its descendants
            nodes.pop()
        tree = self.trees.get(prefix.namespace)
        if tree is None:
            return 0
        node, known, width = nodes[-1] if nodes else tree.root, tree.nodes, self._page_bytes
        for start in range(len(nodes) * width, len(prefix.packed), width):
            child = known.get(node.serial + prefix.packed[start : start + width])
            if child is None:
                break
            nodes.append(child)
            node = child
        return len(nodes)

    def next_key(self, prefix: Prefix) -> tuple[Namespace, bytes] | None:
        """Names the first page of `prefix` that the last `match` did not find; None where all were found.

        Two sequences whose next keys are equal share at least that page beyond what the cache holds.
        """
        start = len(prefix.nodes) * self._page_bytes
        if start >= len(prefix.packed):
            return None
        serial = prefix.nodes[-1].serial if prefix.nodes else bytes(8)
        return prefix.namespace, serial + prefix.packed[start : start + self._page_bytes]

    @staticmethod
    def idle(nodes: Sequence[Node]) -> int:
        """How many nodes of a path nobody references: a suffix of it, because a path is held from its root."""
        return len(nodes) - bisect_left(nodes, True, key=lambda n: n.refs == 0)

    # -- life of a node -----------------------------------------------------------------------------------------------

    def tree(self, namespace: Namespace) -> Tree:
        """The namespace's tree, made if there is none."""
        tree = self.trees.get(namespace)
        if tree is None:
            tree = self.trees[namespace] = Tree(namespace)
        return tree

    def drop_if_unused(self, tree: Tree) -> None:
        """Forget an empty tree that no request can add to: namespaces may be many and short-lived."""
        if not tree.writers and not tree.nodes and self.trees.get(tree.namespace) is tree:
            del self.trees[tree.namespace]

    def insert(self, tree: Tree, parent: Node, packed: bytes, page: int) -> Node:
        """Turn a page into a node, or reference the equal node that exists already."""
        node = tree.child(parent, packed)
        if node is not None:
            self.reference(node)
            return node
        self._serial += 1
        serial, key = self._serial.to_bytes(8, "little"), parent.serial + packed
        node = Node(tree, parent, serial, key, page, parent.depth + 1, refs=1)
        parent.children += 1
        tree.nodes[key] = node
        return node

    def reference(self, node: Node) -> None:
        """Hold a node."""
        if node.refs == 0:
            self.evictable -= 1
        node.refs += 1

    def dereference(self, node: Node) -> None:
        """Let go of a node."""
        node.refs -= 1
        node.last_used = self.clock
        if node.refs:
            return
        if node.alive:
            self.evictable += 1
            if not node.children:
                self._offer_leaf(node)
        else:
            self.pool.free([node.page])

    def evict(self, count: int) -> None:
        """Free `count` cached pages, least recently used leaves first. There must be as many evictable ones."""
        freed: list[int] = []
        bare: Node | None = None
        while len(freed) < count:
            node, bare = bare or self._oldest_leaf(), None
            parent = node.parent
            assert parent is not None  # noqa: S101  # roots are never offered
            if self.on_evict is not None:
                self.on_evict(node)
            del node.tree.nodes[node.key]
            node.alive = False
            parent.children -= 1
            self.evictable -= 1
            self.evictions += 1
            freed.append(node.page)
            if parent is node.tree.root:
                self.drop_if_unused(node.tree)
            elif not parent.refs and not parent.children:
                if parent.last_used == node.last_used:
                    bare = parent  # nothing is older: the usual case, a prompt that nobody has shared
                else:
                    self._offer_leaf(parent)
        if bare is not None:
            self._offer_leaf(bare)
        self.pool.free(freed)

    def _oldest_leaf(self) -> Node:
        """Take the least recently used leaf off the queue."""
        while not _stands(offer := heapq.heappop(self._leaves)):
            pass
        return offer[2]

    def flush(self, tree: Tree) -> int:
        """Forget a tree; returns the pages freed at once. Referenced nodes live on, unreachable, until let go of."""
        del self.trees[tree.namespace]
        for node in tree.nodes.values():
            node.alive = False
        freed = [n.page for n in tree.nodes.values() if not n.refs]
        tree.nodes.clear()
        self.evictable -= len(freed)
        self.pool.free(freed)
        self._compact_leaves()
        return len(freed)

    def _offer_leaf(self, node: Node) -> None:
        """Queue a leaf that nobody references for eviction."""
        self._ticket += 1
        heapq.heappush(self._leaves, (node.last_used, self._ticket, node))
        if len(self._leaves) > 2 * self.evictable + _HEAP_SLACK:
            self._compact_leaves()

    def _compact_leaves(self) -> None:
        """Drop the offers that later use has outdated; without pressure nothing else would ever remove them."""
        self._leaves = [offer for offer in self._leaves if _stands(offer)]
        heapq.heapify(self._leaves)

    # -- proof ------------------------------------------------------------------------------------------------------

    def check(self, held: Iterable[Node], total_pages: int) -> dict[int, Node]:
        """Verify every invariant of the forest; O(everything), for tests.

        Args:
            held: nodes that requests reference, once per reference.
            total_pages: usable pages of the pool.

        Returns:
            Every node there is, by `id`.

        Raises:
            AssertionError: with what is wrong.
        """
        owners: dict[int, int] = {}
        nodes: dict[int, Node] = {}
        for node in held:
            owners[id(node)] = owners.get(id(node), 0) + 1
            nodes[id(node)] = node
        for tree in self.trees.values():
            expect(bool(tree.writers or tree.nodes), "an unused tree was kept")
            check_tree(tree)
            nodes |= {id(n): n for n in tree.nodes.values()}
        for key, node in nodes.items():
            expect(node.refs == owners.get(key, 0), "a reference count differs from the number of owners")
            expect(node.alive or node.refs > 0, "a dead node that nobody references was kept")
        expect(self.evictable == sum(n.refs == 0 for n in nodes.values()), "the evictable count is off")
        standing = sorted(id(offer[2]) for offer in self._leaves if _stands(offer))
        idle = sorted(key for key, n in nodes.items() if n.alive and not n.refs and not n.children)
        expect(standing == idle, "the queue of evictable leaves is off")
        expect(len(self._leaves) <= 2 * total_pages + _HEAP_SLACK, "outdated offers of leaves pile up")
        return nodes


def _stands(offer: tuple[int, int, Node]) -> bool:
    """Whether an offered node is still an idle leaf, unused since the offer."""
    last_used, _, node = offer
    return node.alive and not node.refs and not node.children and node.last_used == last_used
