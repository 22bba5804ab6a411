"""Tables of seconds by machine, first layer and end, from which pipelines are searched; and those of mean layers. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np

from mlx_ring.core.types import LayerRange
from mlx_ring.planner.group_search import shortest_pace
from mlx_ring.planner.pipeline import MachineStage, Pipeline
from mlx_ring.planner.plan import Times
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile
from mlx_ring.planner.rank_costs import Ring
from mlx_ring.planner.request import Chunks, Demand, PlanRequest, chunks_alone, usual_chunks
from mlx_ring.planner.search import MachineLayers, RequestTables
from mlx_ring.planner.stage_costs import TOKEN_BYTES, StageTables, Table, long_chunk_on
from mlx_ring.planner.tensor_groups import SUMS_PER_LAYER, SharedModel

_LOOSER = (1.0, 1.12, 1.3, 1.6, 2.2, math.inf)
"""Multiples of the shortest possible pace that are tried."""
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Users:
    """Decode steps of several streams at once."""

    groups: int
    """Number of decode groups, which the stages compute in turn."""
    rows: int
    """Number of rows in each."""
    round_weight: float = 1.0
    """Weight of a whole round in the time of a token; the rest is that of the slowest stage for all groups."""


_LONE = Users(1, 1)


class Timetable:
    """Seconds of every possible stage and hop, computed once for each number of rows and machines that differ by name only."""

    def __init__(self, model: ModelProfile, cluster: ClusterProfile, demand: Demand) -> None:
        self.model = model
        self.cluster = cluster
        self.demand = demand
        self.costs = StageTables(model, demand)
        places: dict[NodeProfile, int] = {}
        self._alike = [
            places.setdefault(replace(node, name=""), place) for place, node in enumerate(cluster.nodes)
        ]
        """First machine with the same profile, for each machine."""
        self._unhindered: dict[int, list[Table]] = {}
        self._steady: dict[int, list[Table]] = {}
        self._prefill: dict[tuple[int, int], list[Table]] = {}
        self._hops: dict[int, Table] = {}

    def pipeline(self, pieces: Sequence[MachineLayers]) -> Pipeline:
        """Return the pipeline of these stages, for its predicted times."""
        nodes = self.cluster.nodes
        stages = [
            _TableStage(self.costs, nodes[piece.node], LayerRange(piece.first, piece.end), self, piece)
            for piece in pieces
        ]
        return Pipeline(self.cluster, stages, self.demand)

    def request_s(self, pieces: Sequence[MachineLayers], request: PlanRequest) -> float:
        """Return the seconds that `auto` minimizes: of a whole request, or to its first token."""
        return self.pipeline(pieces).minimized_s(request)

    def requests_s(self, pipelines: Sequence[Sequence[MachineLayers]], request: PlanRequest) -> Table:
        """Return `request_s` of many pipelines of different machines, computed at once: `(pipelines,)`.

        It is infinite where a stage does not fit or a machine does not reach the next.
        """
        by_stages: dict[int, list[int]] = defaultdict(list)
        for place, pieces in enumerate(pipelines):
            by_stages[len(pieces)].append(place)
        seconds = np.full(len(pipelines), np.inf)
        for places in by_stages.values():
            seconds[places] = self._requests_s([pipelines[place] for place in places], request)
        return seconds

    def _requests_s(self, pipelines: Sequence[Sequence[MachineLayers]], request: PlanRequest) -> Table:
        """Return the seconds of pipelines with equally many stages, by the formulas of `Pipeline`."""
        nodes = np.array([[piece.node for piece in pieces] for pieces in pipelines])
        pairs = nodes[:, :-1], nodes[:, 1:]

        def by_stage(tables: Sequence[Table]) -> Table:
            return np.array(
                [[tables[piece.node][piece.first, piece.end] for piece in pieces] for pieces in pipelines]
            )

        def around_s(rows: int) -> Table | float:
            if not pairs[0].size:
                return 0.0
            return self.hops(rows)[pairs].sum(axis=1) + self.back(rows)[nodes[:, -1], nodes[:, 0]]

        def slowest_s(stages: Table, rows: int) -> Table:
            links_s = rows * self._row_seconds()[pairs] if pairs[0].size else stages
            return np.maximum(stages.max(axis=1), links_s.max(axis=1))

        streams = request.streams
        groups = min(nodes.shape[1], streams)
        rows = -(-streams // groups)
        round_s = by_stage(self.tables(rows)).sum(axis=1) + around_s(rows)
        token_s = np.maximum(round_s, groups * slowest_s(by_stage(self.steady_tables(rows)), rows))
        if request.objective == "throughput":
            return token_s / streams
        chunks, rows = request.chunks, request.chunk_rows
        chunk_s = by_stage(self._prefill_tables(request)) / chunks
        prompt_s = request.users * np.array([node.prompt_s for node in self.cluster.nodes])[nodes[:, 0]]
        later_s = (request.users * chunks - 1) * slowest_s(chunk_s, rows)
        first_token_s = prompt_s + chunk_s.sum(axis=1) + later_s + around_s(rows) + token_s
        return first_token_s + (request.minimized_tokens and request.minimized_tokens * token_s)

    def request_tables(self, request: PlanRequest, users: Users = _LONE) -> RequestTables:
        """Return the parts of a request's time: a sum over stages and hops, and the slowest pace of stages and links.

        With several users, a token takes a whole round, or the time of the slowest stage for all groups, whichever is longer.
        Any weighted mean of the two is a lower bound.
        """
        chunks, tokens = request.chunks, 1 + request.minimized_tokens
        later, rows = request.users * chunks - 1, request.chunk_rows
        in_rounds, in_paces = tokens * users.round_weight, tokens * (1 - users.round_weight) * users.groups
        prefill = self._prefill_tables(request)
        decode, steady = self.tables(users.rows), self.steady_tables(users.rows)
        return RequestTables(
            sums=self._once(lambda place: prefill[place] / chunks + _scaled(in_rounds, decode[place])),
            hops=self.hops(rows) + _scaled(in_rounds, self.hops(users.rows)),
            back=self.back(rows) + _scaled(in_rounds, self.back(users.rows)),
            paces=self._once(
                lambda place: later * (prefill[place] / chunks) + _scaled(in_paces, steady[place])
            ),
            link_paces=(later * rows + in_paces * users.rows) * self._row_seconds(),
        )

    def _row_seconds(self) -> Table:
        """Return the seconds for which one row's activations keep a link busy."""
        row_bytes = np.array([self._row_bytes(node) for node in self.cluster.nodes], float)
        return row_bytes[:, None] / self.cluster.link_tables[1]

    def _row_bytes(self, node: NodeProfile) -> int:
        return self.model.hidden_size * self.costs.model_on(node).number_bytes

    def tables(self, rows: int) -> list[Table]:
        """Return for each machine the seconds of every possible stage, if the machine was idle before.

        Args:
            rows: number of rows in the step.
        """
        if rows not in self._unhindered:
            self._add_times(rows)
        return self._unhindered[rows]

    def steady_tables(self, rows: int) -> list[Table]:
        """Return for each machine the seconds of every possible stage, if the machine computes all the time."""
        if rows not in self._steady:
            self._add_times(rows)
        return self._steady[rows]

    def _add_times(self, rows: int) -> None:
        nodes, context = self.cluster.nodes, self.demand.mean_context_tokens
        times = self._once(lambda place: self.costs.seconds(nodes[place], rows, context))
        self._unhindered[rows] = [each.unhindered for each in times]
        self._steady[rows] = [each.steady for each in times]

    def _prefill_tables(self, request: PlanRequest) -> list[Table]:
        """Return for each machine the mean seconds of every possible stage's prefill of the users' prompts."""
        key = request.prompt_tokens, request.users
        if key not in self._prefill:
            nodes = self.cluster.nodes
            self._prefill[key] = self._once(lambda place: self.costs.prefill_table(nodes[place], *key))
        return self._prefill[key]

    def _once(self, value: Callable[[int], _Value]) -> list[_Value]:
        """Return a value for each machine by its place, computed once for those that are alike."""
        made = {place: value(place) for place in dict.fromkeys(self._alike)}
        return [made[place] for place in self._alike]

    def hops(self, rows: int) -> Table:
        """Return the seconds from machine to machine, with the activations of `rows` rows."""
        if rows not in self._hops:
            self._hops[rows] = self._messages([rows * self._row_bytes(node) for node in self.cluster.nodes])
        return self._hops[rows]

    def back(self, rows: int) -> Table:
        """Return the seconds from machine to machine, with the drawn tokens of `rows` rows."""
        return self._messages([rows * TOKEN_BYTES] * len(self.cluster.nodes))

    def _messages(self, each: Sequence[int]) -> Table:
        latency_s, bandwidth = self.cluster.link_tables
        return latency_s + np.array(each, float)[:, None] / bandwidth


def _scaled(factor: float, seconds: Table) -> Table:
    """Return `factor * seconds`; what is infinite stays so."""
    return np.multiply(factor, seconds, out=np.full(seconds.shape, np.inf), where=np.isfinite(seconds))


@dataclass(frozen=True, slots=True)
class _TableStage(MachineStage):
    """Stage of one machine, whose decode times are looked up."""

    times: Timetable
    piece: MachineLayers

    def seconds(self, rows: int, context_tokens: int) -> Times[float]:
        """Return the seconds of a decode step."""
        if context_tokens != self.times.demand.mean_context_tokens:
            return MachineStage.seconds(self, rows, context_tokens)
        place = (self.piece.first, self.piece.end)
        unhindered, steady = self.times.tables(rows), self.times.steady_tables(rows)
        return Times(float(unhindered[self.piece.node][place]), float(steady[self.piece.node][place]))


# ---- mean layers


@dataclass(frozen=True, slots=True)
class MeanLayer:
    """Times of a mean layer on a machine, or on several that compute layers together."""

    members: tuple[int, ...]
    """Places of the machines in the cluster."""
    decode_s: float
    chunk_s: float
    """Seconds of a prompt's chunk."""
    alone_s: float
    """Mean seconds of a chunk if there are no other stages: the first prompt may have longer ones."""
    step_s: float
    """Seconds of a decode step beside its layers."""
    room: float
    """Number of layers that fit into the memory."""


class MeanLayers:
    """Times of a model's mean layer on the machines of a cluster, alone or in groups."""

    def __init__(self, times: Timetable, shared: SharedModel, request: PlanRequest) -> None:
        """Prepare them for a request; `shared` is the model as groups hold it."""
        self._times = times
        self._nodes = times.cluster.nodes
        self._shared = shared
        self._request = request
        self._layers = len(times.model.layers)
        self._chunks = request.chunks
        self._parts: dict[tuple[int, int], _Parts] = {}
        self._minimized = 1 + request.minimized_tokens
        self._hop_of: dict[int, Table] = {}

    def alone(self, place: int, rows: int) -> MeanLayer:
        """Return the mean layer on one machine, in steps of `rows` rows."""
        node, costs = self._nodes[place], self._times.costs
        step = costs.stage_seconds(node, 0, self._layers, rows, self._times.demand.mean_context_tokens)
        decode_s = step.steady if self._request.objective == "throughput" else step.unhindered
        tokens = self._request.prompt_tokens
        prompt_s = costs.prefill_seconds(node, 0, self._layers, tokens)
        alone_s = costs.alone_seconds(node, tokens)
        part_s = costs.seconds_in(costs.usual(node, tokens, is_part=True), node, 0, self._layers)
        held = costs.memory(node)[0]
        each = max(1.0, (held[-1] - held[1]) / max(1, self._layers - 1))
        own_s = _own_seconds(node)
        room = max(0.0, (node.usable_bytes - float(held[1])) // each + 1)
        if self._times.demand.kv_memory_bytes is not None:
            # Memory does not grow in proportion to the layers where a given KV memory ends.
            room = float(np.count_nonzero(held[1:] <= node.usable_bytes))
        return MeanLayer(
            (place,),
            (decode_s - own_s) / self._layers,
            part_s / self._chunks / self._layers,
            self._mean_s(alone_s, prompt_s),
            own_s,
            room,
        )

    def _mean_s(self, alone_s: float, prompt_s: float) -> float:
        """Return the mean seconds of a layer's chunk, where the first prompt takes `alone_s` and the others `prompt_s`."""
        users = self._request.users
        return (alone_s + (users - 1) * prompt_s) / (users * self._chunks * self._layers)

    def together(self, members: tuple[int, ...], ring: Ring, rows: int) -> MeanLayer | None:
        """Return the mean layer of ranks that take equally long, as if shares were divisible; None if they are too many."""
        most = self._shared.most_ranks
        if len(members) > most:
            return None
        parts = [self._parts_on(place, rows) for place in members]
        level = (1 + sum(one.fixed_s / one.shared_s for one in parts)) / sum(
            1 / one.shared_s for one in parts
        )
        wanted = [max(1 / most, (level - one.fixed_s) / one.shared_s) for one in parts]
        shares = [share / sum(wanted) for share in wanted]
        step_s = max(one.fixed_s + share * one.shared_s for one, share in zip(parts, shares, strict=True))
        model, demand, tokens = self._times.model, self._request.demand, self._request.prompt_tokens
        logits = rows * model.vocabulary * max(shares) * model.number_bytes
        step_s += ring.gather_s(logits) + ring.sum_s(TOKEN_BYTES * rows)
        read_s = partial(self._read_s, list(zip(members, shares, strict=True)), ring)
        prompt_s = alone_s = read_s(usual_chunks(tokens, demand.step_tokens))
        part_s = read_s(usual_chunks(tokens, demand.stage_tokens))
        if most := long_chunk_on([(self._nodes[place], self._layers) for place in members], model, demand):
            usual = demand.step_tokens
            chunks = chunks_alone(tokens, usual, most, lambda size, before: read_s(((size, 1),), before))
            alone_s = prompt_s if chunks is None else read_s(chunks)
        return MeanLayer(
            members,
            step_s / self._layers
            + SUMS_PER_LAYER * ring.sum_s(rows * model.hidden_size * model.number_bytes),
            part_s / self._chunks / self._layers,
            self._mean_s(alone_s, prompt_s),
            max(_own_seconds(self._nodes[place]) for place in members),
            self._room(members),
        )

    def _read_s(
        self, ranks: Sequence[tuple[int, float]], ring: Ring, chunks: Chunks, context: int = 0
    ) -> float:
        """Return the seconds in which ranks with these places and shares read a prompt in the given steps after a context."""
        each, model = list[float](), self._times.model
        for place, share in ranks:
            bounds = self._shared.bounds(self._nodes[place])
            least_s, whole_s = (one.prefill_s(0, self._layers, 0, context, chunks) for one in bounds)
            each.append(least_s + share * (whole_s - least_s))
        row_bytes = model.hidden_size * model.number_bytes
        sums_s = sum(count * ring.sum_s(size * row_bytes) for size, count in chunks)
        return max(each) + SUMS_PER_LAYER * self._layers * sums_s

    def _parts_on(self, place: int, rows: int) -> _Parts:
        if (place, rows) not in self._parts:
            node, context = self._nodes[place], self._times.demand.mean_context_tokens
            ends = self._shared.bounds(node)
            fixed_s, whole_s = (float(one.seconds_before(rows, context)[-1]) for one in ends)
            shared_s = max(1e-12, (whole_s - fixed_s) * node.ratios.decode)
            self._parts[place, rows] = _Parts(fixed_s * node.ratios.decode, shared_s)
        return self._parts[place, rows]

    def _room(self, members: Sequence[int]) -> float:
        """Return the layers that fit into the memory of a group: a part of each in every rank, and the rest once."""
        free = everywhere = once = 0.0
        for place in members:
            none, whole = self._shared.bounds(self._nodes[place])
            least, one = none.memory_bytes(0, self._layers), none.memory_bytes(0, 1)
            fixed = max(0.0, (least - one) / max(1, self._layers - 1))
            free += max(0.0, self._nodes[place].usable_bytes - (least - fixed * self._layers))
            everywhere += fixed
            # The shared bytes are about the same on every machine.
            once = max(once, (whole.memory_bytes(0, self._layers) - least) / self._layers)
        return free / max(1.0, everywhere + once)

    def rows(self, stages: int) -> int:
        """Return the rows of a decode step, for a number of stages."""
        streams = self._request.streams
        return -(-streams // min(stages, streams))

    def estimate(self, units: Sequence[MeanLayer]) -> tuple[float, list[int]]:
        """Return about the seconds that the request minimizes over these stages, and which of them have layers.

        Several bounds of the pace are tried, as if layers were divisible. The fastest stages get as many as bound and memory
        allow. For throughput, it is the time of a token of all streams. It is infinite if memory does not suffice.
        """
        if sum(min(unit.room, self._layers) for unit in units) < self._layers:
            return math.inf, []
        rows = self.rows(min(len(units), self._layers))
        streams = min(len(units), self._request.streams)
        later = self._request.users * self._chunks - 1
        if self._request.objective == "throughput":
            weights = [unit.decode_s for unit in units]
            paces = weights
        else:
            weights = [unit.chunk_s + self._minimized * unit.decode_s for unit in units]
            more = self._minimized * streams if streams > 1 else 0
            paces = [later * unit.chunk_s + more * unit.decode_s for unit in units]
        order = sorted(range(len(units)), key=weights.__getitem__)
        shortest = shortest_pace(self._layers, paces, [unit.room for unit in units])
        best: tuple[float, list[int]] = (math.inf, [])
        for looser in _LOOSER:
            # No bound at all, even where the shortest pace is 0 because nothing waits for a stage.
            pace_s = math.inf if math.isinf(looser) else shortest * looser
            layers = self._filled(order, paces, units, pace_s)
            used = [place for place, count in enumerate(layers) if count > 0]
            if self.rows(len(used) or 1) != rows:
                # Estimated with the rows of fewer stages.
                continue
            cost = self._cost([units[place] for place in used], [layers[place] for place in used], later)
            if cost < best[0]:
                best = cost, used
        return best

    def _filled(
        self, order: Sequence[int], paces: Sequence[float], units: Sequence[MeanLayer], pace_s: float
    ) -> list[float]:
        """Return the layers of each unit: the first ones get as many as memory and pace allow."""
        left, layers = float(self._layers), [0.0] * len(units)
        for place in order:
            most = min(units[place].room, pace_s / paces[place] if paces[place] else math.inf)
            layers[place] = min(left, most)
            left -= layers[place]
        return layers if left <= 1e-6 * self._layers else [0.0] * len(units)

    def _cost(self, units: Sequence[MeanLayer], layers: Sequence[float], later: int) -> float:
        """Return the time that the objective minimizes, or that of a token of all users."""
        if not units:
            return math.inf
        streams = self._request.streams
        stages = min(len(units), streams)
        rows = -(-streams // stages)
        each = [unit.step_s + unit.decode_s * count for unit, count in zip(units, layers, strict=True)]
        around_s = self._around_s(units, rows)
        token_s = sum(each) + around_s if streams == 1 else max(sum(each) + around_s, stages * max(each))
        if self._request.objective == "throughput":
            return token_s
        is_alone = len(units) == 1
        chunks = [
            (unit.alone_s if is_alone else unit.chunk_s) * count
            for unit, count in zip(units, layers, strict=True)
        ]
        rows = self._request.chunk_rows
        return sum(chunks) + later * max(chunks) + self._around_s(units, rows) + self._minimized * token_s

    def _around_s(self, units: Sequence[MeanLayer], rows: int) -> float:
        if len(units) == 1:
            return 0.0
        hops = self._hops(rows)
        return sum(
            max(float(hops[one.members[0], place]) for place in other.members) * len(other.members)
            for one, other in pairwise(units)
        ) + float(self._hops(0)[units[-1].members[0], units[0].members[0]])

    def _hops(self, rows: int) -> Table:
        if rows not in self._hop_of:
            self._hop_of[rows] = self._times.hops(rows) if rows else self._times.back(1)
        return self._hop_of[rows]


def _own_seconds(node: NodeProfile) -> float:
    """Return the seconds of a decode step beside its layers."""
    return node.costs.step_s * node.ratios.decode + node.ratios.overhead_s


@dataclass(frozen=True, slots=True)
class _Parts:
    """Seconds of all layers on one rank: those of any share, and those in proportion to it."""

    fixed_s: float
    shared_s: float
