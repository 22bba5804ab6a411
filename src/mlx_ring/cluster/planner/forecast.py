"""What planning expects of stages that are there: for steps of any size, and of their memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_ring.cluster.planner.grants import lone_stream
from mlx_ring.cluster.planner.profiles import ClusterProfile, ModelProfile, NodeProfile
from mlx_ring.cluster.planner.stage_tables import Demand, StageTables, Times
from mlx_ring.core.types import LayerRange


@dataclass(frozen=True, slots=True)
class PromisedMemory:
    """What a stage was counted to take. Bytes."""

    weight_bytes: int
    kv_bytes: int
    """Of the promised sequences at the promised length."""
    working_bytes: int
    """Activations of a chunk, scores over the vocabulary."""

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.working_bytes


class Forecast:
    """Of one pipeline."""

    def __init__(
        self,
        model: ModelProfile,
        demand: Demand,
        cluster: ClusterProfile,
        stages: Sequence[tuple[NodeProfile, LayerRange]],
    ) -> None:
        """`stages` gives the node and the layers of each, in the pipeline's order."""
        self.demand = demand
        self._model = model
        self._cluster = cluster
        self._stages = tuple(stages)
        self._tables = StageTables(model, demand)

    def __len__(self) -> int:
        return len(self._stages)

    def decode_s(self, stage: int, rows: int, context_tokens: int) -> float:
        """One step with a token of each of so many sequences, each behind so long a context."""
        # Several rows in a group mean that every group has some, and that no stage rests.
        if rows > 1 or all(node.grant is None for node, _ in self._stages):
            return self._times(stage, rows, context_tokens).steady
        return self._lone_stream(context_tokens)[0][stage]

    def chunk_s(self, stage: int, tokens: int, context_tokens: int) -> float:
        """One step with so many tokens of a prompt: multiplying them, or reading the weights once if that takes longer."""
        node, layers = self._stages[stage]
        before, after = (
            self._tables.prefill_seconds(node, layers.start, layers.end, length)
            for length in (context_tokens, context_tokens + tokens)
        )
        step_s = node.costs.step_s / (node.grant.share if node.grant else 1.0)
        return max(after - before + step_s, self._times(stage, 1, context_tokens).steady)

    def token_s(self, context_tokens: int) -> float:
        """From one token of a stream that is alone to the next: every stage, and the hops around."""
        return self._lone_stream(context_tokens)[1]

    def _lone_stream(self, context_tokens: int) -> tuple[list[float], float]:
        times = [self._times(stage, 1, context_tokens) for stage in range(len(self))]
        unhindered, steady = [each.unhindered for each in times], [each.steady for each in times]
        return lone_stream(unhindered, steady, self._around_s(), [node.name for node, _ in self._stages])

    def _times(self, stage: int, rows: int, context_tokens: int) -> Times[float]:
        node, layers = self._stages[stage]
        return self._tables.stage_seconds(node, layers.start, layers.end, rows, context_tokens)

    def _around_s(self) -> float:
        if len(self) == 1:
            return 0.0
        nodes = [node for node, _ in self._stages]
        return sum(
            self._cluster.link(one.name, other.name).seconds(
                self._model.hidden_size * self._tables.model_on(one).number_bytes
            )
            for one, other in zip(nodes, [*nodes[1:], nodes[0]], strict=True)
        )

    def memory(self, stage: int) -> PromisedMemory:
        """As the plan counts it."""
        node, layers = self._stages[stage]
        total = int(self._tables.memory(node)[layers.start, layers.end])
        kv = self._tables.kv_bytes(node, layers.start, layers.end)
        weights = self._tables.weight_bytes(node, layers.start, layers.end)
        return PromisedMemory(weights, kv, max(0, total - weights - kv))

    def node(self, stage: int) -> NodeProfile:
        """Where it is."""
        return self._stages[stage][0]
