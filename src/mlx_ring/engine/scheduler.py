"""Admission and order of an instance's steps. Pure: values in, steps out; no I/O, no clock, no arrays.

The engine calls `schedule` and sends the steps, then calls `on_answer` with each answer. The policy:

- Decode comes first (`decode.py`), prefill fills the gaps (`prefill.py`).
- Requests are admitted first come, first served, as soon as their grammar is ready and their KV fits.
- The newest sequence is preempted, and computed again later, when KV memory runs out.
- KV operations travel with the next step, or alone when no step is in flight that could cause one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Ordered

from mlx_ring.core.engine_stats import CacheStats, Meter, Policy, SchedulerStats, StepTotals
from mlx_ring.core.errors import ProtocolError
from mlx_ring.core.types import RankId, TokenLogprob
from mlx_ring.engine.admission import Suspects
from mlx_ring.engine.decode import Decoding, MicroBatch
from mlx_ring.engine.disk_kv import DiskKv
from mlx_ring.engine.in_flight import Predict, SentStep, StepDeadlines, StepsInFlight, predict_chunk_by
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.kv_manager import KvManager
from mlx_ring.engine.prefill import Prefilling
from mlx_ring.engine.resumption import KeptKv, LeftKv, PrefillSpeed, Resumptions
from mlx_ring.engine.rows import end_stage, prefill_row, read_result, samples_token
from mlx_ring.engine.sequence import Advance, Sequence
from mlx_ring.engine.step_times import ChunkSizer
from mlx_ring.engine.ways_back import Ways
from mlx_ring.rpc.failures import failure_to_error
from mlx_ring.rpc.protos import step_pb2


class Scheduler:
    """Scheduler of one instance, for one epoch."""

    def __init__(
        self,
        ranks: Ordered[RankId],
        *,
        instance: str,
        epoch: int,
        policy: Policy,
        kv: Mapping[RankId, RankKv] | None = None,
        predict: Predict | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._meter = meter = Meter() if meter is None else meter
        self._stages = max(rank.stage for rank in ranks) + 1
        self._sampler = RankId(self._stages - 1, 0)
        self._instance, self.epoch = instance, epoch
        self._policy = self.policy = policy
        self._waiting: dict[int, Sequence] = {}
        self._running = self.running = dict[int, Sequence]()
        self.suspects = Suspects(self._waiting, self._running)
        saves = policy.kv_disk is not None and policy.prefix_cache
        self.disk = DiskKv(ranks, kv, meter.measured, policy.kv_owners, epoch) if saves else None
        self._kv = self.kv = KvManager(kv, prefix_cache=policy.prefix_cache, disk=self.disk)
        speed = PrefillSpeed(self._stages, meter.measured, predict_chunk_by(predict))
        self.ways = Ways(speed, self._kv, self.disk, self._running, self._waiting, meter.record_way)
        self._sizer = ChunkSizer(self._stages, chunk=policy.prefill_chunk, max_itl_ratio=policy.max_itl_ratio)
        self._decoding = Decoding(policy, self._stages, sizer=self._sizer, kv=self._kv)
        self.in_flight = StepsInFlight(ranks, StepDeadlines(policy.step_deadline_s, predict))
        self._prefilling = Prefilling(
            policy,
            self._stages,
            batches=self._decoding,
            in_flight=self.in_flight,
            sizer=self._sizer,
            kv=self._kv,
            running=self._running,
            make_chunk=prefill_row,
        )
        self._steps_failed = self._preemptions = 0
        self._resumptions = Resumptions()
        self._most_running = policy.max_num_seqs
        """Limit of running sequences, lowered while ranks report too much memory, so that a preempted sequence stays out."""
        self._closing = False
        """True once operations go out at once, because no answers are awaited."""

    # ---- admission and end

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def places(self) -> int:
        """Number of sequences that may be added now, to run or to wait."""
        in_line = any(sequence.is_ready for sequence in self._waiting.values())
        free = 0 if in_line else self._policy.max_num_seqs - len(self._running)
        return max(0, self._policy.max_queued_requests - len(self._waiting) + free)

    @property
    def capacity_tokens(self) -> int | None:
        """Most tokens of one sequence; None without a limit."""
        return self._kv.budget.capacity_tokens

    @property
    def kv_limits(self) -> Mapping[RankId, int]:
        """Bytes of KV that each rank may hold; empty without limits."""
        return self._kv.budget.limits

    def limit_kv(self, limits: Mapping[RankId, int]) -> None:
        """Set each rank's limit of KV bytes; present sequences continue, one at a time if needed."""
        sequences = [*self._running.values(), *self._waiting.values()]
        self._kv.limit(limits, max((sequence.max_length for sequence in sequences), default=0))

    def shared_tokens(self, tokens: tuple[int, ...]) -> int:
        """Return the number of a prompt's tokens that the cache could supply now."""
        return self._kv.shared(tokens, self._running)

    @property
    def tokens_to_read(self) -> int:
        """Number of prompt tokens that are still to be computed."""
        sequences = [*self._running.values(), *self._waiting.values()]
        return sum(max(0, sequence.fill_to - sequence.scheduled) for sequence in sequences)

    @property
    def num_open(self) -> int:
        """Number of sequences that run or wait."""
        return len(self._running) + len(self._waiting)

    def add(self, sequence: Sequence, kept: KeptKv | None = None) -> None:
        """Append a sequence to the queue, and KV that was kept of it. Others pass it until it is ready."""
        if kept is not None:
            self._kv.keep_for(sequence, kept)
        if sequence.back is not None or self.disk is not None:
            self.ways.add(sequence)
        self._waiting[sequence.id] = sequence
        self.suspects.add(sequence)

    def free_kept(self, kept: Iterable[KeptKv]) -> None:
        """Free KV that was kept for sequences that do not come."""
        self._kv.free_kept(kept)

    def left_kv(self) -> dict[int, LeftKv]:
        """Return the KV that a loss leaves of each sequence."""
        return self._kv.left(self._running.values(), self.in_flight.rows(), self._stages)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence that is complete, or whose client left, also while steps with its rows are in flight.

        Its KV is kept for prompts with the same prefix, so that a prompt that is sent again continues where the first one
        was left. Of a text that was only pooled, just the part that it took over is kept. No prompt continues a
        pooled text, and it would evict what chats reuse.
        """
        if self._take_out(sequence):
            self._kv.keep(sequence, None if sequence.request.pooling is None else sequence.taken)

    def _fail(self, sequence: Sequence) -> None:
        """Remove a sequence whose KV may be wrong."""
        if self._take_out(sequence):
            self._kv.free(sequence.id)

    def _take_out(self, sequence: Sequence) -> bool:
        """Remove a sequence; return True if it was running, so that its KV must be kept or freed."""
        self.suspects.remove(sequence)
        if self._waiting.pop(sequence.id, None) is not None:
            self._kv.drop_kept(sequence.id)
            self._kv.add_operations(self.disk.leave(sequence) if self.disk is not None else ())
            return False
        if self._running.pop(sequence.id, None) is None:
            return False
        sequence.generation += 1
        self._prefilling.remove(sequence.id)
        self._decoding.remove(sequence.id)
        self._most_running = self._policy.max_num_seqs
        return True

    @property
    def unanswered(self) -> dict[int, dict[RankId, int]]:
        """First step with a row of a sequence that a rank has not answered, by sequence and rank."""
        return self.in_flight.unanswered

    def reset(self) -> None:
        """Remove every sequence and free all KV."""
        self._waiting.clear()
        for sequence in list(self._running.values()):
            self._fail(sequence)
        self._kv.reset()
        self._closing = True

    # ---- steps

    def schedule(self, now: float) -> list[step_pb2.Step]:
        """Return every step that can be sent now, in order."""
        if self._decoding.is_held_still and self.suspects.next_one() is None:
            self._decoding.release()
        steps = list(self._decode_steps(now))
        self._admit(now)
        while (step := self._prefill_step(now)) is not None:
            steps += [step, *self._decode_steps(now)]
        if self._kv.has_operations and (self._closing or self.in_flight.completed == self.in_flight.sent):
            steps.append(self._make_step([], [], None, now))
        return steps

    def _decode_steps(self, now: float) -> Iterator[step_pb2.Step]:
        while (step := self._decode_step(now)) is not None:
            yield step

    def _decode_step(self, now: float) -> step_pb2.Step | None:
        """Make the next decode step, unless prompts are about to be complete: then all of them decode at once."""
        if self._prefilling.is_almost_read():
            return None
        if (chosen := self._decoding.next_rows(self._make_room)) is None:
            return None
        batch, rows = chosen
        step = self._make_step([sequence for sequence, _ in rows], [row for _, row in rows], batch, now)
        batch.in_flight += 1
        batch.last_step = step.step
        return step

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Reserve `tokens` for a running sequence, ending restores or preempting the newest; return False if it must wait.

        As many are preempted at once as all rows of a step need, so that ranks take them out of their batch together.
        """
        while not (self._is_relieved() and self._kv.grow(sequence, tokens)):
            if self._kv.budget.awaits(tokens, sequence.id):
                return False
            if not self.ways.give_up_restore() and self._preempt_newest() is sequence:
                return False
        return True

    def _preempt_newest(self) -> Sequence:
        """Preempt the newest sequence that need not run alone, if there is one."""
        newest = max(self._running.values(), key=lambda each: (not each.runs_alone, each.id))
        self._preempt(newest)
        self._preemptions += 1
        return newest

    def _is_relieved(self) -> bool:
        """Return True if the ranks hold no more than their limits; a sequence that runs alone may always continue."""
        if len(self._running) == 1 or self._kv.relieve():
            return True
        self._most_running = len(self._running) - 1
        return False

    def _preempt(self, sequence: Sequence) -> None:
        """Preempt a running sequence: free its KV and queue it by its arrival, to be computed again."""
        del self._running[sequence.id]
        self._prefilling.remove(sequence.id)
        self._decoding.remove(sequence.id)
        self._kv.free(sequence.id)
        sequence.preempt()
        self._waiting[sequence.id] = sequence
        in_order = sorted(self._waiting.items())
        self._waiting.clear()
        self._waiting.update(in_order)

    def _admit(self, now: float) -> None:
        """Admit sequences in order. Suspects run alone, one after the other, while those before them wait with their KV."""
        suspect = self.suspects.next_one()
        if suspect is not None and suspect.id in self._running:
            return
        # Once a suspect has its turn, it comes before those that gave their memory to it.
        if not self._decoding.is_held_still:
            self._admit_in_order(now)
        if suspect is not None and self.suspects.may_be_alone:
            self._decoding.hold_still()
            is_alone = self.in_flight.completed == self.in_flight.sent
            if is_alone and self.suspects.has_grammar(suspect):
                self._admit_alone(suspect, now)

    def _admit_in_order(self, now: float) -> None:
        """Admit sequences up to the first suspect."""
        while len(self._running) < self._most_running:
            sequence = next((each for each in self.suspects.before() if each.is_ready), None)
            if sequence is None or not self._kv.admit(sequence, self._running):
                return
            self._join(sequence, now)

    def _admit_alone(self, suspect: Sequence, now: float) -> None:
        """Admit a suspect beside sequences that are held still; preempt some of them if there is no room."""
        while len(self._running) >= self._most_running or not self._kv.admit(suspect, self._running):
            if not self._running or self._kv.budget.being_freed or self.ways.give_up_restore():
                return
            self._preempt_newest()
        self._join(suspect, now)

    def _join(self, sequence: Sequence, now: float) -> None:
        del self._waiting[sequence.id]
        self._running[sequence.id] = sequence
        self._prefilling.add(sequence)
        sequence.admit(now)

    def _prefill_step(self, now: float) -> step_pb2.Step | None:
        if not (chunks := self._prefilling.next_chunks()):
            return None
        sequences = [sequence for sequence, _ in chunks]
        step = self._make_step(sequences, [row for _, row in chunks], None, now)
        self._prefilling.last_step = step.step
        for sequence in sequences:
            self._after_chunk(sequence)
        return step

    def _after_chunk(self, sequence: Sequence) -> None:
        self._kv.after_chunk(sequence)
        if sequence.is_prefilled:
            self._prefilling.remove(sequence.id)
            if sequence.wants_tokens:
                sequence.unanswered += not sequence.redraws
                self._decoding.add(sequence)

    def _make_step(
        self,
        sequences: list[Sequence],
        rows: list[step_pb2.Row],
        batch: MicroBatch[Sequence] | None,
        now: float,
    ) -> step_pb2.Step:
        number, is_prefill = self.in_flight.sent + 1, bool(rows) and batch is None
        step = step_pb2.Step(
            instance=self._instance,
            epoch=self.epoch,
            step=number,
            operations=self._kv.take_operations(number, now, has_rows=bool(rows), is_prefill=is_prefill),
            rows=rows,
            feed_back_tokens=self._stages > 1 and any(map(samples_token, rows)),
            end_stage=end_stage(sequences[0], rows[0]) if rows else 0,
        )
        self.in_flight.send(step, sequences, batch, now)
        return step

    # ---- answers

    def on_answer(self, done: step_pb2.StepDone, now: float) -> list[Advance]:
        """Record one rank's answer to a step, and return its effect on sequences.

        Raises:
            ProtocolError: a rank that is not in the plan, or an answer out of order.
        """
        if (done.instance, done.epoch) != (self._instance, self.epoch):
            return []
        answered = self.in_flight.record_answer(done, now)
        sent_step = answered.sent_step
        self._kv.budget.report(answered.rank, done.kv_bytes)
        advances: list[Advance] = []
        if done.HasField("failure"):
            advances += self._fail_rows(sent_step, done.failure)
        else:
            self._sizer.record(answered.timing, is_prefill=sent_step.is_prefill)
            if sent_step.is_prefill:
                self._meter.record_chunk(answered.timing, self._stages)
        if answered.rank == self._sampler:
            if sent_step.batch is not None:
                sent_step.batch.in_flight -= 1
            advances += self._commit_rows(sent_step, done, now)
        if self.in_flight.discard_completed():
            self._kv.settle(self.in_flight.completed)
        return advances

    def _fail_rows(self, sent_step: SentStep, failure: step_pb2.Failure) -> Iterator[Advance]:
        """End the rows that the failure names. If it names none, recompute all rows, each alone; a third failure without progress ends them.

        Rows that a rank found out of step are recomputed too: another row's failure, still to arrive, broke them. A failure
        that concerns rows of an ended sequence may have that cause alone, and is not counted.
        """
        self._steps_failed += not sent_step.failed
        sent_step.failed = True
        is_stale = len(list(sent_step.current())) < len(sent_step.sequences)
        again = not failure.sequences or failure.kind == ProtocolError.__name__
        for sequence in failure.sequences or [each.id for each in sent_step.sequences]:
            if sequence in self._kv.held and sequence not in self._running:
                # It has ended, and its cached KV is missing or wrong.
                self._kv.free(sequence)
        concerned = self._running.keys() & (failure.sequences or self._running)
        for sequence, _ in list(sent_step.current()):
            if sequence.id not in concerned:
                continue
            if again and (is_stale or sequence.record_failure()):
                self._preempt(sequence)
                continue
            self._fail(sequence)
            yield Advance(sequence, error=failure_to_error(failure))

    def _commit_rows(self, sent_step: SentStep, done: step_pb2.StepDone, now: float) -> Iterator[Advance]:
        results = {result.sequence: result for result in done.results}
        for sequence, row in list(sent_step.current()):
            if sequence.id not in self._running:
                continue
            try:
                reading = read_result(row, results.get(sequence.id))
            except ProtocolError as error:
                self._fail(sequence)
                yield Advance(sequence, error=error)
                continue
            sequence.prompt_logprobs.extend(reading.prompt_logprobs)
            if reading.hidden_sum is not None:
                sequence.add_hidden(reading.hidden_sum)
            if row.draft:
                self._decoding.rollback(sequence, row, len(reading.sampled))
            if sequence.redraws:
                self._resumptions.compare(sequence, reading.sampled)
            elif samples_token(row) or row.start + len(row.tokens.ids) >= sequence.fill_to:
                yield self._advance(sequence, reading.sampled, now)

    def _advance(self, sequence: Sequence, sampled: tuple[TokenLogprob, ...], now: float) -> Advance:
        sequence.unanswered -= bool(sampled)
        if sequence.is_resumed:
            self._resumptions.record_prefilled(sequence)
        tokens = sequence.commit(sampled, now)
        self._kv.add_operations(() if self.disk is None else self.disk.after_tokens(sequence))
        if sequence.finish_reason is not None:
            self.finish(sequence)
        return Advance(sequence, tokens)

    # ---- reports

    def cache_stats(self) -> CacheStats:
        return self._kv.stats()

    def totals(self, now: float, began: float) -> StepTotals:
        """Return the totals since `began`."""
        cache = self._kv.stats()
        return StepTotals(
            ranks=self.in_flight.totals(now, began),
            read_tokens=self.in_flight.read_tokens,
            steps_failed=self._steps_failed,
            preemptions=self._preemptions,
            drafts=self._decoding.drafts,
            draft_tokens=self._decoding.draft_tokens,
            accepted_tokens=self._decoding.accepted_tokens,
            cache_query_tokens=cache.query_tokens,
            cache_hit_tokens=cache.hit_tokens,
            cache_evictions=cache.evictions,
            cache_restored_tokens=cache.restored_tokens,
            cache_peer_tokens=cache.peer_tokens,
            cache_saved_tokens=cache.saved_tokens,
            cache_moved_tokens=cache.moved_tokens,
            **self._resumptions.totals(),
        )

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            sequences_held=self._kv.sequences_held,
            kv_bytes=self.in_flight.kv_bytes,
            steps_sent=self.in_flight.sent,
            steps_completed=self.in_flight.completed,
            steps_failed=self._steps_failed,
            recent=self.in_flight.recent,
            num_preemptions=self._preemptions,
            draft_tokens=self._decoding.draft_tokens,
            accepted_tokens=self._decoding.accepted_tokens,
        )
