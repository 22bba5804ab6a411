"""Predicted step times and memory of a loaded pipeline, and a table of its steps for simulations. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mlx_ring.core.types import CpuWeights, LayerRange, even_chunk, even_part
from mlx_ring.planner.pipeline import MachineStage, Pipeline
from mlx_ring.planner.plan import Plan, Times
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile, StepRatios
from mlx_ring.planner.rank_costs import RankCosts
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.planner.stage_costs import StageTables, long_chunk_on
from mlx_ring.planner.tensor_groups import GroupStage, SharedModel, given_group


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
        self.pipeline = Pipeline(
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

    @property
    def long_chunk(self) -> int:
        """Most tokens of a prompt alone in a step, if that takes less than a second; 0 for the usual number."""
        ranks = [
            (node, len(layers))
            for stage, (_, layers) in enumerate(self._stages)
            for node in self._nodes(stage)
        ]
        return long_chunk_on(ranks, self._model, self.demand)

    def decode_s(self, stage: int, rows: int, context_tokens: int) -> float:
        """Return the seconds of a decode step by its number of sequences and context length."""
        # With several rows per group every group has some, so no stage idles.
        if rows > 1 or all(
            node.cpu_quota is None for stage in range(len(self)) for node in self._nodes(stage)
        ):
            return self._times(stage, rows, context_tokens).steady
        return self.pipeline.lone_stream(context_tokens)[0][stage]

    def chunk_s(self, stage: int, tokens: int, context_tokens: int) -> float:
        """Return the seconds of a prefill step: the larger of computing and of reading the weights once."""
        node, layers = self._stages[stage]
        if (group := self._groups[stage]) is not None:
            chunk_s = group.chunk_seconds(layers.start, layers.end, tokens, context_tokens)
            return max(chunk_s, self._times(stage, 1, context_tokens).steady)
        chunk_s = self._tables.chunk_seconds(node, layers.start, layers.end, tokens, context_tokens)
        return max(chunk_s, self._times(stage, 1, context_tokens).steady)

    def token_s(self, context_tokens: int) -> float:
        """Return the seconds from token to token of a single stream, all stages and hops included."""
        return self.pipeline.token_s(1, context_tokens)

    def _times(self, stage: int, rows: int, context_tokens: int) -> Times[float]:
        return self.pipeline.stages[stage].seconds(rows, context_tokens)

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


_KNOT_TOKENS, _EXACT = 512, 32
"""First context between which steps are interpolated, and the tokens of a chunk up to which each number is computed."""


class StepTable:
    """Times of the steps of a pipeline for any rows, context and chunk, interpolated between computed ones.

    Steps of few rows are computed for each number. Contexts are computed at powers of two, and chunks at eight lengths in
    each octave. Between them, times are nearly straight lines.
    """

    def __init__(self, forecast: Forecast, head_s: float) -> None:
        """Prepare the table; `head_s` are the seconds from the head to a stage, and from there back."""
        self._forecast = forecast
        self._head_s = head_s
        self._decode: dict[tuple[int, int, int], float] = {}
        self._last: dict[tuple[int, int], tuple[int, int, float, float]] = {}
        """The last contexts between which a decode step was interpolated, by stage and rows, and their times."""
        self._chunks: dict[tuple[int, int, int], float] = {}
        self._hops: dict[tuple[int, int], tuple[float, float]] = {}
        self._back: dict[int, float] = {}

    def decode_s(self, stage: int, rows: int, context_tokens: float) -> float:
        """Return the seconds of a decode step on a stage, by its rows and their mean context."""
        key = stage, rows
        low, high, begin, rise = self._last.get(key, (0, 0, 0.0, 0.0))
        if not low <= context_tokens < high:
            low, high = _knots(context_tokens)
            begin = self._decode_at(stage, rows, low)
            rise = self._decode_at(stage, rows, high) - begin
            self._last[key] = low, high, begin, rise
        return begin + rise * (context_tokens - low) / (high - low)

    def _decode_at(self, stage: int, rows: int, context: int) -> float:
        key = stage, rows, context
        if key not in self._decode:
            self._decode[key] = self._forecast.decode_s(*key)
        return self._decode[key]

    def chunk_s(self, stage: int, spans: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of a prefill step on a stage, by the tokens before each part of a prompt and its own."""
        tokens = sum(part for _, part in spans)
        # The context at which one chunk compares as many pairs of tokens.
        pairs = sum(part * (start + part / 2) for start, part in spans)
        context = pairs / tokens - tokens / 2
        low, high = _knots(max(0.0, context))
        begin, end = self._chunk_between(stage, tokens, low), self._chunk_between(stage, tokens, high)
        return begin + (end - begin) * (context - low) / (high - low)

    def _chunk_between(self, stage: int, tokens: int, context: int) -> float:
        width = max(1, 1 << max(0, tokens.bit_length() - 4)) if tokens > _EXACT else 1
        low = tokens // width * width
        begin = self._chunk_at(stage, low, context)
        if low == tokens:
            return begin
        return begin + (self._chunk_at(stage, low + width, context) - begin) * (tokens - low) / width

    def _chunk_at(self, stage: int, tokens: int, context: int) -> float:
        key = stage, tokens, context
        if key not in self._chunks:
            self._chunks[key] = self._forecast.chunk_s(*key)
        return self._chunks[key]

    def hop_s(self, stage: int, tokens: int) -> tuple[float, float]:
        """Return the seconds until a step's activations have arrived behind a stage, and for which they occupy the link."""
        key = stage, tokens
        if key not in self._hops:
            pipeline = self._forecast.pipeline
            self._hops[key] = pipeline.forward_s(stage, tokens), pipeline.occupied_s(stage, tokens)
        return self._hops[key]

    def back_s(self, rows: int) -> float:
        """Return the seconds from the last stage to the first, with drawn tokens."""
        if rows not in self._back:
            self._back[rows] = self._forecast.pipeline.back_s(rows)
        return self._back[rows]

    def head_s(self) -> float:
        """Return the seconds from the head to a stage, and from there back."""
        return self._head_s


def _knots(context_tokens: float) -> tuple[int, int]:
    """Return the computed contexts around one."""
    if context_tokens < _KNOT_TOKENS:
        return 0, _KNOT_TOKENS
    low = 1 << int(context_tokens).bit_length() - 1
    return low, 2 * low


StageRanks = tuple[LayerRange, Sequence[tuple[NodeProfile, float]]]
"""Layers of a stage, and the node and share of each of its ranks."""


def with_even_chunks(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> PlanRequest:
    """Return the request with the chunks in which the engine about reads its prompts over several stages.

    They are those of two stages of the cluster's fastest machines: searches need chunks that depend on no plan.
    """
    demand, layers = request.demand, len(model.layers)
    if demand.even_tokens:
        return request
    tables, node = StageTables(model, demand), max(cluster.nodes, key=lambda node: node.bandwidth)
    tokens, longest = request.prompt_tokens, min(demand.step_tokens, request.prompt_tokens)

    def half_us(tokens: int) -> float:
        return 1e6 * tables.seconds_in(((tokens, 1),), node, 0, layers) / 2

    size = even_chunk(request.users * tokens, 2, longest, half_us) or longest
    return replace(request, demand=replace(demand, even_tokens=even_part(tokens, size, longest)))


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


class KvRoom(NamedTuple):
    """KV memory of a rank."""

    limit_bytes: int
    bytes_per_token: int
    bytes_per_sequence: int


_ROOM_TOKENS = 1024
"""Tokens by which two forecasts differ, for the KV memory of one."""


def forecast_plan(
    model: ModelProfile, cluster: ClusterProfile, demand: Demand, plan: Plan
) -> tuple[Forecast, list[list[KvRoom]]]:
    """Return the predictions for a plan, and the KV memory of each rank of each stage.

    The KV cache may take what is given, or what weights and working memory leave of a machine's usable memory.
    """
    nodes = {node.name: node for node in cluster.nodes}
    stages = settle_weights(
        model,
        demand,
        cluster,
        [(stage.layers, [(nodes[rank.node], rank.share) for rank in stage.ranks]) for stage in plan.stages],
    )

    def forecast(context: int) -> Forecast:
        one = replace(demand, context_tokens=context, sequences=1, kv_memory_bytes=None)
        firsts = [(ranks[0][0], layers) for layers, ranks in stages]
        return Forecast(model, one, cluster, firsts, [ranks for _, ranks in stages])

    less, more = forecast(1), forecast(1 + _ROOM_TOKENS)
    held, names = defaultdict[str, int](int), Counter[str]()
    for stage, (_, ranks) in enumerate(stages):
        for (node, _), memory in zip(ranks, less.memory_of_ranks(stage), strict=True):
            held[node.name] += memory.total_bytes - memory.kv_bytes
            names[node.name] += 1

    def room(node: NodeProfile, short: PromisedMemory, long: PromisedMemory) -> KvRoom:
        each = -(-(long.kv_bytes - short.kv_bytes) // _ROOM_TOKENS)
        left = demand.kv_memory_bytes
        if left is None:
            left = (node.usable_bytes - held[node.name]) // names[node.name]
        return KvRoom(max(0, left), each, max(0, short.kv_bytes - each))

    return forecast(demand.context_tokens), [
        [
            room(node, short, long)
            for (node, _), short, long in zip(
                ranks, less.memory_of_ranks(stage), more.memory_of_ranks(stage), strict=True
            )
        ]
        for stage, (_, ranks) in enumerate(stages)
    ]
