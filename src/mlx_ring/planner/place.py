"""Entry points of the planner: `place(model, cluster, request)`, and `plan_given` for stages that have their machines.

Pure, and total: a plan, or an error that says what is missing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.planner.forecast import StageRanks, settle_weights, with_even_chunks
from mlx_ring.planner.memory_fit import explain_shortage
from mlx_ring.planner.pipeline import Pipeline
from mlx_ring.planner.plan import WHY_LEFT_OUT, LeftOut, Plan, Prediction, RankPlan, StagePlan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile
from mlx_ring.planner.rank_costs import beside_others
from mlx_ring.planner.request import FULL_PRECISION_BITS, USUAL_CONTEXT, Demand, PlanRequest
from mlx_ring.planner.search import MachineLayers, Partition
from mlx_ring.planner.strategies import METHODS, OVER_ALL, PipelineMethod, TensorMethod
from mlx_ring.planner.tensor_groups import GroupStage, SharedModel, given_group
from mlx_ring.planner.tensor_plans import best_of_both, place_tensor, plan_of
from mlx_ring.planner.tensor_search import SharedPipeline
from mlx_ring.planner.timetable import Timetable
from mlx_ring.rpc.link_profile import UNREACHABLE, LinkProfile

_MOST_COMPARED = 8
"""Machines up to which a plan with one of them is compared with a split over all."""


def _explained(times: Timetable, request: PlanRequest, partition: Partition) -> Plan:
    """Return the plan of a pipeline, with its prediction and reasons but those of machines that are left out."""
    pipeline = times.pipeline(partition.pieces)
    prediction, (stages_s, _) = pipeline.prediction(request), pipeline.lone_stream()
    return Plan(
        model=times.model.name,
        strategy=request.strategy,
        objective=request.objective,
        context_tokens=request.demand.context_tokens,
        sequences=request.demand.sequences,
        kv_bits=request.demand.kv_bits,
        stages=tuple(
            _stage(times, request, piece, token_s)
            for piece, token_s in zip(partition.pieces, stages_s, strict=True)
        ),
        left_out=(),
        prediction=prediction,
        remarks=_remarks(times, request, partition, prediction),
    )


def _stage(times: Timetable, request: PlanRequest, piece: MachineLayers, token_s: float) -> StagePlan:
    node = times.cluster.nodes[piece.node]
    rank = RankPlan(
        node=node.name,
        share=1.0,
        weight_bytes=times.costs.weight_bytes(node, piece.first, piece.end),
        memory_bytes=int(times.costs.memory(node)[piece.first, piece.end]),
        usable_bytes=node.usable_bytes,
    )
    return StagePlan(
        node=node.name,
        layers=LayerRange(piece.first, piece.end),
        weight_bytes=rank.weight_bytes,
        memory_bytes=rank.memory_bytes,
        usable_bytes=rank.usable_bytes,
        token_s=token_s,
        why=_why(times, request, piece),
        ranks=(rank,),
    )


def _why(times: Timetable, request: PlanRequest, piece: MachineLayers) -> str:
    method = METHODS[request.strategy]
    reason = method.reason(times, piece.node) if isinstance(method, PipelineMethod) else ""
    node, layers = times.cluster.nodes[piece.node], len(times.model.layers)
    memory = times.costs.memory(node)
    if piece.end < layers and memory[piece.first, piece.end + 1] > node.usable_bytes:
        reason += "; its memory is full"
    return f"{piece.end - piece.first} of {layers} layers: {reason}"


def _left_out(times: Timetable, request: PlanRequest, used: Collection[str]) -> tuple[LeftOut, ...]:
    """Return the machines without layers, beside those that are used."""
    left_out: list[LeftOut] = []
    for place, node in enumerate(times.cluster.nodes):
        if node.name in used:
            continue
        if other := _out_of_reach(times.cluster, node, used):
            why = f"it and {other} do not reach each other"
        elif not np.isfinite(times.tables(1)[place]).any():
            why = "too little memory for a single layer"
        else:
            why = WHY_LEFT_OUT[request.objective]
        left_out.append(LeftOut(node.name, why))
    return tuple(left_out)


def _out_of_reach(cluster: ClusterProfile, node: NodeProfile, used: Collection[str]) -> str:
    """Return the name of a machine of the plan that this one does not reach, or an empty string."""
    names = [each.name for each in cluster.nodes if each.name in used]
    return next((name for name in names if cluster.link(node.name, name) == UNREACHABLE), "")


def _fullest(times: Timetable, partition: Partition) -> float:
    """Return the used share of the memory of the machine with the largest share."""
    nodes = times.cluster.nodes
    return max(
        times.costs.memory(nodes[piece.node])[piece.first, piece.end] / nodes[piece.node].usable_bytes
        for piece in partition.pieces
    )


def _remarks(
    times: Timetable, request: PlanRequest, partition: Partition, prediction: Prediction
) -> tuple[str, ...]:
    nodes = times.cluster.nodes
    if request.objective == "memory":
        return (f"The fullest machine is {_fullest(times, partition):.0%} full.",)
    if len(partition.pieces) == 1:
        why = _why_alone(times, request, prediction) if len(nodes) > 1 else ""
        return (why,) if why else ()
    alone_s = [float(table[0, -1]) for table in times.steady_tables(1)]
    best = min(range(len(alone_s)), key=lambda place: alone_s[place])
    if not np.isfinite(alone_s[best]):
        return ("No machine alone has the memory for it.",)
    if request.users > 1:
        return ()
    speed = f"{1e3 * alone_s[best]:.1f} ms a token instead of {1e3 * prediction.token_s:.1f}"
    if alone_s[best] < prediction.token_s:
        return (f"{nodes[best].name} alone would be faster for a single stream: {speed}.",)
    return (f"{nodes[best].name} alone would take {speed}.",)


def _why_alone(times: Timetable, request: PlanRequest, prediction: Prediction) -> str:
    """Return what a split over all machines would cost by the request's objective; empty if it is found to cost nothing."""
    are_few = len(times.cluster.nodes) <= min(_MOST_COMPARED, len(times.model.layers))
    split = OVER_ALL.split(times, request) if are_few else None
    if split is None or len(split.pieces) == 1:
        return "One machine alone is fastest."
    other = times.pipeline(split.pieces).prediction(request)
    other_s = other.minimized_s(request.objective)
    if prediction.minimized_s(request.objective) >= other_s:
        return ""
    if not math.isfinite(other_s):
        return "One machine alone is fastest."
    if request.objective == "throughput":
        best = f"has the highest throughput: {prediction.tokens_per_s:.1f} tokens/s instead of {other.tokens_per_s:.1f}"
    elif request.objective == "first-token":
        best = f"is fastest: {prediction.first_token_s:.2f} s to the first token instead of {other.first_token_s:.2f}"
    else:
        best = f"is fastest: {prediction.request_s:.2f} s for a request instead of {other.request_s:.2f}"
    machines = f"with {len(split.pieces)} machines"
    return f"One machine alone {best} {machines}. `--strategy balanced` splits the layers all the same."


def place(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> Plan:
    """Return the plan that the request's strategy makes.

    Raises:
        PlanError: the machines cannot hold the model as promised, or the request contradicts itself.
    """
    plan = place_if_it_fits(model, cluster, request)
    if plan is None:
        raise PlanError(explain_shortage(model, cluster, request))
    return plan


def place_if_it_fits(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, *, explains: bool = True
) -> Plan | None:
    """Return the plan that `place` makes; None, without a search for the reason, if the memory does not suffice.

    Without `explains`, it lacks the remark what tensor parallelism would gain where it is not possible.

    Raises:
        PlanError: the request contradicts itself, or its strategy cannot be used with these machines.
    """
    check_request(model, cluster, request)
    request = with_even_chunks(model, cluster, request)
    method = METHODS[request.strategy]
    if isinstance(method, TensorMethod):
        return place_tensor(model, cluster, request, method.search)
    times = Timetable(model, cluster, request.demand)
    partition = method.split(times, request)
    if partition is not None:
        _check_hops(cluster, request, partition.pieces)
    plan = None if partition is None else _explained(times, request, partition)
    if method.chooses_nodes:
        plan = best_of_both(model, cluster, request, plan, explains=explains)
    return None if plan is None else _with_left_out(times, request, plan)


def plan_of_pieces(times: Timetable, request: PlanRequest, pieces: Sequence[MachineLayers]) -> Plan:
    """Return the plan of a pipeline whose stages were found elsewhere."""
    return _with_left_out(times, request, _explained(times, request, Partition(tuple(pieces), 0.0)))


def _with_left_out(times: Timetable, request: PlanRequest, plan: Plan) -> Plan:
    used = {rank.node for stage in plan.stages for rank in stage.ranks}
    return replace(plan, left_out=_left_out(times, request, used))


def check_request(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> None:
    """Check that there is a machine, and that the model can have the context and the KV cache.

    Raises:
        PlanError: one of them is missing.
    """
    if not cluster.nodes:
        raise PlanError("There is no machine to plan for; name one or more.")
    _check_demand(model, request)


def _check_demand(model: ModelProfile, request: PlanRequest) -> None:
    """Raise `PlanError` if the model has no context as long, or cannot have the KV cache."""
    if not model.quantizes_kv and request.demand.kv_bits < FULL_PRECISION_BITS:
        raise PlanError(
            f"A KV cache of {request.demand.kv_bits} bits was requested; {model.name} cannot use a quantized one."
        )
    context, most = request.demand.context_tokens, model.context_tokens
    if context <= most:
        return
    needed = request.prompt_tokens + request.answer_tokens
    if context == needed and needed > USUAL_CONTEXT:
        raise PlanError(
            f"A prompt of {request.prompt_tokens} tokens and an answer of {request.answer_tokens} need a context of {needed}; "
            f"{model.name} supports {most} at most."
        )
    raise PlanError(f"A context of {context} tokens was requested; {model.name} supports {most} at most.")


def _check_hops(cluster: ClusterProfile, request: PlanRequest, pieces: Sequence[MachineLayers]) -> None:
    """Raise `PlanError` if two neighbours in the pipeline, or its last and first machine, do not reach each other."""
    names = [cluster.nodes[piece.node].name for piece in pieces]
    for one, other in zip(names, [*names[1:], names[0]], strict=True):
        if cluster.link(one, other) == UNREACHABLE:
            raise PlanError(
                f"With the strategy {request.strategy} {one} would send to {other}, but the two do not reach "
                "each other: fix the network between them, or let the strategy auto choose."
            )


# ---- given stages


LoadedStages = tuple[tuple[LayerRange, tuple[tuple[str, float], ...]], ...]
"""Stages of a loaded instance, in the pipeline's order: its layers, and the machine and share of each rank."""


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """Machines of a head, and what it does with them."""

    machines: ClusterProfile
    """Connected machines, with the memory that a model may use; none if none is measured."""
    request: PlanRequest
    """Strategy, objective, usual request and bits of the KV cache with which it plans."""
    replicas: tuple[LoadedStages, ...] = ()
    """Stages of each loaded instance of the model; none if it is not loaded."""
    count: int | None = None
    """Number of replicas that it is set up for; None for one, or the best number for throughput."""
    policy: Policy | None = None
    """Scheduler's settings of the model; None if they are not known."""


@dataclass(frozen=True, slots=True)
class PlanningBasis:
    """Machines, model and settings with which a head plans, in values that JSON has."""

    model: ModelProfile
    remarks: tuple[str, ...]
    """Sentences on what the model's name means."""
    nodes: tuple[NodeProfile, ...]
    links: tuple[tuple[str, str, LinkProfile | None], ...]
    """Two machines, and the link between them; None if they do not reach each other."""
    usual_link: LinkProfile
    request: PlanRequest
    replicas: tuple[LoadedStages, ...]
    policy: Policy | None

    @classmethod
    def of(cls, running: RunningCluster, model: ModelProfile, remarks: tuple[str, ...]) -> PlanningBasis:
        """Return what a running cluster plans a model with."""
        machines = running.machines
        links = tuple(
            (*sorted(ends), None if link == UNREACHABLE else link) for ends, link in machines.links.items()
        )
        return cls(
            model,
            remarks,
            machines.nodes,
            cast("tuple[tuple[str, str, LinkProfile | None], ...]", links),
            machines.usual_link,
            running.request,
            running.replicas,
            running.policy,
        )

    @property
    def machines(self) -> ClusterProfile:
        """Machines and links."""
        links = {frozenset((one, other)): link or UNREACHABLE for one, other, link in self.links}
        return ClusterProfile(self.nodes, links, self.usual_link)


def stages_of(plan: Plan) -> LoadedStages:
    """Return the layers of each stage of a plan, with its machines and their shares."""
    return tuple(
        (stage.layers, tuple((rank.node, rank.share) for rank in stage.ranks)) for stage in plan.stages
    )


def plan_loaded(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, replicas: Sequence[LoadedStages]
) -> list[Plan]:
    """Return the plan of each loaded instance, with its part of the sequences.

    Instances on one machine have equal parts of its memory, and of its speed while they compute at the same time.

    Raises:
        PlanError: the stages need more memory than a machine has, or the model cannot have the context or the KV cache.
    """
    _check_demand(model, request)
    instances = Counter(
        name for stages in replicas for name in {name for _, ranks in stages for name, _ in ranks}
    )
    part, users = (-(-count // len(replicas)) for count in (request.demand.sequences, request.users))
    each = replace(request, demand=replace(request.demand, sequences=part), users=users)

    def planned(stages: LoadedStages, at_once: int) -> Plan:
        """Return the plan of an instance while so many of them compute."""
        nodes = {node.name: _beside(node, instances[node.name], at_once) for node in cluster.nodes}
        ranks = [(layers, [(nodes[name], share) for name, share in ranks]) for layers, ranks in stages]
        shared = replace(cluster, nodes=tuple(nodes.values()))
        return plan_given(model, shared, each, ranks, "as they are loaded")

    plans: list[Plan] = []
    for stages in replicas:
        plan = planned(stages, request.users)
        together = planned(stages, request.demand.sequences).prediction
        speeds = {"tokens_per_s": together.tokens_per_s, "fewer_tokens_per_s": together.fewer_tokens_per_s}
        plans.append(replace(plan, prediction=replace(plan.prediction, **speeds)))
    return plans


def _beside(node: NodeProfile, instances: int, at_once: int) -> NodeProfile:
    """Return a machine as one of several instances on it finds it, while at most so many compute."""
    if instances <= 1:
        return node
    part = replace(node, memory_bytes=node.memory_bytes // instances)
    return beside_others(part, min(instances, max(1, at_once)))


def plan_instances(
    model: ModelProfile, machine: ClusterProfile, request: PlanRequest, count: int
) -> list[Plan]:
    """Return the plans of several whole instances on the only machine, as `serve` loads them there.

    Raises:
        PlanError: their parts of the memory do not suffice, or the model has no context as long.
    """
    stages: LoadedStages = ((LayerRange(0, len(model.layers)), ((machine.nodes[0].name, 1.0),)),)
    return plan_loaded(model, machine, request, [stages] * count)


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
    request = with_even_chunks(model, cluster, request)
    stages = settle_weights(model, request.demand, cluster, stages)
    shared = SharedModel(model, request.demand, model.shared)
    groups = [GroupStage(given_group(shared, cluster, ranks), layers) for layers, ranks in stages]
    _check_kv_memory(model, groups, request.demand)
    pipeline = Pipeline(cluster, groups, request.demand)
    prediction = pipeline.prediction(request)
    stage_s = tuple(pipeline.lone_stream(shared.context_tokens)[0])
    plan = plan_of(model, cluster, request, SharedPipeline(tuple(groups), stage_s, prediction, 0.0), "")
    _check_memory(plan, quantizes_kv=model.quantizes_kv)
    reason = f"of {len(model.layers)} layers: {how}"
    given = tuple(replace(stage, why=f"{len(stage.layers)} {reason}") for stage in plan.stages)
    left_out = tuple(replace(left, why=f"the stages are {how}") for left in plan.left_out)
    return replace(plan, stages=given, left_out=left_out, remarks=())


def _check_reach(cluster: ClusterProfile, stages: Sequence[StageRanks]) -> None:
    following = [*stages[1:], *stages[:1]]
    for (_, [(sender, _), *_]), (_, receivers) in zip(stages, following, strict=True):
        for receiver, _ in receivers:
            if len(stages) > 1 and cluster.link(sender.name, receiver.name) == UNREACHABLE:
                raise PlanError(
                    f"{sender.name} would send to {receiver.name}, but the two do not reach each other: "
                    "fix the network between them."
                )


def _check_kv_memory(model: ModelProfile, stages: Sequence[GroupStage], demand: Demand) -> None:
    """Raise `PlanError` if a worker's given KV memory does not hold the promised load."""
    for stage in stages:
        first, end = stage.layers.start, stage.layers.end
        share, member = min(
            ((member.costs.kv_share(first, end), member) for member in stage.group.members),
            key=lambda pair: pair[0],
        )
        if share < 1:
            given = demand.kv_memory_bytes or 0
            raise PlanError(
                f"{model.name} with {demand.sequences} x {demand.context_tokens} tokens needs {given / share / 1e6:.0f} MB "
                f"of KV cache in the worker on {member.node.name}, which has {given / 1e6:.0f} MB (--kv-cache-memory): "
                "ask for fewer or shorter sequences, or give more."
            )


def _check_memory(plan: Plan, *, quantizes_kv: bool) -> None:
    taken, usable = Counter[str](), dict[str, int]()
    remedies = (
        ", a smaller --max-model-len, or --kv-bits 8" if quantizes_kv else " or a smaller --max-model-len"
    )
    for stage in plan.stages:
        for rank in stage.ranks:
            taken[rank.node] += rank.memory_bytes
            usable[rank.node] = rank.usable_bytes
    for node, nbytes in taken.items():
        if nbytes > usable[node]:
            raise PlanError(
                f"The workers on {node} need {nbytes / 1e9:.1f} GB for {plan.model} with {plan.context_tokens} tokens of context, "
                f"and it has {usable[node] / 1e9:.1f} GB for them: use more machines{remedies}."
            )
