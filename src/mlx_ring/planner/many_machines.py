"""Replicas over more than eight machines. Pure.

Alike machines join in replicas of equal size, and the rest in mixed ones. The sizes are improved kind by kind, and divisions of
few machines by moves. Bounds of each replica's throughput choose sizes and moves without plans. A division is planned only
while they say that it may have a higher throughput than the best one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, permutations, product

from mlx_ring.core.errors import PlanError
from mlx_ring.planner.pipeline import PipelineBounds
from mlx_ring.planner.place import place_if_it_fits
from mlx_ring.planner.plan import LeftOut, Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.rank_costs import alike_machines
from mlx_ring.planner.request import PlanRequest
from mlx_ring.planner.search import MOST_NODES, any_partition
from mlx_ring.planner.stage_costs import StageTables
from mlx_ring.planner.tensor_plans import with_left_undone
from mlx_ring.planner.timetable import Timetable

_KINDS_IMPROVED = 16
"""Number of kinds of machines up to which each gets a size of its own."""
_SIZES = 3
"""Number of sizes of replicas that are tried for hundreds of machines, from the smallest that fits."""
_FEW = 64
"""Number of machines up to which all sizes are tried, and replicas are improved one by one."""
_MOST_TRIES, _FEWER_TRIES = 400, 10
"""Numbers of replicas that are planned to improve a division, without bounds and with them."""
_MOST_MOVES = 400
"""Number of moves by bounds before the replicas are planned."""
_ROUNDING = 1 + 1e-9
"""Factor by which bounds of throughputs are raised, because times are rounded."""
_BETTER = 1.001
"""Factor by which a move must raise the throughput."""

Division = list[tuple[int, ...]]
"""Places of each replica's machines."""
Move = tuple[Division, Division]
"""Replicas that a move ends, and those that it makes."""
Speeds = Callable[[Division, float, float], list[float]]
"""Function that returns the throughput of each replica with a mean number of sequences; none if all have too little together."""


class ManyMachines:
    """Division of many machines into replicas of up to `MOST_NODES` machines."""

    def __init__(self, model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> None:
        self._model = model
        self._cluster = cluster
        self._request = request
        self._kinds = alike_machines(cluster)
        self._kind_of = {place: number for number, kind in enumerate(self._kinds) for place in kind}
        self._first_ones = [cluster.nodes[kind[0]] for kind in self._kinds]
        """A machine of each kind."""
        self._plans: dict[tuple[tuple[int, ...], int], Plan | None] = {}
        """Plan of machines, by kinds, with a share of the sequences; it names them by their order."""
        self._with_remarks: dict[tuple[tuple[int, ...], int], Plan | None] = {}
        self._pipelines: dict[tuple[tuple[int, ...], int], bool] = {}
        """True for machines, by kinds, that hold a replica as a pipeline with a share of the sequences."""
        self._alone: dict[tuple[int, int], float] = {}
        """Throughput of one machine, by kind, with a share of the sequences; 0 if it does not hold a replica."""
        shares = _may_share(model, cluster, request)
        self._bounds = None if shares else PipelineBounds(model, cluster, self._kinds, request)

    def plans(self, count: int | None) -> tuple[Plan, ...]:
        """Return a plan for each replica; None chooses their number by the throughput of all. There are none if none fits.

        Raises:
            PlanError: the machines cannot hold that many.
        """
        best = self._by_count(count) if count else self._by_throughput()
        share = self._request.share(max(1, len(best)))
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
        """Return the best division of one size for all kinds, then improved kind by kind, and for few machines by moves."""
        few = len(self._cluster.nodes) <= _FEW
        if self._bounds is not None and few:
            return self._improved_by_bounds(self._by_size(self._highest), self._bounds)
        best = self._by_size(self._speeds)
        return self._improved(best) if few else best

    def _by_size(self, speeds: Speeds) -> Division:
        """Return the best division of one size for all kinds, then improved kind by kind."""
        best: tuple[float, Division, list[int]] = (0.0, [], [])
        tried, few = 0, len(self._cluster.nodes) <= _FEW
        for size in range(1, MOST_NODES + 1):
            best = max(best, self._tried([size] * len(self._kinds), best[0], speeds), key=lambda one: one[0])
            tried += bool(best[1])
            if tried == _SIZES and not few:
                break
        if best[1] and 1 < len(self._kinds) <= _KINDS_IMPROVED:
            for kind in range(len(self._kinds)):
                for size in range(1, MOST_NODES + 1):
                    sizes = [*best[2][:kind], size, *best[2][kind + 1 :]]
                    best = max(best, self._tried(sizes, best[0], speeds), key=lambda one: one[0])
        return best[1]

    def _improved(self, division: Division) -> Division:
        """Return the division after moves, while plans say that the throughput rises."""
        most = len(self._plans) + _MOST_TRIES
        best = self._throughput(division, self._speeds), division
        while len(self._plans) < most:
            least = best[0] * _BETTER
            moved = (_after(best[1], move) for move in self._moves(best[1]))
            tried = ((self._throughput(each, self._speeds, least), each) for each in moved)
            better = next((one for one in tried if one[0] > least), None)
            if better is None:
                break
            best = better
        return best[1]

    def _improved_by_bounds(self, start: Division, bounds: PipelineBounds) -> Division:
        """Return the division after the best moves by bounds. Plans replace bounds until they change no move."""
        best, division, most = (0.0, start), start, len(self._plans) + _FEWER_TRIES
        while len(self._plans) < most:
            for _ in range(_MOST_MOVES):
                least = _BETTER * self._throughput(division, self._highest)
                kinds = (self._best_move(division, each, bounds) for each in (self._moves, self._exchanges))
                move = next((move for value, move in kinds if value > least), None)
                if move is None:
                    break
                division = _after(division, move)
            planned = len(self._plans)
            best = max(best, (self._throughput(division, self._speeds), division), key=lambda one: one[0])
            if len(self._plans) == planned:
                break
        return start if self._throughput(start, self._speeds, best[0]) > best[0] else best[1]

    def _best_move(
        self, division: Division, possible: Callable[[Division], Iterator[Move]], bounds: PipelineBounds
    ) -> tuple[float, Move]:
        """Return the possible move after which the replicas' bounds have the greatest sum, and the throughput by that."""
        by_count: dict[int, list[Move]] = defaultdict(list)
        for ended, made in possible(division):
            by_count[len(division) - len(ended) + len(made)].append((ended, made))
        best: tuple[float, Move] = 0.0, ([], [])
        for count, moves in by_count.items():
            if not 0 < count <= self._request.demand.sequences:
                continue
            mean = self._request.demand.sequences / count
            _compute(bounds, [*map(self._key, chain(division, *(made for _, made in moves)))], mean)
            speeds = {members: self._bound(self._key(members), mean) for members in division}
            idle, whole = sum(not speed for speed in speeds.values()), sum(speeds.values())
            for ended, made in moves:
                new = [self._bound(self._key(members), mean) for members in made]
                if idle > sum(not speeds[members] for members in ended) or not all(new):
                    continue
                speed = whole - sum(speeds[members] for members in ended) + sum(new)
                best = max(best, (speed, (ended, made)), key=lambda one: one[0])
        return best

    def _moves(self, division: Division) -> Iterator[Move]:
        """Yield moves of one machine, and joined or dropped replicas, each once for replicas of the same machines."""
        unused, seen = self._unused(division), set[tuple[Hashable, ...]]()
        for one, other in permutations([*division, *unused], 2):
            key = self._key(one), self._key(other)
            if key in seen or other in unused:
                continue
            seen.add(key)
            ended = [other] if one in unused else [one, other]
            if len(one) + len(other) <= MOST_NODES:
                yield ended, [one + other]
            if len(one) > 1 and len(other) < MOST_NODES:
                for place in {self._kind_of[place]: place for place in one}.values():
                    yield ended, [tuple(each for each in one if each != place), (*other, place)]
        for members in {self._key(members): members for members in division}.values():
            if len(division) > 1:
                yield [members], []

    def _exchanges(self, division: Division) -> Iterator[Move]:
        """Yield moves that exchange a machine for one of another replica, or for an unused one."""
        unused, seen = self._unused(division), set[tuple[Hashable, ...]]()
        for one, other in combinations([*division, *unused], 2):
            key, is_unused = (self._key(one), self._key(other)), other in unused
            if key in seen or one in unused or (not is_unused and len(one) == len(other) == 1):
                continue
            seen.add(key)
            for mine, theirs in product(one, other):
                changed = (*(place for place in one if place != mine), theirs)
                if is_unused:
                    yield [one], [changed]
                elif self._kind_of[mine] != self._kind_of[theirs]:
                    yield [one, other], [changed, (*(place for place in other if place != theirs), mine)]

    def _unused(self, division: Division) -> Division:
        used = {place for members in division for place in members}
        return [(place,) for place in range(len(self._cluster.nodes)) if place not in used]

    def _throughput(self, division: Division, speeds: Speeds, least: float = 0.0) -> float:
        """Return the tokens per second of all replicas together; 0 if one does not hold its share, or if it is `least` at most."""
        if not 0 < len(division) <= self._request.demand.sequences:
            return 0.0
        found = speeds(division, self._request.demand.sequences / len(division), least)
        return sum(found) if all(found) else 0.0

    def _speeds(self, division: Division, mean: float, least: float) -> list[float]:
        """Return the throughput of each replica; none once all together surely have `least` at most."""
        keys = [self._key(members) for members in division]
        members_of, numbers = dict(zip(keys, division, strict=True)), Counter(keys)
        bounds = dict(zip(keys, self._highest(division, mean, least), strict=True))
        most = sum(bounds[key] * number for key, number in numbers.items())
        speeds: dict[tuple[int, ...], float] = {}
        for key, number in numbers.items():
            if most <= least:
                return []
            speeds[key] = self._speed(members_of[key], mean)
            if math.isfinite(most):
                most -= number * max(0.0, bounds[key] - speeds[key])
        return [speeds[key] for key in keys]

    def _highest(self, division: Division, mean: float, _least: float) -> list[float]:
        """Return the bound of each replica's throughput."""
        keys = [self._key(members) for members in division]
        if self._bounds is not None:
            _compute(self._bounds, keys, mean)
        return [self._bound(key, mean) for key in keys]

    def _bound(self, key: tuple[int, ...], mean: float) -> float:
        """Return a throughput that machines of these kinds cannot exceed: that of their plan if they have one."""
        if len(key) == 1:
            return self._speed_alone(key[0], mean) * _ROUNDING
        share = math.ceil(mean)
        if (key, share) in self._plans:
            return _speed_of(self._plans[key, share], mean) * _ROUNDING
        if self._bounds is None:
            return math.inf
        fewer = self._bounds.tokens_per_s(key, share - 1) if mean < share else 0.0
        return _between(self._bounds.tokens_per_s(key, share), fewer, mean) * _ROUNDING

    def _key(self, members: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(self._kind_of[place] for place in members))

    def _tried(self, sizes: list[int], least: float, speeds_of: Speeds) -> tuple[float, Division, list[int]]:
        """Return the throughput and the division for these sizes, by kind; no more replicas than sequences.

        There is none if its throughput is `least` at most.
        """
        sequences = self._request.demand.sequences
        # As if each machine were a replica's share of its own, then with the shares of the replicas that were found.
        found = self._division(sizes, self._request.share(max(1, len(self._cluster.nodes) // max(sizes))))
        share = self._request.share(max(1, min(len(found), sequences)))
        # Shares of the replicas that hold one are whole sequences, so together they do not exceed the sum of all.
        speeds = speeds_of(found, sequences / max(1, min(len(found), sequences)), least)
        fastest = sorted(
            ((speed, members) for speed, members in zip(speeds, found, strict=bool(speeds)) if speed),
            key=lambda one: -one[0],
        )[:sequences]
        if self._request.share(max(1, len(fastest))) > share:
            return 0.0, [], sizes
        division = [members for _, members in fastest]
        return self._throughput(division, speeds_of, least), division, sizes

    def _division(self, sizes: Sequence[int], share: int) -> Division:
        """Return replicas of alike machines, and mixed ones of the rest; machines too small for any are left out."""
        found: Division = []
        rest: list[int] = []
        for kind, size in zip(self._kinds, sizes, strict=True):
            groups = [tuple(kind[first : first + size]) for first in range(0, len(kind), size)]
            # All but the last, which may be smaller, are alike.
            if len(groups[0]) < size or not self._holds(groups[0], share):
                rest += kind
                continue
            found += groups[:-1]
            if len(groups[-1]) == size:
                found.append(groups[-1])
            else:
                rest += groups[-1]
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
        if any(self._speed_alone(self._kind_of[place], share) for place in members):
            return True
        key = self._key(members), share
        if self._bounds is None and (key in self._plans or not self._holds_stages(key, members, share)):
            return self._plan(members, share) is not None
        # Without shared layers, there is a plan if there is a pipeline.
        return self._holds_stages(key, members, share)

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

    def _speed(self, members: tuple[int, ...], mean: float) -> float:
        """Return the throughput of these machines as a replica, in tokens per second; 0 if it does not fit."""
        if len(members) == 1:
            return self._speed_alone(self._kind_of[members[0]], mean)
        return _speed_of(self._plan(members, math.ceil(mean)), mean)

    def _speed_alone(self, kind: int, mean: float) -> float:
        """Return the throughput of a machine as a replica, as its plan has it; 0 if it does not fit."""
        share = math.ceil(mean)
        if mean < share:
            return _between(self._speed_alone(kind, share), self._speed_alone(kind, share - 1), mean)
        if (kind, share) not in self._alone:
            demand = replace(self._request.demand, sequences=share)
            times = StageTables(self._model, demand).seconds(
                self._first_ones[kind], share, demand.mean_context_tokens
            )
            self._alone[kind, share] = share / max(float(times.unhindered[0, -1]), float(times.steady[0, -1]))
        return self._alone[kind, share]

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
        try:
            return place_if_it_fits(*self._alike(members, share), explains=False)
        except PlanError:
            return None

    def _alike(self, members: Sequence[int], share: int) -> tuple[ModelProfile, ClusterProfile, PlanRequest]:
        """Return what is planned for machines like these."""
        nodes = [self._cluster.nodes[place] for place in members]
        names = {node.name: _stand_in(place) for place, node in enumerate(nodes)}
        pairs = map(frozenset, combinations(names, 2))
        links = {
            frozenset(names[name] for name in pair): self._cluster.links[pair]
            for pair in pairs
            if pair in self._cluster.links
        }
        renamed = tuple(replace(node, name=names[node.name]) for node in nodes)
        request = replace(self._request, demand=replace(self._request.demand, sequences=share))
        return self._model, replace(self._cluster, nodes=renamed, links=links), request

    def _explained(self, members: tuple[int, ...], share: int) -> Plan | None:
        """Return the plan of machines like these with all remarks."""
        key = self._key(members), share
        if key not in self._with_remarks:
            plan = self._plan(members, share)
            self._with_remarks[key] = plan and with_left_undone(
                *self._alike(self._by_kind(members), share), plan
            )
        return self._with_remarks[key]

    def _named(self, members: tuple[int, ...], share: int) -> Plan | None:
        """Return the plan of exactly these machines."""
        names = [self._cluster.nodes[place].name for place in self._by_kind(members)]
        plan = self._explained(members, share)

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


def _after(division: Division, move: Move) -> Division:
    """Return the division after a move."""
    ended, made = move
    return [*(members for members in division if members not in ended), *made]


def _speed_of(plan: Plan | None, mean: float) -> float:
    if plan is None:
        return 0.0
    return _between(plan.prediction.tokens_per_s, plan.prediction.fewer_tokens_per_s, mean)


def _between(speed: float, fewer: float, mean: float) -> float:
    """Return the mean throughput of alike replicas, some of which have one sequence less; 0 if they do not hold the most."""
    return speed - (math.ceil(mean) - mean) * (speed - fewer) if speed else 0.0


def _compute(bounds: PipelineBounds, keys: Sequence[tuple[int, ...]], mean: float) -> None:
    for share in {math.ceil(mean), math.floor(mean)}:
        bounds.compute(keys, share)


def _may_share(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> bool:
    """Return True if two machines might compute layers together, which has no such bound."""
    links = (cluster.usual_link, *cluster.links.values())
    is_trusted = any(link.trusted for link in links) or sum(node.trusted for node in cluster.nodes) > 1
    return request.allows_tensor and model.shared is not None and is_trusted


def _stand_in(place: int) -> str:
    """Return the name of a machine in a plan that is made once for all machines like it."""
    return f"\N{SYMBOL FOR NULL}{place}\N{SYMBOL FOR NULL}"


def too_many_replicas(model: ModelProfile, cluster: ClusterProfile, count: int, fitting: int) -> str:
    """Return the error for more replicas than fit."""
    return (
        f"{len(cluster.nodes)} machines cannot hold {count} replicas of {model.name}, but they can hold {fitting}. "
        "Ask for fewer, for a shorter context or for fewer sequences."
    )
