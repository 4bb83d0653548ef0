"""The earlier sequences that a new one extends or agrees with, in time linear in the tokens.

A tree holds every sequence added so far; an edge is a run of ids, so that comparing is comparing
slices. Each sequence is walked once, from the root, when it is added.
"""

from typing import NamedTuple


class Shared(NamedTuple):
    """What the tree knew about a sequence when it was added."""

    continues: int | None
    """The longest earlier sequence that is a prefix of the new prompt and that no sequence
    continues yet; the latest of several."""
    extends: int
    """Length of the longest earlier sequence that is a prefix of the new prompt, continued or
    not; 0 if there is none."""
    nearest: int | None
    """The latest of the earlier sequences that agree longest with the new one."""
    length: int
    """How many leading ids the new sequence and `nearest` have in common."""


class PrefixTree:
    """Sequences of ids, numbered in the order they are added.

    >>> tree = PrefixTree()
    >>> tree.add((7, 1, 2), prompt=1)
    Shared(continues=None, extends=0, nearest=None, length=0)
    >>> tree.add((7, 1, 2, 5, 3), prompt=4)
    Shared(continues=0, extends=3, nearest=0, length=3)
    >>> tree.add((7, 1, 9), prompt=2)
    Shared(continues=None, extends=0, nearest=1, length=2)
    """

    def __init__(self) -> None:
        """Start with no sequence."""
        self._root = _Node(())
        self._count = 0

    def add(self, ids: tuple[int, ...], prompt: int) -> Shared:
        """Add a sequence whose first `prompt` ids are its prompt; say what it shares.

        Source: radix tree, Morrison (1968), doi:10.1145/321479.321481.
        """
        number, self._count = self._count, self._count + 1
        node, depth, extends, open_ends = self._root, 0, 0, None
        nearest, node.latest = node.latest, number
        while depth < len(ids) and (child := node.children.get(ids[depth])) is not None:
            common = _agreement(child.edge, ids, depth)
            if common < len(child.edge):
                child = node.divide(child, common)
            node, depth = child, depth + common
            nearest, node.latest = node.latest, number
            if depth <= prompt and node.is_end:
                extends = depth
                open_ends = node.open or open_ends
        continues = open_ends.pop() if open_ends else None
        if depth < len(ids):
            node.children[ids[depth]] = node = _Node(ids[depth:])
            node.latest = number
        node.is_end = True
        node.open.append(number)
        return Shared(continues, extends, nearest, depth)


class _Node:
    __slots__ = ("children", "edge", "is_end", "latest", "open")

    def __init__(self, edge: tuple[int, ...]) -> None:
        self.edge = edge
        self.children: dict[int, _Node] = {}
        self.latest: int | None = None  # of the sequences that pass through or end here
        self.is_end = False
        self.open: list[int] = []  # sequences that end here and that none continues

    def divide(self, child: "_Node", at: int) -> "_Node":
        """Put a node into the edge to `child`, after its first `at` ids."""
        upper = _Node(child.edge[:at])
        upper.latest = child.latest
        child.edge = child.edge[at:]
        upper.children[child.edge[0]] = child
        self.children[upper.edge[0]] = upper
        return upper


def _agreement(edge: tuple[int, ...], ids: tuple[int, ...], start: int) -> int:
    """How many leading ids of `edge` are found in `ids` at `start`."""
    other = ids[start : start + len(edge)]
    if edge == other:
        return len(edge)
    pairs = enumerate(zip(edge, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), len(other))
