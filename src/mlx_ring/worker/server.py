"""gRPC server of a worker. Its threads make no arrays: they hand work to the compute thread and pass on its answers.

The compute thread is the process's main thread. MLX's streams belong to threads,
so the thread that loads the model also computes.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import grpc
import mlx.core as mx

from mlx_ring.core.errors import NotReady, ProtocolError, RingError
from mlx_ring.core.logs import set_log_epoch
from mlx_ring.host.process import own_memory
from mlx_ring.rpc.backends import has_collective_link
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.frames import Frame
from mlx_ring.rpc.hello import check_hello, make_hello
from mlx_ring.rpc.links import Inbox
from mlx_ring.rpc.methods import LINK, LOAD, READ_KV, RELINK, STATUS, STEPS, WORKER_SERVICE, service_handler
from mlx_ring.rpc.protos import hello_pb2, step_pb2, worker_pb2
from mlx_ring.worker.group import group_use
from mlx_ring.worker.neighbours import caller_node, first_message
from mlx_ring.worker.platform.device import device_memory, device_name
from mlx_ring.worker.replies import StepStream
from mlx_ring.worker.reshaping import StageHolder
from mlx_ring.worker.runner import StageRunner
from mlx_ring.worker.stage import build_stage
from mlx_ring.worker.step import monotonic_us

log = logging.getLogger(__name__)
_SAVE_AT_END_S = 2.0
"""Longest time for which a worker that ends still writes KV to its disk."""
_ProgressQueue = queue.SimpleQueue[worker_pb2.LoadProgress | None]


class WorkerServer(StageHolder):
    """gRPC methods of a worker, and the loop in which it computes."""

    def handler(self) -> grpc.GenericRpcHandler:
        calls = (LOAD, self.load), (STEPS, self.steps), (LINK, self.link), (RELINK, self.relink)
        return service_handler(WORKER_SERVICE, (*calls, (READ_KV, self.read_kv), (STATUS, self.status)))

    def compute(self) -> None:
        """Run jobs in the calling thread until `stop`."""
        while not self._stopping:
            self._next_job()()
        if self._built is not None and self._built.disk is not None:
            self._built.disk.settle(_SAVE_AT_END_S)

    def _next_job(self) -> Callable[[], None]:
        """Return the next job. If none comes soon while a step is under way, answer that step first."""
        runner = self._runner
        if runner is not None and runner.is_pending:
            job = self._jobs.get_within(runner.patience_s)
            if job is not None:
                return job
            self._finish_step()
        return self._jobs.get()

    def stop(self) -> None:
        """End `compute` after the current job, and drop the jobs that wait."""
        self._stopping = True
        self._halt.release(0)
        self._neighbours.break_off(NotReady("This worker is ending."))
        self._jobs.put(lambda: None)

    # Load

    def load(
        self, request: worker_pb2.LoadRequest, _context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.LoadProgress]:
        """Load the stage that the plan assigns, or a next plan. The stream ends with `ready` or a failure."""
        if request.gain:
            yield from self._gain(request)
            return
        try:
            check_hello(request.hello, make_hello(node=self._identity.node), "the agent")
            inbox = self._assign(request)
        except RingError as error:
            yield worker_pb2.LoadProgress(failure=error_to_failure(error))
            return
        progress = _ProgressQueue()
        sent = threading.Event()
        self._jobs.put(lambda: self._build(request, inbox, progress, sent))
        for message in iter(progress.get, None):
            yield message
            sent.set()

    def _assign(self, request: worker_pb2.LoadRequest) -> Inbox:
        with self._lock:
            if self._request is not None:
                raise ProtocolError(
                    f"This worker already holds {self._request.assignment.instance}: start another one."
                )
            self._request, self._head = request, request.hello.fencing_id
        assignment = request.assignment
        self._phase = "loading"
        set_log_epoch(assignment.epoch)
        return self._neighbours.assign(assignment)

    def _build(
        self, request: worker_pb2.LoadRequest, inbox: Inbox, progress: _ProgressQueue, sent: threading.Event
    ) -> None:
        """Build the stage and report the result. Runs on the compute thread."""

        def report(message: worker_pb2.LoadProgress) -> None:
            self._weight_bytes = max(self._weight_bytes, message.bytes_loaded)
            progress.put(message)
            if message.phase == "group":
                sent.wait(10.0)

        try:
            built = build_stage(
                request,
                inbox,
                self.hello(),
                report,
                trust=self._access.trust,
                group_port=self._access.group,
                loss_recorder=self._neighbours.loss_recorder,
                disk_settings=self._identity.disk,
            )
            self._transfers.attach(built.store, request.assignment, built.model.cache_numbers)
            built.runner.use_transfers(self._transfers)
            self._built, self._runner, self._dtype, self._kv = built, built.runner, built.dtype, built.kv
            self._sends, self._grammars = built.sends, built.grammars
            self._phase = "ready"
            report(worker_pb2.LoadProgress(ready=True, phase="ready", bytes_loaded=self._weight_bytes))
            log.info("Ready: BLAS %s, dtype %s, device %s", self._identity.blas, self._dtype, device_name())
        except Exception as error:
            self._phase = "failed"
            is_meant = isinstance(error, RingError)  # then its sentence says all
            log.log(logging.ERROR, "Loading failed: %s", error, exc_info=not is_meant)
            progress.put(worker_pb2.LoadProgress(failure=error_to_failure(error)))
        finally:
            progress.put(None)

    # Steps

    def steps(
        self, requests: Iterator[worker_pb2.StepsRequest], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.StepsReply]:
        """Greet, then execute steps in their order and answer each."""
        try:
            stream = self._open_stream(first_message(requests, context).hello)
        except RingError as error:
            yield worker_pb2.StepsReply(failure=error_to_failure(error))
            return
        yield worker_pb2.StepsReply(hello=self.hello())
        threading.Thread(target=self._read_steps, args=(requests, stream), name="steps", daemon=True).start()
        yield from iter(stream.answers.get, None)

    def _open_stream(self, hello: hello_pb2.Hello) -> StepStream:
        """Take over from an earlier head, which has no effect if this head is not newer."""
        if self._runner is None:
            raise NotReady("This worker has not loaded a stage yet.")
        stream = StepStream()
        with self._lock:
            check_hello(hello, self.hello(self._head), "the head")
            before, is_same_head = self._stream, hello.fencing_id == self._head
            if before is not None and self._request and has_collective_link(self._request.assignment):
                # Steps of the earlier head would stay in the collective on some stages and not on others.
                raise NotReady("Workers whose links are collectives serve one head: start others.")
            self._stream, self._head = stream, hello.fencing_id
            self._halt.release(0)
            self._halt = stream.halt
            self._enter_epoch(hello.epoch)
            self._next.announce(None)
            kept, self._kept = self._kept, ()
            # At once: the new head's first requests do not wait for the step that the compute thread is in.
            self._forget_fetches()
            if self._grammars is not None:
                self._grammars.reset()
        if self._neighbours.loss is not None:
            stream.answers.put(worker_pb2.StepsReply(failure=error_to_failure(self._neighbours.loss)))
        if before is not None:
            before.answers.put(None)
        self._jobs.put(partial(self._reset, self._runner, kept, keeps_left=is_same_head))
        return stream

    def _reset(
        self, runner: StageRunner, kept: Sequence[worker_pb2.KeptSequence], *, keeps_left: bool
    ) -> None:
        """Free what an earlier epoch or head has left, except the part to keep of some sequences. Runs on the compute thread."""
        if not keeps_left:
            self._transfers.keep_left(())
        runner.reset(kept)

    def _forget_fetches(self) -> None:
        """Forget the KV that an earlier head let this rank fetch."""
        if self._built is not None and self._built.disk is not None:
            self._built.disk.reset()
        self._transfers.reset()

    def _enter_epoch(self, epoch: int) -> None:
        """Enter a new epoch, which drops messages of earlier ones.

        A head that takes over loaded workers counts epochs on.
        """
        request = self._request
        if request is not None and epoch > request.assignment.epoch:
            request.assignment.epoch = epoch
            self._kept = ()
            self._neighbours.advance(epoch)
            set_log_epoch(epoch)

    def _read_steps(self, requests: Iterator[worker_pb2.StepsRequest], stream: StepStream) -> None:
        try:
            for request in requests:
                match request.WhichOneof("message"):
                    case "kv_limit":
                        self._jobs.put(partial(self._limit_kv, stream, request.kv_limit))
                    case "fetch":
                        self._fetch(stream, request.fetch)
                    case "export":
                        self._jobs.put(partial(self._export, stream, request.export))
                    case "keep_left":
                        self._jobs.put(partial(self._keep_left, stream, request.keep_left.sequences))
                    case "prepare":
                        self._prepare(stream, request.prepare)
                    case "drop_grammar":
                        self._jobs.put(partial(self._drop_grammar, stream, request.drop_grammar))
                    case _:
                        self._jobs.put(partial(self.execute, stream, request.step, monotonic_us()))
        except grpc.RpcError:
            log.info("The head's step stream ended")
        finally:
            stream.answers.put(None)

    def _limit_kv(self, stream: StepStream, limit_bytes: int) -> None:
        if stream is self._stream and self._runner is not None:
            self._runner.limit_kv(limit_bytes)

    def _fetch(self, stream: StepStream, wanted: worker_pb2.FetchKv) -> None:
        """Read saved KV, or that of other workers, while steps run, unless another head has taken over."""

        def answer(blocks: int, problem: str) -> None:
            stream.put_fetched(worker_pb2.KvFetched(id=wanted.id, blocks=blocks, problem=problem))

        with self._lock:
            if wanted.sources and stream is self._stream:
                self._transfers.fetch(wanted, answer)
            elif (built := self._built) is None or built.disk is None or stream is not self._stream:
                answer(0, "")
            else:
                built.disk.fetch(wanted, stream.put_fetched)

    def _export(self, stream: StepStream, export: worker_pb2.ExportKv) -> None:
        """Let others read KV, unless another head has taken over. Runs on the compute thread, after the earlier steps."""
        with self._lock:
            if stream is self._stream:
                self._transfers.export(export)

    def _keep_left(self, stream: StepStream, sequences: Collection[int]) -> None:
        """Free KV of the stage before, except some, unless another head has taken over. Runs on the compute thread."""
        if stream is self._stream:
            self._transfers.keep_left(sequences)

    def read_kv(self, request: worker_pb2.ReadKvRequest, context: grpc.ServicerContext) -> Iterator[Frame]:
        """Send KV to a worker of another instance that the head has named."""
        return self._transfers.read(request, caller_node(context), context.is_active)

    def _prepare(self, stream: StepStream, wanted: worker_pb2.PrepareGrammar) -> None:
        """Compile a grammar while steps run."""
        with self._lock:
            if stream is self._stream and self._grammars is not None:
                self._grammars.prepare(wanted, partial(stream.put_prepared, wanted.id))

    def _drop_grammar(self, stream: StepStream, id_: int) -> None:
        """Drop a grammar. Runs on the compute thread, after the earlier steps."""
        if stream is self._stream and self._grammars is not None:
            self._grammars.drop(id_)

    def execute(self, stream: StepStream, step: step_pb2.Step, arrived_us: int) -> None:
        """Take in one step, unless another head has taken over since its arrival. Runs on the compute thread."""
        if stream.halt.holds(step, arrived_us):
            return
        if stream is self._stream and self._runner is not None:
            self._taken_from = stream
            self._answer(self._runner.take(step, arrived_us, stream.halt.begin))

    # Link

    def link(
        self, frames: Iterator[Frame], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.FrameAccepted]:
        """Receive what another stage sends, until it closes the stream."""
        return self._neighbours.link(frames, context)

    # Status

    def status(
        self, request: worker_pb2.StatusRequest, _context: grpc.ServicerContext
    ) -> worker_pb2.WorkerStatus:
        """Report state and sizes without the compute thread, so that a long step does not look like a dead worker."""
        self._access.revoke(request.revoked)
        runner, built = self._runner, self._built
        memory, left = device_memory()
        return worker_pb2.WorkerStatus(
            hello=self.hello(self._head),
            phase=self._phase,
            rss_bytes=own_memory(),
            weight_bytes=self._held_weight_bytes,
            kv_bytes=(runner.kv_bytes if runner else 0) + self._transfers.left_bytes,
            device_memory_bytes=mx.get_active_memory(),
            peak_memory_bytes=mx.get_peak_memory(),
            device=device_name(),
            uses_cuda=mx.cuda.is_available(),
            dtype=self._dtype,
            blas=self._identity.blas,
            kernels=self._identity.kernels,
            cpu_weights=built.cpu_weights if built else "",
            last_step=runner.last_step if runner else 0,
            sequences=runner.num_sequences if runner else 0,
            pid=os.getpid(),
            kv=self._kv,
            memory_bytes=memory,
            memory_left_bytes=left,
            port=self._access.port,
            sends=self._sends(),
            group_port=self._access.group.number if self._access.group else 0,
            group_host=self._access.group.host if self._access.group else "",
            means=self._access.capabilities,
            group=group_use(self._request.assignment) if self._request else None,
            waits=self._waits_in(),
        )
