"""Number of replicas of a model, and their machines: `place_replicas(model, cluster, request, count)`. Pure.

Every replica answers its part of the promised sequences. The throughput of a set of machines as one pipeline is bounded by its
slowest stage. Over those bounds the best division into replicas is found exactly, by examining all sets.

More than eight machines are divided by kind: alike machines join in replicas of equal size, and the rest in mixed ones. The
sizes are improved kind by kind.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np

from mlx_ring.core.errors import PlanError
from mlx_ring.planner.place import place
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.request import PlanRequest
from mlx_ring.planner.search import MOST_NODES, Kinds, kinds_of, steadiest_costs
from mlx_ring.planner.stage_costs import held_kv_bytes
from mlx_ring.planner.tensor_plans import best_of_both
from mlx_ring.planner.timetable import Timetable

_WORTH = 1.02
"""Factor by which one more replica must raise the predicted throughput, because predictions are not exact."""


def place_replicas(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, count: int | None
) -> tuple[Plan, ...]:
    """Return a plan for each replica, each on machines of its own.

    Args:
        model: sizes of the model.
        cluster: machines and links.
        request: promised load of all replicas together.
        count: number of replicas; None chooses the number with the highest throughput, if that is the objective.

    Raises:
        PlanError: the machines cannot hold that many replicas, or the request contradicts itself.
    """
    if count == 1 or (count is None and (request.objective != "throughput" or request.strategy != "auto")):
        return (place(model, cluster, request),)
    _check(cluster, request, count)
    if len(cluster.nodes) > MOST_NODES:
        return _ManyMachines(model, cluster, request).plans(count)
    most = min(len(cluster.nodes), max(1, request.demand.sequences))
    divisions = {
        number: _best_division(model, cluster, request, number)
        for number in ([count] if count else range(1, most + 1))
    }
    best: tuple[float, tuple[int, ...]] = (0.0, ())
    for speed, sets in divisions.values():
        if sets and speed > best[0] * (_WORTH if best[1] else 0.0):
            best = (speed, sets)
    if not best[1]:
        # Only tensor parallelism fits.
        return (_whole(model, cluster, request, count),)
    each = replace(request, demand=replace(request.demand, sequences=_share(request, len(best[1]))))
    plans = tuple(place(model, _among(cluster, members), each) for members in best[1])
    if count is None and _is_better_shared(model, cluster, request, plans):
        return (place(model, cluster, request),)
    return plans


_FEW_NODES = 64
"""Number of machines up to which several plans for a load are compared."""
_PLANNED_STREAMS = 64
"""Streams of each machine for which plans for a load are made, where memory allows."""


def place_for_load(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest
) -> Iterator[tuple[Plan, ...]]:
    """Yield different plans: for the throughput of many streams, and for the latency of one.

    Args:
        model: sizes of the model.
        cluster: machines and links.
        request: one sequence of the longest request; more of them are promised where memory allows.

    Raises:
        PlanError: the model does not fit.
    """
    nodes, seen = len(cluster.nodes), list[object]()
    # The number of replicas that is best by bounds, and the largest one.
    for count in (None, *(range(nodes, 1, -1) if nodes <= MOST_NODES else ())):
        plans = _for_most_streams(model, cluster, request, count)
        if plans and (divided := [_divided(plan) for plan in plans]) not in seen:
            seen.append(divided)
            yield plans
        if plans and (count or nodes > _FEW_NODES):
            break
    if nodes > _FEW_NODES and seen:
        return
    quickest = place(model, cluster, request)
    if [_divided(quickest)] not in seen:
        yield (quickest,)


def _for_most_streams(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, count: int | None
) -> tuple[Plan, ...]:
    """Return plans for the throughput of as many streams as memory allows; none if the replicas do not fit."""
    for streams in _streams(model, cluster, request):
        each = replace(request, objective="throughput", demand=replace(request.demand, sequences=streams))
        try:
            return place_replicas(model, cluster, each, count)
        except PlanError:
            continue
    return ()


def _divided(plan: Plan) -> list[object]:
    return [(stage.layers, [(rank.node, rank.share) for rank in stage.ranks]) for stage in plan.stages]


def _streams(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> list[int]:
    """Return numbers of streams for which to try to plan: those of about half of the free memory, then fewer."""
    each = sum(held_kv_bytes(layer, model, request.demand) for layer in model.layers)
    usable = sum(node.usable_bytes for node in cluster.nodes)
    free = usable - max(1, int(usable / (1.2 * model.weight_bytes))) * model.weight_bytes
    nodes = len(cluster.nodes)
    most = min(_PLANNED_STREAMS * nodes, max(nodes, int(free / 2 / max(1.0, each))))
    return sorted({most, max(nodes, most // 8), nodes}, reverse=True)


def alike_plans(cluster: ClusterProfile, plans: Sequence[Plan]) -> list[list[Plan]]:
    """Return the plans in lists of those with the same layers on alike machines and links."""
    nodes = {node.name: replace(node, name="") for node in cluster.nodes}
    kinds: list[tuple[object, list[Plan]]] = []
    for plan in plans:
        ranks = [rank for stage in plan.stages for rank in stage.ranks]
        likeness = (
            [(stage.layers, len(stage.ranks)) for stage in plan.stages],
            [(nodes[rank.node], rank.share) for rank in ranks],
            [cluster.link(one.node, other.node) for one, other in pairwise(ranks)],
        )
        same = next((members for kind, members in kinds if kind == likeness), None)
        if same is None:
            kinds.append((likeness, [plan]))
        else:
            same.append(plan)
    return [members for _, members in kinds]


def _whole(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, count: int | None) -> Plan:
    """Return one plan over all machines, if that is allowed.

    Raises:
        PlanError: it does not fit either, with what is missing, or so many replicas were requested.
    """
    whole = place(model, cluster, request)
    if count is None:
        return whole
    raise PlanError(
        f"{len(cluster.nodes)} machines cannot hold {count} replicas of {model.name}; one over "
        f"{len(whole.stages)} of them fits. Ask for fewer, for a shorter context or for fewer sequences."
    )


def _check(cluster: ClusterProfile, request: PlanRequest, count: int | None) -> None:
    nodes = len(cluster.nodes)
    if request.strategy != "auto":
        raise PlanError(
            f"Replicas are planned by the strategy auto; {request.strategy} was requested with {count} of them."
        )
    if count is not None and count > nodes:
        raise PlanError(
            f"{count} replicas were requested, but there are {nodes} machines: each replica needs one."
        )


def _is_better_shared(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, plans: tuple[Plan, ...]
) -> bool:
    """Return True if tensor parallelism gives more throughput than all replicas together."""
    if not request.allows_tensor:
        return False
    shared = best_of_both(model, cluster, request, None)
    together = sum(plan.prediction.tokens_per_s for plan in plans)
    return shared is not None and shared.prediction.tokens_per_s > together


def _share(request: PlanRequest, replicas: int) -> int:
    """Return the number of sequences for each replica."""
    return -(-request.demand.sequences // replicas)


def _best_division(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, replicas: int
) -> tuple[float, tuple[int, ...]]:
    """Return the total throughput, and the machines of each replica as bits; no machines if memory does not suffice."""
    speeds = _speeds(model, cluster, request, replicas)
    everyone = (1 << len(cluster.nodes)) - 1
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(0, 0): (0.0, ())}
    for number in range(1, replicas + 1):
        for members, speed in speeds.items():
            rest = everyone & ~members
            subset = rest
            while True:
                before = best.get((number - 1, subset))
                if before is not None:
                    key, total = (number, subset | members), before[0] + speed
                    if total > best.get(key, (0.0, ()))[0]:
                        best[key] = (total, (*before[1], members))
                if not subset:
                    break
                subset = (subset - 1) & rest
    found = [partition for (number, _), partition in best.items() if number == replicas]
    speed, sets = max(found, key=lambda partition: partition[0], default=(0.0, ()))
    # The replica with the first machine comes first.
    return speed, tuple(sorted(sets, key=lambda members: members & -members))


def _speeds(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, replicas: int
) -> dict[int, float]:
    """Return the throughput of each set of machines as one of the replicas, in tokens per second."""
    sequences = _share(request, replicas)
    timetable = Timetable(model, cluster, replace(request.demand, sequences=sequences))
    most = len(cluster.nodes) - replicas + 1
    costs: dict[int, dict[int, float]] = {}
    speeds: dict[int, float] = {}
    for stages in range(1, most + 1):
        groups = min(stages, sequences)
        rows = -(-sequences // groups)
        if rows not in costs:
            largest = max(
                size for size in range(1, most + 1) if -(-sequences // min(size, sequences)) == rows
            )
            costs[rows] = steadiest_costs(timetable.steady_tables(rows), timetable.hops(rows), largest)
        for members, slowest in costs[rows].items():
            if members.bit_count() == stages and np.isfinite(slowest):
                # With fewer groups than stages, stages idle.
                speeds[members] = sequences / (max(groups, stages) * slowest)
    return speeds


def _among(cluster: ClusterProfile, members: int) -> ClusterProfile:
    nodes = tuple(node for place, node in enumerate(cluster.nodes) if members >> place & 1)
    return replace(cluster, nodes=nodes)


# ---- more than eight machines

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


class _ManyMachines:
    """Division of many machines into replicas of up to `MOST_NODES` machines."""

    def __init__(self, model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> None:
        self._model = model
        self._cluster = cluster
        self._request = request
        self._kinds = _kinds(cluster)
        self._kind_of = {place: number for number, kind in enumerate(self._kinds) for place in kind}
        self._speeds: dict[tuple[tuple[int, ...], int], float] = {}

    def plans(self, count: int | None) -> tuple[Plan, ...]:
        """Return a plan for each replica; None chooses their number by the throughput of all.

        Raises:
            PlanError: the machines cannot hold that many.
        """
        best = self._by_count(count) if count else self._by_throughput()
        if not best:
            return (_whole(self._model, self._cluster, self._request, count),)
        share = _share(self._request, len(best))
        return tuple(self._place(members, share) for members in sorted(best))

    def _by_count(self, count: int) -> Division:
        size = min(MOST_NODES, len(self._cluster.nodes) // count)
        found = self._division([size] * len(self._kinds), _share(self._request, count))
        if len(found) < count:
            return []
        share = _share(self._request, count)
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
        most = len(self._speeds) + _MOST_TRIES
        best = self._throughput(division), division
        while len(self._speeds) < most:
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
        share = _share(self._request, len(division))
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
        found = self._division(sizes, _share(self._request, max(1, len(self._cluster.nodes) // max(sizes))))
        share = _share(self._request, max(1, min(len(found), sequences)))
        fastest = sorted(
            (members for members in found if self._speed(members, share)),
            key=lambda members: -self._speed(members, share),
        )[:sequences]
        if _share(self._request, max(1, len(fastest))) > share:
            return 0.0, [], sizes
        return self._together(fastest, share), fastest, sizes

    def _division(self, sizes: Sequence[int], share: int) -> Division:
        """Return replicas of alike machines, and mixed ones of the rest; machines too small for any are left out."""
        found: Division = []
        rest: list[int] = []
        for kind, size in zip(self._kinds, sizes, strict=True):
            for group in _in_parts(kind, size):
                if len(group) == size and self._speed(group, share):
                    found.append(group)
                else:
                    rest += group
        nodes = self._cluster.nodes
        joined: tuple[int, ...] = ()
        for one in sorted(rest, key=lambda one: -nodes[one].usable_bytes):
            joined = (*joined, one)
            if len(joined) >= min(sizes) and self._speed(joined, share):
                found.append(joined)
                joined = ()
            elif len(joined) == MOST_NODES:
                joined = joined[1:]
        return [*found, joined] if joined and self._speed(joined, share) else found

    def _speed(self, members: tuple[int, ...], share: int) -> float:
        """Return the throughput of these machines as a replica, in tokens per second; 0 if it does not fit."""
        key = self._key(members), share
        if key not in self._speeds:
            self._speeds[key] = self._made_speed(members, share)
        return self._speeds[key]

    def _made_speed(self, members: tuple[int, ...], share: int) -> float:
        usable = sum(self._cluster.nodes[place].usable_bytes for place in members)
        if usable < self._model.weight_bytes:
            return 0.0
        try:
            return self._place(members, share).prediction.tokens_per_s
        except PlanError:
            return 0.0

    def _place(self, members: tuple[int, ...], share: int) -> Plan:
        nodes = tuple(self._cluster.nodes[place] for place in members)
        names = {node.name for node in nodes}
        links = {pair: link for pair, link in self._cluster.links.items() if pair <= names}
        each = replace(self._request, demand=replace(self._request.demand, sequences=share))
        return place(self._model, replace(self._cluster, nodes=nodes, links=links), each)


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
