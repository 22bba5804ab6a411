"""Methods of the strategies: how each splits the layers, and the reason that it gives for a stage. Pure.

`settings/strategies.py` has their names and help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, groupby, pairwise

import numpy as np

from mlx_ring.core.errors import PlanError
from mlx_ring.planner.request import PlanRequest
from mlx_ring.planner.search import (
    MOST_NODES,
    MachineLayers,
    Partition,
    has_partition,
    in_order,
    quickest_partition,
    quickest_request,
    steadiest_costs,
)
from mlx_ring.planner.stage_costs import StageTables
from mlx_ring.planner.tensor_plans import TensorSearch
from mlx_ring.planner.tensor_search import SharedLayers
from mlx_ring.planner.timetable import Timetable
from mlx_ring.settings.strategies import Strategy

Split = Callable[[Timetable, PlanRequest], Partition | None]
"""Function that chooses machines and layers; None if they do not fit into the memory."""
Reason = Callable[[Timetable, int], str]
"""Function that says why a machine, given by its place, got its layers."""


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
            return has_partition(times.tables(1), times.hops(1))
        return self.split(times, request) is not None


@dataclass(frozen=True, slots=True)
class TensorMethod:
    """Strategy by which machines compute layers together."""

    search: TensorSearch


def fastest(times: Timetable, request: PlanRequest) -> Partition | None:
    """Return the best choice of machines, order and layers for the objective."""
    many = len(times.cluster.nodes) > MOST_NODES
    if request.objective != "throughput" or many:
        return _soonest(times, request)
    quickest = quickest_partition(times.tables(1), times.hops(1), times.steady_tables(1), back=times.back(1))
    if quickest is None:
        return None
    best = replace(quickest, with_node=())
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
    """Return the pipeline that answers a request soonest."""
    found = [quickest_request(times.request_tables(request))]
    if len(times.cluster.nodes) <= MOST_NODES and any(node.cpu_quota for node in times.cluster.nodes):
        # A quota may set the pace of tokens too.
        steady = times.steady_tables(1)
        found.append(quickest_partition(times.tables(1), times.hops(1), steady, back=times.back(1)))
    possible = [Partition(each.pieces, times.request_s(each.pieces, request)) for each in found if each]
    return min(possible, key=lambda each: each.cost, default=None)


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
    ends = [0, *accumulate(counts)]
    pieces = tuple(MachineLayers(node, first, end) for node, (first, end) in enumerate(pairwise(ends)))
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


METHODS: Mapping[Strategy, PipelineMethod | TensorMethod] = {
    "auto": PipelineMethod(fastest, _speed_reason, chooses_nodes=True),
    "uniform": PipelineMethod(
        by_shares(_equal_shares), lambda _times, _place: "as many layers as the others, plus or minus one"
    ),
    "memory": PipelineMethod(by_shares(_memory_shares), _memory_reason),
    "compute": PipelineMethod(by_shares(_speed_shares), _speed_reason),
    "balanced": PipelineMethod(
        balanced, lambda _times, _place: "to make the slowest stage as fast as possible"
    ),
    "custom": PipelineMethod(custom, lambda _times, _place: "as given"),
    "tensor": TensorMethod(SharedLayers.tensor),
    "hybrid": TensorMethod(SharedLayers.hybrid),
}
"""Method of every strategy that `settings/strategies.py` names."""


def proportional_counts(layers: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Return numbers of layers in proportion to `shares`, each at least one, by largest remainder.

    Raises:
        PlanError: a share is not positive, or there are more shares than layers.
    """
    for share in shares:
        if not 0 < share < float("inf"):
            raise PlanError(f"A share of {share} was given; every share must be more than 0.")
    if not 1 <= len(shares) <= layers:
        raise PlanError(
            f"{len(shares)} shares were given, but the model has {layers} layers: each machine needs a layer."
        )
    exact = [Fraction(share) for share in shares]
    total = sum(exact)
    wanted = [share * layers / total for share in exact]
    counts = [max(1, int(count)) for count in wanted]
    while sum(counts) != layers:
        step = 1 if sum(counts) < layers else -1
        candidates = [place for place, count in enumerate(counts) if count + step >= 1]
        # The earlier of two with the same remainder gets the layer.
        place = max(candidates, key=lambda place: (step * (wanted[place] - counts[place]), -step * place))
        counts[place] += step
    return tuple(counts)


def given_counts(layers: int, counts: Sequence[int]) -> tuple[int, ...]:
    """Return the given numbers of layers.

    Raises:
        PlanError: they do not add up to the model's layers, or one is less than one.
    """
    if sum(counts) != layers or min(counts, default=0) < 1:
        raise PlanError(
            f"The layers given are {', '.join(map(str, counts))}, which is {sum(counts)} of {layers}: "
            "each machine needs one or more, and the sum must be all layers."
        )
    return tuple(counts)
