"""Search for plans with tensor parallelism: all machines in one group, or groups as stages of a pipeline. Pure.

Every set of machines that may exchange is considered as one group, with shares by which all ranks take equally long. For
pipelines of groups, every set is a candidate for a stage; the best orders of them are split exactly and predicted in
full. For a single stream the best plan answers soonest, prompt included; otherwise it has the highest throughput.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np

from mlx_ring.core.types import LayerRange
from mlx_ring.planner.group_search import (
    Changes,
    GroupOrder,
    GroupSearch,
    SizedGroups,
    block_ends,
    cut,
    even_divisions,
)
from mlx_ring.planner.pipeline import Pipeline
from mlx_ring.planner.plan import Prediction
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile
from mlx_ring.planner.rank_costs import Kinds, Rings, kinds_of, sets_by_size
from mlx_ring.planner.request import PlanRequest
from mlx_ring.planner.search import FEW_NODES, MOST_NODES
from mlx_ring.planner.stage_costs import TOKEN_BYTES, Table
from mlx_ring.planner.tensor_groups import (
    GroupStage,
    RankGroup,
    SharedModel,
    alone,
    fitting_group,
    is_enough_for_all,
    quick_group,
    stage_seconds,
)

_LOOKED_AT = 6
"""Number of orders of groups that are predicted in full."""
_KINDS_ALONE = 3
"""Number of kinds of machines that are searched alone where there are too many unlike machines to search all."""
_PATIENCE, _LESS_PATIENCE = 20, 4
"""Number of pipelines that are changed in a row without finding a better one; less for many machines, none above eight."""
_FAR = 2.0
"""Multiple of the least cost from which a rough cost is exact enough."""
_MISSING = 1e12
"""Cost of what does not fit, beside the missing bytes: more than any seconds."""
_NEARLY = 0.03
"""Share of the memory that may be missing after even divisions, so that small changes may help."""
_FEW_LAYERS = 12
_CUTS = (True, False)
"""Passes of the split: with any shares that memory allows, then with the shares that were found."""


@dataclass(frozen=True, slots=True)
class SharedPipeline:
    """Stages, at least one of which has several ranks."""

    stages: tuple[GroupStage, ...]
    stage_s: tuple[float, ...]
    """Seconds of one token of a single stream, by stage."""
    prediction: Prediction
    cost: float

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node.name for stage in self.stages for node in stage.group.nodes)

    @property
    def layers(self) -> int:
        """Number of layers of all stages."""
        return sum(len(stage.layers) for stage in self.stages)


class SharedLayers:
    """Search for the best pipelines of a model over the machines of a cluster."""

    def __init__(
        self, model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, *, trusting: bool = False
    ) -> None:
        """Prepare the search; with `trusting` as if every interface were trusted and every model could be split."""
        self._shared = SharedModel(model, request.demand, model.shared)
        self._cluster = cluster
        self._request = request
        self._places = range(len(cluster.nodes))
        token_bytes = model.hidden_size * model.number_bytes
        self._rings = Rings(cluster, token_bytes, trusting=trusting)
        self._trusting = trusting
        self._layers = len(model.layers)
        self._made: dict[tuple[int, ...], list[RankGroup]] = {}
        self._stages: dict[tuple[tuple[int, ...], int, int, int], GroupStage | None] = {}
        self._place_of = {node.name: place for place, node in enumerate(cluster.nodes)}
        self._kinds = self._find_kinds()
        self._kind_of = {place: number for number, kind in enumerate(self._kinds) for place in kind}

    @property
    def is_possible(self) -> bool:
        """True if any two machines may exchange and the model can be split."""
        return (self._shared.sizes is not None or self._trusting) and any(
            self._rings.among(pair) is not None for pair in combinations(self._places, 2)
        )

    def has(self, name: str) -> bool:
        """Return True if the cluster has a machine of this name."""
        return name in self._place_of

    def tensor(self, *, of_all: bool = False) -> SharedPipeline | None:
        """Return the best single group; with `of_all` that of the whole cluster."""
        sets = [tuple(self._places)] if of_all else self._unlike_sets()
        groups = (self._whole(members) for members in sets)
        pipelines = [
            self._predicted([GroupStage(group, LayerRange(0, self._layers))]) for group in groups if group
        ]
        return min(pipelines, key=lambda pipeline: pipeline.cost, default=None)

    def hybrid(
        self, *, of_all: bool = False, near: Sequence[Sequence[tuple[Sequence[str], int]]] = ()
    ) -> SharedPipeline | None:
        """Return the best pipeline with a group as a stage.

        Args:
            of_all: True to use the whole cluster.
            near: other plans, by machines and number of layers of each stage; better ones may be a few changes away.
        """
        if len(self._places) < 2 or self._layers < 2:  # noqa: PLR2004 - stages
            return None
        found = [] if self._is_alike else self._by_orders(of_all=of_all)
        if not of_all and 2 < len(self._places) <= FEW_NODES:  # noqa: PLR2004 - more than a pair
            # Where memory is short, changes of all machines' pipelines lead elsewhere.
            found += filter(None, [self.hybrid(of_all=True)])
        starts = [*map(self._by_names, near), *(self._sized(pipeline.stages) for pipeline in found)]
        changes = self._changes([*starts, *self._even_divisions()], of_all=of_all)
        changes.search()
        made = self._stages_of(changes.best)
        return min(
            [*found, *([self._predicted(made)] if made else [])], key=lambda one: one.cost, default=None
        )

    def fits(self, *, of_all: bool = False) -> bool:
        """Return True if the memory suffices for some plan; with `of_all` for one over the whole cluster."""
        if not is_enough_for_all(self._shared, self._cluster.nodes):
            return False
        sets = [] if of_all else sorted(self._unlike_sets(), key=len, reverse=True)
        if any(map(self._whole, sets)):
            return True
        starts = self._even_divisions()
        changes = Changes(starts, self._cost_of, self._kind_of, of_all=of_all, patience=_LESS_PATIENCE)
        usable = sum(node.usable_bytes for node in self._cluster.nodes)
        if changes.least < _MISSING + _NEARLY * usable:
            changes.search(enough=_MISSING)
        return changes.least < _MISSING

    def _by_orders(self, *, of_all: bool) -> list[SharedPipeline]:
        """Return pipelines of the best orders of groups."""
        found: list[SharedPipeline] = []
        # A stage over all machines may not pay off, and few layers allow few splits.
        even_so = of_all or self._layers <= _FEW_LAYERS
        candidates = [one for one in self._sets(1) if len(one) == 1 or self._is_worth(one, even_so=even_so)]
        if all(len(members) == 1 for members in candidates):
            return []
        orders = self._search(candidates).orders(of_all=of_all)
        for order in sorted(orders, key=lambda order: self._weight(order, candidates)):
            groups = [candidates[candidate] for candidate in order.candidates]
            if all(len(members) == 1 for members in groups):
                continue
            made = self._cut(groups)
            if made is not None:
                found.append(made)
            if len(found) == _LOOKED_AT:
                break
        return found

    # ---- small changes

    @property
    def is_searchable(self) -> bool:
        """True if the machines are few, or so many alike that even divisions lead to the best of them."""
        return len(self._places) <= MOST_NODES or self._is_alike

    @property
    def _is_alike(self) -> bool:
        count, unlike = len(self._places), math.prod(len(kind) + 1 for kind in self._kinds)
        most = 1 << (MOST_NODES if count > MOST_NODES else count // 2)
        return count > FEW_NODES and unlike <= most

    def parts(self) -> list[list[int]]:
        """Return the places of machines to search instead of all: the fastest ones, and each of the fastest kinds.

        Those without the memory for the model are left out.
        """
        nodes, whole = self._cluster.nodes, self._shared.model.weight_bytes

        def speed(place: int) -> float:
            return nodes[place].rate(self._shared.model.weights).bandwidth

        kinds = sorted(self._kinds, key=lambda kind: -sum(map(speed, kind)))[:_KINDS_ALONE]
        fastest = sorted(self._places, key=speed, reverse=True)[:MOST_NODES]
        parts = [sorted(part) for part in (fastest, *kinds) if len(part) > 1]
        return [part for part in parts if sum(nodes[place].usable_bytes for place in part) >= whole]

    def _even_divisions(self) -> Iterator[SizedGroups]:
        places = [place for kind in self._kinds for place in kind]
        room = [max(1, node.usable_bytes) for node in self._cluster.nodes]
        return even_divisions(places, room, self._layers, self._shared.most_ranks)

    def _changes(self, starts: Iterable[SizedGroups], *, of_all: bool) -> Changes:
        places = len(self._places)
        patience = _PATIENCE if places <= FEW_NODES else _LESS_PATIENCE if places <= MOST_NODES else 0
        return Changes(starts, self._cost_of, self._kind_of, of_all=of_all, patience=patience)

    def _sized(self, stages: Sequence[GroupStage]) -> SizedGroups:
        return self._by_names([([node.name for node in stage.nodes], len(stage.layers)) for stage in stages])

    def _by_names(self, stages: Sequence[tuple[Sequence[str], int]]) -> SizedGroups:
        return tuple(
            (tuple(sorted(self._place_of[name] for name in names)), layers) for names, layers in stages
        )

    def _cost_of(self, stages: SizedGroups, least: float) -> float:
        """Return the cost of a pipeline: roughly if it is far from the least one, and the missing memory if it does not fit."""
        if least < _MISSING:
            rough = self._rough_cost_of(stages)
            if rough > _FAR * least:
                return rough
        made = self._stages_of(stages)
        if not made:
            return _MISSING + self._missing_bytes(stages)
        return Pipeline(self._cluster, made, self._request.demand).minimized_s(self._request)

    def _rough_cost_of(self, stages: SizedGroups) -> float:
        """Return the cost with shares by speed, as if memory had no limit."""
        made, first = list[GroupStage](), 0
        for members, layers in stages:
            groups = self._quick(members) if len(members) <= self._shared.most_ranks else []
            if not groups:
                return np.inf
            made.append(GroupStage(groups[0], LayerRange(first, first + layers)))
            first += layers
        return Pipeline(self._cluster, made, self._request.demand).minimized_s(self._request)

    def _missing_bytes(self, stages: SizedGroups) -> int:
        """Return about how much memory is missing."""
        nodes, missing, first = self._cluster.nodes, 0, 0
        for members, layers in stages:
            each = [nodes[place] for place in members]
            whole = self._shared.bounds(each[0])[1].memory_bytes(first, first + layers)
            missing += max(0, whole - sum(node.usable_bytes for node in each))
            first += layers
        return missing

    def _stages_of(self, stages: SizedGroups) -> list[GroupStage]:
        """Return the stages with the best shares; none if one has too little memory."""
        if not stages:
            return []
        rows, first, made = self._rows(len(stages)), 0, list[GroupStage]()
        for members, layers in stages:
            if (stage := self._stage_of(members, first, first + layers, rows)) is None:
                return []
            made.append(stage)
            first += layers
        return made

    def _stage_of(self, members: tuple[int, ...], first: int, end: int, rows: int) -> GroupStage | None:
        key = members, first, end, rows
        if key not in self._stages:
            if (alike := self._first_ones(members)) != members:
                stage = self._stage_of(alike, first, end, rows)
                self._stages[key] = stage and replace(stage, group=self._on(members, stage.group))
            else:
                groups = self._quick(members) if len(members) <= self._shared.most_ranks else []
                self._stages[key] = self._fitted(groups, first, end, rows) if groups else None
        return self._stages[key]

    def _first_ones(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return the first machines of a kind in place of machines of it; machines of several kinds as they are."""
        kind = self._kind_of[members[0]]
        is_one = all(self._kind_of[place] == kind for place in members)
        return tuple(self._kinds[kind][: len(members)]) if is_one else members

    def _on(self, members: tuple[int, ...], group: RankGroup) -> RankGroup:
        return group.on([self._cluster.nodes[place] for place in members], members)

    def _weight(self, order: GroupOrder, candidates: Sequence[tuple[int, ...]]) -> float:
        """Return the cost by which orders are sorted: that of plans, with the shares and the split of the search.

        For throughput, the slowest stage serves as many decode groups as there are stages.
        """
        if self._request.objective == "throughput":
            return order.cost * min(len(order.candidates), self._request.demand.sequences)
        ends = [int(block_ends(self._layers)[end]) for end in (0, *order.ends)]
        stages = [
            GroupStage(self._quick(candidates[candidate])[0], LayerRange(first, end))
            for candidate, (first, end) in zip(order.candidates, pairwise(ends), strict=True)
        ]
        prompt_s = Pipeline(self._cluster, stages, self._request.demand).first_token_s(
            self._request.prompt_tokens
        )
        return prompt_s + self._request.minimized_tokens * order.cost

    # ---- one group

    def _sets(self, least: int) -> Iterator[tuple[int, ...]]:
        most = min(len(self._places), self._shared.most_ranks)
        for size in range(least, most + 1):
            yield from combinations(self._places, size)

    def _find_kinds(self) -> Kinds:
        """Return the machines, in lists of those that are alike."""
        nodes, numbers = self._cluster.nodes, dict[object, int]()

        def number(one: NodeProfile, other: NodeProfile) -> int:
            return numbers.setdefault(self._cluster.link(one.name, other.name), len(numbers))

        links = np.array([[number(one, other) for other in nodes] for one in nodes], float)
        return kinds_of([replace(node, name="") for node in nodes], links)

    def _unlike_sets(self) -> Iterator[tuple[int, ...]]:
        """Yield the sets of several machines, without those that differ by alike machines only."""
        for size, sets in enumerate(sets_by_size(self._kinds)):
            if 1 < size <= self._shared.most_ranks:
                for bits in sets:
                    yield tuple(place for place in self._places if bits >> place & 1)

    def _whole(self, members: Sequence[int]) -> RankGroup | None:
        if not 1 < len(members) <= self._shared.most_ranks:
            return None
        quick = self._quick(tuple(members))
        if quick and self._rows(1) == self._rows(2) and quick[0].fits(0, self._layers):
            return quick[0]
        ring = self._rings.among(members)
        if ring is None:
            return None
        nodes = [self._cluster.nodes[place] for place in ring.nodes]
        return fitting_group(self._shared, nodes, ring, 0, self._layers, self._rows(1))

    def _predicted(self, stages: Sequence[GroupStage]) -> SharedPipeline:
        pipeline = Pipeline(self._cluster, stages, self._request.demand)
        prediction = pipeline.prediction(self._request)
        each = tuple(pipeline.lone_stream(self._shared.context_tokens)[0])
        cost = prediction.minimized_s(self._request.objective)
        return SharedPipeline(tuple(stages), each, prediction, cost)

    def _rows(self, stages: int) -> int:
        """Return the rows of a step, for a number of stages."""
        streams = self._request.streams
        return -(-streams // min(stages, streams))

    # ---- pipelines of groups

    def _is_worth(self, members: tuple[int, ...], *, even_so: bool) -> bool:
        """Return True if the machines together are faster than the slowest alone; else a pipeline is no worse."""
        groups = self._quick(members)
        if not groups or even_so:
            return bool(groups)
        together = self._all_layers_s(groups[0])
        return together < max(self._all_layers_s(self._quick((place,))[0]) for place in members)

    def _all_layers_s(self, group: RankGroup) -> float:
        """Return the seconds of all layers, regardless of memory."""
        return group.stage_seconds(0, self._layers, self._rows(2), self._shared.context_tokens).steady

    def _search(self, candidates: Sequence[tuple[int, ...]]) -> GroupSearch:
        ends, adds = block_ends(self._layers), self._request.objective != "throughput"
        tables = [
            stage_seconds(self._quick(members), self._rows(2), ends, adds=adds, any_shares=True)
            for members in candidates
        ]
        model = self._shared.model
        hops = self._hops(candidates, model.hidden_size * model.number_bytes)
        back = self._hops([(place,) for place in self._places], TOKEN_BYTES)
        if not adds:
            hops, back = (np.where(np.isfinite(table), 0.0, np.inf) for table in (hops, back))
        bits = [sum(1 << place for place in members) for members in candidates]
        return GroupSearch(bits, tables, hops, back, adds=adds)

    def _hops(self, candidates: Sequence[tuple[int, ...]], row_bytes: int) -> Table:
        """Return the seconds from each machine to the ranks of each candidate."""
        nbytes = self._rows(2) * row_bytes
        nodes, link = self._cluster.nodes, self._cluster.link

        def hop_s(one: int, members: tuple[int, ...]) -> float:
            others = [place for place in members if place != one]
            links = [link(nodes[one].name, nodes[place].name) for place in others]
            return max((each.seconds(nbytes * len(members)) for each in links), default=0.0)

        return np.array([[hop_s(one, members) for members in candidates] for one in self._places])

    def _quick(self, members: tuple[int, ...]) -> list[RankGroup]:
        """Return the group with shares by speed, and by memory too if the first has too little of it."""
        if members not in self._made:
            alike = self._first_ones(members)
            self._made[members] = (
                self._make_quick(members)
                if alike == members
                else [self._on(members, group) for group in self._quick(alike)]
            )
        return self._made[members]

    def _make_quick(self, members: tuple[int, ...]) -> list[RankGroup]:
        if len(members) == 1:
            return [alone(self._shared, self._cluster.nodes[members[0]], members[0])]
        ring = self._rings.among(members)
        if ring is None:
            return []
        nodes = [self._cluster.nodes[place] for place in ring.nodes]
        by_speed = quick_group(self._shared, nodes, ring, self._rows(2), by_memory=False)
        if by_speed.fits(0, self._layers):
            return [by_speed]
        return [by_speed, quick_group(self._shared, nodes, ring, self._rows(2), by_memory=True)]

    def _cut(self, members: Sequence[tuple[int, ...]]) -> SharedPipeline | None:
        """Return the pipeline after alternating between layers and shares for these groups in this order."""
        ends, adds = np.arange(self._layers + 1), self._request.objective != "throughput"
        rows = self._rows(len(members))
        choices, found = [self._quick(each) for each in members], list[SharedPipeline]()
        for any_shares in _CUTS:
            tables = [
                stage_seconds(groups, rows, ends, adds=adds, any_shares=any_shares) for groups in choices
            ]
            made = self._all_fitted(choices, cut(tables, adds=adds) or [], rows)
            if not made:
                continue
            found.append(self._predicted(made))
            choices = [[stage.group] for stage in made]
        return min(found, key=lambda pipeline: pipeline.cost, default=None)

    def _all_fitted(
        self, choices: Sequence[list[RankGroup]], pieces: Sequence[tuple[int, int]], rows: int
    ) -> list[GroupStage]:
        """Return the stages; none if one has too little memory."""
        fitted = [
            self._fitted(groups, *piece, rows) for groups, piece in zip(choices, pieces, strict=bool(pieces))
        ]
        made = [stage for stage in fitted if stage is not None]
        return made if len(made) == len(choices) else []

    def _fitted(self, groups: Sequence[RankGroup], first: int, end: int, rows: int) -> GroupStage | None:
        """Return the stage with the best shares for these layers."""
        some = groups[0]
        if len(some.members) == 1:
            return GroupStage(some, LayerRange(first, end)) if some.fits(first, end) else None
        group = fitting_group(self._shared, some.nodes, some.ring, first, end, rows)
        return None if group is None else GroupStage(group, LayerRange(first, end))
