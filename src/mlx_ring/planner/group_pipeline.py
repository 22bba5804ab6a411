"""Predicted times of a pipeline whose stages are machines or groups of machines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mlx_ring.core.types import LayerRange
from mlx_ring.planner.cpu_quota import lone_stream
from mlx_ring.planner.plan import Prediction
from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.planner.request import PlanRequest
from mlx_ring.planner.stage_costs import CHUNK_TOKENS, TOKEN_BYTES, Times
from mlx_ring.planner.tensor_groups import RankGroup


@dataclass(frozen=True, slots=True)
class GroupStage:
    """Layers of a stage, and the group that computes them."""

    group: RankGroup
    layers: LayerRange

    def seconds(self, rows: int, context_tokens: int) -> Times[float]:
        """Return the seconds of one step."""
        return self.group.stage_seconds(self.layers.start, self.layers.end, rows, context_tokens)


class GroupPipeline:
    """Pipeline of stages, in order."""

    def __init__(self, cluster: ClusterProfile, stages: Sequence[GroupStage]) -> None:
        self.stages = tuple(stages)
        self._cluster = cluster

    def around_s(self, rows: int) -> float:
        """Return the seconds of all hops; rank 0 of a stage sends to every rank of the next."""
        groups = [stage.group for stage in self.stages]
        if len(groups) == 1:
            return 0.0
        forward = sum(
            self._hop_s(one, other, self._nbytes(one, other, rows)) for one, other in pairwise(groups)
        )
        back_bytes = rows * TOKEN_BYTES * len(groups[0].members)
        return forward + self._hop_s(groups[-1], groups[0], back_bytes)

    def _nbytes(self, one: RankGroup, other: RankGroup, rows: int) -> int:
        model = one.shared.on(one.members[0].node).model
        return rows * model.hidden_size * model.number_bytes * len(other.members)

    def _hop_s(self, one: RankGroup, other: RankGroup, nbytes: int) -> float:
        sender = one.members[0].node
        return max(self._cluster.link(sender.name, node.name).seconds(nbytes) for node in other.nodes)

    def _busiest_link_s(self, rows: int) -> float:
        """Return the seconds for which a step of `rows` rows keeps the busiest link from the next step."""
        groups = [stage.group for stage in self.stages]
        return max(
            (
                self._nbytes(one, other, rows)
                / min(
                    self._cluster.link(one.members[0].node.name, node.name).bandwidth for node in other.nodes
                )
                for one, other in pairwise(groups)
            ),
            default=0.0,
        )

    def lone_stream(self, context_tokens: int) -> tuple[list[float], float]:
        """Return the seconds of each stage, and the seconds from token to token, for a single stream."""
        times = [stage.seconds(1, context_tokens) for stage in self.stages]
        names = ["+".join(node.name for node in stage.group.nodes) for stage in self.stages]
        return lone_stream(
            [each.unhindered for each in times], [each.steady for each in times], self.around_s(1), names
        )

    def tokens_per_s(self) -> float:
        """Return the throughput with as many decode groups as stages, as `Timetable` predicts it."""
        shared = self.stages[0].group.shared
        sequences = shared.demand.sequences
        groups = min(len(self.stages), sequences)
        rows = -(-sequences // groups)
        times = [stage.seconds(rows, shared.context_tokens) for stage in self.stages]
        once = sum(each.unhindered for each in times) + self.around_s(rows)
        slowest_s = max(*(each.steady for each in times), self._busiest_link_s(rows))
        return sequences / max(groups * slowest_s, once)

    def first_token_s(self, tokens: int) -> float:
        """Return the seconds to the first token of a prompt."""
        chunks = -(-tokens // CHUNK_TOKENS)
        times = [
            stage.group.prefill_seconds(stage.layers.start, stage.layers.end, tokens) / chunks
            for stage in self.stages
        ]
        rows = min(tokens, CHUNK_TOKENS)
        around, slowest_s = self.around_s(rows), max(*times, self._busiest_link_s(rows))
        context = self.stages[0].group.shared.context_tokens
        return sum(times) + (chunks - 1) * slowest_s + around + self.lone_stream(context)[1]

    def prediction(self, request: PlanRequest) -> Prediction:
        """Return the prediction for a plan."""
        context = self.stages[0].group.shared.context_tokens
        token_s, first_token_s = self.lone_stream(context)[1], self.first_token_s(request.prompt_tokens)
        return Prediction(
            token_s=token_s,
            tokens_per_s=self.tokens_per_s(),
            first_token_s=first_token_s,
            prompt_tokens=request.prompt_tokens,
            request_s=first_token_s + request.answer_tokens * token_s,
            answer_tokens=request.answer_tokens,
        )
