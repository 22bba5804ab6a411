"""Predicted times of a pipeline. Each stage is a machine, or several that compute its layers together. Pure.

These are the times of every plan, whatever found it: of `auto`, of given layers, of tensor groups and of a loaded model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from mlx_ring.core.types import LayerRange
from mlx_ring.planner.cpu_quota import lone_stream
from mlx_ring.planner.plan import Prediction
from mlx_ring.planner.profiles import ClusterProfile, NodeProfile
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.planner.stage_costs import CHUNK_TOKENS, TOKEN_BYTES, StageTables, Times
from mlx_ring.planner.tensor_groups import RankGroup


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
        """Return the seconds of all chunks of a prompt, after a context."""
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
        """Return the seconds of all chunks of a prompt, after a context."""
        layers = self.layers
        return self.tables.prefill_seconds(self.node, layers.start, layers.end, tokens, context_tokens)


@dataclass(frozen=True, slots=True)
class GroupStage:
    """Layers that a group of ranks computes together. A lone rank is a group, too."""

    group: RankGroup
    layers: LayerRange

    @property
    def nodes(self) -> tuple[NodeProfile, ...]:
        """Machine of each rank, rank 0 first."""
        return self.group.nodes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's activations, as rank 0 sends them."""
        model = self.group.shared.on(self.group.nodes[0]).model
        return model.hidden_size * model.number_bytes

    def seconds(self, rows: int, context_tokens: int) -> Times[float]:
        """Return the seconds of a decode step."""
        return self.group.stage_seconds(self.layers.start, self.layers.end, rows, context_tokens)

    def prefill_seconds(self, tokens: int, context_tokens: int = 0) -> float:
        """Return the seconds of all chunks of a prompt, after a context."""
        return self.group.prefill_seconds(self.layers.start, self.layers.end, tokens, context_tokens)


class Pipeline:
    """Stages in order, the links between them, and the promised load."""

    def __init__(self, cluster: ClusterProfile, stages: Sequence[Stage], demand: Demand) -> None:
        self.stages = tuple(stages)
        self._cluster = cluster
        self._demand = demand
        self._token_s: dict[tuple[int, int | None], float] = {}
        self._machines = ["+".join(dict.fromkeys(node.name for node in stage.nodes)) for stage in stages]

    # ---- hops

    def around_s(self, rows: int) -> float:
        """Return the seconds of all hops; rank 0 of a stage sends to every rank of the next."""
        if len(self.stages) == 1:
            return 0.0
        forward = sum(self._hop_s(one, other, rows * one.row_bytes) for one, other in pairwise(self.stages))
        return forward + self._hop_s(self.stages[-1], self.stages[0], rows * TOKEN_BYTES)

    def _hop_s(self, one: Stage, other: Stage, nbytes: int) -> float:
        sender = one.nodes[0]
        all_bytes = nbytes * len(other.nodes)
        return max(self._cluster.link(sender.name, node.name).seconds(all_bytes) for node in other.nodes)

    def _busiest_link_s(self, rows: int) -> float:
        """Return the seconds for which a step of `rows` rows keeps the busiest link from the next step."""
        return max(
            (
                rows
                * one.row_bytes
                * len(other.nodes)
                / min(self._cluster.link(one.nodes[0].name, node.name).bandwidth for node in other.nodes)
                for one, other in pairwise(self.stages)
            ),
            default=0.0,
        )

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

    def tokens_per_s(self) -> float:
        """Return the throughput of all promised sequences."""
        return self._demand.sequences / self.token_s(self._demand.sequences)

    def _times(self, rows: int, context_tokens: int | None) -> list[Times[float]]:
        context = self._demand.mean_context_tokens if context_tokens is None else context_tokens
        return [stage.seconds(rows, context) for stage in self.stages]

    # ---- requests

    def first_token_s(self, prompt_tokens: int, users: int = 1) -> float:
        """Return the seconds to the first token of the last of `users` prompts that arrive at once."""
        chunks = -(-prompt_tokens // CHUNK_TOKENS)
        rows = min(prompt_tokens, CHUNK_TOKENS)
        times = [stage.prefill_seconds(prompt_tokens) / chunks for stage in self.stages]
        slowest_s = max(*times, self._busiest_link_s(rows))
        later_s = (users * chunks - 1) * slowest_s
        prompt_s = users * self.stages[0].nodes[0].prompt_s
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
            first_token_s=first_token_s,
            prompt_tokens=request.prompt_tokens,
            request_s=first_token_s + request.answer_tokens * token_s,
            answer_tokens=request.answer_tokens,
            users=request.users,
        )
