"""Methods of the strategies: how each splits the layers, and the reason that it gives for a stage. Pure.

`settings/strategies.py` has their names and help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain, groupby, islice, pairwise, permutations

import numpy as np

from mlx_ring.core.errors import PlanError
from mlx_ring.planner.group_search import KnownCuts
from mlx_ring.planner.plan import given_counts, proportional_counts
from mlx_ring.planner.request import PlanRequest
from mlx_ring.planner.search import (
    FEW_NODES,
    MOST_NODES,
    MachineLayers,
    Partition,
    any_partition,
    in_order,
    quickest_partition,
    quickest_request,
    steadiest_costs,
)
from mlx_ring.planner.stage_costs import StageTables, Table
from mlx_ring.planner.tensor_plans import TensorSearch
from mlx_ring.planner.tensor_search import SharedLayers
from mlx_ring.planner.timetable import Timetable, Users
from mlx_ring.settings.strategies import Strategy

Split = Callable[[Timetable, PlanRequest], Partition | None]
"""Function that chooses machines and layers; None if they do not fit into the memory."""
Reason = Callable[[Timetable, int], str]
"""Function that says why a machine, given by its place, got its layers."""

_MOST_CHANGES = 10_000
"""Number of stages of the changed pipelines that are tried to improve one."""
_NO_BETTER, _IMPROVED, _FASTEST = 0.999, 4, 6
"""Part of the best time that a lower bound may reach, number of pipelines that are improved, and of machines that are
searched alone."""
_ROUNDING = 1e-12
"""Relative difference of two times that is no difference."""
_FULLER = 0.01
"""Share of a machine's memory that does not matter when the fullest machine is to be least full."""


@dataclass(frozen=True, slots=True)
class PipelineMethod:
    """Strategy that gives each machine layers of its own."""

    split: Split
    reason: Reason
    chooses_nodes: bool = False
    """True if it may leave machines out or let them compute layers together."""

    def fits(self, times: Timetable, request: PlanRequest) -> bool:
        """Return True if there is a split."""
        if self.chooses_nodes:
            return any_partition(times.tables(1), times.hops(1)) is not None
        return self.split(times, request) is not None


@dataclass(frozen=True, slots=True)
class TensorMethod:
    """Strategy by which machines compute layers together."""

    search: TensorSearch


def fastest(times: Timetable, request: PlanRequest) -> Partition | None:
    """Return the best choice of machines, order and layers for the objective."""
    if request.objective == "memory":
        return _emptiest(times, request)
    many = len(times.cluster.nodes) > MOST_NODES
    if request.objective != "throughput" or many:
        return _soonest(times, request)
    best = quickest_partition(times.tables(1), times.hops(1), times.steady_tables(1), back=times.back(1))
    if best is None:
        return None
    for bound, stages in sorted(_throughput_bounds(times), reverse=True):
        if bound <= times.pipeline(best.pieces).tokens_per_s():
            break
        partition = _quickest_with(times, stages, times.demand.sequences / bound)
        if (
            partition is not None
            and times.pipeline(partition.pieces).tokens_per_s() > times.pipeline(best.pieces).tokens_per_s()
        ):
            best = partition
    return best


def _soonest(times: Timetable, request: PlanRequest) -> Partition | None:
    """Return the pipeline that answers all users' requests soonest, or that has the highest throughput of many machines."""
    many = len(times.cluster.nodes) > MOST_NODES
    tables = times.request_tables(request)
    found: list[Partition | None] = (
        [quickest_request(tables)] if request.users == 1 else [*_by_stages(times, request)]
    )
    if many and not tables.is_exact:
        found += [quickest_request(tables, among=tables.fastest(_FASTEST)), in_order(tables.paces)]
    if not many and any(node.cpu_quota for node in times.cluster.nodes):
        # A quota may set the pace of tokens too.
        steady = times.steady_tables(1)
        found.append(quickest_partition(times.tables(1), times.hops(1), steady, back=times.back(1)))
    possible = {each.pieces for each in found if each is not None and _is_possible(times, each.pieces)}
    soonest = sorted(
        (Partition(pieces, times.request_s(pieces, request)) for pieces in possible), key=lambda one: one.cost
    )
    improved = (_improved(times, request, each) for each in soonest[:_IMPROVED])
    return min(improved, key=lambda each: each.cost, default=None)


def _by_stages(times: Timetable, request: PlanRequest) -> Iterator[Partition]:
    """Yield for each number of stages pipelines that answer several users soon.

    A token takes a round, or the slowest stage's time for all decode groups, whichever is longer. A weighted mean of the two
    bounds the time from below. So the weight is moved to the side that is longer, until nothing better can be found.
    """
    best_s = np.inf
    most = min(len(times.cluster.nodes), len(times.model.layers))
    numbers, weights = _stages_and_weights(most)
    for stages in numbers:
        groups = min(stages, request.users)
        rows, low, high = -(-request.users // groups), 0.0, 1.0
        for weight in weights:
            middle = (low + high) / 2 if weight is None else weight
            tables = times.request_tables(request, Users(groups, rows, middle))
            found = quickest_request(replace(tables, stages=stages if most <= MOST_NODES else None))
            if found is None:
                break
            yield found
            best_s = min(best_s, times.request_s(found.pieces, request))
            in_rounds = times.pipeline(found.pieces).waits_for_rounds(request.users)
            if found.cost >= best_s * _NO_BETTER or in_rounds == (middle == 1.0):
                break
            low, high = (middle, high) if in_rounds else (low, middle)


def _stages_and_weights(most: int) -> tuple[Sequence[int], Sequence[float | None]]:
    """Return the numbers of stages, and the first weights, for which pipelines are searched; None is between two others."""
    if most <= FEW_NODES:
        return range(1, most + 1), (1.0, 0.0, None, None)
    if most <= MOST_NODES:
        return sorted({1, 2, 4, most}), (1.0, 0.0)
    return (most,), (0.5,)


def _improved(times: Timetable, request: PlanRequest, start: Partition) -> Partition:
    """Return the pipeline after small changes, while one of them answers sooner."""
    best, left = start, _MOST_CHANGES // len(start.pieces)
    nodes = len(times.cluster.nodes)

    @cache
    def paces(groups: int) -> list[Table]:
        return times.request_tables(request, Users(groups, -(-request.streams // groups), 0.0)).paces

    known: KnownCuts = {}

    def evenly(used: Sequence[int]) -> Iterator[tuple[MachineLayers, ...]]:
        """Yield the cut by which all stages take equally long."""
        of_groups = paces(min(len(used), request.streams))
        if cut := in_order([of_groups[node] for node in used], known):
            yield tuple(replace(piece, node=used[piece.node]) for piece in cut.pieces)

    while left > 0:
        used = [piece.node for piece in best.pieces]
        changed = chain(
            _changed(best.pieces, nodes),
            chain.from_iterable(map(evenly, chain([used], _with_other_machines(used, nodes)))),
        )
        tried = list(islice(changed, left))
        seconds = times.requests_s(tried, request)
        left -= int(np.isfinite(seconds).sum())
        least = int(seconds.argmin()) if tried else -1
        if least < 0 or not seconds[least] < best.cost * (1 - _ROUNDING):
            break
        best = Partition(tried[least], times.request_s(tried[least], request))
    return best


def _changed(pieces: Sequence[MachineLayers], nodes: int) -> Iterator[tuple[MachineLayers, ...]]:
    """Yield pipelines with a layer moved, a machine dropped or exchanged, or stages in another order."""
    used, counts = [piece.node for piece in pieces], [piece.end - piece.first for piece in pieces]
    places = range(len(used))
    # Layers go to a neighbour first, because in a long pipeline not every change is tried.
    for one, other in sorted(permutations(places, 2), key=lambda pair: abs(pair[0] - pair[1])):
        moved = list(counts)
        if counts[one] > 1:
            moved[one], moved[other] = moved[one] - 1, moved[other] + 1
            yield _in_pieces(used, moved)
        if abs(one - other) == 1:
            # All of its layers go to the neighbour.
            moved = list(counts)
            moved[other] += moved[one]
            yield _in_pieces(used[:one] + used[one + 1 :], moved[:one] + moved[one + 1 :])
    unused = sorted(set(range(nodes)) - set(used))
    for place in places:
        for node in unused:
            yield _in_pieces([*used[:place], node, *used[place + 1 :]], counts)
    for one, other in permutations(places, 2):
        order = [place for place in places if place != one]
        order.insert(other, one)
        yield _in_pieces([used[place] for place in order], [counts[place] for place in order])
        if one < other:
            swapped = list(used)
            swapped[one], swapped[other] = used[other], used[one]
            yield _in_pieces(swapped, counts)
            # The order of some stages is reversed.
            order = [*places[:one], *places[one : other + 1][::-1], *places[other + 1 :]]
            yield _in_pieces([used[place] for place in order], [counts[place] for place in order])


def _with_other_machines(used: list[int], nodes: int) -> Iterator[list[int]]:
    """Yield the machines with one left out, exchanged for an unused one, or added."""
    unused = sorted(set(range(nodes)) - set(used))
    for place in range(len(used) + 1):
        rest = used[place + 1 :]
        if place < len(used) and len(used) > 1:
            yield used[:place] + rest
        for node in unused:
            yield [*used[:place], node, *used[place:]]
            if place < len(used):
                yield [*used[:place], node, *rest]


def _in_pieces(nodes: Sequence[int], counts: Sequence[int]) -> tuple[MachineLayers, ...]:
    """Return the stages of these machines, with the given number of layers each."""
    ends = accumulate(counts, initial=0)
    return tuple(
        MachineLayers(node, first, end) for node, (first, end) in zip(nodes, pairwise(ends), strict=True)
    )


def _is_possible(times: Timetable, pieces: Sequence[MachineLayers]) -> bool:
    """Return True if every stage fits into its machine's memory, and machines reach the next."""
    tables = times.tables(1)
    held = all(np.isfinite(tables[piece.node][piece.first, piece.end]) for piece in pieces)
    return held and bool(np.isfinite(times.pipeline(pieces).around_s(1)))


def _emptiest(times: Timetable, request: PlanRequest) -> Partition | None:
    """Return the pipeline with the lowest peak memory share, within 1 %; ties go to the fastest."""
    nodes = times.cluster.nodes
    filled = [times.costs.memory(node) / max(1, node.usable_bytes) for node in nodes]
    reach = times.hops(1)

    def tables(level: float) -> list[Table]:
        return [
            np.where(part <= level, table, np.inf)
            for part, table in zip(filled, times.tables(1), strict=True)
        ]

    low, high = 0.0, 1.0
    emptiest = any_partition(tables(high), reach)
    while emptiest is not None and high - low > _FULLER:
        middle = (low + high) / 2
        if (found := any_partition(tables(middle), reach)) is None:
            low = middle
        else:
            emptiest, high = found, middle
    request_tables = times.request_tables(request)
    sums = [
        np.where(part <= high, table, np.inf) for part, table in zip(filled, request_tables.sums, strict=True)
    ]
    # Over many unlike machines, not every pipeline is searched.
    return quickest_request(replace(request_tables, sums=sums)) or emptiest


def _throughput_bounds(times: Timetable) -> Iterator[tuple[float, int]]:
    """Yield for each number of stages an upper bound of the throughput."""
    sequences = times.demand.sequences
    for rows, same_rows in groupby(
        range(1, len(times.cluster.nodes) + 1), lambda stages: -(-sequences // stages)
    ):
        numbers = list(same_rows)
        costs = steadiest_costs(times.steady_tables(rows), times.hops(rows), numbers[-1])
        for number in numbers:
            slowest = min(
                (cost for members, cost in costs.items() if members.bit_count() == number), default=0.0
            )
            if slowest:
                yield sequences / (min(number, sequences) * slowest), number


def _quickest_with(times: Timetable, stages: int, least_s: float) -> Partition | None:
    """Return the pipeline of `stages` stages with the fastest round of all decode groups.

    A round is never shorter than the time that the slowest stage takes for all groups.
    """
    sequences = times.demand.sequences
    rows, groups = -(-sequences // stages), min(stages, sequences)
    paces = [groups * table for table in times.steady_tables(rows)]
    return quickest_partition(
        times.tables(rows), times.hops(rows), paces, stages=stages, least=least_s, back=times.back(rows)
    )


def balanced(times: Timetable, _request: PlanRequest) -> Partition | None:
    """Return the split over all machines, in the given order, whose slowest stage is fastest."""
    _check_layers(times)
    return in_order(times.steady_tables(1))


def by_shares(shares: Callable[[Timetable], Sequence[float]]) -> Split:
    """Return a strategy that splits layers in proportion to a share of each machine."""

    def split(times: Timetable, _request: PlanRequest) -> Partition | None:
        of_nodes = shares(times)
        _check_layers(times)
        return _partition_of(times, proportional_counts(len(times.model.layers), of_nodes))

    return split


def custom(times: Timetable, request: PlanRequest) -> Partition | None:
    """Return the split by the request's layer counts, or by its proportions."""
    layers = len(times.model.layers)
    if request.counts:
        _check_given(times, len(request.counts), "layer counts")
        return _partition_of(times, given_counts(layers, request.counts))
    _check_given(times, len(request.proportions), "proportions")
    _check_layers(times)
    return _partition_of(times, proportional_counts(layers, request.proportions))


def _check_given(times: Timetable, given: int, what: str) -> None:
    if given != (nodes := len(times.cluster.nodes)):
        raise PlanError(
            f"The strategy custom takes {what} for each of the {nodes} machines; {given} were given."
        )


def _check_layers(times: Timetable) -> None:
    nodes, layers = len(times.cluster.nodes), len(times.model.layers)
    if nodes > layers:
        raise PlanError(
            f"{nodes} machines were given and {times.model.name} has {layers} "
            "layers: each machine needs a layer, so use fewer machines."
        )


def _partition_of(times: Timetable, counts: Sequence[int]) -> Partition | None:
    tables = times.tables(1)
    pieces = _in_pieces(range(len(counts)), counts)
    cost = sum(float(tables[piece.node][piece.first, piece.end]) for piece in pieces)
    return Partition(pieces, cost) if np.isfinite(cost) else None


def _equal_shares(times: Timetable) -> list[float]:
    return [1.0] * len(times.cluster.nodes)


def _memory_shares(times: Timetable) -> list[float]:
    return [float(node.usable_bytes) for node in times.cluster.nodes]


def _speed_shares(times: Timetable) -> list[float]:
    """Return the speed of each machine over all layers, as if its memory had no limit."""
    costs = StageTables(times.model, times.demand)
    boundless = [replace(node, memory_bytes=1 << 62) for node in times.cluster.nodes]
    return [1 / float(costs.seconds(node, 1, 0).steady[0, -1]) for node in boundless]


def _memory_reason(times: Timetable, place: int) -> str:
    shares = _memory_shares(times)
    return f"{shares[place] / sum(shares):.0%} of the usable memory"


def _speed_reason(times: Timetable, place: int) -> str:
    node = times.cluster.nodes[place]
    bandwidth = node.rate(times.costs.model_on(node).weights).bandwidth / 1e9
    speed = f"reads {bandwidth:,.0f} GB/s" if bandwidth >= 10 else f"reads {bandwidth:.1f} GB/s"  # noqa: PLR2004 - two digits
    return f"{speed} for {node.cpu_quota.share:.0%} of the time" if node.cpu_quota else speed


OVER_ALL = PipelineMethod(balanced, lambda _times, _place: "to make the slowest stage as fast as possible")
"""Method that gives every machine layers, the split whose slowest stage is fastest."""

METHODS: Mapping[Strategy, PipelineMethod | TensorMethod] = {
    "auto": PipelineMethod(fastest, _speed_reason, chooses_nodes=True),
    "uniform": PipelineMethod(
        by_shares(_equal_shares), lambda _times, _place: "as many layers as the others, plus or minus one"
    ),
    "memory": PipelineMethod(by_shares(_memory_shares), _memory_reason),
    "compute": PipelineMethod(by_shares(_speed_shares), _speed_reason),
    "balanced": OVER_ALL,
    "custom": PipelineMethod(custom, lambda _times, _place: "as given"),
    "tensor": TensorMethod(SharedLayers.tensor),
    "hybrid": TensorMethod(SharedLayers.hybrid),
}
"""Method of every strategy that `settings/strategies.py` names."""


def uses_all_machines(strategy: Strategy) -> bool:
    """Return True if a strategy gives layers to every machine, also where fewer would be faster."""
    method = METHODS[strategy]
    return isinstance(method, PipelineMethod) and not method.chooses_nodes
