"""Execution of one stage's steps: cache operations, activations in, layers, activations or results out.

A step is taken in, built, submitted to the device, and concluded: waited for and answered. While one step is under
way, the next is built on top of it if nothing must be waited for. So the device does not wait for
Python. Answers leave in stream order. Only the compute thread calls this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_ring.core.errors import ProtocolError, StaleMessage
from mlx_ring.rpc.backends import backend_of, has_collective_link
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.compute_thread import Wait, Waits, group_failure
from mlx_ring.worker.forward import StageForward, end_mark, evaluate, flat_activations
from mlx_ring.worker.grammars import GrammarCompiler, StepMasks
from mlx_ring.worker.inputs import (
    StepInput,
    StepInputs,
    ends_at,
    own_part,
    row_length,
    sampled_key,
    samples_token,
)
from mlx_ring.worker.kv import KVStore
from mlx_ring.worker.replies import StageLinks, StepAnswers, StepTraces
from mlx_ring.worker.results import NO_MASKS, StepDraws, grammar_masks
from mlx_ring.worker.sequences import SequenceTable, TokenFeedback
from mlx_ring.worker.shard import StageModel
from mlx_ring.worker.step import Patience, StepClock, StepWork, monotonic_us
from mlx_ring.worker.tensor import Group

if TYPE_CHECKING:
    from mlx_ring.worker.kv.disk import KvDisk  # it imports NumPy
    from mlx_ring.worker.kv.transfer import KvTransfers


class StageRunner:
    """Runner that executes steps strictly in stream order and answers each."""

    def __init__(
        self,
        assignment: worker_pb2.StageAssignment,
        model: StageModel,
        kv: KVStore,
        links: StageLinks,
        group: Group | None = None,
        grammars: GrammarCompiler | None = None,
        disk: KvDisk | None = None,
        *,
        submits_ahead: bool | None = None,
    ) -> None:
        """Connect the parts of a stage.

        By default a GPU gets a step before the last one is done: it accepts commands without making the caller wait.
        A CPU does not. Its queue is short, so the caller would wait for most of the step and answer the last one late.

        Args:
            grammars: for the last stage, which draws.
            disk: where KV is saved; None: nowhere.
            submits_ahead: whether the device gets a step before the last one is done.
        """
        self._assignment = assignment
        self._model = model
        self._kv = kv
        self._forward = StageForward(model, kv)
        self._grammars = grammars if model.is_last else None
        self._sequences = SequenceTable(kv, model.vocab_size, self._grammars, disk)
        self._token_feedback = TokenFeedback(links.inbox, self._sequences)
        self._inputs = StepInputs(model, links.inbox, self._sequences, self._token_feedback)
        self._answers = StepAnswers(assignment, model, links)
        self._submits_ahead = (
            mx.default_device() != mx.Device(mx.cpu) if submits_ahead is None else submits_ahead
        )
        self._group = group
        self.spoiled: Exception | None = None
        """Error that made this rank's group unusable: a step failed here that other ranks may have continued."""
        self._pending: StepWork | None = None
        self._patience = Patience()
        self._traces = StepTraces()
        self.waits = Waits()
        """Waits of the compute thread; other threads may read it."""
        self._computing, self._receiving = computing_wait(assignment), receiving_wait(assignment)
        self.last_step = 0
        self.kv_bytes = 0
        """Bytes of KV held after the last answered step; other threads may read it."""

    def use_transfers(self, transfers: KvTransfers) -> None:
        """Adopt keys and values from other workers."""
        self._sequences.transfers = transfers

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def is_pending(self) -> bool:
        """True if a step was taken in and not answered."""
        return self._pending is not None

    @property
    def patience_s(self) -> float:
        """Seconds to wait for another step before calling `finish`, while one is under way."""
        return 0.0 if self._pending is None else self._patience.seconds(self._pending, monotonic_us())

    def take(
        self, step: step_pb2.Step, arrived_us: int, begin: Callable[[int], None] | None = None
    ) -> Iterator[step_pb2.StepDone]:
        """Take in a step and yield the answers that are due: of the step before, and perhaps of this one.

        A failure is also an answer, and becomes a tombstone for the stages downstream.

        Args:
            step: the step.
            arrived_us: time of its arrival.
            begin: function to call with its number once its input is there; an error that it raises fails the step.
        """
        with self.waits.during(self._computing):
            yield from self._take(step, arrived_us, begin)

    def _take(
        self, step: step_pb2.Step, arrived_us: int, begin: Callable[[int], None] | None
    ) -> Iterator[step_pb2.StepDone]:
        step = own_part(step, self._assignment.stage)
        self._answers.expect(step)
        work = StepWork(step, StepClock(arrived_us, monotonic_us()), begin)
        before = self._pending
        if before is not None and not self._can_build_ahead(before, step):
            yield self._finish(before)
            before = None
            work.clock.started = monotonic_us()
        self._start(work)
        if before is not None:
            if self._submits_ahead:
                self._submit(work)
            yield self._finish(before, work)
            if work.is_rolled_back:
                self._attempt(work, self._build)
        self._submit(work)
        self._draw_by_grammar(work)
        self._pending = work
        if not work.is_pending:
            yield self._finish(work)

    def finish(self) -> Iterator[step_pb2.StepDone]:
        """Wait for the step that is under way, and yield its answer if there is one."""
        if self._pending is not None:
            with self.waits.during(self._computing):
                yield self._finish(self._pending)

    def run(self, step: step_pb2.Step, arrived_us: int) -> step_pb2.StepDone:
        """Take in a step and wait for its answer."""
        *_, done = [*self.take(step, arrived_us), *self.finish()]
        return done

    def limit_kv(self, limit_bytes: int) -> None:
        """Limit the KV memory of this rank, as the head asks.

        A pass must have the same rows on all ranks of a group. So the head gives them limits in proportion to their
        shares, all before the same step.
        """
        self._kv.limit(limit_bytes or None)

    def reset(self, kept: Sequence[worker_pb2.KeptSequence] = ()) -> None:
        """Free every sequence for a new head, except the part to keep of some."""
        for _ in self.finish():
            pass
        # The ranks of a group may have ended in different steps, so they bring what they keep into one order. Not all of
        # them may have the last limit.
        if self._group is not None:
            self._kv.limit(None)
        self._sequences.reset(kept, moves=self._group is not None)
        self._token_feedback.reset()
        self._traces = StepTraces()
        self.last_step = 0
        self.kv_bytes = self._kv.nbytes

    def relink(self, links: StageLinks) -> None:
        """Send to other neighbours from now on; the inbox stays."""
        self._answers.relink(links)

    # ---- building

    def _can_build_ahead(self, before: StepWork, step: step_pb2.Step) -> bool:
        """Report whether a step can be built while the one before is under way, without a long wait.

        Never in a group: the answer depends on timing, which differs between ranks. KV might then move at different
        steps, but the same rows must share a pass on all ranks.
        """
        return (
            self._group is None
            and before.allows_building_ahead
            and self._kv.can_undo
            and bool(step.rows)
            and all(operation.HasField("open") for operation in step.operations)
            and not self._forward.stops(step)
            # If KV that the device is reading moved, MLX would copy it as a whole.
            and self._kv.stay([(row.sequence, row_length(row)) for row in step.rows if row.HasField("input")])
            and self._inputs.is_ready(step, self._patience.seconds(before, monotonic_us()))
        )

    def _start(self, work: StepWork) -> None:
        """Take in what the step brings, and build it."""
        self._attempt(work, self._take_in)
        if work.step.rows and work.error is None:
            self._attempt(work, self._build)

    def _attempt(self, work: StepWork, part: Callable[[StepWork], None]) -> None:
        try:
            part(work)
        except Exception as error:  # noqa: BLE001 - any error must reach the head and the next stage
            self._roll_back(work)
            work.error = error
            if self._group is not None and part == self._build:
                work.error = self.spoiled = group_failure(error)

    def _take_in(self, work: StepWork) -> None:
        """Do what must happen only once, however often the step is built."""
        self._admit(work.step)
        work.refused = self._sequences.apply(work.step.operations, work.step.epoch)
        if work.step.rows:
            deadline = time.monotonic() + work.step.deadline_s if work.step.deadline_s else None
            waiting = monotonic_us()
            with self.waits.during(self._receiving):
                work.message = self._inputs.receive(work.step, deadline)
            work.clock.link_wait += monotonic_us() - waiting
        if work.begin is not None:
            work.begin(work.step.step)

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

    def _build(self, work: StepWork) -> None:
        """Build everything up to the answer, lazily. It can be rolled back."""
        step, refused = work.step, work.refused
        work.failed = {row.sequence: refused[row.sequence] for row in step.rows if row.sequence in refused}
        work.inputs = self._inputs.feed(step, work.message, work.failed)
        self._forward.build(work.inputs, work.passes)
        if self._model.is_last:
            work.waits_to_draw = work.inputs.has_grammars
            if not work.waits_to_draw:
                work.draws = self._draws(work.inputs, work)
            return
        sends_on = work.passes and not ends_at(step, self._assignment.stage)
        work.activations = flat_activations(work.passes) if sends_on else None
        if self._model.is_first and step.feed_back_tokens:
            sampling = [row.row.sequence for row in work.inputs.rows if samples_token(row.row)]
            self._token_feedback.expect(sampled_key(step), sampling)

    def _draws(self, inputs: StepInput, work: StepWork, masks: StepMasks = NO_MASKS) -> StepDraws:
        head = self._model.head if inputs.only_draws else None
        return StepDraws(inputs, work.passes, self._group, head, masks)

    def _roll_back(self, work: StepWork) -> None:
        """Undo what was built. Sequences return to their state before the step, except for its operations."""
        self._kv.undo([item.batch for item in work.passes])
        if work.draws is not None:
            work.draws.withdraw()
        for row in work.inputs.rows if work.inputs is not None else []:
            row.state.sampled = row.sampled_before
        work.roll_back()

    # ---- computing

    def _submit(self, work: StepWork) -> None:
        """Give the step to the device without waiting for it."""
        if work.is_submitted or not work.is_pending:
            return
        work.is_submitted = True
        work.outputs = self._outputs(work)
        try:
            evaluate(work.passes, *work.outputs)
        except Exception as error:  # noqa: BLE001 - MLX raises any kind of error
            self._mark_lost(work, error)
        work.clock.submitted = monotonic_us()

    def _draw_by_grammar(self, work: StepWork) -> None:
        """Draw under grammars. They need every token before, and run while the device computes the pass.

        From here on the step cannot be rolled back, because the device has it.
        """
        if not work.waits_to_draw or not work.is_pending or work.inputs is None:
            return
        work.waits_to_draw = False
        try:
            masks = grammar_masks(work.inputs, self._model.vocab_size, work.failed)
            self._forget_grammars(work.inputs, masks)
            work.draws = self._draws(work.inputs, work, masks)
            mx.async_eval(*work.draws.arrays)
            work.outputs += work.draws.arrays
        except Exception as error:  # noqa: BLE001 - MLX raises any kind of error
            self._mark_lost(work, error)

    def _forget_grammars(self, inputs: StepInput, masks: StepMasks) -> None:
        """Forget grammars that failed, so that the next request for one compiles it again."""
        for row in inputs.rows:
            if row.row.sequence in masks.failed and self._grammars is not None:
                self._grammars.forget(row.state.opened)

    def _outputs(self, work: StepWork) -> list[mx.array]:
        if work.activations is not None:
            return [work.activations]
        outputs = list(work.draws.arrays) if work.draws is not None else []
        if outputs:
            outputs += [end_mark([item]) for item in work.passes if not any(item.offsets)]
        if work.has_lookups or work.waits_to_draw:
            outputs += [item.values for item in work.passes if any(item.offsets)]
        if self._group is not None:
            # Some ranks may compute a token's last sums together with its KV: then all compute them.
            outputs += [item.values for item in work.passes if set(item.batch.counts) == {1}]
        return outputs or [end_mark(work.passes)]

    def _mark_lost(self, work: StepWork, error: Exception) -> None:
        """Record that the step failed while it was computed."""
        if work.draws is not None:
            work.draws.withdraw()
        self._kv.fail([item.batch for item in work.passes])
        work.error = error
        if self._group is not None:
            work.error = self.spoiled = group_failure(error)

    # ---- answering

    def _finish(self, work: StepWork, follower: StepWork | None = None) -> step_pb2.StepDone:
        """Wait for the step and answer it. Roll back a follower that was built on tokens that changed."""
        self._pending = None
        if work.is_pending:
            self._conclude(work, follower)
        if follower is not None:
            follower.clock.started = monotonic_us()
        done = self._answers.give(work)
        done.kv_bytes = self.kv_bytes = self._kv.nbytes
        done.timings.CopyFrom(work.clock.timings(monotonic_us()))
        done.spans.extend(self._traces.note(work.step, done.timings))
        return done

    def _conclude(self, work: StepWork, follower: StepWork | None) -> None:
        """Wait until the device has finished the step, and record the sampled tokens."""
        try:
            mx.eval(*work.outputs)
            work.drawn = work.draws.read() if work.draws is not None else []
            self._patience.note(work, monotonic_us())
            for item in work.passes:
                self._kv.commit(item.batch)
        except Exception as error:  # noqa: BLE001 - MLX raises any kind of error
            if follower is not None:
                self._roll_back(follower)
            self._mark_lost(work, error)
            return
        if self._group is not None:
            self._group.end_step()
        built_on = follower.built_on if follower is not None else set[int]()
        if follower is not None and any(row.is_redrawn and row.sequence in built_on for row in work.drawn):
            self._roll_back(follower)
            built_on.clear()
        if work.draws is not None:
            work.draws.withdraw()
        for drawn in work.drawn:
            drawn.settle(used=drawn.sequence in built_on)


def computing_wait(assignment: worker_pb2.StageAssignment) -> Wait:
    """Return the wait for a step's results. Ranks of a stage compute and join collectives in one pass."""
    if assignment.tp_size > 1:
        return Wait("collective", backend_of(assignment), f"the other ranks of stage {assignment.stage}")
    return Wait("device")


def receiving_wait(assignment: worker_pb2.StageAssignment) -> Wait:
    """Return the wait for a step's input. Sampled tokens return to the first stage over gRPC, whatever the link."""
    if not assignment.stage:
        return Wait("link", peer=f"stage {max(1, assignment.stages) - 1}")
    peer = f"stage {assignment.stage - 1}"
    if has_collective_link(assignment):
        return Wait("collective", backend_of(assignment), peer)
    return Wait("link", peer=peer)
