"""Measured times of steps, and the sizes of prefill chunks that follow from them. Pure.

A step's time depends on its content, so only comparable steps are grouped. Decode steps are grouped by their rows, one
token for each, and chunks by their tokens. Not counted are failed steps, and steps with drafts, because a row then has
several tokens.

A chunk delays every running sequence by its own time on the slowest stage. The time of a token without chunks is known
from decode steps; the promised ratio leaves the rest to chunks. Unused time is saved for some steps, so that a short
prompt is read in few chunks and a long one in small ones. A stream's tokens therefore keep the promised ratio on
average, and exceed it only by the time that the saved steps left.

How a chunk's time grows with its size differs. On a slow CPU it is proportional. Where few tokens already read most
experts, hundreds of tokens take hardly longer than two. So sizes are measured as they occur, and larger ones are tried
step by step.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from operator import lt
from statistics import fmean, median

from mlx_ring.core.engine_stats import StepTiming

SMALLEST_CHUNK = 2
_EARLY = 2048
"""Tokens before a chunk up to which its time counts for prompts of any length: attention takes little of it."""
_MOST_DEBT = 8.0
"""Time that prompts may owe, over the most time that can be saved for them."""
_STEPS_SAVED = 8
"""Number of decode steps whose unused time is saved at most."""
_WEIGHT = 0.25
"""Weight of the newest measurement in a running mean."""
_MARGIN, _MARGIN_OF_SEVERAL = 0.9, 0.8
"""Parts of the time left to chunks that are used, on one stage and on several: a chunk alone leaves gaps on later ones."""


class RunningMean:
    """An exponentially weighted mean; None before the first value."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + _WEIGHT * (value - self.value)


_CLASSES_PER_OCTAVE = 4
"""Number of classes of chunk sizes from one size to its double."""
_OF_A_CLASS, _REMEMBERED = 3, 64
"""Number of chunks that are kept of each class; number of chunks after which a class without new ones is forgotten."""
_CONTRADICTS = 1.25
"""Factor by which a smaller chunk must be slower than a larger one, so that the older of them is forgotten."""
_APART = 0.75
"""Ratio of two sizes from which their times show the time of a token."""


class ChunkTimes:
    """Time of a stage's chunk by its size, and the largest size within a time.

    The last chunks of each class of sizes are kept. The one with the middle time stands for the class, so an outlier has no
    effect. Between these sizes, times are interpolated. Outside, they follow the line to the nearest size that is not too
    close, or are proportional if there is none. Above the largest size, one of at most its double is tried, or as many
    tokens as proportional time allows.

    Let twice the tokens take at most twice as long. Then no chunk above the smallest measured size takes more than twice the
    given time, unless the speed has changed.
    """

    def __init__(self) -> None:
        self._recorded = 0
        self._classes: dict[int, deque[tuple[float, int, int]]] = {}
        """Time, tokens and number of the last chunks of each class ..."""
        self._middles: dict[int, tuple[float, int, int]] = {}
        """... and the one of them with the middle time."""
        self._tokens: list[int] = []
        """Measured sizes, one of each class."""
        self._us: list[float] = []
        """Their times; none is less than that of a smaller size."""
        self._known: dict[int, float] = {}  # Times by size, since the last chunk.

    @property
    def sizes(self) -> tuple[int, int]:
        """Smallest and largest measured size; 0 before the first chunk."""
        return (self._tokens[0], self._tokens[-1]) if self._tokens else (0, 0)

    def record(self, tokens: int, compute_us: float) -> None:
        """Learn from a chunk."""
        self._recorded += 1
        place = int(_CLASSES_PER_OCTAVE * math.log2(tokens))
        kept = self._classes.setdefault(place, deque(maxlen=_OF_A_CLASS))
        kept.append((compute_us, tokens, self._recorded))
        new_us, _, _ = self._middles[place] = _middle(kept)
        if len(kept) == 1:
            self._middles = dict(sorted(self._middles.items()))
        oldest, slowest_us = self._recorded - _REMEMBERED, _CONTRADICTS * new_us
        sizes, times_us = list[int](), list[float]()
        for other, (us, size, _) in [*self._middles.items()]:
            contradicts = us > slowest_us if other < place else new_us > _CONTRADICTS * us
            is_old = bool(sizes) and self._classes[other][-1][2] <= oldest
            if contradicts or is_old:
                del self._classes[other], self._middles[other]
            else:
                sizes.append(size)
                times_us.append(us)
        is_rising = all(map(lt, times_us, times_us[1:]))
        self._tokens, self._us = sizes, times_us if is_rising else _rising(times_us)
        self._known.clear()

    def us(self, tokens: int) -> float:
        """Return the microseconds of a chunk; 0 before the first one."""
        if not self._tokens:
            return 0.0
        if tokens not in self._known:
            size, us, slope = self._line(bisect_right(self._tokens, tokens))
            self._known[tokens] = max(0.0, us + slope * (tokens - size))
        return self._known[tokens]

    def most(self, us: float) -> int:
        """Return the largest size to try within a time; call it after the first chunk."""
        place = bisect_right(self._us, us)
        size, size_us, slope = self._line(place)
        if place == 0 and not slope:
            return 0
        found = size + (us - size_us) / slope if slope else math.inf
        if place < len(self._us):
            return int(found)
        is_known = self._tokens[0] <= _APART * size
        least = size + 1 if is_known else size + 1 + size // 8
        return max(least, int(min(found, size * max(2.0, us / max(1.0, size_us)))))

    def _line(self, place: int) -> tuple[int, float, float]:
        """Return a size, its time and that of each further token, between the measured size of this place and the one before."""
        sizes, last = self._tokens, len(self._tokens) - 1
        if place > last:
            return (
                sizes[last],
                self._us[last],
                self._slope(bisect_right(sizes, _APART * sizes[last]) - 1, last),
            )
        if place:
            return sizes[place - 1], self._us[place - 1], self._slope(place - 1, place)
        larger = bisect_left(sizes, sizes[0] / _APART)
        return sizes[0], self._us[0], self._slope(0, larger) if larger <= last else self._slope(-1, 0)

    def _slope(self, one: int, other: int) -> float:
        """Return the time of a token between two measured sizes, the first of which may be -1 for an empty chunk."""
        tokens, us = (self._tokens[one], self._us[one]) if one >= 0 else (0, 0.0)
        return (self._us[other] - us) / (self._tokens[other] - tokens)


def _middle(chunks: Iterable[tuple[float, int, int]]) -> tuple[float, int, int]:
    """Return the chunk with the middle time, of two the faster one."""
    in_order = sorted(chunks)
    return in_order[(len(in_order) - 1) // 2]


def _rising(values: list[float]) -> list[float]:
    """Return the values with the mean of neighbours wherever one is less than the one before."""
    means: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while means and means[-1][0] >= mean:
            before, more = means.pop()
            mean, count = (mean * count + before * more) / (count + more), count + more
        means.append((mean, count))
    return [mean for mean, count in means for _ in range(count)]


class ChunkSizer:
    """Costs of steps, and the sizes of chunks that follow from them."""

    def __init__(self, stages: int, *, chunk: int, max_itl_ratio: float) -> None:
        self._stages = stages
        self._chunk = chunk
        self._left = (max_itl_ratio - 1.0) * (_MARGIN if stages == 1 else _MARGIN_OF_SEVERAL)
        """Time that a decode step leaves to prompts, as a multiple of its own."""
        self._decode_us = [RunningMean() for _ in range(stages)]
        """Time of one decode step without drafts, by stage."""
        self._any_decode_us = [RunningMean() for _ in range(stages)]
        """Time of one decode step with or without drafts, by stage."""
        self._chunk_times = [ChunkTimes() for _ in range(stages)]
        self._early_times = [ChunkTimes() for _ in range(stages)]
        """Times of chunks with few tokens before them, by stage if there are several."""
        self._late: set[int] = set()  # Steps with other chunks.
        self._credit_us = 0.0
        """Time saved for prompts; below 0, prompts took more than their share."""
        self._earned_us = 0.0
        """Time that the last decode step added."""
        self._charged: dict[int, tuple[int, float]] = {}
        """Slowest stage of each step with chunks beside decode, and the time charged for it."""
        self._draft_us = [RunningMean() for _ in range(stages)]
        """Time that a draft token adds to a decode step, by stage."""
        self._is_measured = False
        self._smallest_us = self._largest_us = self._most_us = 0.0

    def record(self, timing: StepTiming, *, is_prefill: bool) -> None:
        """Learn from the answer of a stage's first rank; the others of a group wait for each other."""
        stage = timing.rank.stage
        if not timing.tokens or timing.rank.rank:
            return
        if is_prefill:
            self.record_chunk(stage, timing.step, timing.tokens, timing.compute_us)
        else:
            self.record_decode(stage, timing.rows, timing.tokens, timing.compute_us)

    def record_chunk(self, stage: int, step: int, tokens: int, compute_us: float) -> None:
        """Learn from a prefill step of some tokens on a stage."""
        self._chunk_times[stage].record(tokens, compute_us)
        if self._stages > 1 and step not in self._late:
            self._early_times[stage].record(tokens, compute_us)
        self._is_measured = all(times.sizes[0] for times in self._chunk_times)
        self._smallest_us, self._largest_us = self._chunk_us(SMALLEST_CHUNK), self._chunk_us(self._chunk)
        self._most_us = max(self._smallest_us, min(self._largest_us, _STEPS_SAVED * self._earned_us))
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

    def _earn(self) -> None:
        """Save the time that a decode step leaves to prompts, which is the same on every stage as on the slowest."""
        slowest = 0.0
        for plain, step in zip(self._decode_us, self._any_decode_us, strict=True):
            us = plain.value or step.value
            slowest = us if us is not None and us > slowest else slowest
        self._earned_us = self._left * slowest
        self._most_us = max(self._smallest_us, min(self._largest_us, _STEPS_SAVED * self._earned_us))
        self._credit_us = min(self._most_us, self._credit_us + self._earned_us)

    def _chunk_us(self, tokens: int) -> float:
        """Return the time of a chunk on the slowest stage."""
        return max(times.us(tokens) for times in self._chunk_times)

    def measured_us(self, tokens: int) -> float | None:
        """Return the time of a chunk on the slowest stage; None until every stage has computed one."""
        return self._chunk_us(tokens) if self._is_measured else None

    def early_us(self, tokens: int) -> float | None:
        """Return the time of a chunk with few tokens before it, on the slowest of several stages.

        None if no unlike chunks are measured, and below half of the smallest.
        """
        each = [times.sizes for times in self._early_times]
        if all(2 * tokens >= smallest and smallest < _APART * largest for smallest, largest in each):
            return max(times.us(tokens) for times in self._early_times)
        return None

    @property
    def largest_early(self) -> int:
        """Largest chunk with few tokens before it; 0 if there is none."""
        return min(times.sizes[1] for times in self._early_times)

    def beside_decode(self) -> int:
        """Return the most tokens of a chunk beside answers in progress; 0 until more time is saved."""
        if not self._is_measured:
            return min(self._chunk, SMALLEST_CHUNK)
        if self.is_saving:
            return 0
        most = min(times.most(self._credit_us) for times in self._chunk_times)
        return min(self._chunk, max(SMALLEST_CHUNK, most))

    @property
    def is_saving(self) -> bool:
        """True while too little time is saved for a chunk beside decode, if need be that of several steps for a larger one."""
        if not self._is_measured or self._credit_us < self._smallest_us:
            return self._is_measured
        is_short = self._left < 1.0 or self._earned_us < self._smallest_us
        return is_short and self._credit_us < self._most_us

    def sent(self, step: int, tokens: int, before: int = 0, *, beside_decode: bool) -> None:
        """Charge the prompt tokens of a step that is sent, which has so many tokens before them."""
        if before > _EARLY:
            self._late = {late for late in self._late if late > step - _REMEMBERED} | {step}
        if beside_decode:
            costs_us = [times.us(tokens) for times in self._chunk_times]
            us = max(costs_us)
            self._credit_us -= us
            self._charged[step] = costs_us.index(us), us

    def _settle(self, stage: int, step: int, compute_us: float) -> None:
        """Correct the charge of a chunk to its measured time, and forget those of failed steps before it."""
        for earlier, (slowest, charged) in [*self._charged.items()]:
            if earlier > step or slowest != stage:
                continue
            del self._charged[earlier]
            if earlier == step:
                # One long stall must not keep prompts waiting for thousands of steps.
                most_us = _MOST_DEBT * self._most_us
                self._credit_us = max(-most_us, self._credit_us + charged - compute_us)

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


_STALL = 4
"""Multiple of the median round as which a longer one counts."""


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
    last: tuple[AlikeSteps, ...] = ()
    """The last decode steps, by tokens. A row has several tokens in a step with drafts."""


@dataclass(frozen=True, slots=True)
class StreamPace:
    """Speed of a stream that ran alone, without drafts."""

    token_us: float
    """Median time from one token to the next."""
    tokens: int
    """Number of tokens."""
    context_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeRound:
    """Time of a micro-batch from one decode step to its next, while only decode steps ran."""

    batches: int
    """Number of micro-batches that took turns."""
    rows: int
    """Sequences of the micro-batch."""
    tokens: int
    """Median number of tokens of a step. With drafts, rows have several."""
    rounds: int
    """Number of measured rounds."""
    context_tokens: int
    round_us: float
    """Mean microseconds, all stages, hops and waits included. It is what streams wait; a rare long stall counts in part."""
    compute_us: tuple[float, ...]
    """Median microseconds in which each stage computed."""
    mean_us: tuple[float, ...]
    """Mean ones, which show at once that a machine has become slower."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of all stages."""

    stages: tuple[StageTimes, ...] = ()
    stream: StreamPace | None = None
    """Speed of a single stream; None before there was one."""
    round: DecodeRound | None = None
    """The most frequent kind of rounds; None before two steps of a micro-batch in a row."""


def pace_of(last_stage: Iterable[StepTiming]) -> StreamPace | None:
    """Return the speed from consecutive steps of one sequence, without other steps between them."""
    pairs = [
        (before, after)
        for before, after in pairwise(last_stage)
        if before.rows == after.rows == 1
        and before.sequence == after.sequence > 0
        and after.step == before.step + 1
    ]
    if not pairs:
        return None
    return StreamPace(
        token_us=median(after.finished_us - before.finished_us for before, after in pairs),
        tokens=len(pairs),
        context_tokens=int(median(after.context_tokens for _, after in pairs)),
    )


def round_of(stages: list[Collection[StepTiming]]) -> DecodeRound | None:
    """Return the time between steps of one micro-batch, from those with only decode steps between them.

    Sequences that continue stay in the order of a micro-batch's rows, so the first one tells which it is.
    """
    compute_us = [{timing.step: timing.compute_us for timing in stage} for stage in stages]
    kinds: dict[tuple[int, int], list[tuple[int, StepTiming]]] = defaultdict(list)
    latest: dict[int, tuple[int, StepTiming]] = {}
    for place, timing in enumerate(stages[-1] if stages else ()):
        since, before = latest.get(timing.sequence, (place, timing))
        steps = timing.step - before.step
        is_alike = before.rows == timing.rows and all(timing.step in each for each in compute_us)
        if timing.sequence and is_alike and 0 < steps == place - since:
            kinds[steps, timing.rows].append((timing.finished_us - before.finished_us, timing))
        latest[timing.sequence] = place, timing
    if not kinds:
        return None
    (batches, rows), found = max(kinds.items(), key=lambda kind: len(kind[1]))
    return DecodeRound(
        batches=batches,
        rows=rows,
        tokens=int(median(timing.tokens for _, timing in found)),
        rounds=len(found),
        context_tokens=int(median(timing.context_tokens for _, timing in found)),
        round_us=_mean_without_stalls([round_us for round_us, _ in found]),
        compute_us=tuple(median(each[timing.step] for _, timing in found) for each in compute_us),
        mean_us=tuple(_mean_without_stalls([each[one.step] for _, one in found]) for each in compute_us),
    )


def _mean_without_stalls(times_us: list[int]) -> float:
    most = _STALL * median(times_us)
    return fmean(min(each, most) for each in times_us)
