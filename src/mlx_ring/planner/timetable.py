"""What a model's stages and hops take on the machines of one cluster. Pure."""

from __future__ import annotations

import numpy as np

from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.stage_costs import Demand, StageTables, Table, Times


class Timetable:
    """Tables of seconds, kept once they are made."""

    def __init__(self, model: ModelProfile, cluster: ClusterProfile, demand: Demand) -> None:
        self.costs = StageTables(model, demand)
        self._model = model
        self._cluster = cluster
        self._demand = demand
        self._by_rows: dict[int, list[Times[Table]]] = {}

    def tables(self, rows: int) -> list[Table]:
        """By machine: a step with so many rows, for every stage that it could be, where nothing came before."""
        return [times.unhindered for times in self._times(rows)]

    def steady_tables(self, rows: int) -> list[Table]:
        """The same of machines that always compute."""
        return [times.steady for times in self._times(rows)]

    def _times(self, rows: int) -> list[Times[Table]]:
        if rows not in self._by_rows:
            # Half of the context is what a stream has behind it in the mean.
            context = self._demand.context_tokens // 2
            self._by_rows[rows] = [self.costs.seconds(node, rows, context) for node in self._cluster.nodes]
        return self._by_rows[rows]

    def hops(self, rows: int) -> Table:
        """From machine to machine, with the activations of so many rows."""
        nodes = self._cluster.nodes
        each = [rows * self._model.hidden_size * self.costs.model_on(node).number_bytes for node in nodes]
        names = [node.name for node in nodes]
        return np.array(
            [
                [self._cluster.link(one, other).seconds(nbytes) for other in names]
                for one, nbytes in zip(names, each, strict=True)
            ]
        )
