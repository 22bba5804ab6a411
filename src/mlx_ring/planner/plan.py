"""A plan: the layers of each machine, the reasons, and the predicted times.

A measured split shows what predictions of another one leave out: the time of a step beside computing, which stays when
layers move.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from mlx_ring.core.types import LayerRange
from mlx_ring.planner.catalogue import accuracy
from mlx_ring.planner.request import Objective
from mlx_ring.settings.strategies import Strategy


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One worker of a stage."""

    node: str
    share: float
    """Share of every layer of the stage; the shares of a stage add up to 1."""
    weight_bytes: int
    memory_bytes: int
    """Weights, promised KV cache and working memory."""
    usable_bytes: int


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Consecutive layers of one machine, or of several that compute each layer together."""

    node: str
    """Machine of rank 0, which receives and sends activations."""
    layers: LayerRange
    weight_bytes: int
    memory_bytes: int
    """Weights, promised KV cache and working memory."""
    usable_bytes: int
    token_s: float
    """Seconds of one token of a single stream."""
    why: str
    ranks: tuple[RankPlan, ...]
    """Workers that compute its layers, rank 0 first. The bytes above are their sums."""

    @property
    def is_shared(self) -> bool:
        """True if several ranks compute each layer."""
        return len(self.ranks) > 1


WHY_LEFT_OUT: Mapping[Objective, str] = {
    "latency": "no plan with it answers a request sooner",
    "first-token": "no plan with it has an earlier first token",
    "throughput": "no plan with it has a higher throughput",
    "memory": "with it the fullest machine would be as full",
}
"""Reason for which a machine that could have layers gets none, by objective."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A machine that gets no layers."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """Times predicted by counting bytes, operations and hops; a running server comes close to them."""

    token_s: float
    """Seconds from one token of a stream to the next, with `users` streams."""
    tokens_per_s: float
    """Throughput of all promised sequences together."""
    first_token_s: float
    """Seconds to the first token of a prompt of `prompt_tokens`: of the last user's, if several arrive at once."""
    prompt_tokens: int
    request_s: float
    """Seconds of a whole request: the first token, and an answer of `answer_tokens`."""
    answer_tokens: int
    users: int = 1
    """Number of such requests at once."""

    def minimized_s(self, objective: Objective) -> float:
        """Return the seconds that an objective minimizes, without end over a broken link; less is better."""
        if objective == "throughput":
            return 1 / self.tokens_per_s if self.tokens_per_s else math.inf
        return self.first_token_s if objective == "first-token" else self.request_s


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges in which measurements are to be expected: the prediction over and times the factor by which it may be off."""

    tokens_per_s: tuple[float, float]
    """Speed of one stream."""
    first_token_s: tuple[float, float]
    request_s: tuple[float, float]


def ranges_of(predicted: Prediction, *, is_measured: bool) -> Ranges:
    """Return the ranges of a prediction for machines that were all measured, or were not."""
    decode, prefill = (accuracy("measured" if is_measured else kind) for kind in ("decode", "prefill"))
    speed, first_s = 1 / predicted.token_s, predicted.first_token_s
    answer_s = predicted.request_s - first_s
    return Ranges(
        (speed / decode, speed * decode),
        (first_s / prefill, first_s * prefill),
        (first_s / prefill + answer_s / decode, first_s * prefill + answer_s * decode),
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages in the pipeline's order."""

    model: str
    strategy: Strategy
    objective: Objective
    context_tokens: int
    sequences: int
    kv_bits: int
    stages: tuple[StagePlan, ...]
    left_out: tuple[LeftOut, ...]
    prediction: Prediction
    remarks: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Kind of the plan: `single`, `pipeline`, `tensor` or `hybrid`."""
        if any(stage.is_shared for stage in self.stages):
            return "tensor" if len(self.stages) == 1 else "hybrid"
        return "single" if len(self.stages) == 1 else "pipeline"

    def as_json(self) -> dict[str, Any]:
        """Return the fields for `--json`."""
        # Programs read the objective as `aim`, its name in earlier versions.
        # Programs read the objective under its former name.
        fields = {"aim" if name == "objective" else name: value for name, value in asdict(self).items()}
        return {**fields, "kind": self.kind}


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
