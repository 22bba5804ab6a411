"""A radix tree over token lists: who begins as a prompt begins. Pure.

Each edge holds a run of tokens, and each node names the sequences whose tokens run through the whole of its
edge; a sequence's end parts an edge. A look-up walks down once and compares runs, not single tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Node:
    edge: Tokens
    children: dict[int, _Node] = field(default_factory=dict[int, "_Node"])
    """By the first token of their edges."""
    holders: dict[int, None] = field(default_factory=dict[int, None])


class PrefixIndex:
    """Token lists by sequence."""

    def __init__(self) -> None:
        self._root = _Node(())
        self._tokens: dict[int, Tokens] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._tokens

    def tokens(self, sequence: int) -> Tokens:
        """What is noted for a sequence; empty for one that is not here."""
        return self._tokens.get(sequence, ())

    def put(self, sequence: int, tokens: Tokens) -> None:
        """Note a sequence's tokens in place of what was noted before."""
        present = self._tokens.get(sequence)
        if present is not None and tokens[: len(present)] != present:
            self.remove(sequence)
        self._tokens[sequence] = tokens
        node, place = self._root, 0
        while place < len(tokens):
            node = self._step(node, tokens, place)
            node.holders[sequence] = None
            place += len(node.edge)

    def _step(self, node: _Node, tokens: Tokens, place: int) -> _Node:
        """The child that tokens[place:] goes through, made or cut to fit."""
        child = node.children.get(tokens[place])
        if child is None:
            child = node.children[tokens[place]] = _Node(tokens[place:])
            return child
        shared = _shared(child.edge, tokens, place)
        if shared < len(child.edge):
            upper = _Node(child.edge[:shared], {child.edge[shared]: child}, dict(child.holders))
            child.edge = child.edge[shared:]
            child = node.children[tokens[place]] = upper
        return child

    def remove(self, sequence: int) -> None:
        """Forget a sequence; one that is not here is no matter."""
        tokens = self._tokens.pop(sequence, None)
        if tokens is None:
            return
        node, place = self._root, 0
        while place < len(tokens):
            child = node.children[tokens[place]]
            place += len(child.edge)
            child.holders.pop(sequence, None)
            if not child.holders:
                del node.children[child.edge[0]]
                return
            node = child

    def prefixes(self, tokens: Tokens) -> Iterator[tuple[int, Collection[int]]]:
        """How far `tokens` is shared, and by whom: the longest first, then each shorter point where some part."""
        path: list[tuple[int, Collection[int]]] = []
        node, place = self._root, 0
        while place < len(tokens) and (child := node.children.get(tokens[place])) is not None:
            shared = _shared(child.edge, tokens, place)
            place += shared
            path.append((place, child.holders))
            if shared < len(child.edge):
                break
            node = child
        yield from reversed(path)


def _shared(edge: Tokens, tokens: Tokens, place: int) -> int:
    """How many tokens `edge` and `tokens[place:]` begin with alike: a run at a time, then halving."""
    longest = min(len(edge), len(tokens) - place)
    if edge[:longest] == tokens[place : place + longest]:
        return longest
    low, high = 0, longest
    while high - low > 1:
        middle = (low + high) // 2
        if edge[low:middle] == tokens[place + low : place + middle]:
            low = middle
        else:
            high = middle
    return low
