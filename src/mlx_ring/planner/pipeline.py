"""Predicted times of a pipeline, and bounds of its throughput. Each stage is a machine, or several that share its layers. Pure.

These are the times of every plan, whatever found it: of `auto`, of given layers, of tensor groups and of a loaded model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mlx_ring.core.types import LayerRange
from mlx_ring.planner.plan import Prediction, Times
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile, lone_stream
from mlx_ring.planner.rank_costs import Kinds
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.planner.stage_costs import TOKEN_BYTES, StageTables, Table, before


class Stage(Protocol):
    """Layers of one or more machines."""

    @property
    def nodes(self) -> tuple[NodeProfile, ...]:
        """Machine of each rank, rank 0 first."""
        ...

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's activations, as rank 0 sends them."""
        ...

    def seconds(self, rows: int, context_tokens: int) -> Times[float]:
        """Return the seconds of a decode step."""
        ...

    def prefill_seconds(self, tokens: int, context_tokens: int = 0) -> float:
        """Return the seconds of all usual chunks of a prompt, or of those over several stages, after a context."""
        ...

    def alone_seconds(self, tokens: int) -> float:
        """Return the seconds in which a stage with all layers reads a prompt alone, in chunks that may be longer."""
        ...


@dataclass(frozen=True, slots=True)
class MachineStage:
    """Layers of one machine."""

    tables: StageTables
    node: NodeProfile
    layers: LayerRange

    @property
    def nodes(self) -> tuple[NodeProfile, ...]:
        """The machine."""
        return (self.node,)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's activations."""
        return self.tables.model.hidden_size * self.tables.model_on(self.node).number_bytes

    def seconds(self, rows: int, context_tokens: int) -> Times[float]:
        """Return the seconds of a decode step."""
        return self.tables.stage_seconds(self.node, self.layers.start, self.layers.end, rows, context_tokens)

    def prefill_seconds(self, tokens: int, context_tokens: int = 0) -> float:
        """Return the seconds of all usual chunks of a prompt, after a context."""
        layers = self.layers
        return self.tables.prefill_seconds(self.node, layers.start, layers.end, tokens, context_tokens)

    def alone_seconds(self, tokens: int) -> float:
        """Return the seconds in which a stage with all layers reads a prompt alone, in chunks that may be longer."""
        return self.tables.alone_seconds(self.node, tokens)


class Pipeline:
    """Stages in order, the links between them, and the promised load."""

    def __init__(self, cluster: ClusterProfile, stages: Sequence[Stage], demand: Demand) -> None:
        self.stages = tuple(stages)
        self._cluster = cluster
        self._demand = demand
        self._token_s: dict[tuple[int, int | None], float] = {}
        self._machines = [_machine_of(stage.nodes) for stage in stages]

    # ---- hops

    def around_s(self, rows: int) -> float:
        """Return the seconds of all hops; rank 0 of a stage sends to every rank of the next."""
        if len(self.stages) == 1:
            return 0.0
        forward = sum(self.forward_s(stage, rows) for stage in range(len(self.stages) - 1))
        return forward + self.back_s(rows)

    def _hop_s(self, one: Stage, other: Stage, nbytes: int) -> float:
        sender = one.nodes[0]
        all_bytes = nbytes * len(other.nodes)
        return max(self._cluster.link(sender.name, node.name).seconds(all_bytes) for node in other.nodes)

    def _busiest_link_s(self, rows: int) -> float:
        """Return the seconds for which a step of `rows` rows keeps the busiest link from the next step."""
        return max((self.occupied_s(stage, rows) for stage in range(len(self.stages) - 1)), default=0.0)

    def occupied_s(self, stage: int, rows: int) -> float:
        """Return the seconds for which a step of `rows` rows keeps the link behind a stage from the next step."""
        one, other = self.stages[stage : stage + 2]
        slowest = min(self._cluster.link(one.nodes[0].name, node.name).bandwidth for node in other.nodes)
        return rows * one.row_bytes * len(other.nodes) / slowest

    def forward_s(self, stage: int, rows: int) -> float:
        """Return the seconds until the activations of `rows` rows have arrived behind a stage."""
        one, other = self.stages[stage : stage + 2]
        return self._hop_s(one, other, rows * one.row_bytes)

    def back_s(self, rows: int) -> float:
        """Return the seconds until the first stage has the drawn tokens of `rows` rows."""
        return self._hop_s(self.stages[-1], self.stages[0], rows * TOKEN_BYTES)

    # ---- decode

    def lone_stream(self, context_tokens: int | None = None) -> tuple[list[float], float]:
        """Return the seconds of each stage, and the seconds from token to token, for a single stream."""
        times = self._times(1, context_tokens)
        unhindered, steady = [each.unhindered for each in times], [each.steady for each in times]
        return lone_stream(unhindered, steady, self.around_s(1), self._machines)

    def token_s(self, streams: int = 1, context_tokens: int | None = None) -> float:
        """Return the seconds from one token of each stream to its next, in as many decode groups as there are stages.

        A cycle lasts as long as the slowest machine or link takes for all groups, or one group takes for a whole round.
        """
        key = streams, context_tokens
        if key not in self._token_s:
            if streams == 1:
                self._token_s[key] = self.lone_stream(context_tokens)[1]
            else:
                self._token_s[key] = max(self._round_and_cycle_s(streams, context_tokens))
        return self._token_s[key]

    def waits_for_rounds(self, streams: int) -> bool:
        """Return True if a token takes a whole round, because no stage or link is busy all the time."""
        round_s, cycle_s = self._round_and_cycle_s(streams, None)
        return round_s >= cycle_s

    def _round_and_cycle_s(self, streams: int, context_tokens: int | None) -> tuple[float, float]:
        """Return the seconds of one group's round, and of the slowest machine or link for all groups."""
        groups = min(len(self.stages), streams)
        rows = -(-streams // groups)
        times = self._times(rows, context_tokens)
        round_s = sum(each.unhindered for each in times) + self.around_s(rows)
        steady: dict[str, float] = defaultdict(float)
        for machine, each in zip(self._machines, times, strict=True):
            steady[machine] += each.steady
        return round_s, groups * max(*steady.values(), self._busiest_link_s(rows))

    def tokens_per_s(self, fewer: int = 0) -> float:
        """Return the throughput of all promised sequences, or of so many fewer."""
        streams = self._demand.sequences - fewer
        return streams / self.token_s(streams) if streams else 0.0

    def _times(self, rows: int, context_tokens: int | None) -> list[Times[float]]:
        context = self._demand.mean_context_tokens if context_tokens is None else context_tokens
        return [stage.seconds(rows, context) for stage in self.stages]

    # ---- requests

    def first_token_s(self, prompt_tokens: int, users: int = 1) -> float:
        """Return the seconds to the first token of the last of `users` prompts that arrive at once."""
        prompt_s = users * self.stages[0].nodes[0].prompt_s
        if len(self.stages) == 1:
            # Answers are in progress when the other prompts are read.
            others_s = (users - 1) * self.stages[0].prefill_seconds(prompt_tokens) if users > 1 else 0.0
            return prompt_s + self.stages[0].alone_seconds(prompt_tokens) + others_s + self.token_s(users)
        most = self._demand.stage_tokens
        chunks, rows = -(-prompt_tokens // most), min(prompt_tokens, most)
        times = [stage.prefill_seconds(prompt_tokens) / chunks for stage in self.stages]
        later_s = (users * chunks - 1) * max(*times, self._busiest_link_s(rows))
        return prompt_s + sum(times) + later_s + self.around_s(rows) + self.token_s(users)

    def minimized_s(self, request: PlanRequest) -> float:
        """Return the seconds that the request's objective minimizes, as `Prediction.minimized_s` does; less is better."""
        if request.objective == "throughput":
            return 1 / self.tokens_per_s()
        first_token_s = self.first_token_s(request.prompt_tokens, request.users)
        return first_token_s + request.minimized_tokens * self.token_s(request.users)

    def prediction(self, request: PlanRequest) -> Prediction:
        """Return the prediction for a plan."""
        token_s = self.token_s(request.users)
        first_token_s = self.first_token_s(request.prompt_tokens, request.users)
        return Prediction(
            token_s=token_s,
            tokens_per_s=self.tokens_per_s(),
            fewer_tokens_per_s=self.tokens_per_s(fewer=1),
            first_token_s=first_token_s,
            prompt_tokens=request.prompt_tokens,
            request_s=first_token_s + request.answer_tokens * token_s,
            answer_tokens=request.answer_tokens,
            users=request.users,
        )


def _machine_of(nodes: Sequence[NodeProfile]) -> str:
    """Return the name of a stage's machine, or of its machines together. Stages of the same name share its time."""
    return nodes[0].name if len(nodes) == 1 else "+".join(dict.fromkeys(node.name for node in nodes))


# ---- bounds

Sets = NDArray[np.intp]
"""Kinds of the machines of each set, -1 for none: `(sets, machines)`."""
_HALVINGS = 20
"""Number of times that the interval of a pace is halved."""
_NEVER_S = 1e300
"""Seconds of a layer where there is no machine."""


class _Lines(NamedTuple):
    """Least seconds that a stage computes: a start, and as much for each layer. By kind of machine."""

    layer_s: Table
    start_s: Table
    last_s: Table
    """Start of a stage with the last layer and the output head."""
    whole_s: Table
    """Seconds of all layers."""


class _Rooms(NamedTuple):
    """Most layers that a stage can have by memory. By kind of machine."""

    middle: Table
    first: Table
    """With the first layer, and not the last."""
    last: Table
    whole: Table
    """All layers, or 0."""


class PipelineBounds:
    """Bounds of the throughput of pipelines of single machines; close to that of the best plan if layers are alike.

    A stage takes at least the time of a straight line by its number of layers, whichever they are. At a pace, each machine
    has as many layers as the pace and its memory allow. The pace at which all layers have a place bounds the slowest stage.
    The sum of all stages is least if the fastest machines have the most layers; with the nearest hops, it bounds a round.
    """

    def __init__(
        self, model: ModelProfile, cluster: ClusterProfile, kinds: Kinds, request: PlanRequest
    ) -> None:
        """Prepare the bounds. Machines are given by their kind; `kinds` has the places of each kind's machines."""
        self.layers = len(model.layers)
        self._model, self._demand = model, request.demand
        self._costs = StageTables(model, request.demand)
        self._nodes = [cluster.nodes[kind[0]] for kind in kinds]
        self._links = _links_between(cluster, kinds)
        self._row_bytes = model.hidden_size * min(
            self._costs.model_on(node).number_bytes for node in self._nodes
        )
        quotas = [1.0 if node.cpu_quota is None else node.cpu_quota.share for node in self._nodes]
        self._quota = np.array(quotas)
        self._overhead_s = np.array([node.ratios.overhead_s for node in self._nodes])
        self._lines: dict[int, _Lines] = {}
        self._rooms: dict[int, _Rooms] = {}
        self._highest: dict[tuple[tuple[int, ...], int], float] = {}
        """Bounds by kinds and sequences."""

    def tokens_per_s(self, kinds: tuple[int, ...], share: int) -> float:
        """Return a throughput of `share` sequences that no pipeline of these machines exceeds; 0 without enough memory."""
        if (kinds, share) not in self._highest:
            self.compute([kinds], share)
        return self._highest[kinds, share]

    def compute(self, sets: Iterable[tuple[int, ...]], share: int) -> None:
        """Compute the bounds of many sets of machines at once, except those that are known."""
        new = [kinds for kinds in dict.fromkeys(sets) if (kinds, share) not in self._highest]
        for kinds, seconds in zip(new, self.seconds(new, share) if new else (), strict=True):
            self._highest[kinds, share] = share / float(seconds)

    def seconds(self, sets: Sequence[tuple[int, ...]], share: int) -> Table:
        """Return the least seconds from one token of all sequences to the next: `(sets,)`."""
        width = max(map(len, sets))
        members = np.array([[*kinds, *[-1] * (width - len(kinds))] for kinds in sets], dtype=np.intp)
        alone_s = self.lines(share).whole_s / self._quota + self._overhead_s
        alone_s = np.where(self.rooms(share).whole > 0, alone_s, np.inf)
        least = np.where(members >= 0, alone_s[members], np.inf).min(axis=1)
        several = range(2, min(width, self.layers) + 1)
        return np.minimum(least, _Several(self, members, several, share).seconds()) if several else least

    def lines(self, rows: int) -> _Lines:
        """Return the lines of a step of so many rows, as if no machine had a quota."""
        if rows not in self._lines:
            each = [self._line(node, rows) for node in self._nodes]
            self._lines[rows] = _Lines(*np.array(each, dtype=np.float64).T)
        return self._lines[rows]

    def _line(self, node: NodeProfile, rows: int) -> tuple[float, float, float, float]:
        layers = self._costs.layer_seconds(node, rows, self._demand.mean_context_tokens)
        if node.cpu_quota is not None:
            layers = layers * node.cpu_quota.share
        step_s, mean = (
            node.costs.step_s * node.ratios.decode,
            float(layers[:-1].mean() if self.layers > 1 else 0.0),
        )
        # Distance of the time of the layers before each from the line; a stage is as far below it as the distance falls.
        apart = before(layers - mean)
        highest = np.maximum.accumulate(apart)
        fall = float((apart[1:-1] - highest[:-2]).min(initial=0.0))
        return mean, step_s + fall, step_s + float(apart[-1] - highest[-2]), step_s + float(layers.sum())

    def rooms(self, share: int) -> _Rooms:
        """Return the most layers of a stage for a share of the sequences."""
        if share not in self._rooms:
            costs, ends = (
                StageTables(self._model, replace(self._demand, sequences=share)),
                np.arange(self.layers + 1),
            )
            lengths = np.maximum(0.0, ends[None, :] - ends[:, None])
            fitting = [
                np.where(costs.memory(node) <= node.usable_bytes, lengths, 0.0) for node in self._nodes
            ]
            parts = (np.s_[1:, :-1], np.s_[:1, :-1], np.s_[1:, -1:], np.s_[:1, -1:])
            self._rooms[share] = _Rooms(*(np.array([one[part].max() for one in fitting]) for part in parts))
        return self._rooms[share]

    def steady(self, members: Sets) -> tuple[Table, Table]:
        """Return each machine's share of the time, and the seconds that a step takes beside computing."""
        return self._quota[members], self._overhead_s[members]

    def around_s(self, members: Sets, stages: int, rows: int) -> Table:
        """Return the least seconds of the hops between so many machines of each set, there and back: `(sets,)`."""
        between = members[:, :, None], members[:, None, :]
        apart = (between[0] >= 0) & (between[1] >= 0) & ~np.eye(members.shape[1], dtype=bool)
        latency_s, bandwidth = (table[between] for table in self._links)
        forward_s = np.where(apart, latency_s + rows * self._row_bytes / bandwidth, np.inf)
        # Each machine but the last one sends to another.
        nearest_s = np.sort(forward_s.min(axis=2), axis=1)[:, : stages - 1].sum(axis=1)
        return nearest_s + np.where(apart, latency_s, np.inf).min(axis=(1, 2))


def _links_between(cluster: ClusterProfile, kinds: Kinds) -> tuple[Table, Table]:
    """Return the seconds of an empty message and the bandwidth between machines, by kinds."""
    if not cluster.links:
        usual = cluster.usual_link
        each = [[usual] * len(kinds)] * len(kinds)
    else:
        ends = [(cluster.nodes[kind[0]].name, cluster.nodes[kind[-1]].name) for kind in kinds]
        each = [[cluster.link(one, other) for _, other in ends] for one, _ in ends]
    latency_s = np.array([[link.round_trip_s / 2 for link in row] for row in each])
    return latency_s, np.array([[link.bandwidth for link in row] for row in each])


class _Several:
    """Pipelines of several of each set's machines. Arrays are `(numbers of stages, sets, machines)`, the fastest machines first."""

    def __init__(self, bounds: PipelineBounds, members: Sets, numbers: range, share: int) -> None:
        self._layers = bounds.layers
        groups = [min(number, share) for number in numbers]
        self._groups = np.array(groups, dtype=np.float64)[:, None]
        rows = [-(-share // count) for count in groups]
        present = members >= 0
        lines = [bounds.lines(count) for count in rows]
        layer_s, start_s, last_s = (
            np.where(present, np.stack([line[part] for line in lines])[:, members], _NEVER_S)
            for part in range(3)
        )
        order = np.argsort(layer_s, axis=2)

        def ordered(values: Table) -> Table:
            return np.take_along_axis(np.broadcast_to(values, order.shape), order, axis=2)

        quota, overhead_s = map(ordered, bounds.steady(members))
        self._layer_s, start_s, last_s = ordered(layer_s), ordered(start_s), ordered(last_s)
        self._pace_s = self._layer_s / quota
        self._start_s, self._last_s = start_s / quota + overhead_s, last_s / quota + overhead_s
        self._middle, self._first, self._last = (
            ordered(np.where(present, room[members], 0.0)) for room in bounds.rooms(share)[:3]
        )
        self._absent = ordered(np.where(present, 0.0, -np.inf))
        chosen = np.tri(len(numbers), members.shape[1], numbers.start - 1, dtype=np.bool_)[:, None, :]
        self._longest = chosen[:, :, ::-1]
        """True for as many machines as there are stages, the last ones."""
        shortest = np.where(chosen, np.sort(start_s + overhead_s, axis=2), 0.0).sum(axis=2)
        around = [
            bounds.around_s(members, number, count) for number, count in zip(numbers, rows, strict=True)
        ]
        with_head = (last_s - start_s - self._absent).min(axis=2)
        is_possible = present.sum(axis=1) >= np.array(numbers)[:, None]
        self._fixed_s = np.where(is_possible, np.stack(around) + shortest + with_head, np.inf)
        """Least part of a round beside the layers."""

    def seconds(self) -> Table:
        """Return the least seconds from one token of all sequences to the next, with any number of stages: `(sets,)`."""
        most = np.maximum(self._middle, np.maximum(self._first, self._last))
        ends_s = np.maximum(self._start_s, self._last_s) + self._pace_s * most
        whole_s: Table = np.where(self._absent < 0, 0.0, ends_s).max(axis=2) * (1 + 1e-6)
        is_possible = self._fit(whole_s) & np.isfinite(self._fixed_s)
        low, _ = _halved(np.zeros_like(whole_s), whole_s, self._fit)
        # A slower pace shortens the round, because the fastest machines get more layers.
        low, high = _halved(low, whole_s, lambda pace_s: self._round_s(pace_s) <= self._groups * pace_s)
        slowest_s = np.minimum(self._groups * high, self._round_s(high))
        return np.where(is_possible, np.maximum(self._groups * low, slowest_s), np.inf).min(axis=0)

    def _counts(self, pace_s: Table) -> tuple[Table, Table, Table]:
        """Return the most layers at a pace in the middle of a pipeline, and with its first or last layer."""
        middle = np.floor((pace_s[:, :, None] - self._start_s) / self._pace_s)
        last = np.floor((pace_s[:, :, None] - self._last_s) / self._pace_s)
        return (
            np.clip(middle, 0.0, self._middle),
            np.clip(middle, 0.0, self._first),
            np.clip(last, 0.0, self._last),
        )

    def _fit(self, pace_s: Table) -> NDArray[np.bool_]:
        """Return True if all layers may have a place at a pace: one machine has the first one, and one the last."""
        middle, first, last = self._counts(pace_s)
        most = np.where(self._longest, np.sort(middle, axis=2), 0.0).sum(axis=2)
        ends = [(one - middle + self._absent).max(axis=2) for one in (first, last)]
        return most + ends[0] + ends[1] >= self._layers

    def _round_s(self, pace_s: Table) -> Table:
        """Return the least seconds of a round at a pace."""
        middle, first, last = self._counts(pace_s)
        most = np.maximum(middle, np.maximum(first, last)).cumsum(axis=2)
        layers = np.diff(np.minimum(most, self._layers), axis=2, prepend=0.0)
        return (layers * self._layer_s).sum(axis=2) + self._fixed_s


def _halved(low: Table, high: Table, holds: Callable[[Table], NDArray[np.bool_]]) -> tuple[Table, Table]:
    """Return intervals between values for which something does not hold and does, halved many times."""
    for _ in range(_HALVINGS):
        middle: Table = (low + high) / 2
        is_held = holds(middle)
        low, high = np.where(is_held, low, middle), np.where(is_held, middle, high)
    return low, high
