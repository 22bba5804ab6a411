"""Steps in flight, the progress of each rank, the deadlines of their answers, and the times of the last ones. Pure.

A deadline detects a rank that will never answer, not a slow one. So it is many times the predicted or measured time of
the step, whichever is longer. It is never shorter than the time in which a machine recovers from a short load.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median

from mlx_ring.core.engine_stats import RankTotals, StepTiming
from mlx_ring.core.errors import ProtocolError
from mlx_ring.core.types import RankId
from mlx_ring.engine.decode import MicroBatch
from mlx_ring.engine.resumption import PredictChunk
from mlx_ring.engine.rows import tokens_fed
from mlx_ring.engine.sequence import Sequence
from mlx_ring.engine.step_times import AlikeSteps, StageTimes, StepTimes, pace_of, round_of
from mlx_ring.rpc.protos import step_pb2

_RECENT_STEPS = 256
_FIRST = RankId(0, 0)
_KEPT = 128
"""Number of last steps of each kind that are kept for each stage."""
_KINDS = 8
"""Number of kinds that are reported: the most frequent ones, because each length of a chunk is a kind."""


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
_WEIGHT = 0.25
"""Weight of the newest measurement if it is below the mean; above it, it counts fully."""
_UNTRIED = 4.0
"""Multiple of the shortest deadline for a kind of step new to a stage: kernels are compiled, memory is allocated."""


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


def predict_chunk_by(predict: Predict | None) -> PredictChunk | None:
    """Return the prediction of a chunk alone; None without any."""
    if predict is None:
        return None
    return lambda stage, tokens, context: predict(stage, StepSize(1, tokens, context, is_decode=False))


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


@dataclass(slots=True)
class SentStep:
    """A step that some rank has not answered."""

    step: step_pb2.Step
    sequences: tuple[Sequence, ...]
    """Sequences in the order of the step's rows."""
    generations: tuple[int, ...]
    """Generations of the sequences when the step was sent."""
    batch: MicroBatch[Sequence] | None
    """Micro-batch of a decode step; None for prefill and for operations alone."""
    sent_at: float
    size: StepSize
    answered_at: float = 0.0
    """Time of the latest answer."""
    failed: bool = False

    @property
    def is_prefill(self) -> bool:
        return self.batch is None and bool(self.sequences)

    def current(self) -> Iterator[tuple[Sequence, step_pb2.Row]]:
        """Iterate over the rows whose sequences were not preempted since."""
        for sequence, generation, row in zip(self.sequences, self.generations, self.step.rows, strict=True):
            if sequence.generation == generation:
                yield sequence, row


@dataclass(slots=True)
class _Progress:
    """Progress of one rank."""

    step: int = 0
    kv_bytes: int = 0
    begun: int = 0
    """Last step that it is known, from heartbeats, to have started."""
    begun_at: float = 0.0
    loading_at: float = 0.0
    """Time of the last heartbeat in which it was loading layers, so that steps had to wait."""
    answered_at: float = 0.0
    totals: RankTotals = field(default_factory=RankTotals)


@dataclass(slots=True)
class Answered:
    """A rank's answer with its step."""

    sent_step: SentStep
    rank: RankId
    timing: StepTiming


class StepsInFlight:
    """Every step from its sending until all ranks have answered it."""

    def __init__(self, ranks: Iterable[RankId], deadlines: StepDeadlines) -> None:
        self._progress = {rank: _Progress() for rank in ranks}
        self._deadlines = deadlines
        self._completed_at = 0.0
        self._in_flight: dict[int, SentStep] = {}
        self._recent: deque[StepTiming] = deque(maxlen=_RECENT_STEPS)
        self.window = StepWindow()
        self.sent = 0
        self.read_tokens = 0
        """Prompt tokens that the first stage has computed."""
        self.prefills = 0
        """Number of prefill steps that some rank has not answered."""

    def send(
        self,
        step: step_pb2.Step,
        sequences: Iterable[Sequence],
        batch: MicroBatch[Sequence] | None,
        now: float,
    ) -> SentStep:
        sequences = tuple(sequences)
        generations = tuple(sequence.generation for sequence in sequences)
        sent_step = SentStep(
            step, sequences, generations, batch, now, _size(step, is_decode=batch is not None)
        )
        self._in_flight[step.step] = sent_step
        self.sent = step.step
        self.prefills += sent_step.is_prefill
        return sent_step

    def record_answer(self, done: step_pb2.StepDone, now: float) -> Answered:
        """Record an answer.

        Raises:
            ProtocolError: a rank that is not in the plan, or an answer out of order.
        """
        rank = RankId(done.stage, done.rank)
        progress = self._progress.get(rank)
        if progress is None:
            raise ProtocolError(
                f"Stage {done.stage} rank {done.rank} answered a step, but the plan has no such rank."
            )
        if done.step != progress.step + 1 or done.step > self.sent:
            raise ProtocolError(
                f"Stage {done.stage} rank {done.rank} answered step {done.step} after step {progress.step} "
                f"of {self.sent} sent."
            )
        progress.step, progress.kv_bytes = done.step, done.kv_bytes
        progress.answered_at = now
        sent_step = self._in_flight[done.step]
        sent_step.answered_at = now
        timing = _timing(rank, sent_step, done.timings)
        progress.totals.record(timing)
        self._recent.append(timing)
        if not done.HasField("failure"):
            self.window.record(timing)
            self._deadlines.record(timing)
            if sent_step.is_prefill and rank == _FIRST:
                self.read_tokens += timing.tokens
        return Answered(sent_step, rank, timing)

    def discard_completed(self) -> bool:
        """Discard the steps that every rank has answered; return True if there were any."""
        completed, has_landed = self.completed, False
        while self._in_flight and (number := next(iter(self._in_flight))) <= completed:
            sent_step = self._in_flight.pop(number)
            self.prefills -= sent_step.is_prefill
            self._completed_at = max(self._completed_at, sent_step.answered_at)
            has_landed = True
        return has_landed

    def rows(self) -> Iterator[tuple[Sequence, step_pb2.Row]]:
        """Iterate over the rows that some rank has not answered, of sequences that were not preempted since."""
        return (current for sent in self._in_flight.values() for current in sent.current())

    @property
    def unanswered(self) -> dict[int, dict[RankId, int]]:
        """First step with a row of a sequence that a rank has not answered, by sequence and rank."""
        first: dict[int, dict[RankId, int]] = {}
        for number, sent in self._in_flight.items():
            end = sent.step.end_stage
            owing = [
                rank
                for rank, progress in self._progress.items()
                if progress.step < number and (not end or rank.stage < end)
            ]
            for row in sent.step.rows:
                for rank in owing:
                    first.setdefault(row.sequence, {}).setdefault(rank, number)
        return first

    @property
    def completed(self) -> int:
        """Last step that every rank has answered."""
        return min(progress.step for progress in self._progress.values())

    @property
    def kv_bytes(self) -> dict[RankId, int]:
        return {rank: progress.kv_bytes for rank, progress in self._progress.items()}

    @property
    def answered_at(self) -> dict[RankId, float]:
        """Time of each rank's last answer; 0 before the first one."""
        return {rank: progress.answered_at for rank, progress in self._progress.items()}

    def totals(self, now: float, began: float) -> dict[RankId, RankTotals]:
        """Return each rank's total times since `began`. Idle time excludes the step in progress."""
        by_rank: dict[RankId, RankTotals] = {}
        for rank, progress in self._progress.items():
            owed = self._in_flight.get(progress.step + 1)
            pending_s = 0.0 if owed is None else now - max(owed.sent_at, progress.answered_at)
            idle_us = int(1e6 * (now - began - pending_s)) - progress.totals.busy_us
            by_rank[rank] = replace(progress.totals, idle_us=max(0, idle_us))
        return by_rank

    @property
    def recent(self) -> tuple[StepTiming, ...]:
        return tuple(self._recent)

    def record_started(self, rank: RankId, begun: int, now: float, *, is_loading: bool = False) -> None:
        """Record, from a heartbeat, that a rank started a step, or that it is loading layers between two of them."""
        progress = self._progress.get(rank)
        if progress is None:
            return
        if begun > progress.begun:
            progress.begun, progress.begun_at = begun, now
        if is_loading:
            progress.loading_at = now

    def oldest_unanswered(self, now: float) -> Unanswered | None:
        """Return the rank that all others wait for; None if no answer is owed.

        Ranks execute in order, and each needs the results of the stages before it. For the earliest step that is owed, the
        first stage that owes it has all it needs, and all other ranks will wait for it.
        """
        number = self.completed + 1
        if number > self.sent:
            return None
        sent_step = self._in_flight[number]
        rank = min(rank for rank, progress in self._progress.items() if progress.step < number)
        progress = self._progress[rank]
        begun_at = progress.begun_at if progress.begun == number else 0.0
        since = max(
            *(sent_step.sent_at, sent_step.answered_at, self._completed_at),
            *(begun_at, progress.loading_at),
        )
        return Unanswered(rank, number, now - since, self._deadlines.of(rank.stage, sent_step.size))


def _size(step: step_pb2.Step, *, is_decode: bool) -> StepSize:
    rows = len(step.rows)
    context = sum(row.start for row in step.rows) // max(1, rows)
    return StepSize(rows, sum(map(tokens_fed, step.rows)), context, is_decode)


def _timing(rank: RankId, sent_step: SentStep, timings: step_pb2.Timings) -> StepTiming:
    end = sent_step.step.end_stage
    computes = not end or rank.stage < end
    return StepTiming(
        step=sent_step.step.step,
        rank=rank,
        rows=len(sent_step.sequences) if computes else 0,
        tokens=sent_step.size.tokens if computes else 0,
        is_decode=sent_step.batch is not None,
        started_us=timings.started_us,
        finished_us=timings.finished_us,
        queue_us=timings.queue_us,
        link_wait_us=timings.link_wait_us,
        compute_us=timings.compute_us,
        link_send_us=timings.link_send_us,
        context_tokens=sent_step.size.context_tokens,
        sequence=sent_step.sequences[0].id if sent_step.sequences else 0,
    )


# ---- times of the last steps


class StepWindow:
    """The last comparable steps, of each kind and stage."""

    def __init__(self) -> None:
        self._decode: dict[int, deque[StepTiming]] = defaultdict(_window)
        self._chunks: dict[int, deque[StepTiming]] = defaultdict(_window)
        self._last: dict[int, deque[StepTiming]] = defaultdict(_window)

    def record(self, timing: StepTiming) -> None:
        """Record a step that did not fail."""
        stage, rank = timing.rank
        if rank or not timing.rows:
            return
        if timing.is_decode:
            self._last[stage].append(timing)
        if timing.is_decode and timing.tokens == timing.rows:
            self._decode[stage].append(timing)
        elif not timing.is_decode and timing.rows == 1:
            self._chunks[stage].append(timing)

    def read(self) -> StepTimes:
        """Return the times of the recorded steps."""
        stages = sorted({*self._last, *self._chunks})
        times = tuple(
            StageTimes(
                stage,
                _alike(self._decode.get(stage, ()), by_rows=True),
                _alike(self._chunks.get(stage, ()), by_rows=False),
                _alike(self._last.get(stage, ()), by_rows=False),
            )
            for stage in stages
        )
        pace = pace_of(self._decode.get(max(stages, default=0), ()))
        return StepTimes(times, pace, round_of([self._last.get(stage, ()) for stage in stages]))


def _window() -> deque[StepTiming]:
    return deque(maxlen=_KEPT)


def _alike(timings: Iterable[StepTiming], *, by_rows: bool) -> tuple[AlikeSteps, ...]:
    """Return the most frequent kinds, in order of their size."""
    kinds: dict[int, list[StepTiming]] = defaultdict(list)
    for timing in timings:
        kinds[timing.rows if by_rows else timing.tokens].append(timing)
    frequent = sorted(kinds.values(), key=len, reverse=True)[:_KINDS]
    return tuple(sorted(map(_medians, frequent), key=lambda steps: (steps.rows, steps.tokens)))


def _medians(alike: list[StepTiming]) -> AlikeSteps:
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
