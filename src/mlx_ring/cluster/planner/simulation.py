"""A pipeline by the clock: whoever makes steps meets stages of given times. Pure, and the same every time.

Stages execute steps in stream order. A step begins on a stage when the stage is free, its activations have come, and,
on the first stage, the tokens have come that its rows take from the steps before. Everything that a step waits for
was sent before it, so its times are known the moment it is sent; only answers are events.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Protocol

from mlx_ring.rpc.protos import step_pb2
from mlx_ring.rpc.protos.step_pb2 import Want

_MICRO = 1e6


class StepMaker(Protocol):
    """Whoever decides which rows go into which step: the engine's scheduler, or a policy of a planner's own."""

    def schedule(self, now: float) -> Sequence[step_pb2.Step]:
        """Every step that can go out now."""
        ...

    def answer(self, done: step_pb2.StepDone, now: float) -> object:
        """Take one stage's answer to one step."""
        ...


@dataclass(frozen=True, slots=True)
class Times:
    """How long things take, seconds."""

    stage_s: Callable[[int, step_pb2.Step], float]
    """A step on a stage."""
    hop_s: float = 0.0
    """From the end of a step on a stage to what it sends being where it is wanted."""
    head_s: float = 0.0
    """From the head to a stage, and from there back."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A stage's time for a step: by pass, by token and by token of context that is looked at."""

    per_step_s: float
    per_token_s: float
    per_context_s: float = 0.0

    def __call__(self, step: step_pb2.Step) -> float:
        tokens = sum(map(_tokens, step.rows))
        seen = sum(_tokens(row) * row.start for row in step.rows)
        return self.per_step_s + self.per_token_s * tokens + self.per_context_s * seen if step.rows else 0.0


Arrival = tuple[float, Callable[[float], None]]
"""When something happens at the head, and what: a request comes, a client leaves. It is told the time."""
Sampler = Callable[[int, int], int]
"""The token at a position of a sequence."""


def any_token(_sequence: int, _position: int) -> int:
    """A model that says the same always."""
    return 1


@dataclass(slots=True)
class Simulated:
    """What happened. Seconds."""

    stages: int
    elapsed_s: float = 0.0
    busy_s: list[float] = field(default_factory=list[float])
    """By stage."""
    tokens_s: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """By sequence, when the head had each token."""
    steps: int = 0
    most_in_flight: int = 0
    """Steps with rows that the last stage had not answered."""

    @property
    def utilisation(self) -> list[float]:
        """By stage, the share of the time in which it computed."""
        return [busy / self.elapsed_s if self.elapsed_s else 0.0 for busy in self.busy_s]

    def tokens_per_s(self, begin_s: float, end_s: float) -> float:
        """Tokens that came in a span of time, over its length."""
        came = sum(begin_s < at <= end_s for times in self.tokens_s.values() for at in times)
        return came / (end_s - begin_s)

    def gaps_s(self, sequence: int) -> list[float]:
        """Between a sequence's tokens."""
        return [later - earlier for earlier, later in pairwise(self.tokens_s.get(sequence, ()))]


class Simulation:
    """One run of a step maker over stages."""

    def __init__(self, maker: StepMaker, times: Times, stages: int, sample: Sampler = any_token) -> None:
        self._maker = maker
        self._times = times
        self._sample = sample
        self._free_at = [0.0] * stages
        self._sampled_at: dict[int, float] = {}
        """By sequence, when the last stage will have sampled for it."""
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._in_flight = 0
        self.result = Simulated(stages, busy_s=[0.0] * stages)

    def run(self, arrivals: Sequence[Arrival], *, until_s: float = float("inf")) -> Simulated:
        """Until nothing more happens, or the time is up."""
        for at, happens in arrivals:
            self._push(at, happens)
        while self._events and self._events[0][0] <= until_s:
            now, _, happens = heapq.heappop(self._events)
            self.result.elapsed_s = now
            happens(now)
            for step in self._maker.schedule(now):
                self._send(step, now)
        return self.result

    def _push(self, at: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), happens))

    def _send(self, step: step_pb2.Step, now: float) -> None:
        arrives = now + self._times.head_s
        ready = max([arrives, *self._tokens_ready(step)])
        results: list[step_pb2.RowResult] = []
        last = len(self._free_at) - 1
        self.result.steps += 1
        if step.rows:
            self._in_flight += 1
            self.result.most_in_flight = max(self.result.most_in_flight, self._in_flight)
        for stage in range(len(self._free_at)):
            cost = self._times.stage_s(stage, step)
            begin = max(self._free_at[stage], ready if step.rows else arrives)
            end = self._free_at[stage] = begin + cost
            self.result.busy_s[stage] += cost
            ready = end + self._times.hop_s
            if stage == last:
                results = [self._result(row) for row in step.rows]
                self._sampled_at.update({row.sequence: end for row in step.rows if row.wants})
            done = step_pb2.StepDone(instance=step.instance, epoch=step.epoch, step=step.step, stage=stage)
            done.results.extend(results if stage == last else ())
            done.timings.CopyFrom(
                step_pb2.Timings(
                    started_us=round(begin * _MICRO),
                    finished_us=round(end * _MICRO),
                    compute_us=round(cost * _MICRO),
                )
            )
            self._push(
                end + self._times.head_s, self._answer(done, is_last=stage == last and bool(step.rows))
            )

    def _answer(self, done: step_pb2.StepDone, *, is_last: bool) -> Callable[[float], None]:
        def answer(now: float) -> None:
            self._in_flight -= is_last
            for result in done.results:
                self.result.tokens_s.setdefault(result.sequence, []).extend([now] * len(result.tokens))
            self._maker.answer(done, now)

        return answer

    def _tokens_ready(self, step: step_pb2.Step) -> Iterator[float]:
        """When the first stage has the tokens that the step's rows take from the steps before."""
        hop = self._times.hop_s if len(self._free_at) > 1 else 0.0
        for row in step.rows:
            if row.previous:
                yield self._sampled_at.get(row.sequence, 0.0) + hop

    def _result(self, row: step_pb2.Row) -> step_pb2.RowResult:
        result = step_pb2.RowResult(sequence=row.sequence)
        if any(want.what == Want.TOKEN for want in row.wants):
            position = row.start + _tokens(row) - len(row.draft)
            for place in range(len(row.draft) + 1):
                token = self._sample(row.sequence, position + place)
                result.tokens.append(step_pb2.TokenLogprobs(token=token))
                if place < len(row.draft) and row.draft[place] != token:
                    break
        return result


class DecodeLoop:
    """Groups of sequences that decode for ever, each with some steps under way: a planner's question in its plainest form."""

    def __init__(self, groups: Sequence[int], steps_ahead: int = 2) -> None:
        """`groups` gives the rows of each."""
        self._groups = list(groups)
        self._steps_ahead = steps_ahead
        self._unanswered = [0] * len(groups)
        self._rounds = [0] * len(groups)
        self._group_of: dict[int, int] = {}
        self._stages_left: dict[int, int] = {}
        self._sent = 0

    def schedule(self, now: float) -> list[step_pb2.Step]:
        del now
        steps: list[step_pb2.Step] = []
        while (group := self._next()) is not None:
            self._sent += 1
            self._unanswered[group] += 1
            self._rounds[group] += 1
            self._group_of[self._sent] = group
            rows = [
                step_pb2.Row(
                    sequence=group << 20 | row,
                    start=self._rounds[group],
                    previous=True,
                    wants=[Want(where=Want.LAST, what=Want.TOKEN)],
                )
                for row in range(self._groups[group])
            ]
            steps.append(step_pb2.Step(step=self._sent, rows=rows))
        return steps

    def _next(self) -> int | None:
        """The group that has stepped least, where it may step."""
        group = min(range(len(self._groups)), key=lambda index: (self._rounds[index], index))
        return group if self._unanswered[group] < self._steps_ahead else None

    def answer(self, done: step_pb2.StepDone, now: float) -> None:
        del now
        if done.results:
            self._unanswered[self._group_of.pop(done.step)] -= 1


def predict_throughput(
    stage_s: Sequence[float],
    groups: Sequence[int],
    *,
    steps_ahead: int = 2,
    hop_s: float = 0.0,
    head_s: float = 0.0,
) -> float:
    """Output tokens a second of a pipeline that is full.

    Args:
        stage_s: what one group's decode step takes on each stage.
        groups: rows of each decode group.
        steps_ahead: decode steps of one group that are under way at once.
        hop_s: between stages, and from the last to the first.
        head_s: between head and stages, one way.
    """
    times = Times(lambda stage, _step: stage_s[stage], hop_s, head_s)
    round_s = sum(stage_s) * max(1, len(groups)) + head_s
    simulation = Simulation(DecodeLoop(groups, steps_ahead), times, len(stage_s))
    result = simulation.run([(0.0, lambda _now: None)], until_s=60 * round_s)
    return result.tokens_per_s(20 * round_s, 60 * round_s)


def _tokens(row: step_pb2.Row) -> int:
    return (len(row.tokens.ids) or 1) + len(row.draft)
