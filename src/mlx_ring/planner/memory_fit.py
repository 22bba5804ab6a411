"""Room for a model in a cluster's memory: whether it fits, how often, and what is missing. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mlx_ring.core.errors import PlanError
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.request import Demand, PlanRequest, held_kv_bytes, limited_kv_bytes
from mlx_ring.planner.search import in_order
from mlx_ring.planner.stage_costs import StageTables
from mlx_ring.planner.strategies import METHODS, PipelineMethod, TensorMethod
from mlx_ring.planner.tensor_plans import MOST_ALIKE, place_tensor
from mlx_ring.planner.tensor_search import SharedLayers
from mlx_ring.planner.timetable import Timetable
from mlx_ring.rpc.link_profile import UNREACHABLE

MOST_USERS = 4096
"""Users beyond which room is not counted further."""
_SHORTEST_CONTEXT = 256
_KV_BITS = (8, 4)
_PAIR = 2
_GB = 10**9


def least_bytes(model: ModelProfile, demand: Demand) -> int:
    """Return the bytes of a model's weights and promised KV."""
    return model.weight_bytes + int(sum(held_kv_bytes(layer, model, demand) for layer in model.layers))


def explain_shortage(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> str:
    """Return why no plan fits, and what would fit."""
    if broken := _broken_links(model, cluster, request):
        return broken
    if request.demand.kv_memory_bytes is not None and (why := _given_kv_memory(model, cluster, request)):
        return why
    demand, usable = request.demand, sum(node.usable_bytes for node in cluster.nodes)
    tables = StageTables(model, replace(demand, kv_memory_bytes=None))
    need = min(float(tables.memory(node)[0, -1]) for node in cluster.nodes)
    asked = f"{_asked(model, demand)} needs {need / 1e9:.1f} GB"
    nodes = len(cluster.nodes)
    owner = f"the {nodes} machines have" if nodes > 1 else f"{cluster.nodes[0].name} has"
    have = f"{owner} {usable / 1e9:.1f} GB for it"
    if need > usable:
        begin = f"{asked}, and {have}: {(need - usable) / 1e9:.1f} GB are missing."
    else:
        begin = (
            f"{asked}, and {have}, but the strategy {request.strategy} does not divide it so that it fits."
        )
    return f"{begin} {_nearest_fit(model, cluster, request)}"


def _asked(model: ModelProfile, demand: Demand) -> str:
    several = "" if demand.sequences == 1 else "s"
    return f"{model.name} with {demand.sequences} sequence{several} of {demand.context_tokens} tokens"


def _given_kv_memory(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> str:
    """Return why no plan fits with the given KV memory; empty if none would without it."""
    demand, given = request.demand, request.demand.kv_memory_bytes or 0
    if not fits(model, cluster, replace(request, demand=replace(demand, kv_memory_bytes=None))):
        return ""
    begin = f"{_asked(model, demand)} does not fit with a KV cache of {_size(given)} for each worker"
    if fits(model, cluster, replace(request, demand=replace(demand, context_tokens=1, sequences=1))):
        return f"{begin}: give a larger --kv-cache-memory. {_nearest_fit(model, cluster, request)}"
    return f"{begin}, because no plan leaves every worker that much beside its weights: give a smaller --kv-cache-memory."


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= _GB else f"{nbytes / 1e6:.0f} MB"


def within_kv_memory(
    model: ModelProfile, demand: Demand, replicas: int = 1, *, keeps_context: bool
) -> Demand:
    """Return the load as far as the given KV memory of workers with all layers holds it, one for each replica.

    Any split into several workers then holds it, too. At least one sequence stays, with a shorter context if it is too
    long, unless `keeps_context` is set.
    """
    if demand.kv_memory_bytes is None:
        return demand
    limit = demand.kv_memory_bytes

    def held(tokens: int) -> float:
        one = replace(demand, sequences=1, context_tokens=tokens)
        return sum(limited_kv_bytes(layer, model, one) for layer in model.layers)

    context = demand.context_tokens
    if held(context) > limit and not keeps_context:
        context = most_of(lambda tokens: held(tokens) <= limit, context)
    sequences = replicas * max(1, int(limit / max(1.0, held(context))))
    return replace(demand, context_tokens=context, sequences=min(demand.sequences, sequences))


def _broken_links(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> str:
    """Return the links without which there is no plan; empty if mending them would not help."""
    broken = [sorted(pair) for pair, link in cluster.links.items() if link == UNREACHABLE]
    if not broken or not fits(model, replace(cluster, links={}), request):
        return ""
    pairs = ", ".join(f"{one} and {other}" for one, other in sorted(broken))
    return f"{model.name} needs several machines, and these do not reach each other: {pairs}. Fix the network between them."


def _nearest_fit(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> str:
    demand, found = request.demand, list[str]()

    def are_enough(**changes: int) -> bool:
        return fits(model, cluster, replace(request, demand=replace(demand, **changes)))

    for bits in _KV_BITS if model.quantizes_kv else ():
        if bits < demand.kv_bits and are_enough(kv_bits=bits):
            found.append(f"KV of {bits} bits")
            break
    context = _largest(
        _SHORTEST_CONTEXT, demand.context_tokens, lambda tokens: are_enough(context_tokens=tokens)
    )
    if context:
        found.append(f"a context of {context} tokens")
    sequences = _largest(1, demand.sequences, lambda number: are_enough(sequences=number))
    if sequences:
        found.append(f"{sequences} sequence{'s' * (sequences > 1)}")
    if found:
        return f"This fits: {', or '.join(found)}."
    if are_enough(context_tokens=_SHORTEST_CONTEXT, sequences=1):
        return f"One sequence of {_SHORTEST_CONTEXT} tokens fits."
    return "Even one short sequence does not fit."


def fits(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> bool:
    """Return True if there is a plan; the search for the best one is left out where memory alone decides."""
    method = METHODS[request.strategy]
    try:
        if isinstance(method, TensorMethod):
            if request.strategy == "hybrid" and request.allows_tensor and len(cluster.nodes) > _PAIR:
                search = SharedLayers(model, cluster, request)
                if search.is_searchable and search.is_possible:
                    return search.fits(of_all=True)
            return bool(place_tensor(model, cluster, request, method.search))
        if method.fits(Timetable(model, cluster, request.demand), request):
            return True
    except PlanError:
        return False
    if not method.chooses_nodes or not request.allows_tensor or len(cluster.nodes) > MOST_ALIKE:
        return False
    search = SharedLayers(model, cluster, request)
    return search.is_searchable and search.is_possible and search.fits()


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


def room_for(
    model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, *, is_quick: bool = False
) -> int:
    """Return how many sequences of the request's context its strategy can place at the same time; at least one fits.

    Pipelines in a few orders say how many, then all pipelines and groups of machines whether one more.

    Args:
        model: sizes of the model.
        cluster: machines and links.
        request: strategy, context and bits of the KV cache.
        is_quick: True to leave the second part out, so that it may be some less.
    """
    most = room_at_most(model, cluster, request.demand)
    method = METHODS[request.strategy]

    def with_sequences(sequences: int) -> PlanRequest:
        return replace(request, demand=replace(request.demand, sequences=sequences))

    def are_placed(sequences: int) -> bool:
        return fits(model, cluster, with_sequences(sequences))

    if not isinstance(method, PipelineMethod) or not method.chooses_nodes:
        return most_of(are_placed, most)
    is_whole = bool(np.isfinite(Timetable(model, cluster, request.demand).hops(1)).all())
    room = (
        most_of(lambda number: _is_held(model, cluster, with_sequences(number).demand), most)
        if is_whole
        else 1
    )
    if room == most or (is_quick and is_whole) or not are_placed(room + 1):
        return room
    step = 1
    while room + step <= most and are_placed(room + step):
        room, step = room + step, 2 * step
    return most_of(are_placed, min(most, room + step - 1), room)


def _is_held(model: ModelProfile, cluster: ClusterProfile, demand: Demand) -> bool:
    """Return True if a pipeline over all machines that hold a layer has the memory, in one of a few orders."""
    costs = StageTables(model, demand)
    nodes = sorted(cluster.nodes, key=lambda node: node.usable_bytes)
    held = [np.where(costs.memory(node) <= node.usable_bytes, 0.0, np.inf) for node in nodes]
    empty = np.tri(len(model.layers) + 1, dtype=bool)
    tables = [np.where(empty, np.inf, each) for each in held]
    tables = [each for each in tables if np.isfinite(each).any()]
    return any(
        bool(order) and len(order) <= len(model.layers) and in_order(order) is not None
        for order in (tables, tables[::-1], tables[1:] + tables[:1], tables[:1] + tables[:0:-1])
    )


def room_at_most(model: ModelProfile, cluster: ClusterProfile, demand: Demand) -> int:
    """Return the number of sequences that have room if the memory of all machines were one."""
    per_sequence = sum(held_kv_bytes(layer, model, replace(demand, sequences=1)) for layer in model.layers)
    free = sum(node.usable_bytes for node in cluster.nodes) - model.weight_bytes
    return min(MOST_USERS, max(1, int(free / max(per_sequence, 1.0))))


def most_of(is_possible: Callable[[int], bool], most: int, good: int = 1) -> int:
    """Return the largest number up to `most` that is possible; `good` is."""
    bad = most + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        if is_possible(middle):
            good = middle
        else:
            bad = middle
    return good
