"""Measured times of steps, and deadlines derived from them. Pure.

A step's time depends on its content, so only comparable steps are grouped: decode steps by
their rows, one token for each, and chunks of a single prompt by their tokens. Not counted are steps with
drafts, because a row then has several tokens, chunks of several prompts, and steps that failed.

A deadline detects a rank that will never answer, not a slow one. So it is many times the predicted or measured time
of the step, whichever is longer. It is never shorter than the time in which a machine recovers from a short load.
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
"""Number of last steps of each kind that are kept for each stage."""
_KINDS = 8
"""Number of kinds that are reported: the most frequent ones, because each length of a chunk is a kind."""


@dataclass(frozen=True, slots=True)
class AlikeSteps:
    """Comparable steps of one stage. Times are medians, microseconds."""

    rows: int
    tokens: int
    steps: int
    """Number of steps."""
    context_tokens: int
    """Median length of the context that a row attended to."""
    compute_us: float
    link_wait_us: float
    link_send_us: float
    queue_us: float


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Times of the last steps of a stage, measured by its rank 0."""

    stage: int
    decode: tuple[AlikeSteps, ...]
    """Decode steps, by rows."""
    chunks: tuple[AlikeSteps, ...]
    """Chunks, by tokens."""


@dataclass(frozen=True, slots=True)
class StreamPace:
    """Speed of a stream that ran alone, without drafts."""

    token_us: float
    """Median time from one token to the next."""
    tokens: int
    """Number of tokens."""
    context_tokens: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of all stages."""

    stages: tuple[StageTimes, ...] = ()
    stream: StreamPace | None = None
    """Speed of a single stream; None before there was one."""


class StepWindow:
    """The last comparable steps, of each kind and stage."""

    def __init__(self) -> None:
        self._decode: dict[int, deque[StepTiming]] = defaultdict(_window)
        self._chunks: dict[int, deque[StepTiming]] = defaultdict(_window)

    def record(self, timing: StepTiming) -> None:
        """Record a step that did not fail."""
        stage, rank = timing.rank
        if rank or not timing.rows:
            return
        if timing.is_decode and timing.tokens == timing.rows:
            self._decode[stage].append(timing)
        elif not timing.is_decode and timing.rows == 1:
            self._chunks[stage].append(timing)

    def read(self) -> StepTimes:
        """Return the times of the recorded steps."""
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
    """Return the most frequent kinds, in order of their size."""
    kinds: dict[int, list[StepTiming]] = defaultdict(list)
    for timing in timings:
        kinds[timing.rows if by_rows else timing.tokens].append(timing)
    frequent = sorted(kinds.values(), key=len, reverse=True)[:_KINDS]
    return tuple(sorted(map(_medians, frequent), key=lambda steps: (steps.rows, steps.tokens)))


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
    """Return the speed from consecutive steps of one sequence, without other steps between them."""
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
    """Rank that all others wait for: in the first stage that owes an answer to the earliest step."""

    rank: RankId
    step: int
    waited_s: float
    """Time since the rank had all it needs for the step, or last reported."""
    deadline_s: float
    """Longest allowed time; 0: unlimited."""

    @property
    def is_late(self) -> bool:
        return 0 < self.deadline_s < self.waited_s


_TIMES = 20.0
"""Deadline as a multiple of the expected time."""
_UNTRIED = 4.0
"""Multiple of the shortest deadline for a kind of step new to a stage: kernels are compiled, memory is allocated."""
_WEIGHT = 0.25
"""Weight of the newest measurement if it is below the mean; above it, it counts fully."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """Content of a step that determines its time."""

    rows: int
    tokens: int
    context_tokens: int
    """Mean length of the context that a row attends to."""
    is_decode: bool


Predict = Callable[[int, StepSize], float]
"""Function that predicts the seconds of computation of a stage, given by its number, for a step."""


class StepDeadlines:
    """Deadlines of steps, learned from their measured times."""

    def __init__(self, least_s: float, predict: Predict | None = None) -> None:
        """Start with `least_s` as the shortest deadline; with 0 nothing is ever late."""
        self._least_s = least_s
        self._predict = predict
        self._seconds: dict[tuple[int, bool], float] = {}
        """Seconds of a decode step, or of a token of a chunk, by stage and kind."""

    def record(self, timing: StepTiming) -> None:
        """Learn from one rank's answer."""
        if not timing.tokens:
            return
        seconds = timing.compute_us / 1e6 / (1 if timing.is_decode else timing.tokens)
        kind = timing.rank.stage, timing.is_decode
        mean = self._seconds.get(kind, seconds)
        self._seconds[kind] = max(seconds, mean + _WEIGHT * (seconds - mean))

    def of(self, stage: int, size: StepSize) -> float:
        """Return the deadline in seconds; 0 if there is none."""
        if not self._least_s:
            return 0.0
        measured = self._measured_s(stage, size)
        least = self._least_s * (_UNTRIED if measured is None else 1.0)
        predicted = 0.0 if self._predict is None or not size.rows else self._predict(stage, size)
        return max(least, _TIMES * max(predicted, measured or 0.0))

    def _measured_s(self, stage: int, size: StepSize) -> float | None:
        """Return the measured time; None without a comparable step. Operations alone count as a decode step."""
        seconds = self._seconds.get((stage, size.is_decode or not size.rows))
        return seconds if seconds is None or size.is_decode else seconds * max(1, size.tokens)
