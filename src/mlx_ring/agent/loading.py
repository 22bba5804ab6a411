"""Loading of a plan into new workers, all at once, with the progress of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

import grpc

from mlx_ring.agent.supervisor import Supervisor, Worker
from mlx_ring.core.errors import RingError, ServingError, WorkerLost, WorkerStuck
from mlx_ring.rpc.failures import channel_error, error_to_failure, failure_to_error
from mlx_ring.rpc.methods import LOAD
from mlx_ring.rpc.protos import agent_pb2, step_pb2, worker_pb2

_END_WAIT_S = 2.0
_GROUP = "group"
_GROUP_WAIT_S = 30.0
"""Seconds to wait for the ranks of one stage, which have all been started."""

Item = TypeVar("Item")
_Reports = grpc.aio.UnaryStreamCall[worker_pb2.LoadRequest, worker_pb2.LoadProgress]


async def start_workers(
    supervisor: Supervisor, request: agent_pb2.StartRequest, timeout_s: float
) -> list[Worker]:
    """Start one worker for each assignment; returns once all of them answer.

    Raises:
        RingError: one could not start; the others may still live, for the caller to stop.
    """
    workers = await supervisor.start(request.assignments)
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*map(supervisor.wait_until_up, workers))
    except TimeoutError:
        raise WorkerStuck(f"The workers did not answer within {timeout_s:g} s: see the logs.") from None
    return workers


async def load_workers(
    workers: Sequence[Worker], request: agent_pb2.LoadStagesRequest, timeout_s: float
) -> AsyncIterator[agent_pb2.StageProgress]:
    """Load all started workers at once; each gets the address of the next one on this node.

    Args:
        workers: in the order of the request's assignments.
        timeout_s: for the whole, to the last weight.

    Raises:
        RingError: one could not load; all of them may still live, for the caller to stop.
    """
    progress: asyncio.Queue[agent_pb2.StageProgress] = asyncio.Queue()
    loads = asyncio.gather(
        *(
            _load(worker, _load_request(request, assignment, workers), progress)
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
    worker: Worker, request: worker_pb2.LoadRequest, progress: asyncio.Queue[agent_pb2.StageProgress]
) -> None:
    """Load one; its death ends the wait at once, and is the reason given."""
    load = asyncio.ensure_future(_follow(worker, request, progress))
    end = asyncio.ensure_future(worker.child.wait())
    try:
        await asyncio.wait((load, end), return_when=asyncio.FIRST_COMPLETED)
        if load.done() and isinstance(load.exception(), WorkerLost):
            # A channel breaks a moment before the process's end is known.
            await asyncio.wait((end,), timeout=_END_WAIT_S)
        _raise_if_ended(worker, end)
        load.result()
    finally:
        load.cancel()
        end.cancel()


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
        while isinstance(report := await _next_report(call, worker, report.phase), worker_pb2.LoadProgress):
            if report.HasField("failure"):
                raise failure_to_error(report.failure)
            ready = ready or report.ready
            progress.put_nowait(_stage_progress(worker, report))
    except grpc.RpcError as error:
        raise channel_error(error, worker.label) from error
    if not ready:
        raise WorkerLost(f"{worker.label} ended its report before it was ready.")


async def _next_report(call: _Reports, worker: Worker, phase: str) -> object:
    """Raise `WorkerStuck` if a rank searches too long for the others of its stage; it answers nothing meanwhile."""
    try:
        async with asyncio.timeout(_GROUP_WAIT_S if phase == _GROUP else None):
            return await call.read()
    except TimeoutError:
        where = ", ".join(worker.assignment.group) or "this machine"
        raise WorkerStuck(
            f"{worker.label} did not find the other ranks of its stage within {_GROUP_WAIT_S:g} s, at {where}: "
            "see that these addresses reach each other, and the logs."
        ) from None


def failed_load(error: Exception) -> agent_pb2.StageProgress:
    """Return the last message of a failed load."""
    return agent_pb2.StageProgress(progress=worker_pb2.LoadProgress(failure=as_failure(error)))


def as_failure(error: Exception) -> step_pb2.Failure:
    """Return any error as a failure of the exception tree."""
    return error_to_failure(
        error if isinstance(error, RingError) else ServingError(f"{type(error).__name__}: {error}")
    )


def _stage_progress(worker: Worker, report: worker_pb2.LoadProgress) -> agent_pb2.StageProgress:
    return agent_pb2.StageProgress(stage=worker.stage, rank=worker.rank, progress=report)


def _load_request(
    request: agent_pb2.LoadStagesRequest, assignment: worker_pb2.StageAssignment, workers: Sequence[Worker]
) -> worker_pb2.LoadRequest:
    """Return the assignment with the addresses of this node's stages; those that the head set are kept."""
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
    return worker_pb2.LoadRequest(hello=request.hello, model_path=request.model_path, assignment=filled)
