"""One stage's step: cache operations, activations in, layers, activations or results out.

`StageRunner.run` is the whole of it, top to bottom. Only the compute thread calls it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import mlx.core as mx

from mlx_ring.core.errors import ProtocolError, StaleMessage
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.links import HIDDEN, SAMPLED, Inbox, LinkKey, LinkSender, WireTensor
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.forward import StageForward, StepInput
from mlx_ring.worker.handover import TokenHandover, samples_token
from mlx_ring.worker.kv import KVStore
from mlx_ring.worker.results import row_results
from mlx_ring.worker.sequences import SequenceTable
from mlx_ring.worker.shard import StageModel
from mlx_ring.worker.tensors import from_message, from_wire, to_wire


def monotonic_us() -> int:
    """The machine's monotonic clock, microseconds."""
    return time.monotonic_ns() // 1000


@dataclass(frozen=True, slots=True)
class StageLinks:
    """A stage's ends: what comes in, what goes to the next stage, what goes back to stage 0."""

    inbox: Inbox
    next: LinkSender | None = None
    first: LinkSender | None = None


@dataclass(slots=True)
class _Clock:
    """One step's times, microseconds."""

    arrived: int
    started: int
    link_wait: int = 0
    link_send: int = 0

    def timings(self) -> step_pb2.Timings:
        finished = monotonic_us()
        return step_pb2.Timings(
            started_us=self.started,
            finished_us=finished,
            queue_us=max(0, self.started - self.arrived),
            link_wait_us=self.link_wait,
            link_send_us=self.link_send,
            compute_us=finished - self.started - self.link_wait - self.link_send,
        )


class StageRunner:
    """Executes steps strictly in stream order and answers each."""

    def __init__(
        self, assignment: worker_pb2.StageAssignment, model: StageModel, kv: KVStore, links: StageLinks
    ) -> None:
        self._assignment = assignment
        self._model = model
        self._kv = kv
        self._links = links
        self._forward = StageForward(model, kv)
        self._sequences = SequenceTable(kv)
        self._handover = TokenHandover(links.inbox, self._sequences)
        self.last_step = 0

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def kv_bytes(self) -> int:
        return self._kv.nbytes

    def run(self, step: step_pb2.Step, arrived_us: int) -> step_pb2.StepDone:
        """Execute one step; a failure is an answer too, and a tombstone for whoever waits downstream."""
        clock = _Clock(arrived_us, monotonic_us())
        done = self._answer(step)
        try:
            self._admit(step)
            self._sequences.apply(step.operations)
            if step.rows:
                inputs = self._take_inputs(step, clock)
                if self._model.is_last:
                    outputs = self._forward.outputs(inputs)
                    done.results.extend(row_results(outputs, self._sequences))
                    self._hand_over(step, clock)
                else:
                    activations = self._forward.activations(inputs)
                    self._hand_on(step, inputs, activations, clock)
        except Exception as error:  # noqa: BLE001 - whatever it is, the head and the next stage must hear of it
            done.ClearField("results")
            done.failure.CopyFrom(error_to_failure(error))
            self._send_tombstones(step, done.failure)
        done.kv_bytes = self._kv.nbytes
        done.timings.CopyFrom(clock.timings())
        return done

    def reset(self) -> None:
        """Free every sequence, as a new head wants it."""
        self._sequences.reset()

    def _answer(self, step: step_pb2.Step) -> step_pb2.StepDone:
        return step_pb2.StepDone(
            instance=step.instance,
            epoch=step.epoch,
            step=step.step,
            stage=self._assignment.stage,
            rank=self._assignment.rank,
        )

    def _admit(self, step: step_pb2.Step) -> None:
        ours = self._assignment
        if (step.instance, step.epoch) != (ours.instance, ours.epoch):
            raise StaleMessage(
                f"Step {step.step} is of instance {step.instance} epoch {step.epoch}; "
                f"{ours.instance} epoch {ours.epoch} is in force here."
            )
        if step.step <= self.last_step:
            raise ProtocolError(f"Step {step.step} came after step {self.last_step}.")
        self.last_step = step.step

    def _take_inputs(self, step: step_pb2.Step, clock: _Clock) -> StepInput:
        """The rows' tokens, and the activations where a stage comes before."""
        for row in step.rows:
            _check_length(row)
            self._sequences.check_start(row)
        deadline = time.monotonic() + step.deadline_s if step.deadline_s else None
        waiting = monotonic_us()
        if self._model.is_first:
            tokens = [self._row_tokens(row, deadline) for row in step.rows]
            hidden = _embeddings(step)
            self._expect_tokens(step)
        else:
            message = self._links.inbox.recv(_key(step), deadline)
            tokens = self._downstream_tokens(step, message)
            hidden = from_wire(message)
        clock.link_wait += monotonic_us() - waiting
        for row, ids in zip(step.rows, tokens, strict=True):
            self._sequences.feed(row, ids)
        return StepInput(step.rows, tokens, hidden)

    def _row_tokens(self, row: step_pb2.Row, deadline: float | None) -> list[int]:
        kind = row.WhichOneof("input")
        if kind == "previous":
            return [self._previous_token(row.sequence, deadline), *row.draft]
        return _said_tokens(row)

    def _previous_token(self, sequence: int, deadline: float | None) -> int:
        if not self._model.is_last:
            return self._handover.token(sequence, deadline)
        token = self._sequences[sequence].sampled
        if token is None:
            raise ProtocolError(f"Sequence {sequence} has no sampled token for a row with `previous`.")
        return token

    def _expect_tokens(self, step: step_pb2.Step) -> None:
        if not self._model.is_last:
            self._handover.collect()
            if step.hand_over_tokens:
                self._handover.expect(_key(step, SAMPLED), step.rows)

    @staticmethod
    def _downstream_tokens(step: step_pb2.Step, message: WireTensor) -> list[list[int]]:
        """The rows' tokens on a later stage: from the step, or with the activations where it has `previous`."""
        if not message.tokens:
            return [_said_tokens(row) for row in step.rows]
        tokens: list[list[int]] = []
        begin = 0
        for row in step.rows:
            end = begin + _row_length(row)
            tokens.append(list(message.tokens[begin:end]))
            begin = end
        return tokens

    def _hand_on(self, step: step_pb2.Step, inputs: StepInput, activations: mx.array, clock: _Clock) -> None:
        """Send activations to the next stage, with the token ids if it cannot know them."""
        sending = monotonic_us()
        previous = any(row.WhichOneof("input") == "previous" for row in step.rows)
        tokens = tuple(token for ids in inputs.tokens for token in ids) if previous else ()
        if self._links.next is not None:
            self._links.next.send(_key(step), to_wire(activations, tokens))
        clock.link_send += monotonic_us() - sending

    def _hand_over(self, step: step_pb2.Step, clock: _Clock) -> None:
        """Send what was sampled back to stage 0, where the head asks for it."""
        if not step.hand_over_tokens or self._links.first is None:
            return
        sending = monotonic_us()
        sampled = [self._sequences[row.sequence].sampled for row in step.rows if samples_token(row)]
        tokens = tuple(token for token in sampled if token is not None)
        self._links.first.send(_key(step, SAMPLED), WireTensor("uint32", (0,), b"", tokens))
        clock.link_send += monotonic_us() - sending

    def _send_tombstones(self, step: step_pb2.Step, failure: step_pb2.Failure) -> None:
        if step.rows and self._links.next is not None:
            self._links.next.send_failure(_key(step), failure)
        if step.hand_over_tokens and self._links.first is not None:
            self._links.first.send_failure(_key(step, SAMPLED), failure)


def _key(step: step_pb2.Step, purpose: worker_pb2.Activation.Purpose = HIDDEN) -> LinkKey:
    return LinkKey(step.instance, step.epoch, step.step, purpose)


def _check_length(row: step_pb2.Row) -> None:
    if not _row_length(row):
        raise ProtocolError(f"The row of sequence {row.sequence} has no tokens.")


def _row_length(row: step_pb2.Row) -> int:
    match row.WhichOneof("input"):
        case "tokens":
            return len(row.tokens.ids) + len(row.draft)
        case "embeddings":
            return row.embeddings.shape[0]
        case "token" | "previous":
            return 1 + len(row.draft)
        case _:
            raise ProtocolError(f"The row of sequence {row.sequence} has no input.")


def _said_tokens(row: step_pb2.Row) -> list[int]:
    """The tokens that the step itself names; zeros stand for embeddings."""
    match row.WhichOneof("input"):
        case "tokens":
            return [*row.tokens.ids, *row.draft]
        case "token":
            return [row.token, *row.draft]
        case _:
            return [0] * _row_length(row)


def _embeddings(step: step_pb2.Step) -> mx.array | None:
    """`(tokens, hidden)` that enters layer 0, where the rows are embeddings instead of tokens."""
    given = [row.WhichOneof("input") == "embeddings" for row in step.rows]
    if not any(given):
        return None
    if not all(given):
        raise ProtocolError(f"Step {step.step} mixes rows of embeddings with rows of tokens.")
    return mx.concatenate([from_message(row.embeddings) for row in step.rows])
