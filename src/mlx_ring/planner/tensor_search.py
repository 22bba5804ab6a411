"""Search for plans with tensor parallelism: all machines in one group, or groups as stages of a pipeline. Pure.

Every set of machines that may exchange is considered as one group, with shares by which all ranks take equally long. For
pipelines of groups, every set is a candidate for a stage; the best orders of them are split exactly and predicted in
full. For a single stream the best plan answers soonest, prompt included; otherwise it has the highest throughput.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import cast

import numpy as np

from mlx_ring.core.types import LayerRange
from mlx_ring.planner.group_search import GroupOrder, GroupSearch, block_ends, cut
from mlx_ring.planner.pipeline import GroupStage, Pipeline
from mlx_ring.planner.plan import Prediction
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.rank_costs import Rings
from mlx_ring.planner.request import PlanRequest
from mlx_ring.planner.search import kinds_of, sets_by_size
from mlx_ring.planner.stage_costs import TOKEN_BYTES, Table
from mlx_ring.planner.tensor_groups import (
    Ends,
    RankGroup,
    SharedModel,
    alone,
    fitting_group,
    quick_group,
)

_LOOKED_AT = 6
"""Number of orders of groups that are predicted in full."""
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

    @property
    def is_possible(self) -> bool:
        """True if any two machines may exchange and the model can be split."""
        return (self._shared.sizes is not None or self._trusting) and any(
            self._rings.among(pair) is not None for pair in combinations(self._places, 2)
        )

    def tensor(self, *, of_all: bool = False) -> SharedPipeline | None:
        """Return the best single group; with `of_all` that of the whole cluster."""
        sets = [tuple(self._places)] if of_all else self._unlike_sets()
        groups = (self._whole(members) for members in sets)
        pipelines = [
            self._predicted([GroupStage(group, LayerRange(0, self._layers))]) for group in groups if group
        ]
        return min(pipelines, key=lambda pipeline: pipeline.cost, default=None)

    def hybrid(self, *, of_all: bool = False) -> SharedPipeline | None:
        """Return the best pipeline with a group as a stage; with `of_all` over the whole cluster."""
        if len(self._places) < 2 or self._layers < 2:  # noqa: PLR2004 - stages
            return None
        found: list[SharedPipeline] = []
        # A stage over all machines may not pay off, and few layers allow few splits.
        even_so = of_all or self._layers <= _FEW_LAYERS
        candidates = [one for one in self._sets(1) if len(one) == 1 or self._is_worth(one, even_so=even_so)]
        if all(len(members) == 1 for members in candidates):
            return None
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
        return min(found, key=lambda pipeline: pipeline.cost, default=None)

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

    def _unlike_sets(self) -> Iterator[tuple[int, ...]]:
        """Yield the sets of several machines, without those that differ by alike machines only."""
        nodes, link = self._cluster.nodes, self._cluster.link
        numbers: dict[object, int] = {}
        links = np.array(
            [
                [
                    numbers.setdefault(
                        (link(one.name, other.name), self._cluster.trusts(one, other)), len(numbers)
                    )
                    for other in nodes
                ]
                for one in nodes
            ],
            float,
        )
        kinds = kinds_of([replace(node, name="") for node in nodes], links)
        for size, sets in enumerate(sets_by_size(kinds)):
            if 1 < size <= self._shared.most_ranks:
                for bits in sets:
                    yield tuple(place for place in self._places if bits >> place & 1)

    def _whole(self, members: Sequence[int]) -> RankGroup | None:
        if not 1 < len(members) <= self._shared.most_ranks:
            return None
        if (quick := self._quick(tuple(members))) and quick[0].fits(0, self._layers):
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
        return SharedPipeline(
            tuple(stages), each, prediction, prediction.minimized_s(self._request.objective)
        )

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
            _seconds(self._quick(members), self._rows(2), ends, adds=adds, any_shares=True)
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
            self._made[members] = self._make_quick(members)
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
            tables = [_seconds(groups, rows, ends, adds=adds, any_shares=any_shares) for groups in choices]
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


def _seconds(groups: Sequence[RankGroup], rows: int, ends: Ends, *, adds: bool, any_shares: bool) -> Table:
    """Return the seconds of a stage with the best shares, by its ends; with `any_shares` an estimate for others."""

    def table(group: RankGroup, *, any_shares: bool = False) -> Table:
        times = group.times(rows, group.shared.context_tokens, ends, any_shares=any_shares)
        return times.unhindered if adds else times.steady

    best = np.min([table(group) for group in groups], axis=0)
    if not any_shares or len(groups) == 1:
        return best
    # Between those by speed and those by memory.
    others = np.max([table(group, any_shares=True) for group in groups], axis=0)
    return cast("Table", np.where(np.isfinite(best), best, others))
