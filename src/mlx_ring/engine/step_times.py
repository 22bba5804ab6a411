"""Measured times of steps, and two results of them: deadlines and the size of prefill chunks. Pure.

A step's time depends on its content, so only comparable steps are grouped. Decode steps are grouped by their rows,
one token for each, and chunks of a single prompt by their tokens. Not counted are failed steps, chunks of several
prompts, and steps with drafts, because a row then has several tokens.

A deadline detects a rank that will never answer, not a slow one. So it is many times the predicted or measured time of
the step, whichever is longer. It is never shorter than the time in which a machine recovers from a short load.

A chunk delays every running sequence by its own time on the slowest stage. The time of a token without chunks is known
from decode steps; the promised ratio leaves the rest to chunks. Unused time is saved for some steps, so that a short
prompt is read in few chunks and a long one in small ones. A stream's tokens therefore keep the promised ratio on
average, and exceed it only by the time that the saved steps left.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from mlx_ring.core.engine_stats import StepTiming
from mlx_ring.core.types import RankId

SMALLEST_CHUNK = 2
_SMALLEST_ALONE = 160
"""Smallest chunk of a prompt alone: smaller ones would mostly read the weights."""
_CHUNKS_PER_STAGE = 6
"""Chunks per stage of a prompt alone. More of them read the weights too often; fewer fill and drain the pipeline
too slowly."""
_STEPS_SAVED = 8
"""Number of decode steps whose unused time is saved at most."""
_WEIGHT = 0.25
"""Weight of the newest measurement in a running mean."""
_MARGIN = 0.9


class RunningMean:
    """An exponentially weighted mean; None before the first value."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + _WEIGHT * (value - self.value)


class ChunkSizer:
    """Costs of steps, and the sizes of chunks that follow from them."""

    def __init__(self, stages: int, *, chunk: int, max_itl_ratio: float) -> None:
        self._stages = stages
        self._chunk = chunk
        self._ratio = max_itl_ratio
        self._decode_us = [RunningMean() for _ in range(stages)]
        """Time of one decode step without drafts, by stage."""
        self._any_decode_us = [RunningMean() for _ in range(stages)]
        """Time of one decode step with or without drafts, by stage."""
        self._token_us = [RunningMean() for _ in range(stages)]
        """Time of one prefilled token, by stage."""
        self._credit_us = 0.0
        """Time saved for prompts; below 0, prompts took more than their share."""
        self._earned_us = 0.0
        """Time that the last decode step added."""
        self._charged: dict[int, float] = {}
        """Time charged for each step with chunks beside decode."""
        self._draft_us = [RunningMean() for _ in range(stages)]
        """Time that a draft token adds to a decode step, by stage."""

    def record(self, timing: StepTiming, *, is_prefill: bool) -> None:
        """Learn from one rank's answer."""
        stage = timing.rank.stage
        if not timing.tokens:
            return
        if is_prefill:
            self.record_chunk(stage, timing.step, timing.tokens, timing.compute_us)
        else:
            self.record_decode(stage, timing.rows, timing.tokens, timing.compute_us)

    def record_chunk(self, stage: int, step: int, tokens: int, compute_us: float) -> None:
        """Learn from a prefill step of some tokens on a stage."""
        self._token_us[stage].add(compute_us / tokens)
        self._settle(stage, step, compute_us)

    def record_decode(self, stage: int, rows: int, tokens: int, compute_us: float) -> None:
        """Learn from a decode step on a stage; rows with drafts have several tokens."""
        self._any_decode_us[stage].add(compute_us)
        if tokens == rows:
            self._decode_us[stage].add(compute_us)
        elif (plain := self._decode_us[stage].value) is not None:
            self._draft_us[stage].add(max(0.0, compute_us - plain) / (tokens - rows))
        if stage == 0:
            self._earn()

    def chunk(self, remaining: int, prompt: int, *, beside_decode: bool) -> int:
        """Return the most tokens of a chunk, alone or beside running sequences; 0 if decode must go first.

        Args:
            remaining: tokens of the prompt that are left.
            prompt: tokens that had to be computed when the prompt began.
            beside_decode: True beside running sequences, whose tokens must not wait long.
        """
        if beside_decode:
            return self._beside_decode()
        if self._stages == 1:
            return self._chunk
        even = max(_SMALLEST_ALONE, -(-prompt // (_CHUNKS_PER_STAGE * self._stages)))
        if remaining <= _SMALLEST_ALONE * 3 // 2:
            return min(self._chunk, remaining)
        # The last chunk is small because the first stages are idle while it passes the later ones.
        return min(self._chunk, even, max(_SMALLEST_ALONE, -(-remaining // 2)))

    def _earn(self) -> None:
        """Save the time that a decode step leaves to prompts, which is the same on every stage as on the slowest."""
        slowest = 0.0
        for plain, step in zip(self._decode_us, self._any_decode_us, strict=True):
            slowest = max(slowest, plain.value or step.value or 0.0)
        self._earned_us = (self._ratio - 1.0) * _MARGIN * slowest
        self._credit_us = min(self._most_us, self._credit_us + self._earned_us)

    @property
    def _most_us(self) -> float:
        """Most time that can be saved."""
        return min(self._chunk * self._slowest_token_us, _STEPS_SAVED * self._earned_us)

    @property
    def _slowest_token_us(self) -> float:
        return max([mean.value or 0.0 for mean in self._token_us])

    def _beside_decode(self) -> int:
        """Return the size of a chunk beside decode; 0 until more time is saved."""
        token_us = self._slowest_token_us
        if not token_us:
            return min(self._chunk, SMALLEST_CHUNK)
        if self._credit_us < SMALLEST_CHUNK * token_us or self._is_saving:
            return 0
        return min(self._chunk, int(self._credit_us / token_us))

    @property
    def _is_saving(self) -> bool:
        """True while the time of one step is too little for a chunk, which reads the weights as a step does.

        The time of several steps is then used for one larger chunk.
        """
        return (self._ratio - 1.0) * _MARGIN < 1.0 and self._credit_us < self._most_us

    def sent(self, step: int, tokens: int, *, beside_decode: bool) -> None:
        """Charge the prompt tokens of a step that is sent."""
        if beside_decode:
            cost_us = tokens * self._slowest_token_us
            self._credit_us -= cost_us
            self._charged[step] = cost_us

    def _settle(self, stage: int, step: int, compute_us: float) -> None:
        """Correct the charge of a chunk to its measured time."""
        slowest = max(range(self._stages), key=lambda stage: self._token_us[stage].value or 0.0)
        if stage == slowest and (charged := self._charged.pop(step, None)) is not None:
            self._credit_us += charged - compute_us
        while self._charged and next(iter(self._charged)) < step:
            del self._charged[next(iter(self._charged))]

    def verifying_cost(self, draft_tokens: int) -> float:
        """Return the relative cost of a decode step by its number of draft tokens, on the stage where it is highest.

        Infinite until a step without drafts was timed; for several draft tokens, until one with a draft was.
        """
        if not draft_tokens:
            return 1.0
        plain = [mean.value for mean in self._decode_us]
        ratios = [
            1.0 + draft_tokens * draft.value / step
            for draft, step in zip(self._draft_us, plain, strict=True)
            if draft.value is not None and step
        ]
        if not all(plain) or (draft_tokens > 1 and not ratios):
            return math.inf
        return max(ratios, default=1.0)


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
