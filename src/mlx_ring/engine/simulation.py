"""Simulation of an instance under load: the scheduler's policy over stages of predicted times. Pure and deterministic.

The sequences of a micro-batch decode in the same steps, so a step counts its rows. A sequence is looked at when it joins
its micro-batch, needs another block of KV memory, moves, is preempted or ends. Chunk sizes, turns, the queue of prompts
and the account of KV memory are the engine's own. Speculative decoding is off.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Protocol

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.types import RankId
from mlx_ring.engine.decode import MicroBatch, MicroBatches
from mlx_ring.engine.kv_budget import KvBudget, RankKv
from mlx_ring.engine.simulated_load import Cohort, Gap, Outcome, Prompts, Sent, SimulatedRequest, Span, Stream
from mlx_ring.engine.step_times import ChunkSizer

_MICRO = 1e6


class StepCosts(Protocol):
    """Seconds of steps and messages."""

    def decode_s(self, stage: int, rows: int, context_tokens: float) -> float:
        """Return the seconds of a decode step on a stage, by its rows and their mean context."""
        ...

    def chunk_s(self, stage: int, spans: Sequence[Span]) -> float:
        """Return the seconds of a prefill step on a stage."""
        ...

    def hop_s(self, stage: int, tokens: int) -> tuple[float, float]:
        """Return the seconds until a step's activations have arrived behind a stage, and for which they occupy the link."""
        ...

    def back_s(self, rows: int) -> float:
        """Return the seconds from the last stage to the first, with drawn tokens."""
        ...

    def head_s(self) -> float:
        """Return the seconds from the head to a stage, and from there back."""
        ...


class Simulation:
    """One run of an instance's scheduler over stages."""

    def __init__(
        self,
        costs: StepCosts,
        stages: int,
        policy: Policy,
        *,
        kv: Mapping[RankId, RankKv] | None = None,
        most_waiting: int | None = None,
        is_over: Callable[[Outcome], bool] = lambda _: False,
    ) -> None:
        """Prepare the run.

        Args:
            costs: times of the stages and links.
            stages: number of stages.
            policy: the scheduler's settings; without speculative decoding.
            kv: KV memory of each rank; None for no limit.
            most_waiting: number of waiting requests beyond which the run ends; None for no limit.
            is_over: called at each arrival; the run ends if it returns True.
        """
        self._costs = costs
        self._stages = stages
        self._policy = policy
        self._most_waiting = inf if most_waiting is None else most_waiting
        self._is_over = is_over
        self._waiting: dict[int, Stream] = {}
        self._running: dict[int, Stream] = {}
        self._budget = KvBudget(kv)
        self._is_limited = bool(kv)
        self._sizer = ChunkSizer(stages, chunk=policy.prefill_chunk, max_itl_ratio=policy.max_itl_ratio)
        self._batches = MicroBatches[Stream](stages)
        self._cohorts: dict[MicroBatch[Stream], Cohort] = {}
        self.sent = self.prefills = 0
        self._prefilling = Prompts(
            policy,
            stages,
            batches=self._batches,
            in_flight=self,
            sizer=self._sizer,
            kv=self,
            running=self._running,
        )
        self._completed = 0
        self._frees = False
        """True while freed KV memory waits for a step."""
        self._asks_for_rows = False
        """True if prompts were admitted or preempted, which may allow decode rows at the next answer."""
        self._free_at = [0.0] * stages
        self._link_free_at = [0.0] * stages
        self._events: list[tuple[float, int, int, Sent]] = []
        self._order = 0
        self._head_s = costs.head_s()
        self._outcome = Outcome(0.0, inf)

    def run(self, requests: Sequence[SimulatedRequest], *, skipped: int = 0, drains: bool = True) -> Outcome:
        """Run the requests, in order of arrival, and measure those after the first `skipped` ones.

        With `drains` the run and the measured span end with the last answer, else with the last arrival and its first token.
        """
        begin_s = requests[skipped].at_s if skipped < len(requests) else inf
        self._outcome = Outcome(begin_s, inf if drains else requests[-1].at_s)
        for part in (self._outcome.prefill_s, self._outcome.decode_s, self._outcome.link_s):
            part.extend([0.0] * self._stages)
        measured, place, now = len(requests) - skipped, 0, 0.0
        while True:
            if place < len(requests) and (not self._events or requests[place].at_s <= self._events[0][0]):
                if self._waiting:
                    self._note_waiting(requests[place].at_s - now, now)
                now, place = requests[place].at_s, place + 1
                if len(self._waiting) > self._most_waiting or self._is_over(self._outcome):
                    self._outcome.is_overrun = True
                    break
                self._add(place, requests[place - 1])
                self._schedule(now)
            elif self._events:
                at, _, stage, sent = heapq.heappop(self._events)
                if self._waiting:
                    self._note_waiting(at - now, now)
                now = at
                self._on_answer(sent, stage, now)
            else:
                break
            if not drains and place == len(requests) and len(self._outcome.first_token_s) == measured:
                break
        self._outcome.elapsed_s = now
        self._outcome.end_s = min(self._outcome.end_s, now)
        return self._outcome

    def _note_waiting(self, seconds: float, now: float) -> None:
        if now >= self._outcome.begin_s:
            if len(self._running) < self._policy.max_num_seqs:
                self._outcome.waits_for_memory_s += seconds
            else:
                self._outcome.waits_for_place_s += seconds

    def _add(self, number: int, request: SimulatedRequest) -> None:
        prompt = request.prompt_tokens
        self._waiting[number] = Stream(number, request, prompt, prompt + request.answer_tokens)

    # ---- admission, as `Scheduler` has it

    def _schedule(self, now: float) -> None:
        preempted = self._outcome.preemptions
        while self._send_rows(now):
            pass
        running = len(self._running)
        if self._waiting:
            self._admit(now)
        has_admitted = len(self._running) > running
        while self._prefilling and self._send_chunks(now):
            while self._send_rows(now):
                pass
        self._asks_for_rows = has_admitted or self._outcome.preemptions > preempted
        if self._frees and self._completed == self.sent:
            idle = [0.0] * self._stages
            self._send(Sent(self.sent + 1, 0), now, now + self._head_s, idle, idle)

    def _admit(self, now: float) -> None:
        running = self._running
        while self._waiting and len(running) < self._policy.max_num_seqs:
            stream = next(iter(self._waiting.values()))
            tokens = min(stream.fill_to + 1, stream.max_length)
            if not self._budget.fits(tokens, stream.id, spare_blocks=len(running)):
                return
            self._budget.charge(stream.id, tokens)
            del self._waiting[stream.id]
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
            newest = self._running[max(self._running)]
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
        self._waiting[stream.id] = stream
        in_order = sorted(self._waiting.items())
        self._waiting.clear()
        self._waiting.update(in_order)
        self._outcome.preemptions += 1

    def _remove(self, stream: Stream) -> None:
        """Remove a running stream that is not counted, and free its memory."""
        self._prefilling.remove(stream.id)
        del self._running[stream.id]
        if stream.cohort is not None:
            del stream.cohort.single[stream.id]
            stream.cohort = None
            if (moved := self._batches.remove(stream.id)) is not None:
                self._move(*moved)
        if stream.has_begun:
            self._budget.release(stream.id, self.sent + 1)
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
        if len(self._running) == 1:
            # A lone stream takes all turns.
            (stream,) = self._running.values()
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
        rows = self._single_rows(cohort, number)
        counted, in_flight = cohort.counted, cohort.in_flight
        total = counted + len(rows)
        if not total:
            return False
        known = in_flight[-1].sampled_at if counted and in_flight else 0.0
        for row in rows:
            if row.in_flight:
                known = max(known, row.in_flight[-1].sampled_at)
        back_s = self._costs.back_s(total) if known and self._stages > 1 else 0.0
        context = (cohort.context + sum(row.scheduled for row in rows)) / total
        sent = Sent(self.sent + 1, total, cohort, number, counted)
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
        ready = max(now + self._head_s, known + back_s)
        self._send(sent, now, ready, seconds, self._outcome.decode_s)
        return True

    def _single_rows(self, cohort: Cohort, number: int) -> list[Stream]:
        """Return the streams that are looked at alone and have a row in the next step."""
        if self._is_limited:
            cohort.count_out_until(cohort.blocks, number)
        steps_ahead = self._policy.steps_ahead
        ready = [stream for stream in cohort.single.values() if stream.can_step(steps_ahead)]
        if not self._is_limited:
            return ready
        ready.sort(key=_number)
        rows = [stream for stream in ready if stream.cohort is not None and self._make_room(stream)]
        # Making room for one stream may have preempted another one.
        return [stream for stream in rows if stream.cohort is not None]

    def _send_chunks(self, now: float) -> bool:
        """Send the next prefill step; return False if none may go out."""
        chunks = self._prefilling.next_chunks()
        if not chunks:
            return False
        spans = [span for _, span in chunks]
        sent = Sent(self.sent + 1, sum(span.tokens for span in spans))
        self._prefilling.last_step = sent.step
        self.prefills += 1
        for stream, _ in chunks:
            if stream.scheduled >= stream.fill_to:
                self._prefilling.remove(stream.id)
                stream.in_flight.append(sent)
                sent.single.append((stream, stream.generation))
                self._join(stream, self._batches.add(stream))
                self._prefilling.note_decoding(stream)
        seconds = [self._costs.chunk_s(stage, spans) for stage in range(self._stages)]
        self._send(sent, now, now + self._head_s, seconds, self._outcome.prefill_s)
        return True

    def _send(
        self, sent: Sent, now: float, ready: float, seconds: Sequence[float], busy: list[float]
    ) -> None:
        """Pass a step through the stages; what it waits for was sent before it, so its times are known."""
        self.sent, self._frees = sent.step, False
        arrives, last, outcome, free_at = now + self._head_s, self._stages - 1, self._outcome, self._free_at
        for stage, computing_s in enumerate(seconds):
            begin = max(ready, free_at[stage])
            end = free_at[stage] = begin + computing_s
            sent.compute_us.append(round(end * _MICRO) - round(begin * _MICRO))
            is_within = outcome.begin_s <= begin and end <= outcome.end_s
            busy[stage] += computing_s if is_within else self._within(begin, end)
            if sent.tokens or stage == last:
                self._order += 1
                heapq.heappush(self._events, (end + self._head_s, self._order, stage, sent))
            if stage == last:
                sent.sampled_at = end
                return
            latency_s, occupied_s = self._costs.hop_s(stage, sent.tokens)
            starts = max(end, self._link_free_at[stage])
            self._link_free_at[stage] = starts + occupied_s
            self._outcome.link_s[stage] += self._within(starts, starts + occupied_s)
            # The head sends to every stage itself; a later one has what it needs when the one before hands it on.
            ready = max(arrives, starts + latency_s)

    def _within(self, begin: float, end: float) -> float:
        """Return the seconds of a span that are measured."""
        return max(0.0, min(end, self._outcome.end_s) - max(begin, self._outcome.begin_s))

    # ---- answers

    def _on_answer(self, sent: Sent, stage: int, now: float) -> None:
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
            self.prefills -= 1
        for stream, generation in sent.single:
            if stream.generation == generation:
                self._on_token(stream, sent, now)
        self._completed = sent.step
        self._budget.settle(sent.step)
        self._schedule(now)

    def _answer_cohort(self, sent: Sent, cohort: Cohort, now: float) -> None:
        cohort.batch.in_flight -= 1
        cohort.in_flight.popleft()
        if self._outcome.begin_s <= now <= self._outcome.end_s:
            self._outcome.steps += 1
            self._outcome.rows += sent.tokens
        if sent.counted:
            self._note_gap(now, now - cohort.answered_at, sent.counted)
        cohort.answered, cohort.answered_at = sent.number, now

    def _on_token(self, stream: Stream, sent: Sent, now: float) -> None:
        outcome = self._outcome
        if not stream.joined:
            stream.in_flight.remove(sent)
        if stream.first_token_at is None:
            stream.first_token_at = now
            self._prefilling.note_decoding(stream)
            outcome.tokens += outcome.begin_s <= now <= outcome.end_s
            if stream.request.at_s >= outcome.begin_s:
                outcome.first_token_s.append(now - stream.request.at_s)
        else:
            self._note_gap(now, now - stream.token_at, 1)
        stream.token_at = now
        if not stream.joined and stream.length >= stream.max_length:
            if stream.request.at_s >= outcome.begin_s:
                outcome.request_s.append(now - stream.request.at_s)
            self._remove(stream)

    def _note_gap(self, now: float, gap_s: float, streams: int) -> None:
        outcome = self._outcome
        if outcome.begin_s <= now <= outcome.end_s:
            outcome.gaps.append(Gap(now, gap_s, streams))
            outcome.tokens += streams

    # ---- KV, from the point of view of prompts

    def reuse(self, stream: Stream, _running: Mapping[int, Stream]) -> int:
        """Return the number of tokens that need no prefill if the stream begins now."""
        if stream.has_begun:
            return stream.scheduled
        return stream.request.cached_tokens

    def begin(self, stream: Stream, _running: Mapping[int, Stream]) -> None:
        """Open an admitted stream, with what the prefix cache has of its prompt."""
        if not stream.has_begun:
            stream.has_begun = True
            stream.scheduled = stream.reused = stream.request.cached_tokens


def _number(stream: Stream) -> int:
    return stream.id
