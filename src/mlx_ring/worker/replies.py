"""Replies to a finished step: to the head, to the next stage and to stage 0.

They include spans for traced requests: one for each chunk of a prompt, and one for all of decoding. The head exports
them because a worker's machine may not reach the collector. A step without traced requests only costs a check.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.links import Inbox, LinkSender, WireTensor
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.grammars import grammar_error
from mlx_ring.worker.inputs import ends_at, sampled_key, step_key
from mlx_ring.worker.results import add_lookups
from mlx_ring.worker.shard import StageModel
from mlx_ring.worker.step import Halt, StepWork, monotonic_us
from mlx_ring.worker.tensors import to_wire


class StepListener(Protocol):
    """End of a link whose messages are matched by the order of steps."""

    def expect(self, step: step_pb2.Step) -> None:
        """Expect a step with rows, in the order of the stream."""
        ...


@dataclass(frozen=True, slots=True)
class StageLinks:
    """Links of a stage: from the stage before, to the next stage, and back to stage 0."""

    inbox: Inbox
    next: LinkSender | None = None
    first: LinkSender | None = None
    listeners: tuple[StepListener, ...] = ()
    """Link ends that must learn of every step before it is tried."""


class StepAnswers:
    """Sender of answers and of what other stages wait for."""

    def __init__(self, assignment: worker_pb2.StageAssignment, model: StageModel, links: StageLinks) -> None:
        self._assignment = assignment
        self._model = model
        self._links = links

    def relink(self, links: StageLinks) -> None:
        """Replace the links, and close the earlier ones."""
        before, self._links = self._links, links
        for end in (before.next, before.first):
            if end is not None:
                end.close()

    def expect(self, step: step_pb2.Step) -> None:
        """Announce a step that will be answered."""
        for end in self._links.listeners if step.rows else ():
            end.expect(step)

    def give(self, work: StepWork) -> step_pb2.StepDone:
        """Send on the step's output or its failure. Return the head's answer, without times and sizes."""
        step = work.step
        done = step_pb2.StepDone(
            instance=step.instance,
            epoch=step.epoch,
            step=step.step,
            stage=self._assignment.stage,
            rank=self._assignment.rank,
        )
        failure = work.row_failure()
        if work.error is None and step.rows:
            try:
                self._pass_on(work, done, failure)
            except Exception as error:  # noqa: BLE001 - any error must reach the head and the next stage
                work.error = error
        if work.error is not None:
            done.ClearField("results")
            failure = error_to_failure(work.error)
            self._send_tombstones(step, failure)
        if failure is not None:
            done.failure.CopyFrom(failure)
        return done

    def _pass_on(self, work: StepWork, done: step_pb2.StepDone, failure: step_pb2.Failure | None) -> None:
        if not self._model.is_last:
            self._hand_on(work, failure)
            return
        self._feed_back(work, failure)
        self._add_results(work, done)

    @staticmethod
    def _add_results(work: StepWork, done: step_pb2.StepDone) -> None:
        if work.inputs is None or done.rank:
            return
        results = {
            row.row.sequence: done.results.add(sequence=row.row.sequence)
            for row in work.inputs.rows
            if row.row.wants
        }
        for drawn in work.reported:
            results[drawn.sequence].tokens.extend(drawn.results)
        if work.has_lookups:
            add_lookups(work.inputs, work.passes, results)

    def _hand_on(self, work: StepWork, failure: step_pb2.Failure | None) -> None:
        """Send activations to the next stage, with token ids that it cannot know."""
        if self._links.next is None or work.inputs is None or ends_at(work.step, self._assignment.stage):
            return
        sending = monotonic_us()
        rows = work.inputs.rows
        previous = any(row.previous for row in work.step.rows)
        tokens = tuple(token for row in rows for token in row.tokens) if previous else ()
        activations = work.activations
        if activations is None:
            activations = mx.zeros((0, self._model.hidden_size), self._model.dtype)
        wire = to_wire(activations, tokens)
        self._links.next.send(
            step_key(work.step), WireTensor(wire.dtype, wire.shape, wire.data, tokens, failure)
        )
        work.clock.link_send += monotonic_us() - sending

    def _feed_back(self, work: StepWork, failure: step_pb2.Failure | None) -> None:
        """Send sampled tokens to stage 0, if the head asks for it."""
        if not work.step.feed_back_tokens or self._links.first is None or work.inputs is None:
            return
        sending = monotonic_us()
        sampled = {drawn.sequence: drawn.token for drawn in work.reported}
        tokens = tuple(sampled[row.row.sequence] for row in work.inputs.rows if row.row.sequence in sampled)
        self._links.first.send(sampled_key(work.step), WireTensor("uint32", (0,), b"", tokens, failure))
        work.clock.link_send += monotonic_us() - sending

    def _send_tombstones(self, step: step_pb2.Step, failure: step_pb2.Failure) -> None:
        if step.rows and self._links.next is not None and not ends_at(step, self._assignment.stage):
            self._links.next.send_failure(step_key(step), failure)
        if step.feed_back_tokens and self._links.first is not None:
            self._links.first.send_failure(sampled_key(step), failure)


Span = step_pb2.StageSpan
_CHUNKS = ("tokens", "embeddings")
"""Inputs of rows that prefill a prompt."""


def unix_us() -> int:
    return time.time_ns() // 1000


@dataclass(slots=True)
class _Work:
    """Work done so far, as plain numbers, because counting in messages is slow."""

    parent: str
    is_decode: bool
    started_us: int
    finished_us: int = 0
    steps: int = 0
    tokens: int = 0
    queue_us: int = 0
    link_wait_us: int = 0
    compute_us: int = 0
    link_send_us: int = 0

    def span(self) -> Span:
        return Span(
            traceparent=self.parent,
            is_decode=self.is_decode,
            started_unix_us=self.started_us,
            finished_unix_us=self.finished_us,
            steps=self.steps,
            tokens=self.tokens,
            queue_us=self.queue_us,
            link_wait_us=self.link_wait_us,
            compute_us=self.compute_us,
            link_send_us=self.link_send_us,
        )


class StepTraces:
    """Spans of one rank. It takes every finished step, in order."""

    def __init__(self, clock: Callable[[], int] = unix_us) -> None:
        """Start without spans; `clock` returns Unix time in microseconds."""
        self._clock = clock
        self._parents: dict[int, str] = {}
        """Parent of each traced sequence."""
        self._decoding: dict[int, _Work] = {}

    def note(self, step: step_pb2.Step, timings: step_pb2.Timings) -> list[Span]:
        """Record a step and return the spans that ended with it."""
        ended = self._record_operations(step) if step.operations else []
        if self._parents:
            ended += self._note_rows(step, timings)
        return [work.span() for work in ended]

    def _record_operations(self, step: step_pb2.Step) -> list[_Work]:
        ended: list[_Work] = []
        for operation in step.operations:
            match operation.WhichOneof("operation"):
                case "open":
                    if operation.open.traceparent:
                        self._parents[operation.open.sequence] = operation.open.traceparent
                case "retain":
                    ended += self._end(operation.retain.sequence)
                case "free":
                    ended += self._end(operation.free.sequence)
                case "reset":
                    ended += [work for sequence in [*self._parents] for work in self._end(sequence)]
                case _:
                    pass
        return ended

    def _end(self, sequence: int) -> list[_Work]:
        self._parents.pop(sequence, None)
        work = self._decoding.pop(sequence, None)
        return [] if work is None else [work]

    def _note_rows(self, step: step_pb2.Step, timings: step_pb2.Timings) -> list[_Work]:
        """Record the rows, and return the spans of prompt chunks."""
        rows = [(row, parent) for row in step.rows if (parent := self._parents.get(row.sequence)) is not None]
        if not rows:
            return []
        finished = self._clock()
        # The clock of a machine without a battery may stand in 1970.
        started = max(0, finished - (timings.finished_us - timings.started_us))
        spent = (timings.queue_us, timings.link_wait_us, timings.compute_us, timings.link_send_us)
        chunks: list[_Work] = []
        for row, parent in rows:
            if row.WhichOneof("input") in _CHUNKS:
                work = _Work(parent, is_decode=False, started_us=started)
                chunks.append(work)
            else:
                work = self._decoding.get(row.sequence)
                if work is None:
                    work = self._decoding[row.sequence] = _Work(parent, is_decode=True, started_us=started)
            _add(work, row, finished, spent)
        return chunks


def _add(work: _Work, row: step_pb2.Row, finished_us: int, spent: tuple[int, int, int, int]) -> None:
    queue, link_wait, compute, link_send = spent
    work.finished_us = finished_us
    work.steps += 1
    work.tokens += (len(row.tokens.ids) or 1) + len(row.draft)
    work.queue_us += queue
    work.link_wait_us += link_wait
    work.compute_us += compute
    work.link_send_us += link_send


class StepStream:
    """The head's stream of steps, and the answers to it."""

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[worker_pb2.StepsReply | None] = queue.SimpleQueue()
        self.halt = Halt()

    def put_prepared(self, id_: int, error: BaseException | None) -> None:
        """Answer that a grammar was compiled, or could not be."""
        failure = None if error is None else error_to_failure(grammar_error(error))
        prepared = worker_pb2.GrammarPrepared(id=id_, failure=failure)
        self.answers.put(worker_pb2.StepsReply(prepared=prepared))

    def put_fetched(self, fetched: worker_pb2.KvFetched) -> None:
        """Answer with the number of blocks that were read, or counted."""
        self.answers.put(worker_pb2.StepsReply(fetched=fetched))
