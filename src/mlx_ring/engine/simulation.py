"""Simulation of a pipeline with given stage times, and its outcome. Pure and deterministic.

Stages execute steps in stream order. A step begins on a stage when the stage is free and its activations have
arrived. On the first stage, the tokens that its rows take from earlier steps must have arrived too. Everything that a
step waits for was sent before it, so its times are known at once. Only messages that reach the head are events.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from math import ceil, inf
from typing import Generic, Protocol, TypeVar

from mlx_ring.engine.rows import tokens_fed
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.rpc.protos.step_pb2 import Want

_MICRO = 1e6

Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)


# ---- the outcome; times are in seconds


@dataclass(frozen=True, slots=True)
class Work:
    """One step on one stage."""

    step: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Bubble:
    """A stage without work between two steps."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class StageUse:
    """Work of a stage, in order, without steps that cost nothing."""

    work: tuple[Work, ...]

    def busy_s(self, begin_s: float = 0.0, end_s: float = inf) -> float:
        """Return the busy seconds within a span of time."""
        return sum(max(0.0, min(one.end_s, end_s) - max(one.begin_s, begin_s)) for one in self.work)

    def utilization(self, begin_s: float, end_s: float) -> float:
        """Return the busy share of a span of time."""
        return self.busy_s(begin_s, end_s) / (end_s - begin_s)

    def bubbles(self, begin_s: float = 0.0, end_s: float = inf) -> tuple[Bubble, ...]:
        """Return the gaps without work between two steps, within a span of time."""
        gaps = (
            Bubble(max(one.end_s, begin_s), min(following.begin_s, end_s))
            for one, following in pairwise(self.work)
        )
        return tuple(gap for gap in gaps if gap.length_s > 0)


@dataclass(frozen=True, slots=True)
class SequenceTimes:
    """Times at which the head received each of a sequence's tokens; there is one at least."""

    tokens_s: tuple[float, ...]

    @property
    def first_token_s(self) -> float:
        return self.tokens_s[0]

    @property
    def end_s(self) -> float:
        return self.tokens_s[-1]

    def gaps_s(self, begin_s: float = 0.0, end_s: float = inf) -> Iterator[float]:
        """Yield the seconds from token to token, within a span of time."""
        for earlier, later in pairwise(self.tokens_s):
            if begin_s <= earlier and later <= end_s:
                yield later - earlier


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of a simulation."""

    elapsed_s: float
    """Time of the last event at the head."""
    stages: tuple[StageUse, ...]
    sequences: Mapping[int, SequenceTimes]
    """Those that got a token."""
    steps: int
    most_in_flight: int
    """Steps with rows that the last stage had not answered."""

    def tokens_per_s(self, begin_s: float, end_s: float) -> float:
        """Return the throughput within a span of time."""
        came = sum(begin_s < at <= end_s for times in self.sequences.values() for at in times.tokens_s)
        return came / (end_s - begin_s)

    def itl_s(self, percent: float, begin_s: float = 0.0, end_s: float = inf) -> float:
        """Return a percentile (nearest rank) of the times between tokens of all sequences; 0 without any."""
        gaps = sorted(gap for times in self.sequences.values() for gap in times.gaps_s(begin_s, end_s))
        return gaps[max(0, ceil(percent / 100 * len(gaps)) - 1)] if gaps else 0.0


# ---- the simulation


class StepMaker(Protocol[Answer_co]):
    """Maker of steps from rows: the engine's scheduler, or a policy of the planner."""

    def schedule(self, now: float) -> Sequence[step_pb2.Step]:
        """Return every step that can start now."""
        ...

    def on_answer(self, done: step_pb2.StepDone, now: float) -> Answer_co:
        """Take one stage's answer to one step."""
        ...


@dataclass(frozen=True, slots=True)
class Times:
    """Durations in seconds."""

    stage_s: Callable[[int, step_pb2.Step], float]
    """A step on a stage; `costs.py` has some."""
    hop_s: float = 0.0
    """Seconds from the end of a step on a stage until its message has arrived."""
    head_s: float = 0.0
    """Seconds from the head to a stage, and from there back."""
    head_event_s: float = 0.0
    """Seconds that the head needs for one answer or arrival, one at a time, before it sends the resulting steps."""


Arrival = tuple[float, Callable[[float], None]]
"""Time and action of an event at the head, such as a request or a client that leaves; the action gets the time."""
Sampler = Callable[[int, int], int]
"""The token at a position of a sequence; a draft is accepted as far as it says the same."""
Taken = Callable[[Answer], Iterable[tuple[int, int]]]
"""Number of tokens of an answer by sequence, as the maker of the steps counts them."""


def any_token(_sequence: int, _position: int) -> int:
    """Model that always gives the same answer."""
    return 1


class Simulation(Generic[Answer]):
    """One run of a step maker over stages."""

    def __init__(
        self,
        maker: StepMaker[Answer],
        times: Times,
        stages: int,
        *,
        sample: Sampler = any_token,
        taken: Taken[Answer] | None = None,
    ) -> None:
        """Prepare the run; without `taken` every sampled token counts, even if the step maker drops it."""
        self._maker = maker
        self._times = times
        self._sample = sample
        self._taken = taken
        self._free_at = [0.0] * stages
        self._work: list[list[Work]] = [[] for _ in range(stages)]
        self._sampled_at: dict[int, float] = {}
        """Time at which the last stage will have sampled, by sequence."""
        self._tokens_s: dict[int, list[float]] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._steps = self._in_flight = self._most_in_flight = 0

    def run(self, arrivals: Sequence[Arrival], *, until_s: float = inf) -> Outcome:
        """Run until nothing more happens or the time is up; an endless step maker needs `until_s`."""
        for at, happens in arrivals:
            self._push(at, happens)
        now = 0.0
        while self._events:
            reaches, _, happens = heapq.heappop(self._events)
            done = max(now, reaches) + self._times.head_event_s
            if done > until_s:
                break
            now = done
            happens(now)
            for step in self._maker.schedule(now):
                self._send(step, now)
        return Outcome(
            elapsed_s=now,
            stages=tuple(StageUse(tuple(work)) for work in self._work),
            sequences={number: SequenceTimes(tuple(times)) for number, times in self._tokens_s.items()},
            steps=self._steps,
            most_in_flight=self._most_in_flight,
        )

    def _push(self, at: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), happens))

    # ---- a step passes through the stages

    def _send(self, step: step_pb2.Step, now: float) -> None:
        self._steps += 1
        self._in_flight += bool(step.rows)
        self._most_in_flight = max(self._most_in_flight, self._in_flight)
        arrives = now + self._times.head_s
        ready = max([arrives, *self._tokens_ready(step)])
        last = len(self._work) - 1
        for stage in range(len(self._work)):
            work = self._execute(step, stage, ready if step.rows else arrives)
            # The head sends to every stage itself; a later one has what it needs when the one before hands it on.
            ready = max(arrives, work.end_s + self._times.hop_s)
            if stage == last:
                self._sampled_at.update({row.sequence: work.end_s for row in step.rows if _samples(row)})
            done = self._done(step, stage, work)
            if stage == last:
                done.results.extend(map(self._result, step.rows))
            self._push(
                work.end_s + self._times.head_s, self._answer(done, lands=stage == last and bool(step.rows))
            )

    def _execute(self, step: step_pb2.Step, stage: int, ready: float) -> Work:
        begin = max(self._free_at[stage], ready)
        end = self._free_at[stage] = begin + self._times.stage_s(stage, step)
        work = Work(step.step, begin, end)
        if end > begin:
            self._work[stage].append(work)
        return work

    def _tokens_ready(self, step: step_pb2.Step) -> Iterator[float]:
        """Return the time at which the first stage has the tokens that the rows take from earlier steps."""
        hop = self._times.hop_s if len(self._work) > 1 else 0.0
        for row in step.rows:
            if row.previous and row.sequence in self._sampled_at:
                yield self._sampled_at[row.sequence] + hop

    def _done(self, step: step_pb2.Step, stage: int, work: Work) -> step_pb2.StepDone:
        began, ended = round(work.begin_s * _MICRO), round(work.end_s * _MICRO)
        timings = step_pb2.Timings(started_us=began, finished_us=ended, compute_us=ended - began)
        return step_pb2.StepDone(
            instance=step.instance, epoch=step.epoch, step=step.step, stage=stage, timings=timings
        )

    def _result(self, row: step_pb2.Row) -> step_pb2.RowResult:
        """Return one token, and one more for each accepted draft token."""
        result = step_pb2.RowResult(sequence=row.sequence)
        if not _samples(row):
            return result
        position = row.start + tokens_fed(row) - len(row.draft)
        for place in range(len(row.draft) + 1):
            token = self._sample(row.sequence, position + place)
            result.tokens.append(step_pb2.TokenLogprobs(token=token))
            if place < len(row.draft) and row.draft[place] != token:
                break
        return result

    # ---- and its answers come back

    def _answer(self, done: step_pb2.StepDone, *, lands: bool) -> Callable[[float], None]:
        def answer(now: float) -> None:
            self._in_flight -= lands
            answer = self._maker.on_answer(done, now)
            sampled = ((result.sequence, len(result.tokens)) for result in done.results)
            for sequence, tokens in sampled if self._taken is None else self._taken(answer):
                if tokens:
                    self._tokens_s.setdefault(sequence, []).extend([now] * tokens)

        return answer


def _samples(row: step_pb2.Row) -> bool:
    return any(want.what == Want.TOKEN for want in row.wants)
