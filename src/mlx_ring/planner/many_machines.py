"""Replicas over more than eight machines. Pure.

Alike machines join in replicas of equal size, and the rest in mixed ones. The sizes are improved kind by kind.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np

from mlx_ring.core.errors import PlanError
from mlx_ring.planner.place import place_if_it_fits
from mlx_ring.planner.plan import LeftOut, Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.request import PlanRequest
from mlx_ring.planner.search import MOST_NODES, Kinds, any_partition, kinds_of
from mlx_ring.planner.timetable import Timetable

_KINDS_IMPROVED = 16
"""Number of kinds of machines up to which each gets a size of its own."""
_SIZES = 3
"""Number of sizes of replicas that are tried for hundreds of machines, from the smallest that fits."""
_FEW = 64
"""Number of machines up to which all sizes are tried, and replicas are improved one by one."""
_MOST_TRIES = 400
"""Number of replicas that are planned to improve a division."""

_BETTER = 1.001
"""Factor by which a move must raise the throughput."""

Division = list[tuple[int, ...]]
"""Places of each replica's machines."""


class ManyMachines:
    """Division of many machines into replicas of up to `MOST_NODES` machines."""

    def __init__(self, model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> None:
        self._model = model
        self._cluster = cluster
        self._request = request
        self._kinds = _kinds(cluster)
        self._kind_of = {place: number for number, kind in enumerate(self._kinds) for place in kind}
        self._plans: dict[tuple[tuple[int, ...], int], Plan | None] = {}
        """Plan of machines, by kinds, with a share of the sequences; it names them by their order."""
        self._pipelines: dict[tuple[tuple[int, ...], int], bool] = {}
        """True for machines, by kinds, that hold a replica as a pipeline with a share of the sequences."""

    def plans(self, count: int | None) -> tuple[Plan, ...]:
        """Return a plan for each replica; None chooses their number by the throughput of all. There are none if none fits.

        Raises:
            PlanError: the machines cannot hold that many.
        """
        best = self._by_count(count) if count else self._by_throughput()
        share = self._request.share(len(best))
        plans = (self._named(members, share) for members in sorted(best))
        return tuple(plan for plan in plans if plan is not None)

    def _by_count(self, count: int) -> Division:
        """Return a division into this many replicas; an empty one if no machine or group holds one.

        Raises:
            PlanError: fewer replicas fit.
        """
        size = min(MOST_NODES, len(self._cluster.nodes) // count)
        found = self._division([size] * len(self._kinds), self._request.share(count))
        if found and len(found) < count:
            raise PlanError(too_many_replicas(self._model, self._cluster, count, len(found)))
        share = self._request.share(count)
        return sorted(found, key=lambda members: -self._speed(members, share))[:count]

    def _by_throughput(self) -> Division:
        """Return the best division of one size for all kinds, then improved kind by kind."""
        best: tuple[float, Division, list[int]] = (0.0, [], [])
        tried, few = 0, len(self._cluster.nodes) <= _FEW
        for size in range(1, MOST_NODES + 1):
            best = max(best, self._tried([size] * len(self._kinds)), key=lambda one: one[0])
            tried += bool(best[1])
            if tried == _SIZES and not few:
                break
        if best[1] and 1 < len(self._kinds) <= _KINDS_IMPROVED:
            for kind in range(len(self._kinds)):
                for size in range(1, MOST_NODES + 1):
                    sizes = [*best[2][:kind], size, *best[2][kind + 1 :]]
                    best = max(best, self._tried(sizes), key=lambda one: one[0])
        return self._improved(best[1]) if few else best[1]

    def _improved(self, division: Division) -> Division:
        """Return the division after moves of one machine, and joined or dropped replicas, while the throughput rises."""
        most = len(self._plans) + _MOST_TRIES
        best = self._throughput(division), division
        while len(self._plans) < most:
            tried = ((self._throughput(each), each) for each in self._moved(best[1]))
            better = next((one for one in tried if one[0] > best[0] * _BETTER), None)
            if better is None:
                break
            best = better
        return best[1]

    def _moved(self, division: Division) -> Iterator[Division]:
        """Yield the divisions that one move makes, each once for replicas of the same machines."""
        used = {place for members in division for place in members}
        unused = [(place,) for place in range(len(self._cluster.nodes)) if place not in used]
        seen: set[tuple[Hashable, ...]] = set()
        for one, other in permutations([*division, *unused], 2):
            key = self._key(one), self._key(other)
            if key in seen or other in unused:
                continue
            seen.add(key)
            rest = [members for members in division if members not in (one, other)]
            if len(one) + len(other) <= MOST_NODES:
                yield [*rest, one + other]
            if len(one) > 1 and len(other) < MOST_NODES:
                for place in {self._kind_of[place]: place for place in one}.values():
                    yield [*rest, tuple(each for each in one if each != place), (*other, place)]
        for members in {self._key(members): members for members in division}.values():
            if len(division) > 1:
                yield [each for each in division if each != members]

    def _throughput(self, division: Division) -> float:
        """Return the tokens per second of all replicas together; 0 if one does not hold its share."""
        if not 0 < len(division) <= self._request.demand.sequences:
            return 0.0
        share = self._request.share(len(division))
        return self._together(division, share) if all(self._speed(each, share) for each in division) else 0.0

    def _together(self, division: Division, share: int) -> float:
        """Return the tokens per second of the request's sequences, which may be fewer than all shares."""
        promised = max(1, share * len(division))
        return (
            sum(self._speed(members, share) for members in division)
            * self._request.demand.sequences
            / promised
        )

    def _key(self, members: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(self._kind_of[place] for place in members))

    def _tried(self, sizes: list[int]) -> tuple[float, Division, list[int]]:
        """Return the throughput and the division for these sizes, by kind; no more replicas than sequences."""
        sequences = self._request.demand.sequences
        # As if each machine were a replica's share of its own, then with the shares of the replicas that were found.
        found = self._division(sizes, self._request.share(max(1, len(self._cluster.nodes) // max(sizes))))
        share = self._request.share(max(1, min(len(found), sequences)))
        fastest = sorted(
            (members for members in found if self._speed(members, share)),
            key=lambda members: -self._speed(members, share),
        )[:sequences]
        if self._request.share(max(1, len(fastest))) > share:
            return 0.0, [], sizes
        return self._together(fastest, share), fastest, sizes

    def _division(self, sizes: Sequence[int], share: int) -> Division:
        """Return replicas of alike machines, and mixed ones of the rest; machines too small for any are left out."""
        found: Division = []
        rest: list[int] = []
        for kind, size in zip(self._kinds, sizes, strict=True):
            for group in _in_parts(kind, size):
                if len(group) == size and self._holds(group, share):
                    found.append(group)
                else:
                    rest += group
        nodes = self._cluster.nodes
        joined: tuple[int, ...] = ()
        for one in sorted(rest, key=lambda one: -nodes[one].usable_bytes):
            joined = (*joined, one)
            if len(joined) >= min(sizes) and self._holds(joined, share):
                found.append(joined)
                joined = ()
            elif len(joined) == MOST_NODES:
                joined = joined[1:]
        return [*found, joined] if joined and self._holds(joined, share) else found

    def _holds(self, members: tuple[int, ...], share: int) -> bool:
        """Return True if these machines have the memory for a replica."""
        key = self._key(members), share
        if key in self._plans or not self._holds_stages(key, members, share):
            return self._plan(members, share) is not None
        return True

    def _holds_stages(self, key: tuple[tuple[int, ...], int], members: tuple[int, ...], share: int) -> bool:
        """Return True if they have it as a pipeline of single machines, which is found out much faster than a plan."""
        if key not in self._pipelines:
            nodes = [self._cluster.nodes[place] for place in members]
            possible = None
            if sum(node.usable_bytes for node in nodes) >= self._model.weight_bytes:
                demand = replace(self._request.demand, sequences=share)
                times = Timetable(self._model, replace(self._cluster, nodes=tuple(nodes)), demand)
                possible = any_partition(times.tables(1), times.hops(1))
            self._pipelines[key] = possible is not None
        return self._pipelines[key]

    def _speed(self, members: tuple[int, ...], share: int) -> float:
        """Return the throughput of these machines as a replica, in tokens per second; 0 if it does not fit."""
        plan = self._plan(members, share)
        return 0.0 if plan is None else plan.prediction.tokens_per_s

    def _plan(self, members: tuple[int, ...], share: int) -> Plan | None:
        """Return the plan of machines like these; None if their memory does not suffice."""
        key = self._key(members), share
        if key not in self._plans:
            self._plans[key] = self._place(self._by_kind(members), share)
        return self._plans[key]

    def _by_kind(self, members: tuple[int, ...]) -> list[int]:
        return sorted(members, key=lambda place: (self._kind_of[place], place))

    def _place(self, members: Sequence[int], share: int) -> Plan | None:
        nodes = [self._cluster.nodes[place] for place in members]
        if sum(node.usable_bytes for node in nodes) < self._model.weight_bytes:
            return None
        names = {node.name: _stand_in(place) for place, node in enumerate(nodes)}
        links = {
            frozenset(names[name] for name in pair): link
            for pair, link in self._cluster.links.items()
            if pair <= names.keys()
        }
        renamed = tuple(replace(node, name=names[node.name]) for node in nodes)
        each = replace(self._request, demand=replace(self._request.demand, sequences=share))
        try:
            return place_if_it_fits(self._model, replace(self._cluster, nodes=renamed, links=links), each)
        except PlanError:
            return None

    def _named(self, members: tuple[int, ...], share: int) -> Plan | None:
        """Return the plan of exactly these machines."""
        names = [self._cluster.nodes[place].name for place in self._by_kind(members)]
        plan = self._plan(members, share)

        def named(text: str) -> str:
            for number, name in enumerate(names):
                text = text.replace(_stand_in(number), name)
            return text

        return plan and replace(
            plan,
            stages=tuple(
                replace(
                    stage,
                    node=named(stage.node),
                    why=named(stage.why),
                    ranks=tuple(replace(rank, node=named(rank.node)) for rank in stage.ranks),
                )
                for stage in plan.stages
            ),
            left_out=tuple(LeftOut(named(left.node), named(left.why)) for left in plan.left_out),
            remarks=tuple(map(named, plan.remarks)),
        )


def _stand_in(place: int) -> str:
    """Return the name of a machine in a plan that is made once for all machines like it."""
    return f"\N{SYMBOL FOR NULL}{place}\N{SYMBOL FOR NULL}"


def _kinds(cluster: ClusterProfile) -> Kinds:
    """Return the machines in lists of those with the same profile and the same links."""
    places = {node.name: place for place, node in enumerate(cluster.nodes)}
    numbers: dict[object, int] = {}
    links = np.zeros((len(places), len(places)))
    for pair, link in cluster.links.items():
        if pair <= places.keys():
            one, other = (places[name] for name in pair)
            links[one, other] = links[other, one] = 1 + numbers.setdefault(link, len(numbers))
    return kinds_of([replace(node, name="") for node in cluster.nodes], links)


def _in_parts(places: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    for first in range(0, len(places), size):
        yield tuple(places[first : first + size])


def too_many_replicas(model: ModelProfile, cluster: ClusterProfile, count: int, fitting: int) -> str:
    """Return the error for more replicas than fit."""
    return (
        f"{len(cluster.nodes)} machines cannot hold {count} replicas of {model.name}, but they can hold {fitting}. "
        "Ask for fewer, for a shorter context or for fewer sequences."
    )
