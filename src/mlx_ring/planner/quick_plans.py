"""Quick search for plans, for questions that need many: it takes hundredths of a second where `place` takes a second. Pure.

Layers count as alike and divisible. So a bound of the pace says how many a machine or a group gets. The fastest ones get
as many as the bound and their memory allow. Pipelines and groups are compared by that, and improved by small changes. The best
few are divided and predicted exactly.

It is no restriction of the exact searches. Their states are sets of machines with every first layer and end, which takes their
time. Mean layers have no such states. Their times are no lower bounds either, because layers are unlike, and shares come in
whole heads. So the exact searches could not leave out anything by them without losing plans. Both divide layers by the same
functions (`cut`, `divided`), and predict plans by the same `Pipeline`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, islice

import numpy as np

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.planner.forecast import with_even_chunks
from mlx_ring.planner.group_search import cut, divided
from mlx_ring.planner.memory_fit import explain_shortage, fits
from mlx_ring.planner.pipeline import Pipeline
from mlx_ring.planner.place import check_request, plan_of_pieces
from mlx_ring.planner.place import place as place_exactly
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.rank_costs import Ring, Rings
from mlx_ring.planner.replicas import total_tokens_per_s
from mlx_ring.planner.request import PlanRequest
from mlx_ring.planner.search import FEW_NODES, MachineLayers, RequestTables, in_order
from mlx_ring.planner.stage_costs import StageTables, Table
from mlx_ring.planner.tensor_groups import GroupStage, SharedModel, fitting_group, quick_group
from mlx_ring.planner.tensor_plans import plan_of
from mlx_ring.planner.tensor_search import SharedPipeline
from mlx_ring.planner.timetable import MeanLayer, MeanLayers, Timetable, Users

Groups = tuple[tuple[int, ...], ...]
"""Places of each stage's machines, in the pipeline's order."""

_EXACT, _MOST_EXACT = 2, 8
"""Number of pipelines, and of pipelines with groups, that are predicted exactly, and of those that are divided for that."""
_MOST_TRIED, _FEWER_TRIED = 160, 80
"""Number of pipelines that are estimated, with and without groups."""
_MOST_IN_GROUP, _FULLER = 8, 0.01
_FEW, _WORTH = 8, 1.02
"""Numbers of replicas that are tried beside one for each machine; factor by which they must raise the throughput, as in `replicas`."""
_SUM_BYTES = 8192
"""Bytes of a sum, by which rings of machines are ordered."""


class QuickSearch:
    """Quick search over the machines of a cluster, for any models. Rings of machines are found once."""

    def __init__(self, cluster: ClusterProfile, *, is_brief: bool = False) -> None:
        """Prepare the search; if it `is_brief`, for throughput without groups of many machines."""
        self.cluster = cluster
        self.is_brief = is_brief
        self._rings = Rings(cluster, _SUM_BYTES)
        self._ring_of: dict[tuple[int, ...], Ring | None] = {}

    @cached_property
    def has_rings(self) -> bool:
        """True if any two machines may compute layers together."""
        places = range(len(self.cluster.nodes))
        return any(self.ring(pair) is not None for pair in combinations(places, 2))

    def ring(self, members: tuple[int, ...]) -> Ring | None:
        """Return the ring of several machines; None if they may not compute layers together."""
        if members not in self._ring_of:
            self._ring_of[members] = self._rings.among(members)
        return self._ring_of[members]

    def plan(self, model: ModelProfile, request: PlanRequest, near: Sequence[Plan] = ()) -> Plan:
        """Return a plan by the strategy `auto`, at least as good as the given ones for fewer machines.

        Raises:
            PlanError: none is found.
        """
        check_request(model, self.cluster, request)
        request = with_even_chunks(model, self.cluster, request)
        found = _Search(self, model, request).best(near)
        if found is None:
            raise PlanError(explain_shortage(model, self.cluster, request))
        return found

    def replicas(
        self, model: ModelProfile, request: PlanRequest, count: int | None, near: Sequence[Plan] = ()
    ) -> tuple[Plan, ...]:
        """Return a plan for each replica; None as their number chooses one, or for throughput the best number.

        Raises:
            PlanError: no plan is found, or not for so many replicas.
        """
        sequences, most = request.demand.sequences, len(self.cluster.nodes)
        if count is None and request.objective == "throughput" and sequences > 1:
            numbers = [
                number for number in range(2, min(most, sequences) + 1) if number <= _FEW or number == most
            ]
        else:
            numbers = [count] if count and count > 1 else []
        best = () if count and count > 1 else (self.plan(model, request, near),)
        divisions = [self._divided(model, request, number) for number in numbers]
        if divisions and (not best or max(divisions)[0] > _WORTH * total_tokens_per_s(best, sequences)):
            made = self._apart(model, request, max(divisions)[1])
            if made and (
                not best or total_tokens_per_s(made, sequences) > _WORTH * total_tokens_per_s(best, sequences)
            ):
                best = made
        if not best:
            raise PlanError(
                f"No {count} replicas of {model.name} were found on {most} machines; ask for fewer, for a shorter context or "
                "for fewer sequences."
            )
        return best

    def _divided(
        self, model: ModelProfile, request: PlanRequest, number: int
    ) -> tuple[float, tuple[tuple[int, ...], ...]]:
        """Return replicas on the fastest machines that hold one, and about their throughput; the last one may have all others."""
        part = -(-request.demand.sequences // number)
        demand, layers = replace(request.demand, sequences=part), len(model.layers)
        costs, nodes = StageTables(model, demand), self.cluster.nodes
        seconds = {
            place: costs.stage_seconds(node, 0, layers, part, demand.mean_context_tokens).steady
            for place, node in enumerate(nodes)
            if costs.memory(node)[0, layers] <= node.usable_bytes
        }
        fastest = sorted(seconds, key=seconds.__getitem__)[:number]
        sets: list[tuple[int, ...]] = [(place,) for place in fastest]
        rest = tuple(place for place in range(len(nodes)) if place not in seconds)
        if len(sets) == number - 1 and rest:
            sets.append(rest)
        if len(sets) < number:
            return 0.0, ()
        return sum(part / seconds[place] for place in fastest), tuple(sets)

    def _apart(
        self, model: ModelProfile, request: PlanRequest, sets: Sequence[Sequence[int]]
    ) -> tuple[Plan, ...]:
        """Return a plan for each replica on its machines; none if one does not fit."""
        part = replace(
            request,
            demand=replace(request.demand, sequences=-(-request.demand.sequences // max(1, len(sets)))),
        )
        nodes = self.cluster.nodes
        try:
            return tuple(
                QuickSearch(replace(self.cluster, nodes=tuple(nodes[place] for place in places))).plan(
                    model, part
                )
                for places in sets
            )
        except PlanError:
            return ()


@dataclass(frozen=True, slots=True)
class _Estimate:
    cost: float
    groups: Groups
    """Stages with layers only."""


class _Search:
    """Search for one model and one request."""

    def __init__(self, search: QuickSearch, model: ModelProfile, request: PlanRequest) -> None:
        self._search = search
        self._cluster, self._nodes = search.cluster, search.cluster.nodes
        self._model = model
        self._request = request
        self._demand = request.demand
        self._layers = len(model.layers)
        self._chunks = request.chunks
        self._is_throughput = request.objective == "throughput"
        self._tokens = 1 + request.minimized_tokens
        self._times = Timetable(model, self._cluster, self._demand)
        self._shared = SharedModel(model, self._demand, model.shared)
        self._units: dict[tuple[tuple[int, ...], int], MeanLayer | None] = {}
        self._means = MeanLayers(self._times, self._shared, request)
        self._estimates: dict[Groups, _Estimate] = {}
        self._request_tables: dict[Users, RequestTables] = {}
        self._may_share = (
            request.allows_tensor
            and model.shared is not None
            and request.objective != "memory"
            # Stages of single machines compute the rows of many users at the same time.
            and not (search.is_brief and self._is_throughput and len(self._nodes) > FEW_NODES)
            and search.has_rings
        )

        self._most_tried = _MOST_TRIED if self._may_share else _FEWER_TRIED

    @cached_property
    def singles(self) -> list[MeanLayer]:
        """Each machine alone, with the rows of the first of two stages."""
        rows = self._means.rows(2 if len(self._nodes) > 1 else 1)
        return [self._means.alone(place, rows) for place in range(len(self._nodes))]

    def best(self, near: Sequence[Plan]) -> Plan | None:
        """Return the best plan that is found."""
        if self._request.objective == "memory":
            return self._emptiest() or next(self._any(), None)
        places = {node.name: place for place, node in enumerate(self._nodes)}
        starts = [
            tuple(tuple(sorted(places[rank.node] for rank in stage.ranks)) for stage in plan.stages)
            for plan in near
            if all(rank.node in places for stage in plan.stages for rank in stage.ranks)
        ]
        self._climb(starts)
        plans = [plan for groups in starts if (plan := self._exact(groups)) is not None]
        for is_shared in (False, True):
            plans += islice(self._exact_plans(is_shared=is_shared), _EXACT)
        if not plans:
            plans = [*self._any()]
        return min(plans, key=lambda plan: plan.prediction.minimized_s(self._request.objective), default=None)

    def _any(self) -> Iterator[Plan]:
        """Yield a plan where memory suffices for few divisions only."""
        order = sorted(
            (place for place, unit in enumerate(self.singles) if unit.room >= 1),
            key=lambda place: self._nodes[place].usable_bytes,
        )
        for some in (order, order[::-1], order[1:] + order[:1], order[:1] + order[:0:-1]):
            if (plan := self._apart(some) if some else None) is not None:
                yield plan
                return
        if self._demand.sequences > self._request.users:
            return
        if fits(self._model, self._cluster, self._request):
            yield place_exactly(self._model, self._cluster, self._request)

    def _exact_plans(self, *, is_shared: bool) -> Iterator[Plan]:
        """Yield plans of the best estimates, with or without groups; those that do not fit in whole layers are left out."""
        tried: list[Groups] = []
        for one in sorted(self._estimates.values(), key=lambda one: one.cost):
            if one.cost == math.inf or len(tried) == _MOST_EXACT:
                return
            if any(len(members) > 1 for members in one.groups) == is_shared and one.groups not in tried:
                tried.append(one.groups)
                if (plan := self._exact(one.groups)) is not None:
                    yield plan

    # ---- estimates

    def _climb(self, starts: Sequence[Groups]) -> None:
        """Estimate pipelines, and those that small changes make of the best."""
        for groups in (*starts, *self._starts()):
            self._estimate(groups)
        changed = set[Groups]()
        while len(self._estimates) < self._most_tried:
            best = min(self._estimates.values(), key=lambda one: one.cost, default=None)
            if best is None or best.groups in changed or best.cost == math.inf:
                break
            changed.add(best.groups)
            for groups in self._changes(best.groups):
                self._estimate(groups)

    def _starts(self) -> Iterator[Groups]:
        """Yield the fastest machines one by one, together, and in groups of equal size."""
        fast = sorted(
            (unit for unit in self.singles if unit.room >= 1),
            key=lambda unit: unit.chunk_s * self._chunks + unit.decode_s * self._tokens,
        )
        order = [unit.members[0] for unit in fast]
        large = sorted(order, key=lambda place: -self.singles[place].room)
        for number in range(1, len(order) + 1):
            yield tuple((place,) for place in order[:number])
            if self._may_share and number > 1:
                sizes = [size for size in range(2, min(number, _MOST_IN_GROUP) + 1) if number % size == 0]
                for some in (order, large):
                    for size in sizes:
                        ends = range(0, number, size)
                        yield tuple(tuple(sorted(some[first : first + size])) for first in ends)

    def _changes(self, groups: Groups) -> Iterator[Groups]:
        """Yield pipelines with two stages joined, or one machine elsewhere, out, or in."""
        used = {place for members in groups for place in members}
        places = [place for place in range(len(self._nodes)) if self.singles[place].room >= 1]
        numbers = range(len(groups))
        for place in places:
            rest = [tuple(each for each in members if each != place) for members in groups]
            yield tuple(filter(None, (*rest, (place,))))
            yield tuple(filter(None, rest))
            if self._may_share:
                for number in numbers:
                    joined = [*rest]
                    joined[number] = tuple(sorted((*rest[number], place)))
                    yield tuple(filter(None, joined))
            if place not in used:
                for number in numbers:
                    if len(groups[number]) == 1:
                        yield (*groups[:number], (place,), *groups[number + 1 :])
        if self._may_share:
            for one, other in combinations(numbers, 2):
                both = tuple(sorted(groups[one] + groups[other]))
                yield (*(each for number, each in enumerate(groups) if number not in (one, other)), both)

    def _estimate(self, groups: Groups) -> None:
        groups = tuple(sorted(groups))
        if groups and groups not in self._estimates and len(self._estimates) < self._most_tried:
            self._estimates[groups] = self._made_estimate(groups)

    def _made_estimate(self, groups: Groups) -> _Estimate:
        rows = self._means.rows(min(len(groups), self._layers))
        found = [self._unit(members, rows) for members in groups]
        units = [unit for unit in found if unit is not None]
        if len(units) < len(groups):
            return _Estimate(math.inf, groups)
        cost, used = self._means.estimate(units)
        return _Estimate(cost, tuple(groups[place] for place in used) or groups)

    # ---- units

    def _unit(self, members: tuple[int, ...], rows: int) -> MeanLayer | None:
        key = members, rows
        if key not in self._units:
            self._units[key] = (
                self._means.alone(members[0], rows) if len(members) == 1 else self._group(members, rows)
            )
        return self._units[key]

    def _group(self, members: tuple[int, ...], rows: int) -> MeanLayer | None:
        ring = self._search.ring(members) if self._may_share else None
        return None if ring is None else self._means.together(members, ring, rows)

    # ---- exact plans

    def _exact(self, groups: Groups) -> Plan | None:
        """Return the plan with the best division of the layers among these stages; None if they do not fit."""
        groups = tuple(self._ordered(groups))
        if len(groups) > self._layers:
            return None
        if all(len(members) == 1 for members in groups):
            return self._apart([members[0] for members in groups])
        return self._shared_plan(groups)

    def _ordered(self, groups: Groups) -> list[tuple[int, ...]]:
        """Return the stages in the order of the nearest next one, from the slowest: the last one also has the output head."""
        hops = self._times.hops(1)
        left = sorted(groups, key=lambda members: -self.singles[members[0]].decode_s)
        found = [left.pop(0)]
        while left:
            last = found[-1][0]
            nearest = min(left, key=lambda members: float(hops[last, members[0]]))
            left.remove(nearest)
            found.append(nearest)
        return found

    def _apart(self, order: Sequence[int]) -> Plan | None:
        request, times = self._request, self._times
        stages = min(len(order), request.streams)
        rows = -(-request.streams // stages)
        if self._is_throughput:
            steady = times.steady_tables(rows)
            found = [cut([steady[place] for place in order], adds=False)]
        else:
            weights = (1.0, 0.0) if request.users > 1 else (1.0,)
            tables = [self._tables(Users(stages, rows, weight)).among(order) for weight in weights]
            found = [divided(each.sums, each.paces) for each in tables]
        pipelines = [
            tuple(MachineLayers(place, first, end) for place, (first, end) in zip(order, each, strict=True))
            for each in found
            if each
        ]
        possible = [each for each in pipelines if np.isfinite(times.pipeline(each).around_s(1))]
        best = min(possible, key=lambda each: times.request_s(each, request), default=None)
        return None if best is None else plan_of_pieces(times, request, best)

    def _tables(self, users: Users) -> RequestTables:
        if users not in self._request_tables:
            self._request_tables[users] = self._times.request_tables(self._request, users)
        return self._request_tables[users]

    def _shared_plan(self, groups: Groups) -> Plan | None:
        request, ends = self._request, np.arange(self._layers + 1)
        rows, context = self._means.rows(len(groups)), self._demand.mean_context_tokens
        units = [self._unit(members, rows) for members in groups]
        rings = [self._search.ring(members) if len(members) > 1 else Ring(members, ()) for members in groups]
        later = request.users * self._chunks - 1
        sums, paces, made = list[Table](), list[Table](), list[GroupStage]()
        for unit, ring in zip(units, rings, strict=True):
            if unit is None or ring is None:
                return None
            nodes = [self._nodes[place] for place in ring.nodes]
            group = quick_group(self._shared, nodes, ring, rows, by_memory=False)
            seconds = group.times(rows, context, ends, any_shares=True)
            chunks = (ends[None, :] - ends[:, None]) * unit.chunk_s
            sums.append(seconds.steady if self._is_throughput else chunks + self._tokens * seconds.unhindered)
            paces.append(np.where(np.isfinite(sums[-1]), later * chunks, np.inf))
        division = (cut(sums, adds=False) if self._is_throughput else divided(sums, paces)) or []
        for (first, end), ring in zip(division, rings, strict=bool(division)):
            nodes = [self._nodes[place] for place in (ring.nodes if ring else ())]
            fitted = fitting_group(self._shared, nodes, ring or Ring((), ()), first, end, rows)
            if fitted is None:
                return None
            made.append(GroupStage(fitted, LayerRange(first, end)))
        if not made:
            return None
        pipeline = Pipeline(self._cluster, made, self._demand)
        if not np.isfinite(pipeline.around_s(1)):
            return None
        stage_s = tuple(pipeline.lone_stream(context)[0])
        shared = SharedPipeline(tuple(made), stage_s, pipeline.prediction(request), 0.0)
        return plan_of(self._model, self._cluster, request, shared, "")

    def _emptiest(self) -> Plan | None:
        """Return the pipeline over all machines that hold a layer whose fullest machine is least full."""
        order = [place for place, unit in enumerate(self.singles) if unit.room >= 1][: self._layers]
        if not order:
            return None
        costs = self._times.costs
        filled = [
            np.where(np.isfinite(table), costs.memory(node) / node.usable_bytes, np.inf)
            for node, table in zip(self._nodes, self._times.tables(1), strict=True)
        ]
        found = in_order([filled[place] for place in order])
        if found is None:
            return None
        level = found.cost + _FULLER
        tables = self._tables(Users(1, 1))
        allowed = [np.where(filled[place] <= level, tables.sums[place], np.inf) for place in order]
        paces = [np.where(filled[place] <= level, tables.paces[place], np.inf) for place in order]
        division = divided(allowed, paces) or []
        pieces = [
            MachineLayers(place, first, end)
            for place, (first, end) in zip(order, division, strict=bool(division))
        ]
        return plan_of_pieces(self._times, self._request, pieces)


def search_work(cluster: ClusterProfile) -> int:
    """Return about how long a plan of the planner takes: the number of unlike sets of machines, twice if they may share layers."""
    alike = Counter(replace(node, name="") for node in cluster.nodes)
    sets = math.prod(number + 1 for number in alike.values())
    pairs = combinations(cluster.nodes, 2)
    return sets * (2 if any(cluster.trusts(one, other) for one, other in pairs) else 1)
