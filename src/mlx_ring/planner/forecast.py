"""Predicted step times and memory of a loaded pipeline. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mlx_ring.core.types import CpuWeights, LayerRange
from mlx_ring.planner.pipeline import GroupStage, MachineStage, Pipeline
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile, StepRatios
from mlx_ring.planner.rank_costs import RankCosts
from mlx_ring.planner.request import Demand
from mlx_ring.planner.stage_costs import StageTables, Times
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
        self._model, self._cluster, self._ranks = model, cluster, ranks
        self._stages = tuple(stages)
        self._tables = StageTables(model, demand)
        shared = SharedModel(model, demand, model.shared)
        each = ranks or [[(node, 1.0)] for node, _ in stages]
        self._groups = [given_group(shared, cluster, one) if len(one) > 1 else None for one in each]
        self._pipeline = Pipeline(
            cluster,
            [
                MachineStage(self._tables, node, layers) if group is None else GroupStage(group, layers)
                for (node, layers), group in zip(self._stages, self._groups, strict=True)
            ],
            demand,
        )

    def corrected(self, ratios: Mapping[str, StepRatios]) -> Forecast:
        """Return the predictions with these ratios by node; 1 for all others."""

        def with_ratios(node: NodeProfile) -> NodeProfile:
            return replace(node, ratios=ratios.get(node.name, StepRatios()))

        return Forecast(
            self._model,
            self.demand,
            self._cluster,
            [(with_ratios(node), layers) for node, layers in self._stages],
            [[(with_ratios(node), share) for node, share in ranks] for ranks in self._ranks],
        )

    def __len__(self) -> int:
        return len(self._stages)

    def decode_s(self, stage: int, rows: int, context_tokens: int) -> float:
        """Return the seconds of a decode step by its number of sequences and context length."""
        # With several rows per group every group has some, so no stage idles.
        if rows > 1 or all(
            node.cpu_quota is None for stage in range(len(self)) for node in self._nodes(stage)
        ):
            return self._times(stage, rows, context_tokens).steady
        return self._pipeline.lone_stream(context_tokens)[0][stage]

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
        return self._pipeline.token_s(1, context_tokens)

    def _times(self, stage: int, rows: int, context_tokens: int) -> Times[float]:
        return self._pipeline.stages[stage].seconds(rows, context_tokens)

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
