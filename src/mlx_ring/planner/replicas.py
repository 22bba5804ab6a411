"""Number of replicas of a model, and their machines: `place_replicas(model, cluster, request, count)`. Pure.

Every replica answers its part of the promised sequences. The throughput of a set of machines as one pipeline is bounded by its
slowest stage. Over those bounds the best division into each number of replicas is found exactly, by examining all sets. The
numbers are compared by predicted throughput.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from mlx_ring.core.errors import PlanError
from mlx_ring.planner.many_machines import ManyMachines, too_many_replicas
from mlx_ring.planner.place import place
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.request import PlanRequest, held_kv_bytes
from mlx_ring.planner.search import MOST_NODES, steadiest_costs
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
        found = ManyMachines(model, cluster, request).plans(count)
        return found or (_whole(model, cluster, request, count),)
    most = min(len(cluster.nodes), max(1, request.demand.sequences))
    plans = _best_few(model, cluster, request, [count] if count else range(1, most + 1))
    if not plans:
        # Only tensor parallelism fits.
        return (_whole(model, cluster, request, count),)
    if count is None and _is_better_shared(model, cluster, request, plans):
        return (place(model, cluster, request),)
    return plans


def total_tokens_per_s(plans: Sequence[Plan], sequences: int) -> float:
    """Return the throughput of replicas for so many sequences, of which each replica has its part, rounded up or down."""
    promised, each = sum(plan.sequences for plan in plans), [plan.prediction for plan in plans]
    together, spare = sum(one.tokens_per_s for one in each), promised - sequences
    if spare > len(plans):
        return together * sequences / promised
    return together - sum(sorted(one.tokens_per_s - one.fewer_tokens_per_s for one in each)[: max(0, spare)])


def _best_few(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, numbers: Iterable[int]
) -> tuple[Plan, ...]:
    """Return the plans of the number of replicas with the highest throughput; none if memory does not suffice.

    One more replica must be worth it. Numbers whose bound is below a throughput that was found are not planned.
    """
    sequences = request.demand.sequences
    divisions = [(number, *_best_division(model, cluster, request, number)) for number in numbers]
    made: dict[int, tuple[Plan, ...]] = {}
    highest = 0.0
    for number, bound, sets in sorted(divisions, key=lambda each: -each[1]):
        if not sets or bound <= highest:
            continue
        each = replace(request, demand=replace(request.demand, sequences=request.share(number)))
        made[number] = tuple(place(model, _among(cluster, members), each) for members in sets)
        highest = max(highest, total_tokens_per_s(made[number], sequences))
    best: tuple[Plan, ...] = ()
    for _, plans in sorted(made.items()):
        if not best or total_tokens_per_s(plans, sequences) > _WORTH * total_tokens_per_s(best, sequences):
            best = plans
    return best


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
    if request.demand.kv_memory_bytes is not None:
        free = min(free, nodes * request.demand.kv_memory_bytes)
    most = min(_PLANNED_STREAMS * nodes, max(nodes, int(free / 2 / max(1.0, each))))
    return sorted({most, max(nodes, most // 8), nodes}, reverse=True)


def likeness(cluster: ClusterProfile, plan: Plan) -> object:
    """Return what two plans with the same steps have in common: layers, shares, machines apart from names, and links."""
    nodes = {node.name: node for node in cluster.nodes}
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    names = [rank.node for rank in ranks]
    return (
        tuple((stage.layers, len(stage.ranks)) for stage in plan.stages),
        tuple((replace(nodes[rank.node], name=""), rank.share) for rank in ranks),
        tuple(cluster.link(one, other) for one, other in zip(names, [*names[1:], names[0]], strict=True)),
    )


def _whole(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, count: int | None) -> Plan:
    """Return one plan over all machines, if that is allowed.

    Raises:
        PlanError: it does not fit either, with what is missing, or so many replicas were requested.
    """
    whole = place(model, cluster, request)
    if count is None:
        return whole
    fewer = range(min(count, len(cluster.nodes)) - 1, 1, -1) if len(cluster.nodes) <= MOST_NODES else ()
    fitting = next((number for number in fewer if _best_division(model, cluster, request, number)[1]), 1)
    raise PlanError(too_many_replicas(model, cluster, count, fitting))


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
    together = total_tokens_per_s(plans, request.demand.sequences)
    return shared is not None and shared.prediction.tokens_per_s > together


def _best_division(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, replicas: int
) -> tuple[float, tuple[int, ...]]:
    """Return a bound of the total throughput, and the machines of each replica as bits; no machines without enough memory."""
    share = request.share(replicas)
    speeds = _speeds(model, cluster, request, replicas, share)
    if share > 1 and request.demand.sequences < replicas * share:
        # Some have one sequence less.
        fewer = _speeds(model, cluster, request, replicas, share - 1)
        speeds = {members: max(speed, fewer.get(members, 0.0)) for members, speed in speeds.items()}
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
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, replicas: int, sequences: int
) -> dict[int, float]:
    """Return the throughput of each set of machines as one of the replicas with so many sequences, in tokens per second."""
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
