"""The best way through machines and layers, exactly: who takes which layers, in which order, and who is left out. Pure.

Dynamic programming over sets of machines (Held and Karp's way through cities, with the layers as a second axis):
the best way to cover the layers before `b` by the machines of a set, ending on one of them, is the best over that machine's
first layer `a`. Eight machines and 128 layers take some tenths of a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from mlx_ring.cluster.planner.stage_tables import Table


@dataclass(frozen=True, slots=True)
class Piece:
    """One machine's layers, `[first, end)`."""

    node: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Way:
    """Machines in the pipeline's order."""

    pieces: tuple[Piece, ...]
    cost: float
    with_node: tuple[float, ...] = ()
    """By machine: the cost of the best way that has it; infinite where there is none."""
    alone: tuple[float, ...] = ()
    """By machine: the cost of all layers there."""


class _Search:
    """Ways that begin on the machines of `begins`. Costs and hops add up, or the greatest cost counts, and hops add to it."""

    def __init__(self, tables: Sequence[Table], hops: Table, *, adds: bool, begins: Sequence[int]) -> None:
        self._tables = tables
        self._hops = hops
        self._adds = adds
        self._begins = begins
        self._best: dict[tuple[int, int], Table] = {}
        """By set of machines and the last of them: the cost of covering the layers before each."""
        self._from: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        """The last machine's first layer, and the machine before it."""

    def ways(self, stages: int) -> dict[tuple[int, int], float]:
        """Costs of covering all layers with so many machines, by their set and the last of them."""
        nodes = range(len(self._tables))
        for members in combinations(nodes, stages):
            for last in members:
                self._extend(sum(1 << node for node in members), last)
        return {
            key: float(costs[-1])
            for key, costs in self._best.items()
            if key[0].bit_count() == stages and np.isfinite(costs[-1])
        }

    def _extend(self, members: int, last: int) -> None:
        before = members & ~(1 << last)
        if not before:
            if last in self._begins:
                self._best[members, last] = self._tables[last][0]
                self._from[members, last] = (
                    np.zeros(len(self._tables[last]), np.intp),
                    np.full(len(self._tables[last]), -1),
                )
            return
        sources = [node for node in range(len(self._tables)) if (before, node) in self._best]
        if not sources:
            return
        arriving = np.stack([self._best[before, node] + self._hops[node, last] for node in sources])
        choice = arriving.argmin(axis=0)
        reached = np.take_along_axis(arriving, choice[None], axis=0)[0]
        table = self._tables[last]
        costs = reached[:, None] + table if self._adds else np.maximum(reached[:, None], table)
        first = costs.argmin(axis=0)
        self._best[members, last] = np.take_along_axis(costs, first[None], axis=0)[0]
        self._from[members, last] = (first, np.array(sources)[choice][first])

    def trace(self, members: int, last: int) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        end = len(self._tables[last]) - 1
        while end:
            first, before = (int(found[end]) for found in self._from[members, last])
            pieces.append(Piece(last, first, end))
            members, last, end = members & ~(1 << last), before, first
        return tuple(reversed(pieces))


@dataclass(frozen=True, slots=True)
class _Circle:
    """A way through a set of machines and back to the first."""

    search: _Search
    members: int
    last: int
    cost: float

    def pieces(self) -> tuple[Piece, ...]:
        return self.search.trace(self.members, self.last)


def _circles(
    tables: Sequence[Table], hops: Table, most: int, *, adds: bool, backs: Table | None = None
) -> Iterator[_Circle]:
    """The best ones of up to `most` machines, by their set, the last and, where hops back differ, the first of them.

    `backs` are what counts of the hops back, where that is not all.
    """
    nodes = range(len(tables))
    backs = hops if backs is None else backs
    starts = [nodes] if _all_alike(backs) else [(node,) for node in nodes]
    for begins in starts:
        search = _Search(tables, hops, adds=adds, begins=begins)
        for stages in range(1, most + 1):
            for (members, last), cost in search.ways(stages).items():
                total = cost + _back(backs, last, begins, stages)
                if np.isfinite(total):
                    yield _Circle(search, members, last, total)


def quickest_way(tables: Sequence[Table], hops: Table) -> Way | None:
    """The way on which one token gets around soonest, the hop from the last machine back to the first included.

    Args:
        tables: by machine, seconds of every stage that it could be.
        hops: seconds from machine to machine.
    """
    nodes = range(len(tables))
    best: tuple[float, tuple[Piece, ...]] = (np.inf, ())
    with_node = [np.inf] * len(tables)
    for circle in _circles(tables, hops, len(tables), adds=True):
        for node in nodes:
            if circle.members >> node & 1:
                with_node[node] = min(with_node[node], circle.cost)
        if circle.cost < best[0]:
            best = (circle.cost, circle.pieces())
    if not best[1]:
        return None
    alone = tuple(float(table[0, -1]) for table in tables)
    return Way(best[1], best[0], tuple(with_node), alone)


def _back(hops: Table, last: int, begins: Sequence[int], stages: int) -> float:
    """The hop that takes the token from the last machine to the first."""
    if stages == 1:
        return 0.0
    # Where ways begin anywhere, hops between different machines are alike.
    return float(hops[last, begins[0] if len(begins) == 1 else (last + 1) % len(hops)])


def steadiest_way(tables: Sequence[Table], hops: Table, stages: int) -> Way | None:
    """The way over so many machines whose slowest stage is quickest, and of those the quickest; its cost is that stage's."""
    walls = _walls(hops)
    bounds = [
        one.cost for one in _circles(tables, walls, stages, adds=False) if one.members.bit_count() == stages
    ]
    if not bounds:
        return None
    slowest = min(bounds)
    allowed = [np.where(table <= slowest * (1 + 1e-9), table, np.inf) for table in tables]
    quickest: _Circle | None = None
    # All hops back would take a search for each first machine, for the little by which they differ.
    for one in _circles(allowed, hops, stages, adds=True, backs=walls):
        if one.members.bit_count() == stages and (quickest is None or one.cost < quickest.cost):
            quickest = one
    return None if quickest is None else Way(quickest.pieces(), slowest)


def steadiest_costs(tables: Sequence[Table], hops: Table, most: int) -> dict[int, float]:
    """By set of up to `most` machines, as bits: the slowest stage where all of them serve, cut and ordered best."""
    found: dict[int, float] = {}
    for circle in _circles(tables, _walls(hops), most, adds=False):
        found[circle.members] = min(circle.cost, found.get(circle.members, np.inf))
    return found


def _walls(hops: Table) -> Table:
    """Nothing from machine to machine, and for ever where one does not reach the other."""
    return np.where(np.isfinite(hops), 0.0, np.inf)


def in_order(tables: Sequence[Table]) -> Way | None:
    """The cut over all machines, in the order given, whose slowest stage is quickest."""
    costs = tables[0][0]
    firsts: list[np.ndarray] = [np.zeros(len(costs), np.intp)]
    for table in tables[1:]:
        together = np.maximum(costs[:, None], table)
        firsts.append(together.argmin(axis=0))
        costs = together.min(axis=0)
    if not np.isfinite(costs[-1]):
        return None
    end, pieces = len(costs) - 1, list[Piece]()
    for node in reversed(range(len(tables))):
        first = int(firsts[node][end])
        pieces.append(Piece(node, first, end))
        end = first
    return Way(tuple(reversed(pieces)), float(costs[-1]))


def _all_alike(hops: Table) -> bool:
    apart = hops[~np.eye(len(hops), dtype=bool)]
    return not apart.size or bool(np.all(apart == apart[0]))
