"""Which rows go into which step. Pure: values in, steps out; no I/O, no clock, no arrays.

The engine calls `schedule` and sends what it gives, then `answer` with what comes back. The
policy, in short:

- Decode goes first. Sequences that have their token wait in one line; up to `stages` decode
  steps are in flight at once, so that every stage has one, and the line is split evenly
  among them. Each sequence has one decode step in flight at most.
- Prefill fills the gaps, one chunk of one prompt in a step, prompts in order of arrival. A prompt's
  chunks follow each other through the pipeline; `stages + 1` of them are on their way at
  most, and between two decode steps of a sequence at most one goes out.
- Operations ride on the first step that goes out, or go at once in a step of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import islice

from mlx_ring.core.errors import ProtocolError, RingError
from mlx_ring.core.types import TokenLogprob
from mlx_ring.engine.executor import RankId
from mlx_ring.engine.rows import decode_row, free_operation, open_operation, prefill_row, read_result
from mlx_ring.engine.sequence import Sequence
from mlx_ring.engine.stats import SchedulerStats, StepTiming, Unanswered
from mlx_ring.rpc.failures import failure_to_error
from mlx_ring.rpc.protos import step_pb2

_RECENT_STEPS = 256


@dataclass(frozen=True, slots=True)
class Advance:
    """What an answer means for one sequence: tokens, or its end by an error."""

    sequence: Sequence
    tokens: tuple[TokenLogprob, ...] = ()
    error: RingError | None = None


@dataclass(slots=True)
class _Sent:
    """A step that some rank has not answered yet."""

    step: step_pb2.Step
    sequences: tuple[Sequence, ...]
    """In the order of the step's rows."""
    is_prefill: bool
    tokens: int
    sent_at: float
    failed: bool = False


@dataclass(slots=True)
class _Progress:
    """How far a rank is."""

    step: int = 0
    at: float = 0.0
    kv_bytes: int = 0


@dataclass(slots=True)
class _Running:
    """The sequences that hold a place, by where they stand. Dicts are queues: first in, first out."""

    all: dict[int, Sequence] = field(default_factory=dict[int, Sequence])
    prefilling: dict[int, Sequence] = field(default_factory=dict[int, Sequence])
    ready: dict[int, Sequence] = field(default_factory=dict[int, Sequence])
    """Have their token and no step in flight."""
    decoding: dict[int, int] = field(default_factory=dict[int, int])
    """By sequence, ready or in flight: prefill steps sent before its last decode step."""

    def drop(self, sequence_id: int) -> Sequence | None:
        self.prefilling.pop(sequence_id, None)
        self.ready.pop(sequence_id, None)
        self.decoding.pop(sequence_id, None)
        return self.all.pop(sequence_id, None)


class Scheduler:
    """One instance's steps and sequences, for one epoch."""

    def __init__(
        self,
        ranks: Ordered[RankId],
        *,
        instance: str,
        epoch: int,
        max_num_seqs: int,
        prefill_chunk: int,
        step_deadline_s: float = 0.0,
    ) -> None:
        self._stages = max(rank.stage for rank in ranks) + 1
        self._sampler = RankId(self._stages - 1, 0)
        self._instance = instance
        self._epoch = epoch
        self._max_num_seqs = max_num_seqs
        self._prefill_chunk = prefill_chunk
        self._step_deadline_s = step_deadline_s
        self._waiting: dict[int, Sequence] = {}
        self._running = _Running()
        self._operations: list[step_pb2.CacheOperation] = []
        self._held: set[int] = set()
        self._in_flight: dict[int, _Sent] = {}
        self._decodes_in_flight: set[int] = set()
        self._prefills_in_flight = 0
        self._prefills_sent = 0
        self._steps_sent = 0
        self._steps_failed = 0
        self._progress = {rank: _Progress() for rank in ranks}
        self._recent: deque[StepTiming] = deque(maxlen=_RECENT_STEPS)

    # ---- sequences come and go

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at the end of the line."""
        self._waiting[sequence.id] = sequence

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out and free its KV, also while a step with its row is in flight."""
        if self._waiting.pop(sequence.id, None) is not None:
            return
        if self._running.drop(sequence.id) is not None and sequence.opened_at is not None:
            self._operations.append(free_operation(sequence.id))

    # ---- steps go out

    def schedule(self, now: float) -> list[step_pb2.Step]:
        """Every step that can go out now, in order."""
        steps = list(self._decode_steps(now))
        self._admit()
        steps += self._prefill_steps(now)
        if self._operations:
            steps.append(self._make_step([], [], now))
        return steps

    def _decode_steps(self, now: float) -> Iterator[step_pb2.Step]:
        running = self._running
        while running.ready and len(self._decodes_in_flight) < self._stages:
            slots = self._stages - len(self._decodes_in_flight)
            size = min(_ceil_div(len(running.ready), slots), _ceil_div(len(running.decoding), self._stages))
            group = list(islice(running.ready.values(), size))
            rows = [decode_row(sequence) for sequence in group]
            for sequence in group:
                del running.ready[sequence.id]
                running.decoding[sequence.id] = self._prefills_sent
                sequence.scheduled += 1
            step = self._make_step(group, rows, now)
            self._decodes_in_flight.add(step.step)
            yield step

    def _admit(self) -> None:
        while self._waiting and len(self._running.all) < self._max_num_seqs:
            sequence = self._waiting.pop(next(iter(self._waiting)))
            self._running.all[sequence.id] = sequence
            self._running.prefilling[sequence.id] = sequence

    def _prefill_steps(self, now: float) -> Iterator[step_pb2.Step]:
        while self._running.prefilling and self._may_prefill():
            sequence = next(iter(self._running.prefilling.values()))
            if sequence.opened_at is None:
                sequence.opened_at = now
                self._held.add(sequence.id)
                self._operations.append(open_operation(sequence))
            end = min(sequence.scheduled + self._prefill_chunk, sequence.prompt_length)
            row = prefill_row(sequence, end)
            sequence.scheduled = end
            if sequence.is_prefilled:
                del self._running.prefilling[sequence.id]
            self._prefills_in_flight += 1
            self._prefills_sent += 1
            yield self._make_step([sequence], [row], now, is_prefill=True)

    def _may_prefill(self) -> bool:
        return self._prefills_in_flight <= self._stages and all(
            before == self._prefills_sent for before in self._running.decoding.values()
        )

    def _make_step(
        self, sequences: Iterable[Sequence], rows: list[step_pb2.Row], now: float, *, is_prefill: bool = False
    ) -> step_pb2.Step:
        self._steps_sent += 1
        step = step_pb2.Step(
            instance=self._instance,
            epoch=self._epoch,
            step=self._steps_sent,
            operations=self._operations,
            rows=rows,
            deadline_s=self._step_deadline_s,
        )
        self._operations = []
        tokens = sum(len(row.tokens.ids) or 1 for row in rows)
        self._in_flight[step.step] = _Sent(step, tuple(sequences), is_prefill, tokens, now)
        return step

    # ---- answers come back

    def answer(self, done: step_pb2.StepDone, now: float) -> list[Advance]:
        """Take one rank's answer to one step; tells what it means for which sequences.

        Raises:
            ProtocolError: a rank that is not in the plan, or an answer out of order.
        """
        if (done.instance, done.epoch) != (self._instance, self._epoch):
            return []
        sent = self._note(done, now)
        advances: list[Advance] = []
        if done.HasField("failure"):
            advances += self._fail_rows(sent, done.failure)
        if (done.stage, done.rank) == self._sampler:
            self._decodes_in_flight.discard(done.step)
            advances += self._commit_rows(sent, done, now)
        self._forget_completed()
        return advances

    def _note(self, done: step_pb2.StepDone, now: float) -> _Sent:
        rank = RankId(done.stage, done.rank)
        progress = self._progress.get(rank)
        if progress is None:
            raise ProtocolError(
                f"Stage {done.stage} rank {done.rank} answered a step, and the plan has no such rank."
            )
        if done.step != progress.step + 1 or done.step > self._steps_sent:
            raise ProtocolError(
                f"Stage {done.stage} rank {done.rank} answered step {done.step} after step {progress.step} "
                f"of {self._steps_sent} sent."
            )
        progress.step, progress.at, progress.kv_bytes = done.step, now, done.kv_bytes
        sent = self._in_flight[done.step]
        self._recent.append(_timing(rank, sent, done.timings))
        return sent

    def _fail_rows(self, sent: _Sent, failure: step_pb2.Failure) -> Iterator[Advance]:
        """The rows that are named end; all of them where none is."""
        self._steps_failed += not sent.failed
        sent.failed = True
        for sequence in sent.sequences:
            named = not failure.sequences or sequence.id in failure.sequences
            if named and sequence.id in self._running.all:
                self.finish(sequence)
                yield Advance(sequence, error=failure_to_error(failure))

    def _commit_rows(self, sent: _Sent, done: step_pb2.StepDone, now: float) -> Iterator[Advance]:
        results = {result.sequence: result for result in done.results}
        for sequence, row in zip(sent.sequences, sent.step.rows, strict=True):
            if sequence.id not in self._running.all:
                continue
            try:
                sampled, prompt_logprobs = read_result(row, results.get(sequence.id))
            except ProtocolError as error:
                self.finish(sequence)
                yield Advance(sequence, error=error)
                continue
            sequence.prompt_logprobs.extend(prompt_logprobs)
            if row.start + max(1, len(row.tokens.ids)) >= sequence.prompt_length:
                yield self._advance(sequence, sampled, now)

    def _advance(self, sequence: Sequence, sampled: tuple[TokenLogprob, ...], now: float) -> Advance:
        tokens = sequence.commit(sampled, now)
        if sequence.finish_reason is None:
            self._running.ready[sequence.id] = sequence
            self._running.decoding.setdefault(sequence.id, self._prefills_sent)
        else:
            self.finish(sequence)
        return Advance(sequence, tokens)

    def _forget_completed(self) -> None:
        """Let go of the steps that every rank has answered."""
        completed = self._steps_completed
        while self._in_flight and (number := next(iter(self._in_flight))) <= completed:
            sent = self._in_flight.pop(number)
            self._prefills_in_flight -= sent.is_prefill
            self._held.difference_update(
                operation.free.sequence for operation in sent.step.operations if operation.HasField("free")
            )

    # ---- how it stands

    @property
    def _steps_completed(self) -> int:
        return min(progress.step for progress in self._progress.values())

    def oldest_unanswered(self, now: float) -> Unanswered | None:
        """The rank that has owed an answer longest; None when nobody owes one."""
        owing = [
            Unanswered(
                rank=rank,
                step=progress.step + 1,
                waited_s=now - max(self._in_flight[progress.step + 1].sent_at, progress.at),
                deadline_s=self._step_deadline_s,
            )
            for rank, progress in self._progress.items()
            if progress.step < self._steps_sent
        ]
        return max(owing, key=lambda unanswered: unanswered.waited_s, default=None)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running.all),
            waiting=len(self._waiting),
            sequences_held=len(self._held),
            kv_bytes={rank: progress.kv_bytes for rank, progress in self._progress.items()},
            steps_sent=self._steps_sent,
            steps_completed=self._steps_completed,
            steps_failed=self._steps_failed,
            recent=tuple(self._recent),
        )


def _ceil_div(count: int, parts: int) -> int:
    return -(-count // parts)


def _timing(rank: RankId, sent: _Sent, timings: step_pb2.Timings) -> StepTiming:
    return StepTiming(
        step=sent.step.step,
        rank=rank,
        rows=len(sent.sequences),
        tokens=sent.tokens,
        started_us=timings.started_us,
        finished_us=timings.finished_us,
        queue_us=timings.queue_us,
        link_wait_us=timings.link_wait_us,
        compute_us=timings.compute_us,
        link_send_us=timings.link_send_us,
    )
