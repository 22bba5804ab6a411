"""Events of a simulation, and stages of instances that may share the speed of machines in it. Pure."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from mlx_ring.engine.simulated_load import Cohort, Outcome, Prompts, Sent, SimulatedInstance, StepCounts

_MICRO = 1e6
Call = Callable[[Any, int, float], None]
"""Function that is called at an event, with its subject, a stage and the time."""


class Events:
    """Events to come, the next one first."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Call, int, Any]] = []
        self._number = 0

    def push(self, at_s: float, call: Call, stage: int, subject: object) -> None:
        """Add an event; of several at the same time, the one that was added first comes first."""
        self._number += 1
        heapq.heappush(self.heap, (at_s, self._number, call, stage, subject))


class EventInstance(Protocol):
    """An instance from the point of view of its events."""

    @property
    def waiting(self) -> Sized:
        """Requests that wait."""
        ...

    def note_waiting(self, seconds: float, since: float, /) -> None:
        """Note that requests waited for some seconds from a moment on."""
        ...

    def repeat(self, until_s: float, /) -> float:
        """Answer steps before a time while they only repeat; return the last time, or 0 for none."""
        ...


class EventLine:
    """Events of an instance, or of several that share machines."""

    def __init__(self, events: Events, instances: Sequence[EventInstance], *, repeats: bool) -> None:
        """Prepare the line; with `repeats`, the instance answers steps that repeat by itself."""
        self._events, self._instances, self._repeats, self._now = events.heap, instances, repeats, 0.0

    def next_s(self) -> float:
        """Return the time of the next event; infinite without any."""
        return self._events[0][0] if self._events else inf

    def run_until(self, until_s: float) -> None:
        """Run the events before a time."""
        (instance, *_), repeats, events = self._instances, self._repeats, self._events
        while events and events[0][0] < until_s:
            if repeats and (now := instance.repeat(until_s)):
                self._pass(now)
            else:
                self.run_next()
        if until_s < inf:
            self._pass(until_s)

    def run_next(self) -> None:
        """Run the next event."""
        now, _, call, stage, subject = heapq.heappop(self._events)
        self._pass(now)
        call(subject, stage, now)

    def _pass(self, now: float) -> None:
        for instance in self._instances:
            if instance.waiting:
                instance.note_waiting(now - self._now, self._now)
        self._now = now


class SharedMachines:
    """Machines whose speed is shared by the stages that compute on them at the same time.

    While a machine's stages ask for more than it can run at once, each computes as much slower.
    """

    def __init__(self, most: Sequence[float], parts: Sequence[Mapping[int, float]]) -> None:
        """Prepare the machines.

        Args:
            most: number of workers that each machine runs at once at full speed.
            parts: number of workers of each stage, by machine.
        """
        self._most, self._parts = tuple(most), tuple(parts)
        self._left_s: dict[int, float] = {}
        """Seconds that the step of each computing stage would still take alone ..."""
        self._speeds: dict[int, float] = {}
        """... and the speed at which it is computed, relative to that."""
        self._at_s = 0.0

    def begin(self, stage: int, seconds: float, now: float) -> None:
        """Begin a step on an idle stage, which takes so many seconds alone."""
        self._advance(now)
        self._left_s[stage] = seconds
        self._share()

    def next_end(self) -> tuple[float, int] | None:
        """Return when the next step ends, and its stage; None if none is computed."""
        each = ((self._at_s + left / self._speeds[stage], stage) for stage, left in self._left_s.items())
        return min(each, default=None)

    def end(self, stage: int, now: float) -> None:
        """End the step on a stage."""
        self._advance(now)
        del self._left_s[stage]
        self._share()

    def _advance(self, now: float) -> None:
        for stage in self._left_s:
            self._left_s[stage] = max(0.0, self._left_s[stage] - (now - self._at_s) * self._speeds[stage])
        self._at_s = now

    def _share(self) -> None:
        taken = [0.0] * len(self._most)
        for stage in self._left_s:
            for machine, part in self._parts[stage].items():
                taken[machine] += part
        self._speeds = {
            stage: min([1.0, *(self._most[machine] / taken[machine] for machine in self._parts[stage])])
            for stage in self._left_s
        }


@dataclass(slots=True, eq=False)
class Work:
    """A step on a stage whose machine also computes others."""

    stage: int
    seconds: float
    """Seconds that it takes alone."""
    on_end: Callable[[Work, float], None]
    ready_s: float = inf
    begin_s: float = 0.0


class SharedStages:
    """Stages that compute one step after the other, each as fast as the others on its machines let it."""

    def __init__(self, machines: SharedMachines, events: Events) -> None:
        self._machines, self._events = machines, events
        self._lines: defaultdict[int, deque[Work]] = defaultdict(deque)
        self._computed: dict[int, Work] = {}
        self._changes = 0

    def add(self, stage: int, seconds: float, on_end: Callable[[Work, float], None]) -> Work:
        """Return a step that is queued on a stage, and begins after it was set ready."""
        work = Work(stage, seconds, on_end)
        self._lines[stage].append(work)
        return work

    def set_ready(self, work: Work, at_s: float, now: float) -> None:
        """Let a step begin at a time, if the steps before it have ended by then."""
        work.ready_s = at_s
        if at_s > now:
            self._events.push(at_s, self._on_ready, work.stage, work)
        else:
            self._on_ready(work, work.stage, now)

    def _on_ready(self, _: object, stage: int, now: float) -> None:
        line = self._lines[stage]
        if stage in self._computed or not line or line[0].ready_s > now:
            return
        work = self._computed[stage] = line.popleft()
        work.begin_s = now
        self._machines.begin(stage, work.seconds, now)
        self._expect()

    def _expect(self) -> None:
        """Expect the next end of a step; what was expected before no longer holds."""
        self._changes += 1
        if (found := self._machines.next_end()) is not None:
            at_s, stage = found
            self._events.push(at_s, self._on_end, stage, self._changes)

    def _on_end(self, change: int, stage: int, now: float) -> None:
        if change != self._changes:
            return
        self._machines.end(stage, now)
        work = self._computed.pop(stage)
        self._expect()
        work.on_end(work, now)
        self._on_ready(None, stage, now)


class StageLine:
    """Stages and links of an instance, through which its steps pass."""

    def __init__(
        self,
        instance: SimulatedInstance,
        first: int,
        events: Events,
        shared: SharedStages | None,
        on_answer: Callable[[Sent, int, float], None],
    ) -> None:
        """Prepare the stages.

        Args:
            instance: the instance.
            first: number of its first stage among those of all instances.
            events: receives the answers of stages.
            shared: stages on shared machines, its own among them; None if it shares none.
            on_answer: called when the head has an answer, with the step, the instance's stage, and the time.
        """
        self._costs, self._stages = instance.costs, instance.stages
        self._first, self._events, self._shared, self._on_answer = first, events, shared, on_answer
        self._free_at = [0.0] * instance.stages
        self._link_free_at = [0.0] * instance.stages
        self._awaited: dict[int, list[tuple[Work, float, float]]] = {}
        """Steps on shared machines that wait for the tokens of an earlier one, by that one."""
        self._head_s = instance.costs.head_s()
        self.outcome = Outcome(0.0, inf)

    def send(
        self,
        sent: Sent,
        now: float,
        seconds: Sequence[float],
        busy: list[float],
        after: Sent | None = None,
        back_s: float = 0.0,
    ) -> None:
        """Pass a step through the stages; `back_s` after its rows' last tokens, those of an earlier step, were sampled.

        Where no machine is shared, steps wait only for what was sent before, so their times are known.
        """
        arrives = now + self._head_s
        if self._shared is not None:
            self._send_shared(self._shared, sent, arrives, seconds, busy, after, back_s)
            return
        ready = arrives if after is None else max(arrives, after.sampled_at + back_s)
        last, outcome, free_at, first = self._stages - 1, self.outcome, self._free_at, self._first
        for stage, computing_s in enumerate(seconds):
            begin = max(ready, free_at[stage])
            end = free_at[stage] = begin + computing_s
            sent.compute_us.append(round(end * _MICRO) - round(begin * _MICRO))
            is_within = outcome.begin_s <= begin and end <= outcome.end_s
            busy[first + stage] += computing_s if is_within else self._within(begin, end)
            if sent.tokens or stage == last:
                self._events.push(end + self._head_s, self._on_answer, stage, sent)
            if stage == last:
                sent.sampled_at = end
                return
            # The head sends to every stage itself; a later one has what it needs when the one before hands it on.
            ready = max(arrives, self._handed_on(sent, stage, end))

    def repeat(
        self, cohort: Cohort, counts: StepCounts, prompts: Prompts, until_s: float, steps_ahead: int
    ) -> bool:
        """Answer steps of a lone stage before a time and send the next ones, while they differ in context and chunks only.

        As many decode steps as may be are in flight. Of prompts, only chunks of the first one are sent, except its last. Return True if another chunk may go now.
        """
        events, outcome, head_s, free_at = self._events.heap, self.outcome, self._head_s, self._free_at
        in_flight, batch, change, rows = cohort.in_flight, cohort.batch, cohort.next_change, cohort.counted
        sizer, decode_s, on_answer = prompts.sizer, self._costs.decode_s, self._on_answer
        spares = bool(prompts) and prompts.has_to_spare()
        first = prompts.lone_first() if spares else None
        decode_busy, begin_s, end_s = outcome.decode_s, outcome.begin_s, outcome.end_s
        while events and events[0][0] < until_s:
            now, _, _, _, sent = events[0]
            if sent.single or not sent.tokens or cohort.sent + 1 >= change:
                break
            heapq.heappop(events)
            tokens = sent.tokens
            counts.completed, counts.last_s = sent.step, now
            if sent.cohort is None:
                sizer.record_chunk(0, sent.step, tokens, sent.compute_us[0])
                counts.prefills -= 1
            else:
                in_flight.popleft()
                sizer.record_decode(0, tokens, tokens, sent.compute_us[0])
                if begin_s <= now <= end_s:
                    outcome.note_step(now - cohort.answered_at, tokens)
                cohort.answered, cohort.answered_at = sent.number, now
                while len(in_flight) < steps_ahead:
                    begin = max(now + head_s, free_at[0])
                    seconds = decode_s(0, rows, cohort.context / rows)
                    end = free_at[0] = begin + seconds
                    is_within = begin_s <= begin and end <= end_s
                    decode_busy[self._first] += seconds if is_within else self._within(begin, end)
                    compute_us = round(end * _MICRO) - round(begin * _MICRO)
                    counts.sent, cohort.sent, cohort.context = (
                        counts.sent + 1,
                        cohort.sent + 1,
                        cohort.context + rows,
                    )
                    sent = Sent(counts.sent, rows, cohort, cohort.sent, rows, [], [compute_us], end)
                    in_flight.append(sent)
                    batch.last_step = sent.step
                    self._events.push(end + head_s, on_answer, 0, sent)
                batch.in_flight = len(in_flight)
            if not prompts or (spares and sizer.is_saving):
                continue
            if first is None:
                return True
            if counts.prefills > 1 or batch.last_step <= prompts.last_step:
                continue
            size = sizer.beside_decode()
            if size >= first.fill_to - first.scheduled:
                return True
            sent = Sent(counts.sent + 1, size)
            spans = [prompts.read(first, size, sent.step)]
            counts.sent, counts.prefills = sent.step, counts.prefills + 1
            self.send(sent, now, [self._costs.chunk_s(0, spans)], outcome.prefill_s)
        return False

    def _send_shared(
        self,
        shared: SharedStages,
        sent: Sent,
        arrives: float,
        seconds: Sequence[float],
        busy: list[float],
        after: Sent | None,
        back_s: float,
    ) -> None:
        """Queue a step on all stages; each begins when the one before is over."""

        def on_end(work: Work, now: float) -> None:
            stage = work.stage - self._first
            sent.compute_us.append(round(now * _MICRO) - round(work.begin_s * _MICRO))
            measured = self._within(work.begin_s, now) / max(now - work.begin_s, 1e-12)
            busy[work.stage] += work.seconds * measured
            if sent.tokens or stage == self._stages - 1:
                self._events.push(now + self._head_s, self._on_answer, stage, sent)
            if stage < self._stages - 1:
                ready = max(arrives, self._handed_on(sent, stage, now))
                shared.set_ready(works[stage + 1], ready, now)
                return
            sent.sampled_at = now
            for waiting, ready, more_s in self._awaited.pop(sent.step, ()):
                shared.set_ready(waiting, max(ready, now + more_s), now)

        works = [shared.add(self._first + stage, each, on_end) for stage, each in enumerate(seconds)]
        if after is None or after.sampled_at < inf:
            known = 0.0 if after is None else after.sampled_at + back_s
            shared.set_ready(works[0], max(arrives, known), arrives - self._head_s)
        else:
            self._awaited.setdefault(after.step, []).append((works[0], arrives, back_s))

    def _handed_on(self, sent: Sent, stage: int, end: float) -> float:
        """Return when the activations of a step that ended on a stage have arrived behind it."""
        latency_s, occupied_s = self._costs.hop_s(stage, sent.tokens)
        starts = max(end, self._link_free_at[stage])
        self._link_free_at[stage] = starts + occupied_s
        self.outcome.link_s[self._first + stage] += self._within(starts, starts + occupied_s)
        return starts + latency_s

    def _within(self, begin: float, end: float) -> float:
        """Return the seconds of a span that are measured."""
        return max(0.0, min(end, self.outcome.end_s) - max(begin, self.outcome.begin_s))
