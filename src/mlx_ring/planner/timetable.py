"""Predicted times of a pipeline over the machines of a cluster. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from mlx_ring.planner.cpu_quota import lone_stream
from mlx_ring.planner.plan import Prediction
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.planner.search import MachineLayers, RequestTables
from mlx_ring.planner.stage_costs import CHUNK_TOKENS, TOKEN_BYTES, StageTables, Table, Times


class Timetable:
    """Predicted seconds of stages and hops, computed once for each number of rows."""

    def __init__(self, model: ModelProfile, cluster: ClusterProfile, demand: Demand) -> None:
        self.model = model
        self.cluster = cluster
        self.demand = demand
        self.costs = StageTables(model, demand)
        self._by_rows: dict[int, list[Times[Table]]] = {}

    def prediction(self, pieces: Sequence[MachineLayers], request: PlanRequest) -> Prediction:
        """Return the predicted times of a pipeline."""
        token_s = self.lone_stream(pieces)[1]
        first_token_s = self._first_token_s(pieces, request.prompt_tokens)
        return Prediction(
            token_s=token_s,
            tokens_per_s=self.tokens_per_s(pieces),
            first_token_s=first_token_s,
            prompt_tokens=request.prompt_tokens,
            request_s=first_token_s + request.answer_tokens * token_s,
            answer_tokens=request.answer_tokens,
        )

    def request_s(self, pieces: Sequence[MachineLayers], request: PlanRequest) -> float:
        """Return the seconds that `auto` minimizes: of a whole request, or to its first token."""
        token_s = self.lone_stream(pieces)[1]
        return self._first_token_s(pieces, request.prompt_tokens) + request.minimized_tokens * token_s

    def request_tables(self, request: PlanRequest) -> RequestTables:
        """Return the parts of a request's time: a sum over stages and hops, and the pace of a prompt's chunks."""
        chunks, tokens = -(-request.prompt_tokens // CHUNK_TOKENS), 1 + request.minimized_tokens
        rows = min(request.prompt_tokens, CHUNK_TOKENS)
        nodes = self.cluster.nodes
        paces = [self.costs.prefill_table(node, request.prompt_tokens) / chunks for node in nodes]
        names = [node.name for node in nodes]
        links = [
            [rows * self._row_bytes(node) / self.cluster.link(node.name, other).bandwidth for other in names]
            for node in nodes
        ]
        return RequestTables(
            sums=[pace + tokens * table for pace, table in zip(paces, self.tables(1), strict=True)],
            hops=self.hops(rows) + tokens * self.hops(1),
            back=self.back(rows) + tokens * self.back(1),
            paces=paces,
            link_paces=np.array(links),
            more_chunks=chunks - 1,
        )

    def lone_stream(self, pieces: Sequence[MachineLayers]) -> tuple[list[float], float]:
        """Return the seconds of each stage, and the seconds from token to token, for a single stream."""
        unhindered, steady = (_of(tables, pieces) for tables in (self.tables(1), self.steady_tables(1)))
        return lone_stream(unhindered, steady, self._round_trip_s(pieces, 1))

    def tokens_per_s(self, pieces: Sequence[MachineLayers]) -> float:
        """Return the throughput of all sequences, in as many decode groups as there are stages.

        A cycle lasts as long as the slowest stage or link takes for all groups, or one group takes for a whole round.
        """
        sequences, stages = self.demand.sequences, len(pieces)
        groups = min(stages, sequences)
        rows = -(-sequences // groups)
        round_s = sum(_of(self.tables(rows), pieces)) + self._round_trip_s(pieces, rows)
        slowest_s = max(*_of(self.steady_tables(rows), pieces), self._busiest_link_s(pieces, rows))
        return sequences / max(groups * slowest_s, round_s)

    def _first_token_s(self, pieces: Sequence[MachineLayers], prompt_tokens: int) -> float:
        chunks = -(-prompt_tokens // CHUNK_TOKENS)
        nodes = self.cluster.nodes
        times = [
            self.costs.prefill_seconds(nodes[piece.node], piece.first, piece.end, prompt_tokens) / chunks
            for piece in pieces
        ]
        rows = min(prompt_tokens, CHUNK_TOKENS)
        slowest_s = max(*times, self._busiest_link_s(pieces, rows))
        hops = self._round_trip_s(pieces, rows)
        return sum(times) + (chunks - 1) * slowest_s + hops + self.lone_stream(pieces)[1]

    def _round_trip_s(self, pieces: Sequence[MachineLayers], rows: int) -> float:
        """Return the seconds of all hops of a pipeline, the hop back to the first stage included."""
        places = [piece.node for piece in pieces]
        if len(places) == 1:
            return 0.0
        hops = self.hops(rows)
        forward = sum(float(hops[one, other]) for one, other in pairwise(places))
        return forward + float(self.back(rows)[places[-1], places[0]])

    def _busiest_link_s(self, pieces: Sequence[MachineLayers], rows: int) -> float:
        """Return the seconds for which a step of `rows` rows keeps the busiest link from the next step."""
        nodes = self.cluster.nodes
        return max(
            (
                rows
                * self._row_bytes(nodes[one.node])
                / self.cluster.link(nodes[one.node].name, nodes[other.node].name).bandwidth
                for one, other in pairwise(pieces)
            ),
            default=0.0,
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
            # The mean context of a stream is half of the longest.
            context = self.demand.context_tokens // 2
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


def _of(tables: Sequence[Table], pieces: Sequence[MachineLayers]) -> list[float]:
    return [float(tables[piece.node][piece.first, piece.end]) for piece in pieces]
