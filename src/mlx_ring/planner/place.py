"""Entry point of the planner: `place(model, cluster, request)`. Pure, and total: a plan, or an error that says what is missing."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_ring.core.errors import PlanError
from mlx_ring.planner.explanation import explain_plan, explain_shortage
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.request import PlanRequest
from mlx_ring.planner.search import Piece
from mlx_ring.planner.strategies import METHODS, TensorMethod
from mlx_ring.planner.tensor_plans import best_of_both, place_tensor
from mlx_ring.planner.timetable import Timetable
from mlx_ring.rpc.link_profile import UNREACHABLE


def place(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> Plan:
    """Return the plan that the request's strategy makes.

    Raises:
        PlanError: the machines cannot hold the model as promised, or the request contradicts itself.
    """
    _check(model, cluster, request)
    method = METHODS[request.strategy]
    if isinstance(method, TensorMethod):
        return place_tensor(model, cluster, request, method.search)
    times = Timetable(model, cluster, request.demand)
    partition = method.split(times, request)
    if partition is not None:
        _check_hops(cluster, request, partition.pieces)
    plan = None if partition is None else explain_plan(times, request, partition)
    if method.chooses_nodes:
        plan = best_of_both(model, cluster, request, plan)
    if plan is None:
        raise PlanError(explain_shortage(model, cluster, request))
    return plan


def _check(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> None:
    if not cluster.nodes:
        raise PlanError("There is no machine to plan for; name one or more.")
    if request.demand.context_tokens > model.context_tokens:
        raise PlanError(
            f"A context of {request.demand.context_tokens} tokens was requested; {model.name} supports "
            f"{model.context_tokens} at most."
        )


def _check_hops(cluster: ClusterProfile, request: PlanRequest, pieces: Sequence[Piece]) -> None:
    """Raise `PlanError` if two neighbours in the pipeline, or its last and first machine, do not reach each other."""
    names = [cluster.nodes[piece.node].name for piece in pieces]
    for one, other in zip(names, [*names[1:], names[0]], strict=True):
        if cluster.link(one, other) == UNREACHABLE:
            raise PlanError(
                f"With the strategy {request.strategy} {one} would send to {other}, but the two do not reach "
                "each other: fix the network between them, or let the strategy auto choose."
            )
