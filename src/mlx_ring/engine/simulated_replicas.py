"""Replicas of a plan with the times of their steps, by kind. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from mlx_ring.core.types import RankId
from mlx_ring.engine.kv_budget import RankKv, sequence_bytes
from mlx_ring.planner.forecast import StepTable, forecast_plan
from mlx_ring.planner.plan import Plan, RankPlan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile
from mlx_ring.planner.replicas import likeness
from mlx_ring.planner.request import PlanRequest

MOST_RUNNING = 256
"""Most requests that run at the same time in a replica, if no number is given."""
_MOST_TOGETHER = 16
"""Most instances of unlike replicas that are simulated together."""


@dataclass(frozen=True)
class Replica:
    """An instance with its predicted steps and its KV memory."""

    plan: Plan
    costs: StepTable
    kv: Mapping[RankId, RankKv]
    long_chunk: int = 0
    """Most tokens of a prompt alone in a step; 0 for the usual number."""

    @property
    def stages(self) -> int:
        return len(self.plan.stages)

    def room(self, tokens: int) -> int:
        """Return the number of requests of `tokens` tokens whose KV fits at the same time."""
        return min(
            (rank.limit_bytes // max(1, sequence_bytes(rank, tokens)) for rank in self.kv.values()),
            default=MOST_RUNNING,
        )


class Shares(NamedTuple):
    """Machines that compute several stages: how many workers each runs at once, and of each stage its workers by machine."""

    most: tuple[float, ...]
    parts: tuple[Mapping[int, float], ...]

    @property
    def slower(self) -> float:
        """Factor by which a step takes longer while all stages compute."""
        workers = Counter[int]()
        for parts in self.parts:
            workers.update(parts)
        return max([1.0, *(workers[machine] / most for machine, most in enumerate(self.most))])


@dataclass(frozen=True)
class Replicas:
    """Replicas of the same kind: each is one instance, or several that slow each other down on their machines."""

    members: tuple[Replica, ...]
    """Instances of one of them."""
    names: tuple[tuple[tuple[str, ...], ...], ...]
    """Machines of each stage, of one instance after the other, for each replica."""
    shares: Shares
    """Shared machines of these stages; without machines if none has more stages than it runs at once."""
    kind: object
    """Value that replicas have in common whose steps take as long."""
    unlike: tuple[Replicas, ...] = ()
    """Replicas of other kinds that these consist of; none if they are of one kind."""

    @property
    def stages(self) -> int:
        """Number of stages of the longest instance."""
        return max(member.stages for member in self.members)

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def instances(self) -> int:
        """Number of all instances."""
        return self.count * len(self.members)

    @property
    def tokens_per_s(self) -> float:
        """Predicted throughput of one of them."""
        return sum(member.plan.prediction.tokens_per_s for member in self.members)

    def machine_seconds(self, each: Sequence[Sequence[float]]) -> list[dict[int, float]]:
        """Return the seconds for which each instance takes shared machines, of all that they can compute."""
        found, stage = list[dict[int, float]](), 0
        for seconds in each:
            loads = dict[int, float]()
            for one in seconds:
                for machine, part in self.shares.parts[stage].items():
                    loads[machine] = loads.get(machine, 0.0) + one * part / self.shares.most[machine]
                stage += 1
            found.append(loads)
        return found


def replicas_of(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, plans: Sequence[Plan]
) -> list[Replicas]:
    """Return the replicas of these plans by kind: with the same layers on alike machines and links.

    Instances on one machine have equal parts of its memory. Those that also slow each other down there are one replica.
    """
    instances = Counter(name for plan in plans for name in {rank.node for rank in _ranks(plan)})
    nodes = {
        node.name: replace(node, memory_bytes=node.memory_bytes // max(1, instances[node.name]))
        for node in cluster.nodes
    }
    parted = replace(cluster, nodes=tuple(nodes.values()))
    kinds: dict[object, list[Sequence[Plan]]] = {}
    for together in _together(nodes, plans):
        places = {name: place for place, name in enumerate(dict.fromkeys(_names(together)))}
        alike = tuple(likeness(parted, plan) for plan in together)
        kinds.setdefault((alike, tuple(places[name] for name in _names(together))), []).append(together)
    return [_replicas(model, parted, request, kind, members) for kind, members in kinds.items()]


def _ranks(plan: Plan) -> Iterator[RankPlan]:
    return chain.from_iterable(stage.ranks for stage in plan.stages)


def _names(plans: Sequence[Plan]) -> Iterator[str]:
    return (rank.node for plan in plans for rank in _ranks(plan))


def _workers(nodes: Mapping[str, NodeProfile], plan: Plan) -> list[Counter[str]]:
    """Return the number of workers of each stage by machine, at most as many as it runs at once."""
    each = (Counter(rank.node for rank in stage.ranks) for stage in plan.stages)
    return [
        Counter({name: min(count, _most(nodes[name])) for name, count in workers.items()}) for workers in each
    ]


def _most(node: NodeProfile) -> int:
    """Return the number of workers that a machine runs at once; all of them share a CPU quota."""
    return 1 if node.cpu_quota is not None else node.workers_at_once


def _together(nodes: Mapping[str, NodeProfile], plans: Sequence[Plan]) -> list[list[Plan]]:
    """Return the plans in lists of those that share machines with more workers than these run at once."""
    total = sum((workers for plan in plans for workers in _workers(nodes, plan)), Counter[str]())
    crowded = {name for name, count in total.items() if count > _most(nodes[name])}
    found: list[tuple[set[str], list[Plan]]] = []
    for plan in plans:
        names = crowded.intersection(_names([plan]))
        joined = [each for each in found if each[0] & names] if names else []
        if not joined:
            found.append((names, [plan]))
            continue
        first, *others = joined
        for other in others:
            first[0].update(other[0])
            first[1].extend(other[1])
        first[0].update(names)
        first[1].append(plan)
        found = [each for each in found if not any(each is other for other in others)]
    return [members for _, members in found]


def _replicas(
    model: ModelProfile,
    cluster: ClusterProfile,
    request: PlanRequest,
    kind: object,
    alike: Sequence[Sequence[Plan]],
) -> Replicas:
    first, head = alike[0], cluster.nodes[0].name
    head_s = max(cluster.link(head, name).round_trip_s / 2 for name in _names(first))
    members: list[Replica] = []
    for plan in first:
        forecast, rooms = forecast_plan(model, cluster, request.demand, plan)
        kv = {
            RankId(stage, place): RankKv(*room)
            for stage, ranks in enumerate(rooms)
            for place, room in enumerate(ranks)
        }
        members.append(Replica(plan, StepTable(forecast, head_s), kv, forecast.long_chunk))
    names = tuple(
        tuple(tuple(rank.node for rank in stage.ranks) for plan in plans for stage in plan.stages)
        for plans in alike
    )
    return Replicas(tuple(members), names, _shares(cluster, first), (kind, head_s))


def _shares(cluster: ClusterProfile, plans: Sequence[Plan]) -> Shares:
    nodes = {node.name: node for node in cluster.nodes}
    stages = [workers for plan in plans for workers in _workers(nodes, plan)]
    names = list(dict.fromkeys(_names(plans)))
    if all(sum(workers[name] for workers in stages) <= _most(nodes[name]) for name in names):
        return Shares((), ({},) * len(stages))
    parts = tuple(
        {place: float(workers[name]) for place, name in enumerate(names) if workers[name]}
        for workers in stages
    )
    return Shares(tuple(float(_most(nodes[name])) for name in names), parts)


# ---- unlike replicas


def joined(kinds: Sequence[Replicas]) -> list[Replicas]:
    """Return replicas of unlike kinds as alike groups of them, each behind one router; as they are if a group is too large."""
    count = math.gcd(*(kind.count for kind in kinds))
    sizes = [kind.count // count for kind in kinds]
    size = sum(times * len(kind.members) for kind, times in zip(kinds, sizes, strict=True))
    if len(kinds) == 1 or size > _MOST_TOGETHER:
        return list(kinds)
    members, parts, most = list[Replica](), list[Mapping[int, float]](), list[float]()
    names: list[list[tuple[str, ...]]] = [[] for _ in range(count)]
    for kind, times in zip(kinds, sizes, strict=True):
        for place in range(times):
            first = len(most)
            members += kind.members
            most += kind.shares.most
            parts += [{first + machine: part for machine, part in each.items()} for each in kind.shares.parts]
            for group in range(count):
                names[group] += kind.names[group * times + place]
    key = tuple((kind.kind, times) for kind, times in zip(kinds, sizes, strict=True))
    shares = Shares(tuple(most), tuple(parts))
    return [Replicas(tuple(members), tuple(map(tuple, names)), shares, key, tuple(kinds))]
