"""Plans of stages whose ranks already have their machines. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mlx_ring.core.errors import PlanError
from mlx_ring.planner.forecast import StageRanks, settle_weights
from mlx_ring.planner.pipeline import GroupStage, Pipeline
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.request import PlanRequest
from mlx_ring.planner.tensor_groups import SharedModel, given_group
from mlx_ring.planner.tensor_plans import plan_of
from mlx_ring.planner.tensor_search import SharedPipeline
from mlx_ring.rpc.link_profile import UNREACHABLE


def plan_given(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, stages: Sequence[StageRanks], how: str
) -> Plan:
    """Return the plan of given stages.

    Args:
        model: sizes of the model.
        cluster: all machines, with their links.
        request: promised load.
        stages: stages in the pipeline's order.
        how: reason to report for the split.

    Raises:
        PlanError: the stages need more memory than a machine has, or neighbours do not reach each other.
    """
    _check_reach(cluster, stages)
    stages = settle_weights(model, request.demand, cluster, stages)
    shared = SharedModel(model, request.demand, model.shared)
    groups = [GroupStage(given_group(shared, cluster, ranks), layers) for layers, ranks in stages]
    pipeline = Pipeline(cluster, groups, request.demand)
    prediction = pipeline.prediction(request)
    stage_s = tuple(pipeline.lone_stream(shared.context_tokens)[0])
    plan = plan_of(model, cluster, request, SharedPipeline(tuple(groups), stage_s, prediction, 0.0), "")
    _check_memory(plan)
    reason = f"of {len(model.layers)} layers: {how}"
    given = tuple(replace(stage, why=f"{len(stage.layers)} {reason}") for stage in plan.stages)
    return replace(plan, stages=given, remarks=())


def _check_reach(cluster: ClusterProfile, stages: Sequence[StageRanks]) -> None:
    following = [*stages[1:], *stages[:1]]
    for (_, senders), (_, receivers) in zip(stages, following, strict=True):
        sender, _ = senders[0]
        for receiver, _ in receivers:
            if len(stages) > 1 and cluster.link(sender.name, receiver.name) == UNREACHABLE:
                raise PlanError(
                    f"{sender.name} would send to {receiver.name}, but the two do not reach each other: "
                    "fix the network between them."
                )


def _check_memory(plan: Plan) -> None:
    taken, usable = Counter[str](), dict[str, int]()
    for stage in plan.stages:
        for rank in stage.ranks:
            taken[rank.node] += rank.memory_bytes
            usable[rank.node] = rank.usable_bytes
    for node, nbytes in taken.items():
        if nbytes > usable[node]:
            raise PlanError(
                f"The workers on {node} need {nbytes / 1e9:.1f} GB for {plan.model} with {plan.context_tokens} tokens of context, "
                f"and it has {usable[node] / 1e9:.1f} GB for them: use more machines, a smaller --max-model-len, or --kv-bits 8."
            )
