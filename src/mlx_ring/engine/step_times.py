"""How long steps take, told for steps that can be compared. Pure.

A step's time depends on what is in it, so only steps that are alike in that are put together: decode steps by
their rows, one token for each, and chunks that one prompt has to itself by their tokens. Not counted are steps with
drafts, for a row then has several tokens; chunks of several prompts; and steps that failed.

How long a rank may take for a step before it counts as stuck. Pure.

A deadline finds who will never answer, not who is slow. So it is many times what the step is expected to take, by
what was predicted and by what was measured, whichever is more; and never less than a time in which a machine that
is busy with something else for a moment comes back.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from mlx_ring.core.engine_stats import StepTiming
from mlx_ring.core.types import RankId

_KEPT = 128
"""Last steps of each kind on each stage."""
_KINDS = 8
"""Of chunks there are as many kinds as there are lengths: the most frequent are told."""


@dataclass(frozen=True, slots=True)
class AlikeSteps:
    """Steps of one stage that are alike. Times are medians, microseconds."""

    rows: int
    tokens: int
    steps: int
    """That were counted."""
    context_tokens: int
    """That a row looked back at: the median."""
    compute_us: float
    link_wait_us: float
    link_send_us: float
    queue_us: float


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The last steps of a stage, as its rank 0 has timed them."""

    stage: int
    decode: tuple[AlikeSteps, ...]
    """By rows."""
    chunks: tuple[AlikeSteps, ...]
    """By tokens."""


@dataclass(frozen=True, slots=True)
class StreamPace:
    """How quickly a stream that had the pipeline to itself got its tokens, without drafts."""

    token_us: float
    """From one token to the next: the median."""
    tokens: int
    """That were counted."""
    context_tokens: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of all stages."""

    stages: tuple[StageTimes, ...] = ()
    stream: StreamPace | None = None
    """None before there was one."""


class StepWindow:
    """Keeps the last steps that can be compared, of each kind and stage."""

    def __init__(self) -> None:
        self._decode: dict[int, deque[StepTiming]] = defaultdict(_window)
        self._chunks: dict[int, deque[StepTiming]] = defaultdict(_window)

    def record(self, timing: StepTiming) -> None:
        """Take in a step that was done without a failure."""
        stage, rank = timing.rank
        if rank or not timing.rows:
            return
        if timing.is_decode and timing.tokens == timing.rows:
            self._decode[stage].append(timing)
        elif not timing.is_decode and timing.rows == 1:
            self._chunks[stage].append(timing)

    def read(self) -> StepTimes:
        """What the kept steps tell."""
        stages = sorted({*self._decode, *self._chunks})
        times = tuple(
            StageTimes(
                stage,
                _alike(self._decode.get(stage, ()), by_rows=True),
                _alike(self._chunks.get(stage, ()), by_rows=False),
            )
            for stage in stages
        )
        return StepTimes(times, _pace(self._decode.get(max(stages, default=0), ())))


def _window() -> deque[StepTiming]:
    return deque(maxlen=_KEPT)


def _alike(timings: Iterable[StepTiming], *, by_rows: bool) -> tuple[AlikeSteps, ...]:
    """The most frequent kinds, in order of their size."""
    kinds: dict[int, list[StepTiming]] = defaultdict(list)
    for timing in timings:
        kinds[timing.rows if by_rows else timing.tokens].append(timing)
    frequent = sorted(kinds.values(), key=len, reverse=True)[:_KINDS]
    return tuple(sorted(map(_medians, frequent), key=lambda told: (told.rows, told.tokens)))


def _medians(alike: Sequence[StepTiming]) -> AlikeSteps:
    return AlikeSteps(
        rows=alike[0].rows,
        tokens=alike[0].tokens,
        steps=len(alike),
        context_tokens=int(median(timing.context_tokens for timing in alike)),
        compute_us=median(timing.compute_us for timing in alike),
        link_wait_us=median(timing.link_wait_us for timing in alike),
        link_send_us=median(timing.link_send_us for timing in alike),
        queue_us=median(timing.queue_us for timing in alike),
    )


def _pace(last_stage: Iterable[StepTiming]) -> StreamPace | None:
    """From steps of one and the same sequence that followed each other, with no other step between them."""
    pairs = [
        (before, after)
        for before, after in pairwise(last_stage)
        if before.sequence and before.sequence == after.sequence and after.step == before.step + 1
    ]
    if not pairs:
        return None
    return StreamPace(
        token_us=median(after.finished_us - before.finished_us for before, after in pairs),
        tokens=len(pairs),
        context_tokens=int(median(after.context_tokens for _, after in pairs)),
    )


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The rank that everybody waits for: of the earliest step that is owed, in the first stage that owes it."""

    rank: RankId
    step: int
    waited_s: float
    """Since all that the rank needs for the step was there, or since it was last heard of."""
    deadline_s: float
    """0: none."""

    @property
    def is_late(self) -> bool:
        return 0 < self.deadline_s < self.waited_s


_TIMES = 20.0
"""As long as expected."""
_UNTRIED = 4.0
"""Times the least, where a stage has not done a step of the kind yet: kernels are compiled, memory is taken."""
_WEIGHT = 0.25
"""Of the newest measurement, where it is less than the mean; where it is more, it counts whole."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """What is in a step, as far as its time goes."""

    rows: int
    tokens: int
    context_tokens: int
    """That a row looks back at, in the mean."""
    is_decode: bool


Predict = Callable[[int, StepSize], float]
"""Seconds that a stage, given by its number, was predicted to compute for a step."""


class StepDeadlines:
    """Learns what steps take, and says how long to wait for one."""

    def __init__(self, least_s: float, predict: Predict | None = None) -> None:
        """`least_s` is the least that is waited, for whatever step; with 0 nothing is ever late."""
        self._least_s = least_s
        self._predict = predict
        self._seconds: dict[tuple[int, bool], float] = {}
        """By stage and kind: of a decode step, of a token of a chunk."""

    def record(self, timing: StepTiming) -> None:
        """Learn from one rank's answer."""
        if not timing.tokens:
            return
        seconds = timing.compute_us / 1e6 / (1 if timing.is_decode else timing.tokens)
        kind = timing.rank.stage, timing.is_decode
        mean = self._seconds.get(kind, seconds)
        self._seconds[kind] = max(seconds, mean + _WEIGHT * (seconds - mean))

    def of(self, stage: int, size: StepSize) -> float:
        """Seconds; 0: none."""
        if not self._least_s:
            return 0.0
        measured = self._measured_s(stage, size)
        least = self._least_s * (_UNTRIED if measured is None else 1.0)
        predicted = 0.0 if self._predict is None or not size.rows else self._predict(stage, size)
        return max(least, _TIMES * max(predicted, measured or 0.0))

    def _measured_s(self, stage: int, size: StepSize) -> float | None:
        """None where nothing alike was measured. Operations alone are taken for a decode step."""
        seconds = self._seconds.get((stage, size.is_decode or not size.rows))
        return seconds if seconds is None or size.is_decode else seconds * max(1, size.tokens)
