"""Exact search for the best pipeline: which machines, in which order, with which layers. Pure.

It is dynamic programming over sets of machines (Held and Karp's algorithm, with the layers as a second axis). The best partition
of the layers before `b` over a set, ending on one of its machines, is the best over that machine's first layer `a`. Of machines
that are alike only the first ones are tried: their number counts, not which they are. So 64 alike machines have 64 sets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from mlx_ring.planner.group_search import KnownCuts, arriving_room, by_length, cut, once, paces_by_length
from mlx_ring.planner.rank_costs import Kinds, kinds_of, sets_by_size
from mlx_ring.planner.stage_costs import Table

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
        self._tables = tables
        self._by_length = once(lambda each: by_length(each[0])[-max(1, _longest(each[0])) :], tables)
        """Costs by number of layers, up to the largest number that is possible, and end."""
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
            costs[last if self._starts > 1 else 0] = self._tables[last][0]
            self._best[1 << last] = {last: costs}
            return
        sets = [bits for bits in self._sets[stages - 1] if not bits >> last & 1 and bits & earlier == earlier]
        if not sets:
            return
        reached = np.stack([self._arriving(before, last).min(axis=0) for before in sets])
        for before, costs in zip(sets, self._joined(reached, last), strict=True):
            self._best.setdefault(before | 1 << last, {})[last] = costs

    def _joined(self, costs: Table, last: int) -> Table:
        """Return the cost by set, first machine and end, after this machine's layers are added."""
        rows = costs.reshape(-1, costs.shape[-1])
        best = np.full(rows.shape, np.inf)
        possible = np.flatnonzero(np.isfinite(rows).any(axis=1))
        stages = self._by_length[last]
        for place in range(0, len(possible), _AT_ONCE):
            some = possible[place : place + _AT_ONCE]
            room = self._room[: len(some), : len(stages)]
            reached, before = arriving_room(rows.shape[-1], len(some))
            reached[:] = rows[some]
            best[some] = self._join(before[:, -len(stages) :], stages, out=room).min(axis=1)
        return best.reshape(costs.shape)

    def _arriving(self, before: int, last: int) -> Table:
        """Return the cost by machine of a set, first machine and layer, including the hop to the next machine."""
        return np.stack([costs + self._hops[node, last] for node, costs in self._best[before].items()])

    def trace(self, members: int, last: int, start: int) -> tuple[MachineLayers, ...]:
        pieces: list[MachineLayers] = []
        end = len(self._tables[last]) - 1
        while before := members & ~(1 << last):
            arriving = self._arriving(before, last)[:, start]
            first = int(self._join(arriving.min(axis=0), self._tables[last][:, end]).argmin())
            pieces.append(MachineLayers(last, first, end))
            members, last, end = before, list(self._best[before])[int(arriving[:, first].argmin())], first
        return (MachineLayers(last, 0, end), *reversed(pieces))


def _has_few_sets(kinds: Kinds) -> bool:
    return math.prod(len(kind) + 1 for kind in kinds) <= _MOST_SETS


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

    def search(self) -> Callable[[float], Partition | None]:
        """Return a function that finds the partition with the least sum whose stages and links keep a pace."""
        kinds = self.kinds()
        if not _has_few_sets(kinds):
            return _Chain(self.sums, self.paces, self.hops, self.link_paces, self.back).quickest

        def quickest(slowest_s: float) -> Partition | None:
            allowed = _within(slowest_s, self.sums, self.paces)
            hops = np.where(self.link_paces <= slowest_s, self.hops, np.inf)
            return _quickest(allowed, hops, self.back, kinds, self.stages)

        return quickest

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
    quickest = tables.search()
    close = _CLOSE if len(tables.sums) <= FEW_NODES else _LESS_CLOSE
    best: Partition | None = None
    bound = np.inf
    while bound > 0 and (found := quickest(bound)) is not None:
        slowest_s = tables.slowest_s(found.pieces)
        if best is None or found.cost + slowest_s < best.cost:
            best = Partition(found.pieces, found.cost + slowest_s)
        bound = min(float(np.nextafter(slowest_s, 0.0)), best.cost * (1 - close) - found.cost)
    return best


class _Chain:
    """Search for pipelines over some of many machines, ordered by speed, as the bound of the slowest pace falls."""

    def __init__(
        self, sums: Sequence[Table], paces: Sequence[Table], hops: Table, link_paces: Table, back: Table
    ) -> None:
        self._sums = once(lambda each: by_length(each[0]), sums)
        """Costs of the stages that keep the last bound."""
        self._paces = once(lambda each: by_length(each[0]), paces)
        both = once(lambda each: paces_by_length(each[0], each[1]), self._sums, self._paces)
        self._least, self._most = (np.stack(each) for each in zip(*both, strict=True))
        """Least and greatest pace of a possible stage, by machine and number of layers, all layers first."""
        self._hops, self._link_paces, self._back = hops, link_paces, back
        self._least_back = float(np.min(back, where=~np.eye(len(back), dtype=bool), initial=np.inf))

    def quickest(self, slowest_s: float = np.inf) -> Partition | None:
        """Return the partition with the least sum whose stages and links keep a pace; machines may be left out.

        The pace may not be slower than in the call before.
        """
        possible, count = self._least <= slowest_s, self._least.shape[1] + 1
        partly_slower = np.maximum.accumulate(possible, axis=1) & (self._most > slowest_s)
        for sums, paces, partly in zip(self._sums, self._paces, partly_slower, strict=True):
            if len(rows := np.flatnonzero(partly)):
                sums[rows] = np.where(paces[rows] <= slowest_s, sums[rows], np.inf)
        layer_s = np.stack([sums[-1] for sums in self._sums]).min(axis=1)
        order: list[int] = [node for node in np.argsort(layer_s, kind="stable") if possible[node].any()]
        between = np.ix_(order, order)
        hops = np.where(self._link_paces[between] <= slowest_s, self._hops[between], np.inf)
        costs, alone = np.full((2, len(order), count), np.inf)
        reached, before = arriving_room(count)
        room = np.empty((max(count, len(order)), count))
        tables: list[Table] = []
        for place, node in enumerate(order):
            longest = int(possible[node].argmax())
            table = self._sums[node][longest:]
            tables.append(table)
            alone[place, 1 : len(table) + 1] = np.diagonal(table[::-1], 1)
            costs[place] = alone[place]
            if place:
                np.add(costs[:place], hops[:place, place, None], out=room[:place]).min(axis=0, out=reached)
                joined = np.add(table, before[longest:], out=room[: len(table)]).min(axis=0)
                np.minimum(costs[place], joined, out=costs[place])
        best, pieces = (np.inf, 0), tuple[MachineLayers, ...]()
        for place in np.argsort(costs[:, -1], kind="stable"):
            cost = float(costs[place, -1])
            if not np.isfinite(cost) or cost > best[0]:
                break
            if cost < alone[place, -1] and cost + self._least_back > best[0]:
                continue
            found = _traced(order, tables, costs, hops, int(place))
            home_s = float(self._back[found[-1].node, found[0].node]) if len(found) > 1 else 0.0
            if np.isfinite(home_s) and (cost + home_s, place) < best:
                best, pieces = (cost + home_s, int(place)), found
        return Partition(pieces, best[0]) if pieces else None


def _traced(
    order: Sequence[int], tables: Sequence[Table], costs: Table, hops: Table, place: int
) -> tuple[MachineLayers, ...]:
    """Return the stages of the best partition of all layers that ends on a machine, by its place in the order."""
    pieces, end = list[MachineLayers](), costs.shape[1] - 1
    while True:
        column = tables[place][:, end]
        lengths = len(column)
        alone_s = column[lengths - end] if end <= lengths else np.inf
        first, last = 0, -1
        if place:
            arriving = costs[:place] + hops[:place, place, None]
            reached, before = arriving_room(costs.shape[1])
            reached[:] = arriving.min(axis=0)
            joined = column + before[-lengths:, end]
            shortest = int(joined.argmin())
            if joined[shortest] < alone_s:
                first = end - lengths + shortest
                last = int(arriving[:, first].argmin())
        pieces.append(MachineLayers(int(order[place]), first, end))
        if last < 0:
            return tuple(reversed(pieces))
        place, end = last, first


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
        return _Chain(free, free, walls, walls, walls).quickest()
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
