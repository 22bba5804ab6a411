"""Number of replicas of a model, and their machines: `place_replicas(model, cluster, request, count)`. Pure.

Every replica answers its part of the promised sequences. The throughput of a set of machines as one pipeline is bounded by its
slowest stage. Over those bounds the best division into replicas is found exactly, by examining all sets.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mlx_ring.core.errors import PlanError
from mlx_ring.planner.place import place
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.request import PlanRequest
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
        # The error of a plan over all machines names what is missing.
        whole = place(model, cluster, request)
        if count is None:
            # Only tensor parallelism fits.
            return (whole,)
        raise PlanError(
            f"{len(cluster.nodes)} machines cannot hold {count} replicas of {model.name}; one over "
            f"{len(whole.stages)} of them fits. Ask for fewer, for a shorter context or for fewer sequences."
        )
    each = replace(request, demand=replace(request.demand, sequences=_share(request, len(best[1]))))
    plans = tuple(place(model, _among(cluster, members), each) for members in best[1])
    if count is None and _is_better_shared(model, cluster, request, plans):
        return (place(model, cluster, request),)
    return plans


def _check(cluster: ClusterProfile, request: PlanRequest, count: int | None) -> None:
    nodes = len(cluster.nodes)
    if request.strategy != "auto":
        raise PlanError(
            f"Replicas are planned by the strategy auto; {request.strategy} was requested with {count} of them."
        )
    if nodes > MOST_NODES:
        raise PlanError(f"{nodes} machines were given; replicas are planned for {MOST_NODES} at most.")
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
