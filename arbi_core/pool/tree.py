"""The prefix tree of one namespace: one node per cached page.

A tree keeps its nodes in one dictionary, keyed by the parent's serial number and the page's tokens: a dictionary of
children in every node would quadruple what the garbage collector walks, in pauses that every running request feels.
"""

from __future__ import annotations

from attrs import define, field

from arbi_core.pool.digest import namespace_seed, page_digest

__all__ = ["Node", "Tree", "check_tree", "expect"]


@define(eq=False)
class Node:
    """One cached page; the root of a tree is a node without parent and with the null page.

    Attributes:
        serial: unique, 8 bytes.
        key: where the tree keeps it: the parent's serial and the packed tokens.
        digest: names the whole prefix that ends here.
        refs: requests that hold it.
        last_used: the table's clock when a request last let go of it; it cannot be evicted before.
        alive: whether the tree still has it.
    """

    tree: Tree
    parent: Node | None
    serial: bytes
    key: bytes
    page: int
    digest: bytes
    children: int = 0
    refs: int = 0
    last_used: int = 0
    alive: bool = True


@define(eq=False)
class Tree:
    """The cache of one namespace; `writers` counts the requests that may add to it."""

    namespace: str
    root: Node = field(init=False)
    nodes: dict[bytes, Node] = field(factory=dict)
    writers: int = 0

    def __attrs_post_init__(self) -> None:
        self.root = Node(self, None, bytes(8), b"", 0, namespace_seed(self.namespace))

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
        expect(key == node.key and key[:8] == parent.serial, "a node is kept under another's key")
        expect(node.digest == page_digest(parent.digest, key[8:]), "a digest does not continue its parent's")
        children[parent.serial] = children.get(parent.serial, 0) + 1
    for node in (tree.root, *tree.nodes.values()):
        expect(node.children == children.get(node.serial, 0), "a node miscounts its children")


def expect(condition: bool, message: str) -> None:  # noqa: FBT001
    """Raise `AssertionError` with the message unless the condition holds, also under ``python -O``."""
    if not condition:
        raise AssertionError(message)
