"""Time of steps beside computing, learned from measured rounds: it stays when layers move.

A measured split shows what predictions of another one leave out.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median

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
