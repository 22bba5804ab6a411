"""Entry points of the planner: `place(model, cluster, request)`, and `plan_given` for stages that have their machines.

Pure, and total: a plan, or an error that says what is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.planner.forecast import StageRanks, settle_weights
from mlx_ring.planner.pipeline import GroupStage, Pipeline
from mlx_ring.planner.plan import WHY_LEFT_OUT, LeftOut, Plan, Prediction, RankPlan, StagePlan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile
from mlx_ring.planner.request import PlanRequest
from mlx_ring.planner.search import MachineLayers, Partition
from mlx_ring.planner.stage_costs import StageTables
from mlx_ring.planner.strategies import METHODS, PipelineMethod, TensorMethod
from mlx_ring.planner.tensor_groups import SharedModel, given_group
from mlx_ring.planner.tensor_plans import best_of_both, place_tensor, plan_of
from mlx_ring.planner.tensor_search import SharedPipeline
from mlx_ring.planner.timetable import Timetable
from mlx_ring.rpc.link_profile import UNREACHABLE

_SHORTEST_CONTEXT = 256
_KV_BITS = (8, 4)


def _explained(times: Timetable, request: PlanRequest, partition: Partition) -> Plan:
    """Return the plan of a pipeline, with its prediction and reasons but those of machines that are left out."""
    pipeline = times.pipeline(partition.pieces)
    prediction = pipeline.prediction(request)
    stages_s, _ = pipeline.lone_stream()
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
        return ("One machine alone is fastest.",) if len(nodes) > 1 else ()
    alone_s = [float(table[0, -1]) for table in times.steady_tables(1)]
    best = min(range(len(alone_s)), key=lambda place: alone_s[place])
    if request.users == 1 and alone_s[best] < prediction.token_s:
        return (
            (
                f"{nodes[best].name} alone would be faster for a single stream: "
                f"{1e3 * alone_s[best]:.1f} ms a token instead of {1e3 * prediction.token_s:.1f}."
            ),
        )
    return ()


# ---- what is missing


def explain_shortage(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> str:
    """Return why no plan fits, and what would fit."""
    if broken := _broken_links(model, cluster, request):
        return broken
    demand, usable = request.demand, sum(node.usable_bytes for node in cluster.nodes)
    tables = StageTables(model, demand)
    need = min(float(tables.memory(node)[0, -1]) for node in cluster.nodes)
    several = "" if demand.sequences == 1 else "s"
    asked = (
        f"{model.name} with {demand.sequences} sequence{several} of {demand.context_tokens} tokens "
        f"needs {need / 1e9:.1f} GB"
    )
    have = f"the {len(cluster.nodes)} machines have {usable / 1e9:.1f} GB for it"
    if need > usable:
        begin = f"{asked}, and {have}: {(need - usable) / 1e9:.1f} GB are missing."
    else:
        begin = (
            f"{asked}, and {have}, but the strategy {request.strategy} does not divide it so that it fits."
        )
    return f"{begin} {_nearest_fit(model, cluster, request)}"


def _broken_links(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> str:
    """Return the links without which there is no plan; empty if mending them would not help."""
    broken = [sorted(pair) for pair, link in cluster.links.items() if link == UNREACHABLE]
    if not broken or not _fits(model, replace(cluster, links={}), request):
        return ""
    pairs = ", ".join(f"{one} and {other}" for one, other in sorted(broken))
    return f"{model.name} needs several machines, and these do not reach each other: {pairs}. Fix the network between them."


def _nearest_fit(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> str:
    demand, found = request.demand, list[str]()

    def fits(**changes: int) -> bool:
        return _fits(model, cluster, replace(request, demand=replace(demand, **changes)))

    for bits in _KV_BITS:
        if bits < demand.kv_bits and fits(kv_bits=bits):
            found.append(f"KV of {bits} bits")
            break
    context = _largest(_SHORTEST_CONTEXT, demand.context_tokens, lambda tokens: fits(context_tokens=tokens))
    if context:
        found.append(f"a context of {context} tokens")
    sequences = _largest(1, demand.sequences, lambda number: fits(sequences=number))
    if sequences:
        found.append(f"{sequences} sequence{'s' * (sequences > 1)}")
    if found:
        return f"This fits: {', or '.join(found)}."
    if fits(context_tokens=_SHORTEST_CONTEXT, sequences=1):
        return f"One sequence of {_SHORTEST_CONTEXT} tokens fits."
    return "Even one short sequence does not fit."


def _fits(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> bool:
    method = METHODS[request.strategy]
    times = Timetable(model, cluster, request.demand)
    return isinstance(method, PipelineMethod) and method.fits(times, request)


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest multiple of `low` below `high` that fits; 0 if none does."""
    if low >= high or not fits(low):
        return 0
    good, bad = 1, -(-high // low)
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(low * middle):
            good = middle
        else:
            bad = middle
    return good * low


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
    plan = None if partition is None else _explained(times, request, partition)
    if method.chooses_nodes:
        plan = best_of_both(model, cluster, request, plan)
    if plan is None:
        raise PlanError(explain_shortage(model, cluster, request))
    used = {rank.node for stage in plan.stages for rank in stage.ranks}
    return replace(plan, left_out=_left_out(times, request, used))


def _check(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> None:
    if not cluster.nodes:
        raise PlanError("There is no machine to plan for; name one or more.")
    if request.demand.context_tokens > model.context_tokens:
        raise PlanError(
            f"A context of {request.demand.context_tokens} tokens was requested; {model.name} supports "
            f"{model.context_tokens} at most."
        )


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


def plan_loaded(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, replicas: Sequence[LoadedStages]
) -> list[Plan]:
    """Return the plan of each loaded instance, with its part of the sequences.

    Instances on one machine have equal parts of its memory.

    Raises:
        PlanError: the stages need more memory than a machine has, or the model has no context as long.
    """
    context = request.demand.context_tokens
    if context > model.context_tokens:
        raise PlanError(
            f"A context of {context} tokens was requested; {model.name} supports {model.context_tokens} at most."
        )
    instances = Counter(
        name for stages in replicas for name in {name for _, ranks in stages for name, _ in ranks}
    )
    nodes = {
        node.name: replace(node, memory_bytes=node.memory_bytes // max(1, instances[node.name]))
        for node in cluster.nodes
    }
    shared = replace(cluster, nodes=tuple(nodes.values()))
    part = -(-request.demand.sequences // len(replicas))
    each = replace(request, demand=replace(request.demand, sequences=part))
    return [
        plan_given(
            model,
            shared,
            each,
            [(layers, [(nodes[name], share) for name, share in ranks]) for layers, ranks in stages],
            "as they are loaded",
        )
        for stages in replicas
    ]


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
