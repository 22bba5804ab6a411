"""Exact search for the best pipeline: which machines, in which order, with which layers. Pure.

It is dynamic programming over sets of machines (Held and Karp's algorithm, with the layers as a second axis). The best partition
of the layers before `b` over a set, ending on one of its machines, is the best over that machine's first layer `a`. Of machines
that are alike only the first ones are tried: their number counts, not which they are. So 64 alike machines have 64 sets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np

from mlx_ring.planner.group_search import KnownCuts, cut
from mlx_ring.planner.stage_costs import Table

_Made = TypeVar("_Made")

MOST_NODES = 8
"""Number of machines up to which searches are exact, whatever the machines are."""
_MOST_SETS = 1 << MOST_NODES
"""Number of sets of machines up to which searches are exact, counted without those that differ by alike machines only."""
FEW_NODES, _CLOSE, _LESS_CLOSE = 5, 1e-3, 1e-2
"""Number of machines up to which searches are within a thousandth of the best; above it, within a hundredth."""
_AT_ONCE = 8
"""Number of rows that are joined with a table at once, so that the result fits into the processor's cache."""


@dataclass(frozen=True, slots=True)
class MachineLayers:
    """Layers `[first, end)` of one machine."""

    node: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Partition:
    """Machines in the pipeline's order, with their layers."""

    pieces: tuple[MachineLayers, ...]
    cost: float


class _Search:
    """Costs of partitions, as the sum of all costs and hops, or as the greatest cost."""

    def __init__(
        self, tables: Sequence[Table], hops: Table, kinds: Kinds, *, adds: bool, starts_apart: bool
    ) -> None:
        """Prepare the search; `starts_apart` distinguishes partitions by their first machine, because hops back differ."""
        self._sets = sets_by_size(kinds)
        self._earlier = [0] * len(tables)
        """Bit of the machine before each machine among those that are alike; 0 for the first."""
        for kind in kinds:
            for one, other in pairwise(kind):
                self._earlier[other] = 1 << one
        self._nodes = range(len(tables))
        # By end and first layer, so that the least over first layers is looked for in neighbouring numbers.
        self._tables = once(lambda each: np.ascontiguousarray(each[0].T), tables)
        self._hops = hops
        self._join = np.add if adds else np.maximum
        self._starts = len(tables) if starts_apart else 1
        self._room = np.empty((_AT_ONCE, *tables[0].shape))
        """Reused buffer: allocating it takes longer than filling it."""
        self._best: dict[int, dict[int, Table]] = {}
        """Cost of covering the layers before each layer, by set of machines, last machine and first machine."""

    def partitions(self, stages: int) -> Iterator[tuple[int, int, int, float]]:
        """Yield the set, last machine, first machine and cost of every partition of all layers over `stages` machines.

        Call it for one machine first, then for two, and so on.
        """
        for last in self._nodes:
            self._extend(stages, last)
        for members in self._sets[stages]:
            for last, costs in self._best[members].items():
                for start in np.flatnonzero(np.isfinite(costs[:, -1])):
                    yield members, last, int(start), float(costs[start, -1])

    def _extend(self, stages: int, last: int) -> None:
        """Extend the partitions over one machine fewer by this last machine."""
        earlier = self._earlier[last]
        if stages == 1:
            if earlier:
                return
            costs = np.full((self._starts, len(self._tables[last])), np.inf)
            costs[last if self._starts > 1 else 0] = self._tables[last][:, 0]
            self._best[1 << last] = {last: costs}
            return
        sets = [bits for bits in self._sets[stages - 1] if not bits >> last & 1 and bits & earlier == earlier]
        if not sets:
            return
        reached = np.stack([self._arriving(before, last).min(axis=0) for before in sets])
        for before, costs in zip(sets, self._joined(reached, last), strict=True):
            self._best.setdefault(before | 1 << last, {})[last] = costs

    def _joined(self, reached: Table, last: int) -> Table:
        """Return the cost by set, first machine and end, after this machine's layers are added."""
        rows = reached.reshape(-1, reached.shape[-1])
        best = np.full(rows.shape, np.inf)
        possible = np.flatnonzero(np.isfinite(rows).any(axis=1))
        for place in range(0, len(possible), _AT_ONCE):
            some = possible[place : place + _AT_ONCE]
            room = self._room[: len(some)]
            best[some] = self._join(rows[some][:, None], self._tables[last], out=room).min(axis=2)
        return best.reshape(reached.shape)

    def _arriving(self, before: int, last: int) -> Table:
        """Return the cost by machine of a set, first machine and layer, including the hop to the next machine."""
        return np.stack([costs + self._hops[node, last] for node, costs in self._best[before].items()])

    def trace(self, members: int, last: int, start: int) -> tuple[MachineLayers, ...]:
        pieces: list[MachineLayers] = []
        end = len(self._tables[last]) - 1
        while before := members & ~(1 << last):
            arriving = self._arriving(before, last)[:, start]
            first = int(self._join(arriving.min(axis=0), self._tables[last][end]).argmin())
            pieces.append(MachineLayers(last, first, end))
            members, last, end = before, list(self._best[before])[int(arriving[:, first].argmin())], first
        return (MachineLayers(last, 0, end), *reversed(pieces))


Kinds = Sequence[Sequence[int]]
"""Machines by their places, in lists of those that are alike."""


def kinds_of(keys: Sequence[Hashable], *between: Table) -> Kinds:
    """Return the lists of machines that are alike: two of them can be exchanged without changing any cost.

    Args:
        keys: what makes a machine different, by machine.
        between: costs from machine to machine.
    """
    kinds: dict[Hashable, list[list[int]]] = {}
    for place, key in enumerate(keys):
        lists = kinds.setdefault(key, [])
        same = next((kind for kind in lists if all(_is_alike(kind[0], place, one) for one in between)), None)
        if same is None:
            lists.append([place])
        else:
            same.append(place)
    return sorted(kind for lists in kinds.values() for kind in lists)


def _is_alike(one: int, other: int, costs: Table) -> bool:
    """Return True if the costs stay when the two machines are exchanged."""
    others = np.ones(len(costs), bool)
    others[[one, other]] = False
    return bool(
        costs[one, other] == costs[other, one]
        and np.array_equal(costs[one, others], costs[other, others])
        and np.array_equal(costs[others, one], costs[others, other])
    )


def sets_by_size(kinds: Kinds) -> list[list[int]]:
    """Return all sets of machines by their number, as bits; of machines that are alike, only the first ones."""
    found: list[list[int]] = [[0]]
    for kind in kinds:
        first_ones = [0, *accumulate(1 << place for place in kind)]
        longer: list[list[int]] = [[] for _ in range(len(found) + len(kind))]
        for size, sets in enumerate(found):
            for more, bits in enumerate(first_ones):
                longer[size + more] += [members | bits for members in sets]
        found = longer
    return found


def _has_few_sets(kinds: Kinds) -> bool:
    return math.prod(len(kind) + 1 for kind in kinds) <= _MOST_SETS


def once(make: Callable[[tuple[Table, ...]], _Made], *tables: Sequence[Table]) -> list[_Made]:
    """Return what is made of each machine's tables, once for machines that have the same objects."""
    each: list[tuple[Table, ...]] = list(zip(*tables, strict=True))
    distinct = {tuple(map(id, one)): one for one in each}
    made = {key: make(one) for key, one in distinct.items()}
    return [made[tuple(map(id, one))] for one in each]


def _within(slowest_s: float, tables: Sequence[Table], paces: Sequence[Table]) -> list[Table]:
    """Return the tables, infinite where the pace is slower."""
    return once(lambda each: np.where(each[1] <= slowest_s, each[0], np.inf), tables, paces)


def _by_tables(tables: Sequence[Sequence[Table]], *between: Table) -> Kinds:
    """Return the machines in lists of those with the same tables, of one or several sorts, and costs to others."""
    return kinds_of(once(lambda each: tuple(table.tobytes() for table in each), *tables), *between)


@dataclass(frozen=True, slots=True)
class _Circle:
    """A path through a set of machines and back to the first."""

    search: _Search
    members: int
    last: int
    start: int
    cost: float

    def pieces(self) -> tuple[MachineLayers, ...]:
        return self.search.trace(self.members, self.last, self.start)


def _circles(
    tables: Sequence[Table], hops: Table, back: Table, kinds: Kinds, most: int, *, adds: bool
) -> Iterator[_Circle]:
    """Yield the best circles of up to `most` machines by set, last machine and, if hops back differ, first machine."""
    apart = not _all_alike(back)
    search = _Search(tables, hops, kinds, adds=adds, starts_apart=apart)
    for stages in range(1, most + 1):
        for members, last, start, cost in search.partitions(stages):
            # Without a fixed first machine, all hops back between different machines cost the same.
            back_s = float(back[last, start if apart else (last + 1) % len(back)]) if stages > 1 else 0.0
            if np.isfinite(cost + back_s):
                yield _Circle(search, members, last, start, cost + back_s)


def quickest_partition(
    tables: Sequence[Table],
    hops: Table,
    paces: Sequence[Table] | None = None,
    *,
    stages: int | None = None,
    least: float = 0.0,
    back: Table | None = None,
) -> Partition | None:
    """Return the partition with the shortest round of one token, including the hop from the last machine to the first.

    Args:
        tables: seconds of every possible stage, by machine.
        hops: seconds from machine to machine.
        paces: minimum seconds between two tokens of every possible stage, by machine. The best partition is then found to
            within a thousandth. None uses the stages' own seconds.
        stages: number of machines; None chooses the best.
        least: known lower bound of the cost.
        back: seconds from machine to machine on the way back to the first; None if hops are the same there.
    """
    back = hops if back is None else back
    kinds = _by_tables([tables, tables if paces is None else paces], hops, back)
    partition = _quickest(tables, hops, back, kinds, stages)
    if partition is None or paces is None or all(map(np.array_equal, tables, paces)):
        return partition
    best = _paced(partition, paces)
    # Lower bound: the quickest of all; if those within a bound take longer than the bound, the bound itself.
    low = max(partition.cost, least)
    bound = low * (1 + _CLOSE / 2)
    while best.cost > low * (1 + _CLOSE):
        found = _quickest(_within(bound, tables, paces), hops, back, kinds, stages)
        if found is not None and (paced := _paced(found, paces)).cost < best.cost:
            best = paced
        if found is None or found.cost > bound:
            low = bound
        bound = (low + best.cost) / 2
    return best


def _paced(partition: Partition, paces: Sequence[Table]) -> Partition:
    """Return the partition with the cost of its slowest pace, if that is higher."""
    slowest = max(float(paces[piece.node][piece.first, piece.end]) for piece in partition.pieces)
    return Partition(partition.pieces, max(partition.cost, slowest))


def _quickest(
    tables: Sequence[Table], hops: Table, back: Table, kinds: Kinds, stages: int | None = None
) -> Partition | None:
    most = stages or min(len(tables), len(tables[0]) - 1)
    circles = _circles(tables, hops, back, kinds, most, adds=True)
    possible = (circle for circle in circles if stages is None or circle.members.bit_count() == stages)
    best = min(possible, key=lambda circle: circle.cost, default=None)
    return None if best is None else Partition(best.pieces(), best.cost)


def steadiest_costs(tables: Sequence[Table], hops: Table, most: int) -> dict[int, float]:
    """Return the slowest stage of the best split by set of up to `most` machines, as bits; for `MOST_NODES` at most."""
    walls = _walls(hops)
    kinds = _by_tables([tables], walls)
    found: dict[int, float] = {}
    for circle in _circles(tables, walls, walls, kinds, most, adds=False):
        found[circle.members] = min(circle.cost, found.get(circle.members, np.inf))
    every = (members for sets in sets_by_size([[place] for place in range(len(tables))]) for members in sets)
    return {members: found[first] for members in every if (first := _first_ones(members, kinds)) in found}


def _first_ones(members: int, kinds: Kinds) -> int:
    """Return the set with as many machines of each kind, the first ones."""
    counts = (sum(members >> place & 1 for place in kind) for kind in kinds)
    return sum(1 << place for kind, count in zip(kinds, counts, strict=True) for place in kind[:count])


@dataclass(frozen=True, slots=True)
class RequestTables:
    """Parts of a request's time, in seconds: a sum over stages and hops, and the slowest pace of a stage or link."""

    sums: list[Table]
    hops: Table
    back: Table
    paces: list[Table]
    link_paces: Table
    stages: int | None = None
    """Number of stages; None for any."""

    def kinds(self) -> Kinds:
        """Return the machines, in lists of those that are alike."""
        return _by_tables([self.sums, self.paces], self.hops, self.back, self.link_paces)

    @property
    def is_exact(self) -> bool:
        """True if all sets of machines are searched."""
        return _has_few_sets(self.kinds())

    def fastest(self, number: int) -> list[int]:
        """Return the places of the machines that compute a layer soonest."""
        return sorted(range(len(self.sums)), key=lambda place: _layer_s(self.sums[place]))[:number]

    def among(self, places: Sequence[int]) -> RequestTables:
        """Return the tables of some of the machines."""
        between = np.ix_(places, places)
        return RequestTables(
            [self.sums[place] for place in places],
            self.hops[between],
            self.back[between],
            [self.paces[place] for place in places],
            self.link_paces[between],
        )

    def quickest(self, kinds: Kinds, slowest_s: float = np.inf) -> Partition | None:
        """Return the partition with the least sum, whose stages and links all keep the pace `slowest_s`."""
        allowed = _within(slowest_s, self.sums, self.paces)
        hops = np.where(self.link_paces <= slowest_s, self.hops, np.inf)
        if not _has_few_sets(kinds):
            return _chain(allowed, hops, self.back)
        return _quickest(allowed, hops, self.back, kinds, self.stages)

    def slowest_s(self, pieces: Sequence[MachineLayers]) -> float:
        """Return the slowest pace of a pipeline's stages and links."""
        stages = [float(self.paces[piece.node][piece.first, piece.end]) for piece in pieces]
        links = [float(self.link_paces[one.node, other.node]) for one, other in pairwise(pieces)]
        return max(stages + links)


def quickest_request(tables: RequestTables, *, among: Sequence[int] = ()) -> Partition | None:
    """Return the partition that answers a request soonest, over all machines or `among` some.

    It is within a thousandth of the best for up to five machines, and within a hundredth for up to `MOST_NODES`.

    The bound of the slowest pace falls. The least sum rises with it, so a better pipeline must keep a pace below what the
    best time leaves beside that sum.
    """
    if among:
        found = quickest_request(tables.among(among))
        pieces = () if found is None else (replace(piece, node=among[piece.node]) for piece in found.pieces)
        return found and Partition(tuple(pieces), found.cost)
    kinds = tables.kinds()
    close = _CLOSE if len(tables.sums) <= FEW_NODES else _LESS_CLOSE
    best: Partition | None = None
    bound = np.inf
    while bound > 0 and (found := tables.quickest(kinds, bound)) is not None:
        slowest_s = tables.slowest_s(found.pieces)
        if best is None or found.cost + slowest_s < best.cost:
            best = Partition(found.pieces, found.cost + slowest_s)
        bound = min(float(np.nextafter(slowest_s, 0.0)), best.cost * (1 - close) - found.cost)
    return best


def _chain(tables: Sequence[Table], hops: Table, back: Table) -> Partition | None:
    """Return the quickest partition over some of many machines, ordered by speed; machines may be left out."""
    order = sorted(range(len(tables)), key=lambda node: _layer_s(tables[node]))
    count = len(tables[0])
    costs = np.full((len(order), count), np.inf)
    before, firsts = np.full((len(order), count), -1), np.zeros((len(order), count), np.intp)
    for place, node in enumerate(order):
        costs[place] = tables[node][0]
        if not place:
            continue
        arriving = costs[:place] + hops[order[:place], node][:, None]
        reached, last = arriving.min(axis=0), arriving.argmin(axis=0)
        joined = reached[:, None] + tables[node]
        joined_first = joined.argmin(axis=0)
        joined_s = joined.min(axis=0)
        better = joined_s < costs[place]
        costs[place] = np.where(better, joined_s, costs[place])
        firsts[place] = np.where(better, joined_first, 0)
        before[place] = np.where(better, last[joined_first], -1)
    best: Partition | None = None
    for place in range(len(order)):
        if not np.isfinite(costs[place, -1]):
            continue
        pieces, at, end = list[MachineLayers](), place, count - 1
        while at >= 0:
            first = int(firsts[at, end])
            pieces.append(MachineLayers(order[at], first, end))
            at, end = int(before[at, end]), first
        pieces.reverse()
        home_s = float(back[pieces[-1].node, pieces[0].node]) if len(pieces) > 1 else 0.0
        cost = float(costs[place, -1]) + home_s
        if np.isfinite(cost) and (best is None or cost < best.cost):
            best = Partition(tuple(pieces), cost)
    return best


def _layer_s(table: Table) -> float:
    """Return the seconds of the fastest single layer; infinite if none fits."""
    return float(np.diagonal(table, 1).min())


def any_partition(tables: Sequence[Table], hops: Table) -> Partition | None:
    """Return any partition; None if there is none, or if none is found over many unlike machines."""
    free, walls = once(lambda each: _walls(each[0]), tables), _walls(hops)
    if sum(map(_longest, free)) < len(free[0]) - 1:
        return None
    if np.isfinite(walls).all() and (partition := in_order(free)) is not None:
        return partition
    kinds = _by_tables([free], walls)
    if not _has_few_sets(kinds):
        return _chain(free, walls, walls)
    most = min(len(free), len(free[0]) - 1)
    circle = next(_circles(free, walls, walls, kinds, most, adds=True), None)
    return None if circle is None else Partition(circle.pieces(), circle.cost)


def _longest(table: Table) -> int:
    """Return the largest number of layers that a stage can have."""
    firsts, ends = np.nonzero(np.isfinite(table))
    return int(np.max(ends - firsts, initial=0))


def _walls(hops: Table) -> Table:
    """Return hops that cost nothing, and infinity where one machine does not reach the other."""
    return np.where(np.isfinite(hops), 0.0, np.inf)


def in_order(tables: Sequence[Table], known: KnownCuts | None = None) -> Partition | None:
    """Return the split over all machines, in the given order, with the fastest slowest stage; `known` as for `cut`."""
    found = cut(tables, adds=False, known=known)
    if found is None:
        return None
    pieces = tuple(MachineLayers(node, *ends) for node, ends in enumerate(found))
    return Partition(pieces, max(float(tables[node][ends]) for node, ends in enumerate(found)))


def _all_alike(hops: Table) -> bool:
    apart = hops[~np.eye(len(hops), dtype=bool)]
    return not apart.size or bool(np.all(apart == apart[0]))
