"""Tables of seconds by machine, first layer and end, from which pipelines are searched. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_ring.core.types import LayerRange
from mlx_ring.planner.pipeline import MachineStage, Pipeline
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.planner.search import MachineLayers, RequestTables
from mlx_ring.planner.stage_costs import CHUNK_TOKENS, TOKEN_BYTES, StageTables, Table, Times


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
    """Seconds of every possible stage and hop, computed once for each number of rows."""

    def __init__(self, model: ModelProfile, cluster: ClusterProfile, demand: Demand) -> None:
        self.model = model
        self.cluster = cluster
        self.demand = demand
        self.costs = StageTables(model, demand)
        self._by_rows: dict[int, list[Times[Table]]] = {}

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

    def request_tables(self, request: PlanRequest, users: Users = _LONE) -> RequestTables:
        """Return the parts of a request's time: a sum over stages and hops, and the slowest pace of stages and links.

        With several users, a token takes a whole round, or the time of the slowest stage for all groups, whichever is longer.
        Any weighted mean of the two is a lower bound.
        """
        chunks, tokens = -(-request.prompt_tokens // CHUNK_TOKENS), 1 + request.minimized_tokens
        later, rows = request.users * chunks - 1, min(request.prompt_tokens, CHUNK_TOKENS)
        in_rounds, in_paces = tokens * users.round_weight, tokens * (1 - users.round_weight) * users.groups
        chunk_s = [
            self.costs.prefill_table(node, request.prompt_tokens) / chunks for node in self.cluster.nodes
        ]
        decode, steady = self.tables(users.rows), self.steady_tables(users.rows)
        return RequestTables(
            sums=[chunk + _scaled(in_rounds, table) for chunk, table in zip(chunk_s, decode, strict=True)],
            hops=self.hops(rows) + _scaled(in_rounds, self.hops(users.rows)),
            back=self.back(rows) + _scaled(in_rounds, self.back(users.rows)),
            paces=[
                later * one + _scaled(in_paces, other) for one, other in zip(chunk_s, steady, strict=True)
            ],
            link_paces=(later * rows + in_paces * users.rows) * self._row_seconds(),
        )

    def _row_seconds(self) -> Table:
        """Return the seconds for which one row's activations keep a link busy."""
        names = [node.name for node in self.cluster.nodes]
        return np.array(
            [
                [self._row_bytes(node) / self.cluster.link(node.name, other).bandwidth for other in names]
                for node in self.cluster.nodes
            ]
        )

    def _row_bytes(self, node: NodeProfile) -> int:
        return self.model.hidden_size * self.costs.model_on(node).number_bytes

    def tables(self, rows: int) -> list[Table]:
        """Return for each machine the seconds of every possible stage, if the machine was idle before.

        Args:
            rows: number of rows in the step.
        """
        return [times.unhindered for times in self._times(rows)]

    def steady_tables(self, rows: int) -> list[Table]:
        """Return for each machine the seconds of every possible stage, if the machine computes all the time."""
        return [times.steady for times in self._times(rows)]

    def _times(self, rows: int) -> list[Times[Table]]:
        if rows not in self._by_rows:
            context = self.demand.mean_context_tokens
            self._by_rows[rows] = [self.costs.seconds(node, rows, context) for node in self.cluster.nodes]
        return self._by_rows[rows]

    def hops(self, rows: int) -> Table:
        """Return the seconds from machine to machine, with the activations of `rows` rows."""
        return self._messages([rows * self._row_bytes(node) for node in self.cluster.nodes])

    def back(self, rows: int) -> Table:
        """Return the seconds from machine to machine, with the drawn tokens of `rows` rows."""
        return self._messages([rows * TOKEN_BYTES] * len(self.cluster.nodes))

    def _messages(self, each: Sequence[int]) -> Table:
        names = [node.name for node in self.cluster.nodes]
        return np.array(
            [
                [self.cluster.link(one, other).seconds(nbytes) for other in names]
                for one, nbytes in zip(names, each, strict=True)
            ]
        )


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
