"""Predicted step times and memory of a loaded pipeline. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mlx_ring.core.types import CpuWeights, LayerRange
from mlx_ring.planner.cpu_quota import lone_stream
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile
from mlx_ring.planner.rank_costs import RankCosts
from mlx_ring.planner.request import Demand
from mlx_ring.planner.stage_costs import TOKEN_BYTES, StageTables, Times
from mlx_ring.planner.tensor_groups import SharedModel, given_group


@dataclass(frozen=True, slots=True)
class PromisedMemory:
    """Predicted memory of a stage, in bytes."""

    weight_bytes: int
    kv_bytes: int
    """KV cache of the promised sequences at the promised length."""
    working_bytes: int
    """Activations of a chunk, and logits."""

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.working_bytes


class Forecast:
    """Predictions for one pipeline."""

    def __init__(
        self,
        model: ModelProfile,
        demand: Demand,
        cluster: ClusterProfile,
        stages: Sequence[tuple[NodeProfile, LayerRange]],
        ranks: Sequence[Sequence[tuple[NodeProfile, float]]] = (),
    ) -> None:
        """Prepare the predictions.

        Args:
            model: its sizes.
            demand: what is promised.
            cluster: for the links.
            stages: node and layers of each, in the pipeline's order.
            ranks: of each stage, where some have several: node and share of every rank, in their order.
        """
        self.demand = demand
        self._model = model
        self._cluster = cluster
        self._stages = tuple(stages)
        self._tables = StageTables(model, demand)
        shared = SharedModel(model, demand, model.shared)
        each = ranks or [[(node, 1.0)] for node, _ in stages]
        self._groups = [given_group(shared, cluster, one) if len(one) > 1 else None for one in each]

    def __len__(self) -> int:
        return len(self._stages)

    def decode_s(self, stage: int, rows: int, context_tokens: int) -> float:
        """Return the seconds of a decode step by its number of sequences and context length."""
        # With several rows per group every group has some, so no stage idles.
        if rows > 1 or all(
            node.cpu_quota is None for stage in range(len(self)) for node in self._nodes(stage)
        ):
            return self._times(stage, rows, context_tokens).steady
        return self._lone_stream(context_tokens)[0][stage]

    def chunk_s(self, stage: int, tokens: int, context_tokens: int) -> float:
        """Return the seconds of a prefill step: the larger of computing and of reading the weights once."""
        node, layers = self._stages[stage]
        if (group := self._groups[stage]) is not None:
            chunk_s = group.chunk_seconds(layers.start, layers.end, tokens, context_tokens)
            return max(chunk_s, self._times(stage, 1, context_tokens).steady)
        computing_s = self._tables.prefill_seconds(node, layers.start, layers.end, tokens, context_tokens)
        step_s = node.costs.step_s / (node.cpu_quota.share if node.cpu_quota else 1.0)
        return max(computing_s + step_s, self._times(stage, 1, context_tokens).steady)

    def token_s(self, context_tokens: int) -> float:
        """Return the seconds from token to token of a single stream, all stages and hops included."""
        return self._lone_stream(context_tokens)[1]

    def _lone_stream(self, context_tokens: int) -> tuple[list[float], float]:
        times = [self._times(stage, 1, context_tokens) for stage in range(len(self))]
        unhindered, steady = [each.unhindered for each in times], [each.steady for each in times]
        machines = [
            "+".join(dict.fromkeys(node.name for node in self._nodes(stage))) for stage in range(len(self))
        ]
        return lone_stream(unhindered, steady, self._around_s(), machines)

    def _times(self, stage: int, rows: int, context_tokens: int) -> Times[float]:
        node, layers = self._stages[stage]
        if (group := self._groups[stage]) is not None:
            return group.stage_seconds(layers.start, layers.end, rows, context_tokens)
        return self._tables.stage_seconds(node, layers.start, layers.end, rows, context_tokens)

    def _around_s(self) -> float:
        """Return the seconds of all hops; rank 0 of a stage sends to every rank of the next."""
        if len(self) == 1:
            return 0.0
        forward = sum(
            self._hop_s(one, other, self._row_bytes(one)) for one, other in pairwise(range(len(self)))
        )
        return forward + self._hop_s(len(self) - 1, 0, TOKEN_BYTES)

    def _row_bytes(self, stage: int) -> int:
        return self._model.hidden_size * self._tables.model_on(self._nodes(stage)[0]).number_bytes

    def _hop_s(self, one: int, other: int, row_bytes: int) -> float:
        sender, receivers = self._nodes(one)[0], self._nodes(other)
        nbytes = row_bytes * len(receivers)
        return max(self._cluster.link(sender.name, node.name).seconds(nbytes) for node in receivers)

    def memory(self, stage: int) -> PromisedMemory:
        """Return the memory of a stage, as the sum of its ranks."""
        each = self.memory_of_ranks(stage)
        return PromisedMemory(
            sum(rank.weight_bytes for rank in each),
            sum(rank.kv_bytes for rank in each),
            sum(rank.working_bytes for rank in each),
        )

    def memory_of_ranks(self, stage: int) -> tuple[PromisedMemory, ...]:
        """Return the memory of each rank of a stage."""
        node, layers = self._stages[stage]
        if (group := self._groups[stage]) is not None:
            return tuple(_promised(member.costs, layers) for member in group.members)
        total = int(self._tables.memory(node)[layers.start, layers.end])
        kv = self._tables.kv_bytes(node, layers.start, layers.end)
        weights = self._tables.weight_bytes(node, layers.start, layers.end)
        return (PromisedMemory(weights, kv, max(0, total - weights - kv)),)

    def _nodes(self, stage: int) -> tuple[NodeProfile, ...]:
        """Return the nodes of its ranks."""
        group = self._groups[stage]
        return (self._stages[stage][0],) if group is None else group.nodes

    def node(self, stage: int) -> NodeProfile:
        """Return the node of its rank 0."""
        return self._stages[stage][0]


StageRanks = tuple[LayerRange, Sequence[tuple[NodeProfile, float]]]
"""Layers of a stage, and the node and share of each of its ranks."""


def settle_weights(
    model: ModelProfile, demand: Demand, cluster: ClusterProfile, stages: Sequence[StageRanks]
) -> list[StageRanks]:
    """Choose a form of quantized weights for each rank on a machine that has the choice.

    It is float32 for as many ranks as fit on their machine together, the first of the pipeline first.
    """
    settled: list[list[tuple[NodeProfile, float]]] = [
        [(_holding(node, "quantized"), share) for node, share in ranks] for _, ranks in stages
    ]
    if model.dequantized is None or all(
        ranks == list(before) for ranks, (_, before) in zip(settled, stages, strict=True)
    ):
        return [(layers, ranks) for (layers, _), ranks in zip(stages, settled, strict=True)]

    def memory(stage: int) -> list[int]:
        layers, ranks = stages[stage][0], settled[stage]
        pipeline = Forecast(model, demand, cluster, [(ranks[0][0], layers)], [ranks])
        return [rank.total_bytes for rank in pipeline.memory_of_ranks(0)]

    taken = [memory(stage) for stage in range(len(stages))]
    for stage, (_, ranks) in enumerate(stages):
        for rank, (node, share) in enumerate(ranks):
            if node.cpu_weights != "auto":
                continue
            smaller, settled[stage][rank] = (
                settled[stage][rank],
                (replace(node, cpu_weights="float32"), share),
            )
            more = memory(stage)
            on_node = sum(
                held
                for place, (_, others) in enumerate(stages)
                for (other, _), held in zip(others, more if place == stage else taken[place], strict=True)
                if other.name == node.name
            )
            if on_node <= node.usable_bytes:
                taken[stage] = more
            else:
                settled[stage][rank] = smaller
    return [(layers, ranks) for (layers, _), ranks in zip(stages, settled, strict=True)]


def _holding(node: NodeProfile, weights: CpuWeights) -> NodeProfile:
    return replace(node, cpu_weights=weights) if node.cpu_weights == "auto" else node


def _promised(costs: RankCosts, layers: LayerRange) -> PromisedMemory:
    weights, kv = (count(layers.start, layers.end) for count in (costs.weight_bytes, costs.kv_bytes))
    return PromisedMemory(weights, kv, max(0, costs.memory_bytes(layers.start, layers.end) - weights - kv))
