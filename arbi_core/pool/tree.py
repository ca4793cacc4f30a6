"""The prefix tree of one namespace: one node per cached page.

A tree keeps its nodes in one dictionary, keyed by the parent's serial number and the page's tokens: a dictionary of
children in every node would quadruple what the garbage collector walks, in pauses that every running request feels.
"""

from __future__ import annotations

from attrs import define, field

from arbi_core.pool.digest import namespace_seed, page_digest

__all__ = ["Namespace", "Node", "Tree", "check_tree", "expect"]


@define(frozen=True)
class Namespace:
    """Who may share pages: requests of one tenant that run with the same adapter.

    Attributes:
        tenant: ``""`` is shared by all anonymous callers.
        adapter: ``""`` is the base model.
    """

    tenant: str = ""
    adapter: str = ""

    @property
    def seed(self) -> bytes:
        """Root of the namespace's digests, 32 bytes."""
        return namespace_seed(self.tenant, self.adapter)


@define(eq=False)
class Node:
    """One cached page; the root of a tree is a node without parent and with the null page.

    Attributes:
        serial: unique, 8 bytes.
        key: where the tree keeps it: the parent's serial and the packed tokens.
        depth: pages from the root; the root has 0.
        refs: requests that hold it.
        last_used: the table's clock when a request last let go of it; it cannot be evicted before.
        alive: whether the tree still has it.
        reach: depth of the deepest page that was evicted at or below it.
    """

    tree: Tree
    parent: Node | None
    serial: bytes
    key: bytes
    page: int
    depth: int = 0
    children: int = 0
    refs: int = 0
    last_used: int = 0
    alive: bool = True
    reach: int = 0
    _digest: bytes = b""

    @property
    def digest(self) -> bytes:
        """Names the whole prefix that ends here, 32 bytes; computed when first asked for."""
        chain: list[Node] = []
        node = self
        while not node._digest:
            chain.append(node)
            if node.parent is None:
                break
            node = node.parent
        for node in reversed(chain):
            node._digest = (
                node.tree.namespace.seed if node.parent is None else page_digest(node.parent._digest, node.key[8:])
            )
        return self._digest


@define(eq=False)
class Tree:
    """The cache of one namespace; `writers` counts the requests that may add to it."""

    namespace: Namespace
    root: Node = field(init=False)
    nodes: dict[bytes, Node] = field(factory=dict)
    writers: int = 0

    def __attrs_post_init__(self) -> None:
        self.root = Node(self, None, bytes(8), b"", 0)

    def child(self, parent: Node, packed: bytes) -> Node | None:
        """The node below `parent` that holds these tokens."""
        return self.nodes.get(parent.serial + packed)


def check_tree(tree: Tree) -> None:
    """Verify what must hold within one tree; raises `AssertionError`."""
    children: dict[bytes, int] = {}
    for key, node in tree.nodes.items():
        parent = node.parent
        expect(parent is not None and node.alive and node.tree is tree, "a node hangs in the wrong place")
        assert parent is not None  # noqa: S101  # said above
        expect(parent is tree.root or tree.nodes.get(parent.key) is parent, "a node lost its parent")
        expect(parent is tree.root or parent.refs >= node.refs, "a path is held in part")
        expect(node.depth == parent.depth + 1, "a node miscounts its depth")
        expect(key == node.key and key[:8] == parent.serial, "a node is kept under another's key")
        expect(node.digest == page_digest(parent.digest, key[8:]), "a digest does not continue its parent's")
        children[parent.serial] = children.get(parent.serial, 0) + 1
    for node in (tree.root, *tree.nodes.values()):
        expect(node.children == children.get(node.serial, 0), "a node miscounts its children")


def expect(condition: bool, message: str) -> None:  # noqa: FBT001
    """Raise `AssertionError` with the message unless the condition holds, also under ``python -O``."""
    if not condition:
        raise AssertionError(message)
