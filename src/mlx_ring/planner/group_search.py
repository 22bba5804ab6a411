"""Search for the best pipeline of groups of machines: which machines compute together, in which order. Pure.

Dynamic programming over sets of machines, as in `search`, where a stage may be any group. A partition covers the
layers before `b` over a set, and ends on a group with a certain machine as rank 0. The best one is the best over that
group and its first layer.
All groups of eight machines make some 6,000 steps, so layers are taken in blocks. The chosen order is then split exactly.

The search knows no shares that depend on a stage's memory, and adds a prompt's time up roughly. So what it finds is improved
by small changes: `Changes`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, pairwise, permutations
from typing import TypeVar

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mlx_ring.planner.plan import proportional_counts
from mlx_ring.planner.stage_costs import Table
from mlx_ring.planner.tensor_groups import Ends

_Made = TypeVar("_Made")
_BLOCKS = 32
_BETWEEN = (0.0, 0.06, 0.13, 0.22, 0.35, 0.5, 0.7)
"""Bounds of a division's pace that are tried, between the most even division and the one without a bound."""
_MOST_CHANGES = 6000
"""Number of changed pipelines that are tried."""


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """Candidate groups, in the pipeline's order."""

    candidates: tuple[int, ...]
    ends: tuple[int, ...]
    """Number of each stage's end among the ends at which stages may be cut."""
    cost: float


def block_ends(layers: int) -> Ends:
    """Return the layers at which stages may be cut: every layer, or the ends of blocks."""
    blocks = min(layers, _BLOCKS)
    return np.unique(np.round(np.linspace(0, layers, blocks + 1)).astype(np.intp))


class GroupSearch:
    """Search over candidate groups, given by number; a single machine is one too."""

    def __init__(
        self, members: Sequence[int], tables: Sequence[Table], hops: Table, back: Table, *, adds: bool
    ) -> None:
        """Prepare the search.

        Args:
            members: machines of each candidate, as bits; its rank 0 is the lowest.
            tables: seconds of a stage by its first and last end, for each candidate.
            hops: seconds from machine to candidate.
            back: seconds from machine to machine.
            adds: True to add the stages' seconds up, False to take the greatest.
        """
        self._members = np.array(members)
        self._lowest = [(bits & -bits).bit_length() - 1 for bits in members]
        self._tables = np.stack(tables)
        self._hops, self._back = hops, back
        self._join = np.add if adds else np.maximum
        self._everyone = (1 << len(back)) - 1
        machines, ends = len(back), self._tables.shape[1]
        # By set, machine of the last stage's rank 0, that of the first's, and end.
        self._best = np.full((self._everyone + 1, machines, machines, ends), np.inf)
        for candidate, lowest in enumerate(self._lowest):
            first = self._best[members[candidate], lowest, lowest]
            np.minimum(first, self._tables[candidate][0], out=first)
        self._fill()

    def _fill(self) -> None:
        for rest in range(1, self._everyone):
            starts = np.array([bit for bit in range(len(self._back)) if rest >> bit & 1], dtype=np.intp)
            apart = np.flatnonzero((self._members & rest) == 0)
            if not apart.size or not np.isfinite(self._best[rest]).any():
                continue
            for candidate, costs in zip(apart, self._extended(rest, starts, apart), strict=True):
                place = self._best[rest | int(self._members[candidate]), self._lowest[candidate]]
                place[starts] = np.minimum(place[starts], costs)

    def _arriving(self, rest: int, starts: Ends, apart: Ends) -> Table:
        """Return the cost by candidate, last machine, first machine and end, including the hop to the candidate."""
        # Any machine of the set may be the first or the last.
        reached = self._best[rest][starts][:, starts]
        return reached[None] + self._hops[starts][:, apart].T[:, :, None, None]

    def _extended(self, rest: int, starts: Ends, apart: Ends) -> Table:
        reached = self._arriving(rest, starts, apart).min(axis=1)
        return self._join(reached[:, :, :, None], self._tables[apart][:, None]).min(axis=2)

    def orders(self, *, of_all: bool = False) -> list[GroupOrder]:
        """Return the best order of two or more stages for each set of machines; with `of_all` only the set of all."""
        sets = [self._everyone] if of_all else range(1, self._everyone + 1)
        found = [order for bits in sets if (order := self._order(bits)) is not None]
        return sorted(found, key=lambda order: order.cost)

    def _order(self, bits: int) -> GroupOrder | None:
        closed = self._best[bits, :, :, -1] + self._back
        last, start = np.unravel_index(int(closed.argmin()), closed.shape)
        cost = float(closed[last, start])
        if not np.isfinite(cost):
            return None
        candidates, ends = self._trace(bits, int(last), int(start))
        return GroupOrder(candidates, ends, cost) if len(candidates) > 1 else None

    def _trace(self, bits: int, last: int, start: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the candidates of an order, and the end of each."""
        end, candidates, ends = self._tables.shape[1] - 1, list[int](), list[int]()
        while True:
            target = float(self._best[bits, last, start, end])
            step = self._step_to(bits, last, start, end, target)
            if step is None:
                break
            candidate, before, first = step
            candidates.append(candidate)
            ends.append(end)
            end = first
            if before < 0:
                break
            bits, last = bits & ~int(self._members[candidate]), before
        return tuple(candidates[::-1]), tuple(ends[::-1])

    def _step_to(
        self, bits: int, last: int, start: int, end: int, target: float
    ) -> tuple[int, int, int] | None:
        """Return the candidate that gives an order its cost, the last machine before it (-1 for none), and its first layer."""
        for candidate, own in enumerate(self._members):
            if self._lowest[candidate] != last or int(own) & ~bits:
                continue
            rest = bits & ~int(own)
            if not rest:
                if start == last and self._tables[candidate][0, end] == target:
                    return candidate, -1, 0
                continue
            arriving = self._best[rest, :, start] + self._hops[:, candidate, None]
            joined = self._join(arriving.min(axis=0), self._tables[candidate][:, end])
            first = int(joined.argmin())
            if joined[first] == target:
                return candidate, int(arriving[:, first].argmin()), first
        return None


KnownCuts = dict[tuple[int, ...], tuple[Table, Ends]]
"""Cost by end, and first layer of the last stage, of the best cut of stages in order, by the objects of their tables."""


def cut(
    tables: Sequence[Table], *, adds: bool, known: KnownCuts | None = None
) -> list[tuple[int, int]] | None:
    """Return the layers of stages in this order with the smallest sum or maximum; None if memory does not suffice.

    Calls with the same objects as tables may share what is `known` of the first stages.
    """
    join, reached = np.add if adds else np.maximum, {} if known is None else known
    costs, key, firsts = tables[0][0], (id(tables[0]),), list[Ends]()
    for table in tables[1:]:
        key = (*key, id(table))
        if key not in reached:
            together = join(costs[:, None], table)
            best = together.argmin(axis=0)
            reached[key] = together[best, np.arange(len(best))], best
        costs, first = reached[key]
        firsts.append(first)
    if not np.isfinite(costs[-1]):
        return None
    end, found = len(costs) - 1, list[tuple[int, int]]()
    for before in (*reversed(firsts), None):
        first = 0 if before is None else int(before[end])
        found.append((first, end))
        end = first
    return found[::-1]


def divided(sums: Sequence[Table], paces: Sequence[Table]) -> list[tuple[int, int]] | None:
    """Return the division with about the least sum and slowest pace together; None if none fits."""
    evenly, freely = cut(paces, adds=False), cut(sums, adds=True)
    if evenly is None or freely is None:
        return None

    def slowest_s(division: Sequence[tuple[int, int]]) -> float:
        return max(float(pace[piece]) for pace, piece in zip(paces, division, strict=True))

    def total_s(division: Sequence[tuple[int, int]]) -> float:
        return sum(float(each[piece]) for each, piece in zip(sums, division, strict=True))

    low, high = slowest_s(evenly), slowest_s(freely)
    found = [evenly, freely]
    for part in _BETWEEN if high > low else ():
        bound = low * (high / low) ** part if low else high * part
        allowed = [np.where(pace <= bound, each, np.inf) for each, pace in zip(sums, paces, strict=True)]
        found.append(cut(allowed, adds=True) or evenly)
    return min(found, key=lambda division: total_s(division) + slowest_s(division))


def shortest_pace(layers: int, paces: Sequence[float], rooms: Sequence[float]) -> float:
    """Return the pace at which all machines just compute all layers, if layers were divisible.

    Args:
        layers: number of layers.
        paces: seconds of a layer, by machine.
        rooms: layers that fit into the memory, by machine.
    """
    # Machines are full one after the other, and the rest share the layers by their speed.
    left, speed = float(layers), sum(1 / pace for pace in paces if pace)
    left -= sum(room for pace, room in zip(paces, rooms, strict=True) if not pace)
    for full_s, pace, room in sorted(
        (pace * room, pace, room) for pace, room in zip(paces, rooms, strict=True) if pace
    ):
        if left <= full_s * speed:
            break
        left, speed = left - room, speed - 1 / pace
    else:
        return max((pace * room for pace, room in zip(paces, rooms, strict=True)), default=0.0)
    return max(0.0, left / speed)


SizedGroups = tuple[tuple[tuple[int, ...], int], ...]
"""Machines and number of layers of each stage, in the pipeline's order."""


def even_divisions(
    places: Sequence[int], room: Sequence[int], layers: int, most_ranks: int
) -> Iterator[SizedGroups]:
    """Yield stages of equally many machines, for each number of stages and machines, and those of all machines.

    Args:
        places: machines in the order in which they are divided.
        room: memory of each machine, by which stages get layers.
        layers: number of layers of the model.
        most_ranks: number of machines that a stage may have.
    """
    numbers = range(1, len(places) + 1)
    sizes = [[size] * stages for size in numbers for stages in numbers if size * stages < len(places)]
    sizes += [_evenly(len(places), stages) for stages in numbers]
    for each in sizes:
        if len(each) <= layers and max(each) <= most_ranks:
            ends = accumulate(each, initial=0)
            groups = [tuple(sorted(places[first:end])) for first, end in pairwise(ends)]
            rooms = [sum(room[place] for place in one) for one in groups]
            yield tuple(zip(groups, proportional_counts(layers, rooms), strict=True))


def _evenly(number: int, parts: int) -> list[int]:
    """Return the sizes of parts that differ by one at most."""
    return [number * (part + 1) // parts - number * part // parts for part in range(parts)]


class Changes:
    """Search from given pipelines by small changes.

    The cheapest pipeline that was found is changed next, until several in a row lead to nothing better.
    """

    def __init__(
        self,
        starts: Iterable[SizedGroups],
        cost_of: Callable[[SizedGroups, float], float],
        kind_of: Mapping[int, int],
        *,
        of_all: bool,
        patience: int,
    ) -> None:
        """Prepare the search.

        Args:
            starts: pipelines to begin with.
            cost_of: function that returns a pipeline's cost, given the least one so far.
            kind_of: number for each machine, the same for those that are alike.
            of_all: True for pipelines of all machines only.
            patience: number of pipelines that are changed without finding a better one.
        """
        self._cost_of = cost_of
        self._kind_of = kind_of
        self._of_all = of_all
        self._patience = patience
        self._known: set[Hashable] = set()
        self._unchanged: list[tuple[float, SizedGroups]] = []
        self.least = float("inf")
        """Least cost of all pipelines that were found."""
        self._best: tuple[float, SizedGroups] = (float("inf"), ())
        self._add(starts)

    @property
    def best(self) -> SizedGroups:
        """Cheapest pipeline of two or more stages with a group of several machines; empty if there is none."""
        return self._best[1]

    def search(self, enough: float = 0.0) -> None:
        """Change pipelines, until one costs less than `enough`."""
        left = self._patience
        while self._unchanged and left > 0 and len(self._known) < _MOST_CHANGES and self.least >= enough:
            before = self.least
            self._add(changed(heappop(self._unchanged)[1], len(self._kind_of)))
            left = self._patience if self.least < before else left - 1

    def _add(self, pipelines: Iterable[SizedGroups]) -> None:
        for stages in pipelines:
            # Which of several alike machines a stage has makes no difference.
            key = tuple((tuple(sorted(self._kind_of[node] for node in one)), count) for one, count in stages)
            if key in self._known or (
                self._of_all and sum(len(one) for one, _ in stages) < len(self._kind_of)
            ):
                continue
            self._known.add(key)
            cost = self._cost_of(stages, self.least)
            heappush(self._unchanged, (cost, stages))
            self.least = min(self.least, cost)
            if cost < self._best[0] and len(stages) > 1 and any(len(one) > 1 for one, _ in stages):
                self._best = cost, stages


def changed(stages: SizedGroups, machines: int) -> Iterator[SizedGroups]:
    """Yield the pipelines that differ by one small change: a few layers, one machine, or the place of one stage."""
    yield from _with_moved_layers(stages)
    yield from _with_joined_stages(stages)
    yield from _with_moved_machines(stages, machines)
    yield from _with_exchanged_machines(stages, machines)
    for one, other in permutations(range(len(stages)), 2):
        yield _inserted(_without(stages, one), other, stages[one])
        if one < other:
            swapped = list(stages)
            # The groups change places, and the layers stay.
            swapped[one] = stages[other][0], stages[one][1]
            swapped[other] = stages[one][0], stages[other][1]
            yield tuple(swapped)


def _without(stages: SizedGroups, place: int) -> SizedGroups:
    return stages[:place] + stages[place + 1 :]


def _inserted(stages: SizedGroups, place: int, stage: tuple[tuple[int, ...], int]) -> SizedGroups:
    return (*stages[:place], stage, *stages[place:])


def _replaced(stages: SizedGroups, place: int, members: Sequence[int], layers: int) -> SizedGroups:
    return (*stages[:place], (tuple(sorted(members)), layers), *stages[place + 1 :])


def _with_moved_layers(stages: SizedGroups) -> Iterator[SizedGroups]:
    neighbours = list(pairwise(range(len(stages))))
    for one, other in [*neighbours, *((other, one) for one, other in neighbours)]:
        (members, layers), (others, more) = stages[one], stages[other]
        step = 1
        while step < layers:
            moved = _replaced(stages, one, members, layers - step)
            yield _replaced(moved, other, others, more + step)
            step *= 2
        # The neighbour gets all of them.
        yield _without(_replaced(stages, other, others, more + layers), one)


def _with_joined_stages(stages: SizedGroups) -> Iterator[SizedGroups]:
    for one, other in permutations(range(len(stages)), 2):
        (members, layers), (others, more) = stages[one], stages[other]
        yield _without(_replaced(stages, other, members + others, layers + more), one)


def _with_moved_machines(stages: SizedGroups, machines: int) -> Iterator[SizedGroups]:
    """Yield the pipelines with one machine in another stage, in one of its own, or out."""
    home = {node: place for place, (members, _) in enumerate(stages) for node in members}
    for node in range(machines):
        place = home.get(node)
        if place is None:
            rest = stages
        else:
            members, layers = stages[place]
            if len(members) == 1:
                continue
            rest = _replaced(stages, place, [each for each in members if each != node], layers)
            yield rest
        for other, (others, more) in enumerate(rest):
            if other != place:
                yield _replaced(rest, other, (*others, node), more)
            if more > 1:
                shorter = _replaced(rest, other, others, more - more // 2)
                yield _inserted(shorter, other, ((node,), more // 2))
                yield _inserted(shorter, other + 1, ((node,), more // 2))


def _with_exchanged_machines(stages: SizedGroups, machines: int) -> Iterator[SizedGroups]:
    home = {node: place for place, (members, _) in enumerate(stages) for node in members}
    for one, other in permutations(range(machines), 2):
        here, there = home.get(one), home.get(other)
        if here is None or here == there or (there is not None and one > other):
            continue
        members, layers = stages[here]
        exchanged = _replaced(stages, here, [other if node == one else node for node in members], layers)
        if there is not None:
            members, layers = stages[there]
            exchanged = _replaced(
                exchanged, there, [one if node == other else node for node in members], layers
            )
        yield exchanged


# ---- tables of a search


def once(make: Callable[[tuple[Table, ...]], _Made], *tables: Sequence[Table]) -> list[_Made]:
    """Return what is made of each machine's tables, once for machines that have the same objects."""
    each: list[tuple[Table, ...]] = list(zip(*tables, strict=True))
    distinct = {tuple(map(id, one)): one for one in each}
    made = {key: make(one) for key, one in distinct.items()}
    return [made[tuple(map(id, one))] for one in each]


def by_length(table: Table) -> Table:
    """Return the costs of stages by number of layers, all layers first, and by end: `(layers, layers + 1)`.

    A bound that excludes long stages then leaves the last rows.
    """
    ends = np.arange(len(table))
    firsts = ends - np.arange(len(table) - 1, 0, -1)[:, None]
    return np.where(firsts >= 0, table[firsts, ends], np.inf)


def paces_by_length(sums: Table, paces: Table) -> tuple[Table, Table]:
    """Return the least pace of the possible stages of each number of layers, and the greatest; NaN for none."""
    is_possible = np.isfinite(sums)
    least = np.min(paces, axis=1, where=is_possible, initial=np.inf)
    most = np.max(paces, axis=1, where=is_possible, initial=-np.inf)
    some = is_possible.any(axis=1)
    return np.where(some, least, np.nan), np.where(some, most, np.nan)


def arriving_room(ends: int, *rows: int) -> tuple[Table, Table]:
    """Return room for costs by end, and a view of those before each stage, in the order of `by_length`.

    Their shapes are `(*rows, ends)` and `(*rows, ends - 1, ends)`.
    """
    room = np.full((*rows, 2 * ends - 1), np.inf)
    strides = (*room.strides, room.strides[-1])
    return room[..., ends - 1 :], as_strided(room, (*rows, ends - 1, ends), strides)
