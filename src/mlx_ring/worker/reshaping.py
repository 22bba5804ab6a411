"""Stage of a worker: it can be linked with other neighbours, and replaced by another stage of its model.

The layers of the next stage that the present one lacks are loaded between steps, so that it serves meanwhile. Where the
memory has no room for both, the present stage is dropped first, except for what the next one keeps. `Relink` then
changes the stage, or only its neighbours.
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import grpc
import mlx.core as mx

from mlx_ring.core.errors import NotReady, RingError, StaleMessage
from mlx_ring.core.logs import set_log_epoch
from mlx_ring.rpc.backends import has_collective_link
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.hello import check_hello, make_hello
from mlx_ring.rpc.links import OPENING_LIMIT_S, Opening
from mlx_ring.rpc.protos import hello_pb2, step_pb2, worker_pb2
from mlx_ring.worker.compute_thread import JobQueue, Wait, Waits, complete, end_process
from mlx_ring.worker.grammars import GrammarCompiler
from mlx_ring.worker.kv.transfer import KvTransfers
from mlx_ring.worker.neighbours import Neighbours, OpenedLinks, PeerAccess
from mlx_ring.worker.replies import StageLinks, StepStream
from mlx_ring.worker.runner import StageRunner
from mlx_ring.worker.stage import BuiltStage, DiskSettings, NextStage, Parts, Surroundings
from mlx_ring.worker.step import Halt

log = logging.getLogger(__name__)

_ProgressQueue = queue.SimpleQueue[worker_pb2.LoadProgress | None]
_LOADS = Wait("load")


class NextStages:
    """Next stage of a worker if one was announced, and its load on the compute thread."""

    def __init__(self, jobs: JobQueue[Callable[[], None]], before_part: Callable[[], None]) -> None:
        """Start without one.

        Args:
            jobs: jobs of the compute thread.
            before_part: called there before each part of a load, to answer a step that is under way.
        """
        self._jobs, self._before_part = jobs, before_part
        self.stage: NextStage | None = None
        self.waits = Waits()
        """Waits of the compute thread for parts of a load; other threads may read it."""

    def find(self, wanted: worker_pb2.StageAssignment) -> NextStage | None:
        """Return the next stage if an assignment is for it."""
        stage = self.stage
        return stage if stage is not None and is_same_place(stage.assignment, wanted) else None

    def announce(self, stage: NextStage | None) -> None:
        """Expect a stage instead of another one, whose weights are dropped; None expects none."""
        before, self.stage = self.stage, stage
        if before is not None:
            del before
            self._jobs.put(release_memory)

    def load(
        self, stage: NextStage, drop_present: Callable[[], None] | None = None
    ) -> Iterator[worker_pb2.LoadProgress]:
        """Load the next stage between the steps, and yield the progress, which ends with `ready` or a failure.

        Args:
            stage: the stage that was announced last.
            drop_present: drops the present stage; None to let it serve.
        """
        progress = _ProgressQueue()
        parts = stage.parts(progress.put, drop_present)
        self._jobs.put(partial(self._load_part, stage, parts, progress))
        yield from iter(progress.get, None)

    def _load_part(self, stage: NextStage, parts: Parts, progress: _ProgressQueue) -> None:
        """Load a part, and the next one after the jobs that wait."""
        try:
            has_more = stage is self.stage and self._load_next(parts)
        except Exception as error:
            log.exception("Loading more layers failed")
            self._fail(stage, progress, error)
            return
        total = stage.gained_bytes
        if has_more:
            self._jobs.put(partial(self._load_part, stage, parts, progress))
        elif stage.is_loaded:
            progress.put(
                worker_pb2.LoadProgress(ready=True, phase="ready", bytes_loaded=total, bytes_total=total)
            )
            progress.put(None)
        else:
            error = NotReady(f"The layers {stage.layers} are no longer wanted here.")
            self._fail(stage, progress, error)

    def _load_next(self, parts: Parts) -> bool:
        """Load a part; return False if there was none left."""
        self._before_part()
        with self.waits.during(_LOADS):
            return next(parts, self) is not self

    def _fail(self, stage: NextStage, progress: _ProgressQueue, error: Exception) -> None:
        progress.put(worker_pb2.LoadProgress(failure=error_to_failure(error)))
        progress.put(None)
        if stage is self.stage:
            self.stage = None
        self._jobs.put(release_memory)


def is_same_place(one: worker_pb2.StageAssignment, other: worker_pb2.StageAssignment) -> bool:
    """Report whether two assignments are for the same rank of the same plan, in whatever epoch."""
    of_one, of_other = ((each.instance, each.plan_digest, each.stage, each.rank) for each in (one, other))
    return of_one == of_other


def release_memory() -> None:
    """Free what nothing refers to any more. A model refers to itself, so it needs the collector."""
    gc.collect()
    mx.clear_cache()


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Identity of this worker, for greetings and status, and where it saves KV."""

    node: str
    stage: int
    rank: int
    blas: str
    kernels: str = ""
    disk: DiskSettings | None = None


class StageHolder:
    """Stage of a worker, which can be linked with other neighbours, and replaced by another stage of its model."""

    def __init__(self, identity: WorkerIdentity, access: PeerAccess | None = None) -> None:
        self._identity = identity
        self._access = access or PeerAccess()
        self._jobs: JobQueue[Callable[[], None]] = JobQueue()
        self._runner: StageRunner | None = None
        self._grammars: GrammarCompiler | None = None
        self._built: BuiltStage | None = None
        self._request: worker_pb2.LoadRequest | None = None
        self._neighbours = Neighbours(self._link_hello, self._report_loss)
        self._transfers = KvTransfers(self._between_steps, self._access.trust)
        self._opening = Opening()
        """Links that were opened last after the load."""
        self._stopping = False
        self._stream: StepStream | None = None
        self._head = 0
        """Number of the newest head, which loaded or linked this worker or has its stream; older ones are refused."""
        self._halt = Halt()
        self._taken_from: StepStream | None = None
        """Stream whose steps the runner took in."""
        self._lock = threading.Lock()
        self._phase, self._dtype = "empty", ""
        self._kv = worker_pb2.KvTraits()
        self._weight_bytes = 0
        self._kept: Sequence[worker_pb2.KeptSequence] = ()
        """Sequences of the epoch before whose KV the next head's steps continue."""
        self._sends: Callable[[], worker_pb2.LinkUse | None] = lambda: None
        self._next = NextStages(self._jobs, self._finish_step)
        self._expected: worker_pb2.StageAssignment | None = None
        """Place of the next stage while its neighbours are linked."""

    def hello(self, head: int = 0) -> hello_pb2.Hello:
        """Describe this worker, the stage that it loaded and its last step."""
        request, runner = self._request, self._runner
        assignment = request.assignment if request else worker_pb2.StageAssignment()
        return make_hello(
            instance=assignment.instance,
            epoch=assignment.epoch,
            model_digest=assignment.model_digest,
            plan_digest=assignment.plan_digest,
            node=self._identity.node,
            stage=assignment.stage if request else self._identity.stage,
            rank=self._identity.rank,
            last_step=runner.last_step if runner else 0,
            fencing_id=head,
        )

    def _link_hello(self) -> hello_pb2.Hello:
        """Describe this worker for its links, as it will be if it is about to have another stage."""
        hello, expected = self.hello(), self._expected
        if expected is not None:
            hello.instance, hello.stage = expected.instance, expected.stage
            hello.plan_digest, hello.model_digest = expected.plan_digest, expected.model_digest
        return hello

    def _finish_step(self) -> None:
        """Answer the step that is under way, if there is one."""
        if self._runner is not None and self._runner.is_pending:
            self._answer(self._runner.finish())

    def _between_steps(self, work: Callable[[], None]) -> None:
        """Let the compute thread do work once no step is under way."""

        def finish_first() -> None:
            self._finish_step()
            work()

        self._jobs.put(finish_first)

    def _answer(self, answers: Iterator[step_pb2.StepDone]) -> None:
        for done in answers:
            if done.HasField("failure"):
                log.error("Step %d failed: %s", done.step, done.failure.message)
            if self._runner is not None and self._runner.spoiled:
                end_process(self._runner.spoiled)
            # A head that has taken over since did not ask for these answers.
            if self._taken_from is self._stream and self._stream is not None:
                self._stream.answers.put(worker_pb2.StepsReply(done=done))

    def _report_loss(self, error: RingError) -> None:
        """Report the loss of a link to the head, which ends the instance."""
        if (stream := self._stream) is not None and not self._stopping:
            stream.answers.put(worker_pb2.StepsReply(failure=error_to_failure(error)))

    # Other neighbours

    def relink(
        self, request: worker_pb2.RelinkRequest, _context: grpc.ServicerContext
    ) -> worker_pb2.RelinkReply:
        """Prepare for other neighbours, or join them. Answers from the compute thread, which shows that it runs."""
        done: Future[None] = Future()
        try:
            self._check_relink(request)
            if request.halt:
                return worker_pb2.RelinkReply(begun_step=self._halt.halt())
            if request.commit:
                self._jobs.put(partial(complete, done, self._joining(request)))
            else:
                self._opening.give_up()
                self._leave()
                stage = self._next.find(request.assignment)
                self._expected = None if stage is None else stage.assignment
                halt, until = self._halt, request.until_step
                self._jobs.put(partial(complete, done, partial(self._settle, halt, until)))
                halt.release(until)
                self._neighbours.prepare(request.assignment)
            done.result()
        except RingError as error:
            return worker_pb2.RelinkReply(failure=error_to_failure(error))
        return worker_pb2.RelinkReply()

    def _check_relink(self, request: worker_pb2.RelinkRequest) -> None:
        """Refuse an older head than the newest one, another place, and an epoch that has passed."""
        wanted = request.assignment
        ours = self._request.assignment if self._request is not None else worker_pb2.StageAssignment()
        with self._lock:
            check_hello(
                request.hello, make_hello(node=self._identity.node, fencing_id=self._head), "the head"
            )
            self._head = max(self._head, request.hello.fencing_id)
        stage = self._next.find(wanted)
        if stage is None and (self._built is None or has_collective_link(ours)):
            raise NotReady("This worker cannot be linked with others: start another one.")
        if (stage is None and not is_same_place(ours, wanted)) or wanted.epoch <= ours.epoch:
            raise StaleMessage(
                f"This worker has stage {ours.stage}, rank {ours.rank} of {ours.instance}, epoch {ours.epoch}; it cannot "
                f"become stage {wanted.stage}, rank {wanted.rank} of {wanted.instance}, epoch {wanted.epoch}."
            )

    def _leave(self) -> None:
        """End the head's stream, and drop its steps."""
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.answers.put(None)

    def _settle(self, halt: Halt, until_step: int) -> None:
        """Execute the steps that other ranks of the group have begun, and finish. Runs on the compute thread."""
        self._transfers.keep_left(())
        if self._runner is not None:
            for step, arrived_us in halt.take_held(until_step):
                self._answer(self._runner.take(step, arrived_us, halt.begin))
            self._answer(self._runner.finish())
        halt.settle(until_step)

    def _joining(self, request: worker_pb2.RelinkRequest) -> Callable[[], None]:
        """Link with the new neighbours; return the work that enters their epoch, for the compute thread.

        This thread waits for neighbours, which may have died. Another first phase on the compute thread ends the wait.
        """
        linked = self._next.find(request.assignment) or self._built
        if linked is None:
            raise NotReady("This worker has not loaded a stage yet.")
        opening = self._opening = Opening()
        hello = self._link_hello()
        hello.epoch = request.assignment.epoch
        with opening.within(OPENING_LIMIT_S):
            opened = linked.open_links(request.assignment, hello, opening)
        return partial(self._join, request, opened, opening)

    def _join(self, request: worker_pb2.RelinkRequest, opened: OpenedLinks, opening: Opening) -> None:
        """Enter the epoch of the new neighbours. Runs on the compute thread."""
        stage = self._next.find(request.assignment)
        if not opening.done() or (stage is None and (self._runner is None or self._request is None)):
            raise StaleMessage(f"Other links than those of epoch {request.assignment.epoch} were requested.")
        assignment, kept = request.assignment, request.kept
        if stage is not None:
            self._enter(stage, assignment, opened)
        elif self._runner is not None and self._request is not None:
            self._kept = kept.sequences if assignment.stage >= kept.first_stage else ()
            self._request.assignment.CopyFrom(assignment)
            self._runner.relink(opened.links)
        self._sends = opened.sends
        self._neighbours.advance(assignment.epoch)
        set_log_epoch(assignment.epoch)
        log.info("Linked with the neighbours of epoch %d", assignment.epoch)

    # Another stage

    def _waits_in(self) -> worker_pb2.Wait | None:
        """Return the wait of the compute thread, for a step or a part of a load; None if there is none."""
        of_step = None if (runner := self._runner) is None else runner.waits.status()
        return self._next.waits.status() if of_step is None else of_step

    def _gain(self, request: worker_pb2.LoadRequest) -> Iterator[worker_pb2.LoadProgress]:
        """Expect the stage of a later epoch, or load what the present one lacks of it."""
        try:
            stage = self._announce(request)
        except RingError as error:
            yield worker_pb2.LoadProgress(failure=error_to_failure(error))
            return
        if stage is None or request.gain == worker_pb2.LoadRequest.ANNOUNCED:
            yield worker_pb2.LoadProgress(ready=True, phase="ready")
        else:
            is_after = request.gain == worker_pb2.LoadRequest.AFTER
            yield from self._next.load(stage, self._drop_present if is_after else None)

    def _announce(self, request: worker_pb2.LoadRequest) -> NextStage | None:
        """Return the stage of a request; None if it is the present one, so that no other is expected any more."""
        wanted = request.assignment
        with self._lock:
            check_hello(
                request.hello, make_hello(node=self._identity.node, fencing_id=self._head), "the agent"
            )
            ours = None if self._request is None else self._request.assignment
            if ours is not None and is_same_place(ours, wanted):
                self._next.announce(None)
                return None
            if (stage := self._next.find(wanted)) is not None:
                return stage
            self._check_announced(ours, wanted)
            if ours is None:
                self._head, self._phase, self._expected = request.hello.fencing_id, "loading", wanted
                self._neighbours.assign(wanted)
            around = Surroundings(
                *(self._neighbours.inbox, self._access.trust, self._neighbours.loss_recorder),
                disk_settings=self._identity.disk,
            )
            stage = NextStage(request, self.hello(), self._built, around)
            self._next.announce(stage)
            return stage

    def _check_announced(
        self, ours: worker_pb2.StageAssignment | None, wanted: worker_pb2.StageAssignment
    ) -> None:
        """Raise `NotReady` if this worker cannot have another stage, and `StaleMessage` for an earlier epoch."""
        if wanted.tp_size > 1 or has_collective_link(wanted):
            raise NotReady("Stages of several ranks, or with other links than gRPC, are loaded as a whole.")
        if ours is None:
            return
        if self._built is None or ours.instance != wanted.instance or ours.tp_size > 1:
            raise NotReady(f"This worker of {ours.instance} cannot have another stage: start another one.")
        if ours.model_digest != wanted.model_digest:
            raise NotReady(
                f"The files of {ours.instance} have changed since this worker loaded them: load the whole model again."
            )
        if wanted.epoch <= ours.epoch:
            raise StaleMessage(f"A stage of epoch {wanted.epoch} was announced in epoch {ours.epoch}.")

    def _drop_present(self) -> None:
        """Drop the present stage, whose steps have ended. Runs on the compute thread."""
        if self._runner is not None:
            self._runner.relink(StageLinks(self._neighbours.inbox))
        self._built = self._runner = None
        self._transfers.detach()
        self._weight_bytes = 0 if self._next.stage is None else self._next.stage.kept_bytes
        release_memory()

    def _enter(self, stage: NextStage, assignment: worker_pb2.StageAssignment, opened: OpenedLinks) -> None:
        """Have another stage from now on, and keep the KV of the present one apart. Runs on the compute thread."""
        stage.assignment.CopyFrom(assignment)
        built = stage.enter(opened)
        self._transfers.leave()
        self._drop_present()
        self._transfers.attach(built.store, assignment, built.model.cache_numbers)
        built.runner.use_transfers(self._transfers)
        self._request, self._kept, self._next.stage, self._expected = stage.request, (), None, None
        self._built, self._runner, self._dtype, self._kv = built, built.runner, built.dtype, built.kv
        self._grammars, self._phase = built.grammars, "ready"
        self._weight_bytes = stage.kept_bytes + stage.gained_bytes
        log.info("Computes stage %d, layers %s, from now on", assignment.stage, stage.layers)

    @property
    def _held_weight_bytes(self) -> int:
        """Bytes of the weights in memory, also of those for the next stage."""
        stage = self._next.stage
        return self._weight_bytes + (0 if stage is None else stage.gained_bytes)
