"""Simulation of an instance under load: the scheduler's policy over stages of predicted times. Pure and deterministic.

The sequences of a micro-batch decode in the same steps, so a step counts its rows. A sequence is looked at when it joins
its micro-batch, needs another block of KV memory, moves, is preempted or ends. Chunk sizes, turns, the queue of prompts
and the account of KV memory are the engine's own. Speculative decoding is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from operator import attrgetter

from mlx_ring.core.engine_stats import Policy
from mlx_ring.engine.decode import MicroBatch, MicroBatches
from mlx_ring.engine.kv_budget import KvBudget
from mlx_ring.engine.prefill import SEQUENCE_TOKENS
from mlx_ring.engine.shared_stages import EventLine, Events, SharedMachines, SharedStages, StageLine
from mlx_ring.engine.simulated_load import (
    Cohort,
    CountedKv,
    Outcome,
    Prompts,
    Sent,
    SimulatedInstance,
    StepCounts,
    Stream,
)
from mlx_ring.engine.step_times import ChunkSizer
from mlx_ring.planner.request import SimulatedRequest


class Simulation:
    """One run of an instance's scheduler over stages, or of several instances whose stages share machines."""

    def __init__(
        self,
        instances: Sequence[SimulatedInstance],
        policy: Policy,
        *,
        shared: SharedMachines | None = None,
        most_waiting: int | None = None,
        is_over: Callable[[Outcome], bool] = lambda _: False,
        ends_early: bool = True,
        repeats: bool = True,
    ) -> None:
        """Prepare the run.

        Args:
            instances: stages of each instance; a request goes to the one with the fewest tokens ahead, as `Router` has it.
            policy: the scheduler's settings of each; without speculative decoding.
            shared: machines of all stages, of one instance after the other; None if no machine has several stages.
            most_waiting: number of waiting requests beyond which they queue up; None for no limit.
            is_over: called at each arrival; the run ends if it returns True.
            ends_early: True if the run also ends once requests queue up.
            repeats: False to look at every step alone, also at one like the step before. The outcome is the same.
        """
        firsts = accumulate((instance.stages for instance in instances), initial=0)
        together = None if shared is None else Events()
        stages = None if shared is None or together is None else SharedStages(shared, together)
        own = [together or Events() for _ in instances]
        self._instances = [
            _Instance(instance, first, policy, events, stages)
            for instance, first, events in zip(instances, firsts, own, strict=False)
        ]
        each = zip(own, self._instances, strict=True)
        self._lines = [EventLine(events, [instance], repeats=repeats) for events, instance in each]
        if together is not None:
            self._lines = [EventLine(together, self._instances, repeats=False)]
        self._stages = sum(instance.stages for instance in instances)
        self._most_waiting = inf if most_waiting is None else most_waiting
        self._is_over = is_over
        self._ends_early = ends_early

    def run(self, requests: Sequence[SimulatedRequest], *, skipped: int = 0, drains: bool = True) -> Outcome:
        """Run the requests, in order of arrival, and measure those after the first `skipped` ones.

        With `drains` the run and the measured span end with the last answer, else with the last first token. The span then
        ends with the last arrival if the run may end early.
        """
        begin_s = requests[skipped].at_s if skipped < len(requests) else inf
        outcome = Outcome(begin_s, inf if drains or not self._ends_early else requests[-1].at_s)
        for part in (outcome.prefill_s, outcome.decode_s, outcome.link_s):
            part.extend([0.0] * self._stages)
        for instance in self._instances:
            instance.measure(outcome)
        now, is_ended = 0.0, False
        for number, request in enumerate(requests, 1):
            now = request.at_s
            for line in self._lines:
                line.run_until(now)
            queues = sum(len(one.waiting) for one in self._instances) > self._most_waiting
            outcome.is_overrun |= queues
            if (queues and self._ends_early) or self._is_over(outcome):
                outcome.is_overrun = is_ended = True
                break
            _least_loaded(self._instances, number).add(number, request, now)
        if not is_ended:
            self._finish(outcome, inf if drains else len(requests) - skipped)
        outcome.elapsed_s = now if is_ended else max(each.counts.last_s for each in self._instances)
        outcome.end_s = min(outcome.end_s, outcome.elapsed_s)
        return outcome

    def _finish(self, outcome: Outcome, first_tokens: float) -> None:
        """Run on without arrivals, until so many first tokens were measured or all is answered."""
        while len(outcome.first_token_s) != first_tokens:
            line = min(self._lines, key=EventLine.next_s)
            if line.next_s() == inf:
                return
            if first_tokens == inf:
                line.run_until(inf)
            else:
                line.run_next()


def _least_loaded(instances: Sequence[_Instance], number: int) -> _Instance:
    """Return the instance with the lowest cost for a request; equal ones in turn, by the request's number."""
    if len(instances) == 1:
        return instances[0]
    turn = number % len(instances)
    return min((*instances[turn:], *instances[:turn]), key=_Instance.cost)


class _Instance:
    """Scheduler of one instance."""

    def __init__(
        self,
        instance: SimulatedInstance,
        first: int,
        policy: Policy,
        events: Events,
        shared: SharedStages | None,
    ) -> None:
        self._costs, stages, kv, long_chunk = instance
        self._stages = stages
        self._policy = policy = replace(policy, long_chunk=long_chunk or policy.long_chunk)
        self.waiting: dict[int, Stream] = {}
        self.running: dict[int, Stream] = {}
        self._budget = KvBudget(kv)
        self._is_limited = bool(kv)
        self._sizer = ChunkSizer(stages, chunk=policy.prefill_chunk, max_itl_ratio=policy.max_itl_ratio)
        self._batches = MicroBatches[Stream](stages)
        self._cohorts: dict[MicroBatch[Stream], Cohort] = {}
        self.counts = StepCounts()
        self._prefilling = Prompts(
            policy,
            stages,
            batches=self._batches,
            in_flight=self.counts,
            sizer=self._sizer,
            kv=CountedKv(),
            running=self.running,
        )
        self._frees = False
        """True while freed KV memory waits for a step."""
        self._asks_for_rows = False
        """True if prompts were admitted or preempted, which may allow decode rows at the next answer."""
        self._events = events
        self._line = StageLine(instance, first, events, shared, self._on_answer)
        self.outcome = self._line.outcome

    def measure(self, outcome: Outcome) -> None:
        """Write what is measured to an outcome."""
        self.outcome = self._line.outcome = outcome

    def note_waiting(self, seconds: float, since: float) -> None:
        """Note that requests waited for some seconds from a moment on."""
        if since >= self.outcome.begin_s:
            if len(self.running) < self._policy.max_num_seqs:
                self.outcome.waits_for_memory_s += seconds
            else:
                self.outcome.waits_for_place_s += seconds

    def cost(self) -> int:
        """Return the tokens ahead of a new request's first token, as the router counts them."""
        streams = [*self.waiting.values(), *self.running.values()]
        unread = sum(max(0, stream.fill_to - stream.scheduled) for stream in streams)
        return unread + SEQUENCE_TOKENS * len(streams)

    def add(self, number: int, request: SimulatedRequest, now: float) -> None:
        """Receive a request."""
        prompt = request.prompt_tokens
        self.waiting[number] = Stream(number, request, prompt, prompt + request.answer_tokens)
        self.counts.last_s = now
        self._schedule(now)

    # ---- admission, as `Scheduler` has it

    def _schedule(self, now: float) -> None:
        preempted = self.outcome.preemptions
        while self._send_rows(now):
            pass
        running = len(self.running)
        if self.waiting:
            self._admit(now)
        has_admitted = len(self.running) > running
        while self._prefilling and self._send_chunks(now):
            while self._send_rows(now):
                pass
        self._asks_for_rows = has_admitted or self.outcome.preemptions > preempted
        if self._frees and self.counts.completed == self.counts.sent:
            idle = [0.0] * self._stages
            self._send(Sent(self.counts.sent + 1, 0), now, idle, self.outcome.decode_s)

    def _admit(self, now: float) -> None:
        running = self.running
        while self.waiting and len(running) < self._policy.max_num_seqs:
            stream = next(iter(self.waiting.values()))
            tokens = min(stream.fill_to + 1, stream.max_length)
            if not self._budget.fits(tokens, stream.id, spare_blocks=len(running)):
                return
            self._budget.charge(stream.id, tokens)
            del self.waiting[stream.id]
            running[stream.id] = stream
            stream.admitted_at = now
            self._prefilling.add(stream)

    def _make_room(self, stream: Stream) -> bool:
        """Reserve the next token's KV, preempting the newest streams if needed; return False if it must wait."""
        tokens, budget = stream.scheduled + 1, self._budget
        while not budget.holds(tokens, stream.id):
            if budget.fits(tokens, stream.id):
                budget.charge(stream.id, tokens)
                break
            if budget.awaits(tokens, stream.id):
                return False
            newest = self.running[max(self.running)]
            self._preempt(newest)
            if newest is stream:
                return False
        return True

    def _preempt(self, stream: Stream) -> None:
        if stream.joined and stream.cohort is not None:
            stream.cohort.count_out(stream)
        stream.fill_to = stream.length
        self._remove(stream)
        stream.generation += 1
        stream.scheduled = stream.reused = 0
        stream.has_begun = False
        stream.in_flight.clear()
        self.waiting[stream.id] = stream
        in_order = sorted(self.waiting.items())
        self.waiting.clear()
        self.waiting.update(in_order)
        self.outcome.preemptions += 1

    def _remove(self, stream: Stream) -> None:
        """Remove a running stream that is not counted, and free its memory."""
        self._prefilling.remove(stream.id)
        del self.running[stream.id]
        if stream.cohort is not None:
            del stream.cohort.single[stream.id]
            stream.cohort = None
            if (moved := self._batches.remove(stream.id)) is not None:
                self._move(*moved)
        if stream.has_begun:
            self._budget.release(stream.id, self.counts.sent + 1)
            self._frees = True
        else:
            self._budget.drop(stream.id)

    def _move(self, stream: Stream, batch: MicroBatch[Stream]) -> None:
        if stream.cohort is not None:
            if stream.joined:
                stream.cohort.count_out(stream)
            del stream.cohort.single[stream.id]
        self._join(stream, batch)

    def _join(self, stream: Stream, batch: MicroBatch[Stream]) -> None:
        cohort = self._cohorts.get(batch)
        if cohort is None:
            cohort = self._cohorts[batch] = Cohort(batch)
        stream.cohort = cohort
        cohort.single[stream.id] = stream

    # ---- steps

    def _send_rows(self, now: float) -> bool:
        """Send the next decode step; return False if none may go out."""
        if len(self.running) == 1:
            # A lone stream takes all turns.
            (stream,) = self.running.values()
            cohort = stream.cohort
            if cohort is None or len(cohort.in_flight) >= self._policy.steps_ahead:
                return False
            return self._send_step_of(cohort, now)
        if self._prefilling.is_almost_read():
            return False
        if self._stages == 1:
            (batch,) = self._batches or (None,)
            if batch is None or batch.in_flight >= self._policy.steps_ahead:
                return False
            return self._send_step_of(self._cohorts[batch], now)
        turns = self._batches.in_turn(self._policy.steps_ahead)
        return any(self._send_step_of(self._cohorts[batch], now) for batch in turns)

    def _send_step_of(self, cohort: Cohort, now: float) -> bool:
        number = cohort.sent + 1
        rows = [] if number < cohort.next_change else self._single_rows(cohort, number)
        counted, in_flight = cohort.counted, cohort.in_flight
        total = counted + len(rows)
        if not total:
            return False
        after = in_flight[-1] if counted and in_flight else None
        for row in rows:
            if row.in_flight and (after is None or row.in_flight[-1].step > after.step):
                after = row.in_flight[-1]
        back_s = self._costs.back_s(total) if after is not None and self._stages > 1 else 0.0
        context = (cohort.context + sum(row.scheduled for row in rows)) / total
        sent = Sent(self.counts.sent + 1, total, cohort, number, counted)
        cohort.sent = number
        cohort.context += counted
        in_flight.append(sent)
        cohort.batch.in_flight += 1
        cohort.batch.last_step = sent.step
        for row in rows:
            row.scheduled += 1
            row.in_flight.append(sent)
            sent.single.append((row, row.generation))
            goes_on = row.scheduled + 1 < row.max_length
            if goes_on and row.cohort is cohort and row.in_flight == list(in_flight):
                cohort.count_in(row, needs_blocks=self._is_limited)
        cohort.count_out_until(cohort.ends, number)
        seconds = [self._costs.decode_s(stage, total, context) for stage in range(self._stages)]
        self._send(sent, now, seconds, self.outcome.decode_s, after, back_s)
        return True

    def repeat(self, until_s: float) -> float:
        """Answer steps before a time and send the next ones, while they only repeat; return the last time, or 0 for none."""
        prompts, cohorts, counts = self._prefilling, self._cohorts, self.counts
        if self._stages > 1 or not cohorts or self._frees or self._budget.being_freed:
            return 0.0
        if (self.waiting and len(self.running) < self._policy.max_num_seqs) or prompts.is_almost_read():
            return 0.0
        (cohort,) = cohorts.values()
        if len(cohort.in_flight) < self._policy.steps_ahead:
            return 0.0
        before = counts.completed
        if self._line.repeat(cohort, counts, prompts, until_s, self._policy.steps_ahead):
            while prompts and self._send_chunks(counts.last_s):
                while self._send_rows(counts.last_s):
                    pass
        return counts.last_s if counts.completed > before else 0.0

    def _single_rows(self, cohort: Cohort, number: int) -> list[Stream]:
        """Return the streams that are looked at alone and have a row in the next step."""
        if self._is_limited:
            cohort.count_out_until(cohort.blocks, number)
        steps_ahead = self._policy.steps_ahead
        ready = [stream for stream in cohort.single.values() if stream.can_step(steps_ahead)]
        if not self._is_limited:
            return ready
        ready.sort(key=attrgetter("id"))
        rows = [stream for stream in ready if stream.cohort is not None and self._make_room(stream)]
        # Making room for one stream may have preempted another one.
        return [stream for stream in rows if stream.cohort is not None]

    def _send_chunks(self, now: float) -> bool:
        """Send the next prefill step; return False if none may go out."""
        if self._stages == 1 and self._sizer.is_saving and self._prefilling.has_to_spare():
            return False
        chunks = self._prefilling.next_chunks()
        if not chunks:
            return False
        spans = [span for _, span in chunks]
        sent = Sent(self.counts.sent + 1, sum(span.tokens for span in spans))
        self._prefilling.last_step = sent.step
        self.counts.prefills += 1
        for stream, _ in chunks:
            if stream.scheduled >= stream.fill_to:
                self._prefilling.remove(stream.id)
                stream.in_flight.append(sent)
                sent.single.append((stream, stream.generation))
                self._join(stream, self._batches.add(stream))
                self._prefilling.note_decoding(stream)
        seconds = [self._costs.chunk_s(stage, spans) for stage in range(self._stages)]
        self._send(sent, now, seconds, self.outcome.prefill_s)
        return True

    def _send(
        self,
        sent: Sent,
        now: float,
        seconds: Sequence[float],
        busy: list[float],
        after: Sent | None = None,
        back_s: float = 0.0,
    ) -> None:
        self.counts.sent, self._frees = sent.step, False
        self._line.send(sent, now, seconds, busy, after, back_s)

    # ---- answers

    def _on_answer(self, sent: Sent, stage: int, now: float) -> None:
        self.counts.last_s = now
        if sent.tokens and sent.cohort is not None:
            self._sizer.record_decode(stage, sent.tokens, sent.tokens, sent.compute_us[stage])
        elif sent.tokens:
            self._sizer.record_chunk(stage, sent.step, sent.tokens, sent.compute_us[stage])
        if stage < self._stages - 1:
            # It changes only the time that is saved for prompts.
            if self._prefilling and (self._asks_for_rows or self._prefilling.waits_for_time):
                self._schedule(now)
            return
        if sent.cohort is not None:
            self._answer_cohort(sent, sent.cohort, now)
        elif sent.tokens:
            self.counts.prefills -= 1
        for stream, generation in sent.single:
            if stream.generation == generation:
                self._on_token(stream, sent, now)
        self.counts.completed = sent.step
        self._budget.settle(sent.step)
        self._schedule(now)

    def _answer_cohort(self, sent: Sent, cohort: Cohort, now: float) -> None:
        cohort.batch.in_flight -= 1
        cohort.in_flight.popleft()
        if self.outcome.begin_s <= now <= self.outcome.end_s:
            self.outcome.steps += 1
            self.outcome.rows += sent.tokens
        if sent.counted:
            self.outcome.note_gap(now, now - cohort.answered_at, sent.counted)
        cohort.answered, cohort.answered_at = sent.number, now

    def _on_token(self, stream: Stream, sent: Sent, now: float) -> None:
        outcome = self.outcome
        if not stream.joined:
            stream.in_flight.remove(sent)
        if stream.first_token_at is None:
            stream.first_token_at = now
            self._prefilling.note_decoding(stream)
            is_within = outcome.begin_s <= now <= outcome.end_s
            outcome.begun += is_within
            outcome.tokens += is_within
            if stream.request.at_s >= outcome.begin_s:
                outcome.first_token_s.append(now - stream.request.at_s)
        else:
            outcome.note_gap(now, now - stream.token_at, 1)
        stream.token_at = now
        if not stream.joined and stream.length >= stream.max_length:
            if stream.request.at_s >= outcome.begin_s:
                outcome.request_s.append(now - stream.request.at_s)
            self._remove(stream)
