"""Plans with tensor parallelism between machines, and their comparison with plain pipelines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Protocol

from mlx_ring.core.errors import PlanError
from mlx_ring.models.tensor_shares import splittable
from mlx_ring.planner.plan import WHY_LEFT_OUT, LeftOut, Plan, Prediction, RankPlan, StagePlan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.request import PlanRequest
from mlx_ring.planner.search import MOST_NODES
from mlx_ring.planner.tensor_groups import GroupRank, GroupStage
from mlx_ring.planner.tensor_search import SharedLayers, SharedPipeline


class TensorSearch(Protocol):
    """Search for the best pipeline of machines that compute layers together."""

    def __call__(self, search: SharedLayers, /, *, of_all: bool) -> SharedPipeline | None:
        """Return the best pipeline; with `of_all` over all machines of the cluster."""
        ...


MOST_ALIKE = 64
"""Number of machines up to which sharing layers is considered, if many of them are alike."""
_UNSPLIT, _UNTRUSTED, _UNSERVED = (
    "the model's layers cannot be split",
    "tensor parallelism is neither encrypted nor authenticated, and no interface between these machines is trusted",
    "a collective link uses the only MLX group of a process, so the ranks of a stage have none",
)


def best_of_both(
    model: ModelProfile,
    cluster: ClusterProfile,
    request: PlanRequest,
    apart: Plan | None,
    *,
    explains: bool = True,
) -> Plan | None:
    """Return the better of a plain pipeline and of the plans with tensor parallelism.

    Args:
        model: sizes of the model.
        cluster: machines and links. Of more than eight machines of many kinds, the fastest ones and some kinds may share
            layers.
        request: promised load and objective.
        apart: best pipeline without tensor parallelism; None if there is none.
        explains: False to leave out what tensor parallelism would gain where it is not possible, which takes a search.

    Returns:
        The better plan; None if neither is possible.
    """
    if not _is_compared(cluster, request, apart):
        return apart
    if not _may_share(model, cluster, request):
        return with_left_undone(model, cluster, request, apart) if explains and apart is not None else apart
    search = SharedLayers(model, cluster, request)
    if search.is_searchable:
        searches = [search]
    else:
        parts = [[cluster.nodes[place] for place in part] for part in search.parts()]
        searches = [SharedLayers(model, replace(cluster, nodes=tuple(nodes)), request) for nodes in parts]
    found = [_best_shared(each, apart) for each in searches if each.is_searchable and each.is_possible]
    best = min((one for one in found if one is not None), key=lambda one: one.cost, default=None)
    if best is None:
        return apart
    if apart is None or best.cost < apart.prediction.minimized_s(request.objective):
        reason = _reason(best, request, None if apart is None else apart.prediction)
        return plan_of(model, cluster, request, best, reason)
    times = _times(best.prediction, request)
    return _with_remark(apart, f"If {_groups(best)} computed {_what(best)} together, it would be {times}.")


def _is_compared(cluster: ClusterProfile, request: PlanRequest, apart: Plan | None) -> bool:
    """Return True if sharing layers is considered beside a pipeline."""
    # Ranks that share layers hold norms, embeddings and activations each.
    is_emptiest = request.objective == "memory" and apart is not None
    return not is_emptiest and 1 < len(cluster.nodes) <= MOST_ALIKE


def _may_share(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> bool:
    """Return True if any two machines may compute layers together."""
    pairs = combinations(cluster.nodes, 2)
    return (
        request.allows_tensor
        and model.shared is not None
        and any(cluster.trusts(one, other) for one, other in pairs)
    )


def with_left_undone(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, apart: Plan) -> Plan:
    """Return a pipeline with the remark what tensor parallelism would gain, if it would and is not possible."""
    if (
        not _is_compared(cluster, request, apart)
        or _may_share(model, cluster, request)
        or not SharedLayers(model, cluster, request).is_searchable
    ):
        return apart
    return _with_remark(apart, _left_undone(model, cluster, request, apart))


def _best_shared(search: SharedLayers, apart: Plan | None) -> SharedPipeline | None:
    """Return the best plan in which machines share layers; `apart`, if it has no other machines, may lead to it."""
    tensor = search.tensor()
    near = [] if tensor is None else [[(tensor.nodes, tensor.layers)]]
    if apart is not None and all(search.has(stage.node) for stage in apart.stages):
        near.append([((stage.node,), len(stage.layers)) for stage in apart.stages])
    found = [pipeline for pipeline in (tensor, search.hybrid(near=near)) if pipeline is not None]
    return min(found, key=lambda pipeline: pipeline.cost, default=None)


def place_tensor(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, search: TensorSearch
) -> Plan:
    """Return the plan of a strategy by which machines compute layers together.

    Args:
        model: sizes of the model.
        cluster: machines and links.
        request: promised load and strategy.
        search: search of the strategy.

    Raises:
        PlanError: there is no such plan, and why.
    """
    if problem := _problem(model, cluster, request):
        raise PlanError(problem)
    pipeline = search(SharedLayers(model, cluster, request), of_all=True)
    if pipeline is None:
        raise PlanError(_why_none(model, cluster, request))
    return plan_of(model, cluster, request, pipeline, _reason(pipeline, request, None))


def _problem(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> str:
    """Return why the machines cannot share layers at all; empty if they can."""
    nodes, name = cluster.nodes, f"The strategy {request.strategy}"
    problems = (
        (
            len(nodes) == 1,
            f"{name} shares layers among machines, but there is one; use `serve --tp N` to share them among its workers.",
        ),
        (
            len(nodes) > MOST_ALIKE
            or (len(nodes) > MOST_NODES and not SharedLayers(model, cluster, request).is_searchable),
            f"{len(nodes)} machines were given; {name} is planned for {MOST_NODES} at most, or for {MOST_ALIKE} of few kinds.",
        ),
        (not request.allows_tensor, f"{name} cannot be served: {_UNSERVED}. Choose another strategy."),
        (
            model.shared is None,
            f"{name} is not possible with {model.name}: {_UNSPLIT}; supported are {splittable()}.",
        ),
        (
            request.strategy == "hybrid" and len(nodes) == 2,  # noqa: PLR2004 - a pair
            f"{name} needs at least 3 machines, but there are 2: choose the strategy tensor.",
        ),
        (
            not any(cluster.trusts(one, other) for one, other in combinations(nodes, 2)),
            f"{name} is not possible: {_UNTRUSTED}. Name one on each, or let the strategy auto choose.",
        ),
    )
    return next((problem for applies, problem in problems if applies), "")


def _why_none(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> str:
    """Return why there is no plan over all machines."""
    nodes = cluster.nodes
    for one, other in combinations(nodes, 2):
        if not cluster.trusts(one, other) and request.strategy == "tensor":
            return (
                f"The strategy tensor is not possible with {one.name} and {other.name}: {_UNTRUSTED}. "
                "Leave one of them out, or choose the strategy hybrid."
            )
    most = model.shared.most_ranks if model.shared is not None else len(nodes)
    if request.strategy == "tensor" and len(nodes) > most:
        return (
            f"{model.name} can be shared by {most} machines at most, but there are {len(nodes)}: use fewer."
        )
    usable = sum(node.usable_bytes for node in nodes)
    return (
        f"{model.name} with {request.demand.sequences} x {request.demand.context_tokens} tokens does not fit into the "
        f"{usable / 1e9:.1f} GB of the {len(nodes)} machines by the strategy {request.strategy}, because each rank holds all norms, "
        "embeddings and working memory. Shorten the context, or let the strategy auto choose."
    )


def _left_undone(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, apart: Plan) -> str:
    """Return what tensor parallelism would gain and why it is not used; empty if it would gain nothing."""
    pipeline = SharedLayers(model, cluster, request, trusting=True).tensor()
    if pipeline is None or pipeline.cost >= apart.prediction.minimized_s(request.objective):
        return ""
    why = _UNSPLIT if model.shared is None else _UNTRUSTED
    if model.shared is not None and SharedLayers(model, cluster, request).is_possible:
        why = _UNSERVED
    return f"If {_groups(pipeline)} computed {_what(pipeline)} together, it would be {_times(pipeline.prediction, request)}, but {why}."


def _with_remark(plan: Plan, remark: str) -> Plan:
    return replace(plan, remarks=(*plan.remarks, remark)) if remark else plan


def _reason(pipeline: SharedPipeline, request: PlanRequest, apart: Prediction | None) -> str:
    reason = f"{_groups(pipeline)} compute {_what(pipeline)} together: {_times(pipeline.prediction, request)}"
    return f"{reason}; with separate layers, {_times(apart, request)}." if apart is not None else f"{reason}."


def _groups(pipeline: SharedPipeline) -> str:
    groups = [stage.group for stage in pipeline.stages if len(stage.group.members) > 1]
    return " and ".join("+".join(node.name for node in group.nodes) for group in groups)


def _what(pipeline: SharedPipeline) -> str:
    return "every layer" if len(pipeline.stages) == 1 else "the layers of a stage"


def _times(prediction: Prediction, request: PlanRequest) -> str:
    if request.objective == "throughput":
        return f"{prediction.tokens_per_s:.1f} tokens/s"
    return (
        f"{1e3 * prediction.token_s:.1f} ms a token and {prediction.first_token_s:.2f} s to the first of a prompt of "
        f"{prediction.prompt_tokens}"
    )


# ---- the plan of a pipeline


def plan_of(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, pipeline: SharedPipeline, reason: str
) -> Plan:
    """Return the plan of a pipeline that was found."""
    demand, used = request.demand, set(pipeline.nodes)
    return Plan(
        model=model.name,
        strategy=request.strategy,
        objective=request.objective,
        context_tokens=demand.context_tokens,
        sequences=demand.sequences,
        kv_bits=demand.kv_bits,
        stages=tuple(
            _stage(stage, model, token_s)
            for stage, token_s in zip(pipeline.stages, pipeline.stage_s, strict=True)
        ),
        left_out=tuple(
            LeftOut(node.name, WHY_LEFT_OUT[request.objective])
            for node in cluster.nodes
            if node.name not in used
        ),
        prediction=pipeline.prediction,
        remarks=(reason,),
    )


def _stage(stage: GroupStage, model: ModelProfile, token_s: float) -> StagePlan:
    ranks = [_rank(member, stage) for member in stage.group.members]
    return StagePlan(
        node=ranks[0].node,
        layers=stage.layers,
        weight_bytes=sum(rank.weight_bytes for rank in ranks),
        memory_bytes=sum(rank.memory_bytes for rank in ranks),
        usable_bytes=sum(rank.usable_bytes for rank in ranks),
        token_s=token_s,
        why=_why(ranks, f"{len(stage.layers)} of {len(model.layers)} layers"),
        ranks=tuple(ranks),
    )


def _rank(member: GroupRank, stage: GroupStage) -> RankPlan:
    first, end = stage.layers.start, stage.layers.end
    return RankPlan(
        node=member.node.name,
        share=member.share,
        weight_bytes=member.costs.weight_bytes(first, end),
        memory_bytes=member.costs.memory_bytes(first, end),
        usable_bytes=member.node.usable_bytes,
    )


def _why(ranks: Sequence[RankPlan], layers: str) -> str:
    if len(ranks) == 1:
        return f"{layers}, alone"
    return f"{layers} together; shares by speed and memory"
