"""Predicted times of a pipeline. Each stage is a machine, or several that compute its layers together. Pure.

These are the times of every plan, whatever found it: of `auto`, of given layers, of tensor groups and of a loaded model.

A measured split shows what predictions of another one leave out: the time of a step beside computing, which stays when
layers move.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from mlx_ring.core.types import LayerRange
from mlx_ring.planner.plan import Prediction
from mlx_ring.planner.profiles import ClusterProfile, NodeProfile, lone_stream
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
        forward = sum(self.forward_s(stage, rows) for stage in range(len(self.stages) - 1))
        return forward + self.back_s(rows)

    def _hop_s(self, one: Stage, other: Stage, nbytes: int) -> float:
        sender = one.nodes[0]
        all_bytes = nbytes * len(other.nodes)
        return max(self._cluster.link(sender.name, node.name).seconds(all_bytes) for node in other.nodes)

    def _busiest_link_s(self, rows: int) -> float:
        """Return the seconds for which a step of `rows` rows keeps the busiest link from the next step."""
        return max((self.occupied_s(stage, rows) for stage in range(len(self.stages) - 1)), default=0.0)

    def occupied_s(self, stage: int, rows: int) -> float:
        """Return the seconds for which a step of `rows` rows keeps the link behind a stage from the next step."""
        one, other = self.stages[stage : stage + 2]
        slowest = min(self._cluster.link(one.nodes[0].name, node.name).bandwidth for node in other.nodes)
        return rows * one.row_bytes * len(other.nodes) / slowest

    def forward_s(self, stage: int, rows: int) -> float:
        """Return the seconds until the activations of `rows` rows have arrived behind a stage."""
        one, other = self.stages[stage : stage + 2]
        return self._hop_s(one, other, rows * one.row_bytes)

    def back_s(self, rows: int) -> float:
        """Return the seconds until the first stage has the drawn tokens of `rows` rows."""
        return self._hop_s(self.stages[-1], self.stages[0], rows * TOKEN_BYTES)

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


# ---- time beside computing

_MOST_OVERHEAD_S = 0.2
"""Longest time of a step beside computing that counts."""
_NOISE = 0.05
"""Change of that time, over the time of a step, that counts as noise."""
_MEASUREMENTS = 7
"""Number of last measurements whose median counts: a machine that becomes slower is noticed before half of them show it."""
_SLOWED = 1.5
"""Factor by which a machine has become slower than the others, so that the rest of the time is its own."""


@dataclass(frozen=True, slots=True)
class StageStep:
    """Measured decode step of a stage."""

    node: str
    computing_s: float
    ratio: float
    """Mean over predicted time of computing."""


@dataclass(frozen=True, slots=True)
class Round:
    """Measured time of a micro-batch from one token of its sequences to the next."""

    stages: tuple[StageStep, ...]
    batches: int
    """Number of micro-batches that take turns."""
    rows: int
    """Sequences of one."""
    round_s: float
    hops_s: float
    """Predicted seconds of all hops."""

    @property
    def step_s(self) -> float:
        """Seconds from one step of a stage to the next, whichever micro-batch it is of."""
        return self.round_s / self.batches

    def rest_s(self, known_s: float) -> float:
        """Return the seconds of the round that neither computing, hops nor `known_s` on each stage take."""
        computing_s = sum(stage.computing_s for stage in self.stages)
        return self.round_s - self.hops_s - computing_s - len(self.stages) * known_s

    def common_s(self) -> float:
        """Return the seconds that each step of a stage takes beside computing, so that this round is predicted."""
        longest_s = max(stage.computing_s for stage in self.stages)
        return min(self.rest_s(0.0) / len(self.stages), self.step_s - longest_s)


@dataclass(frozen=True, slots=True)
class _Overhead:
    counted_s: float
    """Seconds that plans count. They stay if the measured ones hardly change."""
    measured_s: float
    at: float
    """Time of the measurement."""


class StepOverheads:
    """Seconds that each decode step of a stage takes beside computing: messages, scheduling, and waits for a core.

    They count on every machine, because they come with each step of any split. A stage with all layers has other ones,
    because it sends no activations. Until they have been measured, those of the other kind count. If one machine has become much slower than
    the others, the time that was added since counts on that machine alone. Otherwise, a split without it would be predicted
    with its waits.
    """

    def __init__(self, clock: Callable[[], float], forget_s: float) -> None:
        """Start without any; they count for `forget_s` seconds without new rounds, by a clock of seconds."""
        self._clock, self._forget_s = clock, forget_s
        self._common: Mapping[bool, _Overhead] = {}
        """Times that are common to all steps: of stages with all layers (True), and of others. It is replaced, too."""
        self._measured_s: defaultdict[bool, deque[float]] = defaultdict(lambda: deque(maxlen=_MEASUREMENTS))
        """The last measurements of the common times."""
        self._added: Mapping[str, _Overhead] = {}
        """Times that count on single machines. It is replaced, as plans read it in other threads."""
        self._least: dict[str, dict[tuple[str, int, int], float]] = {}
        """Least ratio of each machine in rounds of a kind, by instance: predictions may be off by more for one kind."""

    def of(self, node: str, *, is_alone: bool = False) -> float:
        """Return the seconds of a step on a machine, known or not; `is_alone` for a stage with all layers."""
        since = self._clock() - self._forget_s
        fresh = {kind: each.counted_s for kind, each in self._common.items() if each.at >= since}
        common_s = fresh.get(is_alone, fresh.get(not is_alone, 0.0))
        added = self._added.get(node)
        return common_s + (added.counted_s if added is not None and added.at >= since else 0.0)

    def forget(self, node: str) -> None:
        """Forget what was added on a machine."""
        self._added = {other: each for other, each in self._added.items() if other != node}

    def learn(self, rounds: Mapping[str, Round], instances: Collection[str]) -> bool:
        """Learn from the rounds of instances, and return True if the time that is common to all steps has changed.

        Args:
            rounds: the last rounds, by instance. The least time of all instances is common to their steps.
            instances: all instances. Others are forgotten.
        """
        self._least = {name: self._least.get(name, {}) for name in instances}
        common: defaultdict[bool, list[tuple[float, float]]] = defaultdict(list)
        for name, found in rounds.items():
            slowed = self._slowed(name, found)
            if slowed is None:
                common[len(found.stages) == 1].append((found.common_s(), found.step_s))
                for stage in found.stages:
                    self.forget(stage.node)
            else:
                added_s = self._added_s(found, slowed)
                before = self._added.get(slowed.node)
                self._added = {**self._added, slowed.node: self._noted(before, added_s, found.step_s)}
        changed = [self._learn_common(*min(found), is_alone=is_alone) for is_alone, found in common.items()]
        return any(changed)

    def _learn_common(self, measured_s: float, step_s: float, *, is_alone: bool) -> bool:
        """Learn the common time of a kind of stages, and return True if it has changed."""
        before = self._common.get(is_alone)
        if before is not None and before.measured_s == measured_s:
            return False
        measurements = self._measured_s[is_alone]
        measurements.append(measured_s)
        counted_s = self._noted(before, median(measurements), step_s).counted_s
        self._common = {**self._common, is_alone: _Overhead(counted_s, measured_s, self._clock())}
        return (0.0 if before is None else before.counted_s) != counted_s

    def _slowed(self, instance: str, found: Round) -> StageStep | None:
        """Return the longest step of machines that have become slower than others; None if there are none."""
        least, slower = self._least.setdefault(instance, {}), dict[str, float]()
        for stage in found.stages:
            kind = stage.node, found.batches, found.rows
            least[kind] = min(stage.ratio, least.get(kind, stage.ratio))
            slower[stage.node] = stage.ratio / least[kind]
        slowed = [stage for stage in found.stages if slower[stage.node] > _SLOWED * min(slower.values())]
        return max(slowed, key=lambda stage: stage.computing_s, default=None)

    def _added_s(self, found: Round, slowed: StageStep) -> float:
        common_s = self.of("")
        return min(found.rest_s(common_s), found.step_s - slowed.computing_s - common_s)

    def _noted(self, before: _Overhead | None, measured_s: float, step_s: float) -> _Overhead:
        if before is not None and before.measured_s == measured_s:
            return before
        counted_s = min(max(measured_s, 0.0), _MOST_OVERHEAD_S)
        if before is not None and abs(counted_s - before.counted_s) < _NOISE * step_s:
            counted_s = before.counted_s
        return _Overhead(counted_s, measured_s, self._clock())
