"""Loading of a plan into new workers, links of those that stay, and fetched models.

All workers of a plan load at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc

from mlx_ring.agent.supervisor import GROUP_PHASE, SILENT_S, Supervisor, Worker
from mlx_ring.agent.weights.stages import fetch_stages
from mlx_ring.agent.weights.store import WeightStore
from mlx_ring.agent.weights.transfer import PeerChannel
from mlx_ring.core.errors import GroupStuck, RingError, ServingError, StaleMessage, WorkerLost, WorkerStuck
from mlx_ring.core.types import LayerRange
from mlx_ring.host.process import release_freed_memory
from mlx_ring.rpc.backends import backend_of
from mlx_ring.rpc.channels import WEIGHTS_MESSAGE_BYTES, open_aio_channel
from mlx_ring.rpc.failures import channel_error, error_to_failure, failure_to_error
from mlx_ring.rpc.methods import LOAD, RELINK
from mlx_ring.rpc.protos import agent_pb2, step_pb2, worker_pb2
from mlx_ring.rpc.tls.credentials import Credentials
from mlx_ring.rpc.tls.peers import HEAD_NAME, node_name

_END_WAIT_S = 2.0
_GROUP_WAITS_S = {GROUP_PHASE: 30.0, "kernels": 1800.0, "warm-up": 120.0}
"""Seconds to wait for the other ranks of a group, which have all been started: to join, and in the first passes."""

_SETTLE_WAIT_S, _LONGEST_SETTLE_S = 5.0, 30.0
"""Seconds in which a worker that is not stuck finishes its step: usually, and while it answers and computes."""
_HALT_LOOK_S, _LONGEST_HALT_S = 0.5, 10.0
"""Seconds between two looks at a worker that is being halted, which it answers while it computes; and for all of it."""
_LINK_WAIT_S = 10.0
"""Seconds to link with neighbours that are all loaded."""

log = logging.getLogger(__name__)

Item = TypeVar("Item")
_Reports = grpc.aio.UnaryStreamCall[worker_pb2.LoadRequest, worker_pb2.LoadProgress]


async def start_workers(
    supervisor: Supervisor, request: agent_pb2.StartRequest, timeout_s: float
) -> list[Worker]:
    """Start one worker for each assignment; returns once all of them answer.

    Raises:
        RingError: one could not start; the others may still live, for the caller to stop.
    """
    workers = await supervisor.start(request.assignments, request.hello.fencing_id)
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*map(supervisor.wait_until_up, workers))
    except TimeoutError:
        raise WorkerStuck(f"The workers did not answer within {timeout_s:g} s: see the logs.") from None
    return workers


async def load_workers(
    supervisor: Supervisor,
    workers: Sequence[Worker],
    request: agent_pb2.LoadStagesRequest,
    timeout_s: float,
) -> AsyncIterator[agent_pb2.StageProgress]:
    """Load all started workers at once; each gets the address of the next one on this node.

    Args:
        supervisor: the supervisor of the workers.
        workers: in the order of the request's assignments.
        timeout_s: for the whole, to the last weight.

    Raises:
        RingError: one could not load; all of them may still live, for the caller to stop.
    """
    progress: asyncio.Queue[agent_pb2.StageProgress] = asyncio.Queue()
    loads = asyncio.gather(
        *(
            _load(supervisor, worker, _load_request(request, assignment, workers), progress)
            for worker, assignment in zip(workers, request.assignments, strict=True)
        )
    )
    try:
        async with asyncio.timeout(timeout_s):
            async for report in until_done(progress, loads):
                yield report
    except TimeoutError:
        raise WorkerStuck(
            f"The model was not loaded within {timeout_s:g} s: raise --model-load-timeout, or see the logs."
        ) from None
    finally:
        loads.cancel()
        await asyncio.gather(loads, return_exceptions=True)


async def until_done(items: asyncio.Queue[Item], work: asyncio.Future[Any]) -> AsyncIterator[Item]:
    """Yield items until `work` has ended; then raise its error, if any."""
    while not (work.done() and items.empty()):
        arrival = asyncio.ensure_future(items.get())
        await asyncio.wait((arrival, work), return_when=asyncio.FIRST_COMPLETED)
        if arrival.done():
            yield arrival.result()
        else:
            arrival.cancel()
            work.result()
    work.result()


async def _load(
    supervisor: Supervisor,
    worker: Worker,
    request: worker_pb2.LoadRequest,
    progress: asyncio.Queue[agent_pb2.StageProgress],
) -> None:
    """Load one; its death ends the wait at once, and is the reason given. So does a hang, after a while."""
    load = asyncio.ensure_future(_follow(worker, request, progress))
    end = asyncio.ensure_future(worker.child.wait())
    hung = asyncio.ensure_future(supervisor.until_hung(worker))
    try:
        await asyncio.wait((load, end, hung), return_when=asyncio.FIRST_COMPLETED)
        if load.done() and isinstance(load.exception(), WorkerLost):
            # A channel breaks a moment before the process's end is known.
            await asyncio.wait((end,), timeout=_END_WAIT_S)
        _raise_if_ended(worker, end)
        if hung.done():
            raise hung.result()
        load.result()
    finally:
        load.cancel()
        end.cancel()
        hung.cancel()


def _raise_if_ended(worker: Worker, end: asyncio.Future[str]) -> None:
    if end.done():
        raise WorkerLost(f"{worker.label} {end.result()} while it was loading.")


async def _follow(
    worker: Worker, request: worker_pb2.LoadRequest, progress: asyncio.Queue[agent_pb2.StageProgress]
) -> None:
    call = LOAD.aio_unary_stream(worker.channel)(request, wait_for_ready=True)
    report = worker_pb2.LoadProgress()
    ready = False
    try:
        while isinstance(
            report := await _next_report(call, worker, request.assignment, report.phase),
            worker_pb2.LoadProgress,
        ):
            if report.HasField("failure"):
                raise failure_to_error(report.failure)
            ready = ready or report.ready
            worker.loading_phase = report.phase
            worker.record_joining(request.assignment if report.phase == GROUP_PHASE else None)
            progress.put_nowait(_stage_progress(request.assignment, report))
    except grpc.RpcError as error:
        raise channel_error(error, worker.label) from error
    if not ready:
        raise WorkerLost(f"{worker.label} ended its report before it was ready.")


async def _next_report(
    call: _Reports, worker: Worker, assignment: worker_pb2.StageAssignment, phase: str
) -> object:
    """Raise `GroupStuck` if a rank waits too long for the others of its group; it answers nothing while it joins."""
    limit_s = _GROUP_WAITS_S.get(phase) if assignment.group else None
    try:
        async with asyncio.timeout(limit_s):
            return await call.read()
    except TimeoutError:
        backend = backend_of(assignment)
        problem = (
            f"did not join the other ranks of its {backend} group within {limit_s:g} s"
            if phase == GROUP_PHASE
            else f"has waited {limit_s:g} s for the other ranks of its {backend} group in its first pass"
        )
        stuck = GroupStuck(
            f"{worker.label} {problem}, at {', '.join(assignment.group)}: "
            "see that these addresses reach each other, and the logs."
        )
        raise stuck.reported_by(worker.stage, worker.rank) from None


async def relink_workers(
    supervisor: Supervisor, request: agent_pb2.RelinkWorkersRequest
) -> Sequence[tuple[Worker, int]]:
    """Halt workers, prepare them for other neighbours, or link them.

    Returns:
        Those that answered, each with the last step that it had begun when it was halted.

    The first phase ends those that do not answer and, unless the request leaves them, the instance's other workers.

    Raises:
        RingError: a worker refused, or in the second phase one did not answer or has ended.
        StaleMessage: a worker is of a later epoch; all are left as they are.
    """
    instance, epoch = request.assignments[0].instance, request.assignments[0].epoch
    places = {(assignment.stage, assignment.rank): assignment for assignment in request.assignments}
    ours = [worker for worker in supervisor.workers if worker.instance == instance]
    wanted = [worker for worker in ours if not request.pids or worker.child.pid in request.pids]
    # The first phase of an epoch comes before its first worker.
    check_epoch(ours, epoch if request.commit else epoch - 1)
    place_of = {worker.child.pid: place_in(worker, request.assignments) for worker in wanted}
    staying = [worker for worker in wanted if place_of[worker.child.pid] in places and worker.alive]
    missing = places.keys() - {place_of[worker.child.pid] for worker in staying}
    if request.commit and missing:
        stage, rank = min(missing)
        raise WorkerLost(f"The worker of stage {stage}, rank {rank} has ended, so it cannot be linked.")
    if request.halt:
        return _answered(await _relink_all(supervisor, staying, request))
    for worker in staying:
        if worker.prepared_epoch > epoch:
            raise StaleMessage(
                f"{worker.label} was prepared for epoch {worker.prepared_epoch}, after {epoch}."
            )
        worker.prepared_epoch = epoch
        worker.record_head(request.hello.fencing_id)
    ends_others = not request.commit and not request.leaves_others
    others = {worker.child.pid for worker in ours if ends_others and worker not in staying}
    # The end of the others may take a second, and so may a step.
    ending = [supervisor.stop(instance, others)] if others else []
    relinking = asyncio.ensure_future(_relink_all(supervisor, staying, request))
    await asyncio.gather(relinking, *ending)
    answers = relinking.result()
    failures = [answer for _, answer in answers if isinstance(answer, Exception)]
    if request.commit and failures:
        raise failures[0]
    answered = _answered(answers)
    silent = {worker.child.pid for worker, _ in answers} - {worker.child.pid for worker, _ in answered}
    if silent:
        log.warning("%s: %s", instance, " ".join(map(str, failures)))
        await supervisor.stop(instance, silent)
    return answered


_Answer = tuple[Worker, int | BaseException]
"""A worker, and the last step that it had begun when it was halted, or its error."""


def _answered(answers: Iterable[_Answer]) -> list[tuple[Worker, int]]:
    return [(worker, answer) for worker, answer in answers if isinstance(answer, int)]


async def _relink_all(
    supervisor: Supervisor, workers: Sequence[Worker], request: agent_pb2.RelinkWorkersRequest
) -> Sequence[_Answer]:
    """Halt workers, prepare or link them. No rank is waited for if another one of its stage has failed."""
    settled = set[int]()
    asked = [asyncio.ensure_future(_relink(supervisor, worker, request, settled)) for worker in workers]

    def end_others(stage: int, done: asyncio.Future[int]) -> None:
        if not done.cancelled() and done.exception() is not None:
            for worker, one in zip(workers, asked, strict=True):
                if worker.stage == stage:
                    one.cancel()

    if not request.commit:
        for worker, one in zip(workers, asked, strict=True):
            one.add_done_callback(partial(end_others, worker.stage))
    return [*zip(workers, await asyncio.gather(*asked, return_exceptions=True), strict=True)]


def place_in(worker: Worker, assignments: Sequence[worker_pb2.StageAssignment]) -> tuple[int, int]:
    """Return a worker's stage and rank in the plan of some assignments, which may be the one that was announced to it."""
    announced = worker.announced
    if announced is None or announced.plan_digest != assignments[0].plan_digest:
        return worker.stage, worker.rank
    return announced.stage, announced.rank


def check_epoch(workers: Iterable[Worker], epoch: int) -> None:
    """Refuse a request for an epoch that arrives when a later one has begun.

    Raises:
        StaleMessage: a worker is of a later epoch.
    """
    for worker in workers:
        if worker.epoch > epoch:
            raise StaleMessage(f"{worker.label} is of epoch {worker.epoch}; epoch {epoch} has passed.")


async def _relink(
    supervisor: Supervisor,
    worker: Worker,
    request: agent_pb2.RelinkWorkersRequest,
    settled: set[int],
) -> int:
    """Relink one, and return the last step that it had begun. Others of the `settled` stages have finished theirs."""
    place = place_in(worker, request.assignments)
    assignments = {(one.stage, one.rank): one for one in request.assignments}
    until = dict(zip(assignments, request.until_steps, strict=False))
    wanted = worker_pb2.RelinkRequest(
        hello=request.hello,
        assignment=assignments[place],
        commit=request.commit,
        kept=request.kept,
        halt=request.halt,
        until_step=until.get(place, 0),
    )
    limit_s = _LONGEST_HALT_S if request.halt else _LINK_WAIT_S if request.commit else _LONGEST_SETTLE_S
    answer = asyncio.ensure_future(RELINK.aio_unary_unary(worker.channel)(wanted, timeout=limit_s))
    try:
        while not request.commit:
            waits_alone = worker.stage in settled
            await asyncio.wait((answer,), timeout=_HALT_LOOK_S if request.halt else _SETTLE_WAIT_S)
            if answer.done():
                break
            await supervisor.refresh()
            if request.halt and worker.unresponsive.seconds >= SILENT_S:
                raise WorkerStuck(f"{worker.label} has not answered for {SILENT_S:g} s.")
            if not request.halt and (waits_alone or not worker.computes):
                raise WorkerStuck(f"{worker.label} did not end its step within {_SETTLE_WAIT_S:g} s.")
        reply = await answer
    except grpc.RpcError as error:
        raise channel_error(error, worker.label) from error
    finally:
        answer.cancel()
    if reply.HasField("failure"):
        raise failure_to_error(reply.failure)
    settled.add(worker.stage)
    if request.commit:
        worker.assignment, worker.announced = assignments[place], None
    return reply.begun_step


def failed_load(error: Exception) -> agent_pb2.StageProgress:
    """Return the last message of a failed load, of the worker whose group did not get together if there is one."""
    stage, rank = (error.place if isinstance(error, GroupStuck) else None) or (0, 0)
    failure = worker_pb2.LoadProgress(failure=as_failure(error))
    return agent_pb2.StageProgress(stage=stage, rank=rank, progress=failure)


def as_failure(error: Exception) -> step_pb2.Failure:
    """Return any error as a failure of the exception tree."""
    return error_to_failure(
        error if isinstance(error, RingError) else ServingError(f"{type(error).__name__}: {error}")
    )


def _stage_progress(
    assignment: worker_pb2.StageAssignment, report: worker_pb2.LoadProgress
) -> agent_pb2.StageProgress:
    return agent_pb2.StageProgress(stage=assignment.stage, rank=assignment.rank, progress=report)


def _load_request(
    request: agent_pb2.LoadStagesRequest, assignment: worker_pb2.StageAssignment, workers: Sequence[Worker]
) -> worker_pb2.LoadRequest:
    """Return the assignment with the addresses of this node's stages; those that the head set are kept."""
    of_model: dict[str, Any] = {
        "hello": request.hello,
        "model_path": request.model_path,
        "fetched": bool(request.weights),
    }
    if request.gain:
        # Its links are opened when it is linked.
        return worker_pb2.LoadRequest(**of_model, assignment=assignment, gain=request.gain)
    ranks = {
        stage: [
            worker.address
            for worker in sorted(workers, key=lambda worker: worker.rank)
            if worker.stage == stage
        ]
        for stage in (assignment.stage + 1, 0)
    }
    filled = worker_pb2.StageAssignment()
    filled.CopyFrom(assignment)
    if not filled.next_address and (following := ranks[assignment.stage + 1]):
        filled.next_address = following[0]
        filled.next_ranks.extend(worker_pb2.RankEnd(address=address) for address in following[1:])
    if not filled.first_address and (first := ranks[0]):
        filled.first_address = first[0]
        filled.first_ranks.extend(worker_pb2.RankEnd(address=address) for address in first[1:])
    return worker_pb2.LoadRequest(**of_model, assignment=filled)


# ---- models that were fetched for instances


class FetchedModels:
    """Folders that workers load from, kept for as long as their instance runs."""

    def __init__(self, node: str, store: WeightStore, credentials: Callable[[], Credentials]) -> None:
        self._node = node
        self._store = store
        self._credentials = credentials
        self._holds: dict[str, ExitStack] = {}
        """By instance."""

    async def fetch(
        self, instance: str, request: agent_pb2.LoadStagesRequest, progress: Callable[[int, int], None]
    ) -> Path:
        """Have what the request's stages need here.

        Raises:
            WeightsMissing: no node has it.
            RingError: it cannot be kept, or is no model.
        """
        credentials = self._credentials()
        stages = [
            LayerRange(assignment.first_layer, assignment.end_layer) for assignment in request.assignments
        ]
        hold = self._holds.setdefault(instance, ExitStack())
        async with AsyncExitStack() as channels:
            peers = [await channels.enter_async_context(_Asked(peer, credentials)) for peer in request.peers]
            folder = await fetch_stages(
                self._store, request.weights, stages, peers, self._node, progress, hold
            )
        release_freed_memory()
        return folder

    def release(self, running: Sequence[str]) -> None:
        """Release the models of all instances but these."""
        for instance in [instance for instance in self._holds if instance not in running]:
            self._holds.pop(instance).close()


class _Asked:
    """A peer with a separate channel for the time of a fetch."""

    def __init__(self, peer: agent_pb2.WeightsPeer, credentials: Credentials) -> None:
        self._name = peer.node or "the head"
        name = node_name(peer.node) if peer.node else HEAD_NAME
        self._channel = open_aio_channel(
            peer.address, credentials, name, max_message_bytes=WEIGHTS_MESSAGE_BYTES
        )

    async def __aenter__(self) -> PeerChannel:
        return PeerChannel(self._name, self._channel)

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
