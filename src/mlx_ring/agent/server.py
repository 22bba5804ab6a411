"""Service of an agent: starts, loads, watches and stops workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Generator, Iterable, Sequence
from dataclasses import asdict

import grpc

from mlx_ring.agent.loading import (
    FetchedModels,
    as_failure,
    check_epoch,
    failed_load,
    load_workers,
    place_in,
    relink_workers,
    start_workers,
    until_done,
)
from mlx_ring.agent.supervisor import SILENT_S, Supervisor, Worker
from mlx_ring.agent.trust import check_hosts, check_links, check_routes, trusted_devices
from mlx_ring.core.errors import ProtocolError, RingError, WorkerLost
from mlx_ring.core.logs import set_log_epoch
from mlx_ring.host.interfaces import Trust
from mlx_ring.host.power import KeepAwake
from mlx_ring.host.process import usable_memory
from mlx_ring.host.yielding import YieldWatch
from mlx_ring.rpc.hello import check_hello, make_hello
from mlx_ring.rpc.methods import (
    AGENT_SERVICE,
    LOAD_STAGES,
    RELINK_WORKERS,
    START,
    STOP,
    WATCH,
    service_handler,
)
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2

log = logging.getLogger(__name__)

_DEFAULT_HEARTBEAT_S = 2.0
_ROOM = 1.5
"""Free memory with which replaced workers are left while others load, as a multiple of their weights."""


def yielding_message(watch: YieldWatch | None) -> agent_pb2.Yielding | None:
    """Return the report of a machine that yields; None if it does not."""
    state = None if watch is None else watch.state
    return None if state is None else agent_pb2.Yielding(**asdict(state))


class AgentService:
    """One node's agent, as the head sees it."""

    def __init__(
        self,
        node: str,
        supervisor: Supervisor,
        load_timeout_s: float,
        *,
        ends_when_empty: bool = True,
        fetched: FetchedModels | None = None,
        awake: KeepAwake | None = None,
        yields: YieldWatch | None = None,
    ) -> None:
        """Prepare the service.

        Args:
            node: this node's ID.
            supervisor: the node's workers.
            load_timeout_s: maximum seconds to load a model.
            ends_when_empty: True if a Stop of every instance also ends the agent.
            fetched: models that come from other nodes; None if it fetches none.
            awake: hold on this machine's sleep while workers have sequences; None if its head keeps it awake.
            yields: watch of this machine's user; None if it does not yield.
        """
        self._yields = yields
        self._awake = awake or KeepAwake("never")
        self._watchers = 0
        self._fetched = fetched
        self._node = node
        self._ends_when_empty = ends_when_empty
        self._supervisor = supervisor
        self._load_timeout_s = load_timeout_s
        self._tasks: set[asyncio.Task[int]] = set()
        self.stop_requested = asyncio.Event()
        """Set by a Stop of every instance, where the agent then has nothing left to do."""

    def handler(self) -> grpc.GenericRpcHandler:
        return service_handler(
            AGENT_SERVICE,
            (
                (START, self.start),
                (LOAD_STAGES, self.load_stages),
                (RELINK_WORKERS, self.relink),
                (WATCH, self.watch),
                (STOP, self.stop),
            ),
        )

    async def start(
        self, request: agent_pb2.StartRequest, _context: grpc.aio.ServicerContext[object, object]
    ) -> agent_pb2.StartReply:
        """Start processes. Reply once all of them answer; on a failure, end all of them, and no others."""
        try:
            instance = self._check_start(request)
        except RingError as error:
            return agent_pb2.StartReply(failure=as_failure(error))
        try:
            await self._make_room(instance, request.assignments)
            workers = await start_workers(self._supervisor, request, self._load_timeout_s)
        except (RingError, OSError) as error:
            log.error("%s could not be started: %s", instance, error)  # noqa: TRY400 - the sentence is the point
            await self._end_started(request.assignments)
            return agent_pb2.StartReply(failure=as_failure(error))
        except BaseException:
            self._spawn(self._end_started(request.assignments))
            raise
        return agent_pb2.StartReply(
            workers=[_started(worker, self._supervisor.trusted) for worker in workers]
        )

    def _check_start(self, request: agent_pb2.StartRequest) -> str:
        """Return the request's one instance; raise an error if it cannot be started."""
        instance = self._check_instance(request.hello, request.assignments)
        places = {(assignment.stage, assignment.rank) for assignment in request.assignments}
        workers, epoch = self._workers_of(instance), request.assignments[0].epoch
        # Those of an earlier epoch may have been left, because they may answer again.
        if any((worker.stage, worker.rank) in places and worker.epoch >= epoch for worker in workers):
            raise ProtocolError(f"Instance {instance} already runs here: stop it first.")
        check_epoch(workers, epoch)
        set_log_epoch(epoch)
        check_hosts(request.assignments, self._supervisor.trusted)
        return instance

    def _check_instance(
        self, hello: hello_pb2.Hello, assignments: Iterable[worker_pb2.StageAssignment]
    ) -> str:
        """Return the one instance of the assignments, if the head is not older than one that its workers have served."""
        instances = {assignment.instance for assignment in assignments}
        name = next(iter(instances), "")
        self._check_head(hello, self._workers_of(name))
        if len(instances) != 1:
            raise ProtocolError(f"A start request must name one instance; {len(instances)} were named.")
        return name

    def _check_head(self, hello: hello_pb2.Hello, workers: Iterable[Worker]) -> None:
        newest = max((worker.head for worker in workers), default=0)
        check_hello(hello, make_hello(node=self._node, fencing_id=newest), "the head")

    async def _make_room(self, instance: str, assignments: Iterable[worker_pb2.StageAssignment]) -> None:
        """End workers of the instance that are replaced if the memory may not suffice for others beside them.

        These are silent workers, and ranks in whose places others start because their group has lost a rank. A worker
        without a group that answers again is left, because it stays then.
        """
        places = {(assignment.stage, assignment.rank) for assignment in assignments}
        replaced = [
            worker
            for worker in self._workers_of(instance)
            if worker.unresponsive.seconds >= SILENT_S
            or (worker.assignment.tp_size > 1 and (worker.stage, worker.rank) in places)
        ]
        statuses = [worker.status for worker in replaced if worker.status is not None]
        free = min([usable_memory().available_bytes, *(status.memory_left_bytes for status in statuses)])
        if replaced and free < _ROOM * sum(status.weight_bytes for status in statuses):
            await self._supervisor.stop(instance, [worker.child.pid for worker in replaced])

    async def _end_started(self, assignments: Sequence[worker_pb2.StageAssignment]) -> int:
        """End the workers that were started for the assignments; those that stay from the epoch before are kept."""
        instance, epoch = assignments[0].instance, assignments[0].epoch
        places = {(assignment.stage, assignment.rank) for assignment in assignments}
        pids = [
            worker.child.pid
            for worker in self._workers_of(instance)
            if worker.assignment.epoch == epoch and (worker.stage, worker.rank) in places
        ]
        return await self._supervisor.stop(instance, pids) if pids else 0

    def _workers_of(self, instance: str) -> list[Worker]:
        return [worker for worker in self._supervisor.workers if worker.instance == instance]

    async def load_stages(
        self, request: agent_pb2.LoadStagesRequest, _context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[agent_pb2.StageProgress]:
        """Load the started workers. The stream ends once all are ready; on a failure, all of them end.

        Workers that load the stages of a next plan do not end, and serve the present one.
        """
        try:
            instance = self._check_instance(request.hello, request.assignments)
            workers = (
                announce_stages(self._supervisor, request)
                if request.gain
                else self._in_order(instance, request.assignments)
            )
        except RingError as error:
            yield failed_load(error)
            return
        try:
            async for progress in self._fetch(instance, request):
                yield progress
            if request.only_fetch:
                return
            check_routes(request.assignments, self._supervisor.trusted)
            check_links(request.assignments, self._supervisor.trusted)
            if not request.gain:
                await self._supervisor.give_places(instance, request.assignments)
            async for progress in load_workers(self._supervisor, workers, request, self._load_timeout_s):
                yield progress
            self._supervisor.spare.prepare()
        except (RingError, OSError) as error:
            log.error("%s could not be loaded: %s", instance, error)  # noqa: TRY400 - the sentence is the point
            if not request.gain:
                await self._end_started(request.assignments)
            yield failed_load(error)
        except BaseException:
            # The head ended during the call, which is being cancelled: continue in a task of its own.
            if not request.gain:
                self._spawn(self._end_started(request.assignments))
            raise

    async def _fetch(
        self, instance: str, request: agent_pb2.LoadStagesRequest
    ) -> AsyncIterator[agent_pb2.StageProgress]:
        """Fetch the weights that the request names, and set its folder to theirs."""
        if not request.weights:
            return
        if self._fetched is None:
            raise ProtocolError("This agent fetches no weights, because its machine has the model.")
        updates: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def progress(done: int, total: int) -> None:
            loop.call_soon_threadsafe(updates.put_nowait, (done, total))

        fetching = asyncio.ensure_future(self._fetched.fetch(instance, request, progress))
        try:
            async for done, total in until_done(updates, fetching):
                yield _fetched_so_far(request, done, total)
            request.model_path = str(fetching.result())
        finally:
            fetching.cancel()

    def _in_order(self, instance: str, assignments: Sequence[worker_pb2.StageAssignment]) -> list[Worker]:
        """Return the workers that were started for these assignments, in the same epoch."""
        epoch = assignments[0].epoch
        started = {
            (worker.stage, worker.rank): worker
            for worker in self._workers_of(instance)
            if worker.assignment.epoch == epoch
        }
        places = [(assignment.stage, assignment.rank) for assignment in assignments]
        if set(places) != set(started) or len(places) != len(started):
            raise ProtocolError(
                f"{instance} was started here for stages and ranks {sorted(started)}, but {places} were requested."
            )
        return [started[place] for place in places]

    async def relink(
        self,
        request: agent_pb2.RelinkWorkersRequest,
        _context: grpc.aio.ServicerContext[object, object],
    ) -> agent_pb2.RelinkWorkersReply:
        """Prepare loaded workers for other neighbours, or link them."""
        try:
            self._check_instance(request.hello, request.assignments)
            check_links(request.assignments, self._supervisor.trusted)
            answers = await relink_workers(self._supervisor, request)
        except RingError as error:
            return agent_pb2.RelinkWorkersReply(failure=as_failure(error))
        trusted = self._supervisor.trusted
        return agent_pb2.RelinkWorkersReply(
            workers=[
                _started(worker, trusted, begun_step, place_in(worker, request.assignments))
                for worker, begun_step in answers
            ]
        )

    async def watch(
        self, request: agent_pb2.WatchRequest, _context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[agent_pb2.AgentEvent]:
        """Yield the current state, then each change at once, and new figures at each heartbeat."""
        heartbeat_s = request.heartbeat_s or _DEFAULT_HEARTBEAT_S
        with self._supervisor.changes() as changed, self._keeping_awake():
            await self._supervisor.refresh()
            while True:
                changed.clear()
                self._awake.hold(has_work=self._has_sequences)
                yield self._event()
                try:
                    async with asyncio.timeout(heartbeat_s):
                        await changed.wait()
                except TimeoutError:
                    await self._supervisor.refresh()

    @property
    def _has_sequences(self) -> bool:
        statuses = [worker.status for worker in self._supervisor.workers if worker.alive]
        return any(status.sequences for status in statuses if status is not None)

    @contextlib.contextmanager
    def _keeping_awake(self) -> Generator[None]:
        """Let the machine sleep once no head watches it, whatever its workers still hold."""
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._awake.release()

    def _event(self) -> agent_pb2.AgentEvent:
        memory = usable_memory()
        return agent_pb2.AgentEvent(
            hello=make_hello(node=self._node),
            workers=[worker.state() for worker in self._supervisor.workers],
            memory_bytes=memory.total_bytes,
            memory_free_bytes=memory.available_bytes,
            yielding=yielding_message(self._yields),
        )

    async def stop(
        self, request: agent_pb2.StopRequest, _context: grpc.aio.ServicerContext[object, object]
    ) -> agent_pb2.StopReply:
        """End an instance's workers; without a name every worker, and then an agent that has no more to do.

        A request that arrives late ends no worker of a later epoch, or of a newer head.
        """
        if request.instance and request.hello.fencing_id:
            try:
                self._check_head(request.hello, self._workers_of(request.instance))
            except RingError as error:
                log.warning("Ended no worker of %s: %s", request.instance, error)
                return agent_pb2.StopReply()
        stopped = await self._supervisor.stop(request.instance, request.pids, up_to=request.hello.epoch)
        if self._fetched is not None:
            self._fetched.release([worker.instance for worker in self._supervisor.workers])
        if not request.instance and (self._ends_when_empty or request.end):
            self.stop_requested.set()
        return agent_pb2.StopReply(stopped=stopped)

    def _spawn(self, work: Coroutine[object, object, int]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def announce_stages(supervisor: Supervisor, request: agent_pb2.LoadStagesRequest) -> list[Worker]:
    """Record the next plan's assignments of the workers that a request names, and return these.

    Raises:
        WorkerLost: one has ended.
    """
    running = {worker.child.pid: worker for worker in supervisor.workers if worker.alive}
    instance = request.assignments[0].instance
    workers: list[Worker] = []
    for pid, assignment in zip(request.pids, request.assignments, strict=True):
        worker = running.get(pid)
        if worker is None or worker.instance != instance:
            raise WorkerLost(f"No worker of {instance} with pid {pid} runs here any more.")
        own = worker.assignment
        is_present = (own.plan_digest, own.stage) == (assignment.plan_digest, assignment.stage)
        worker.announced = None if is_present else assignment
        workers.append(worker)
    return workers


def _fetched_so_far(request: agent_pb2.LoadStagesRequest, done: int, total: int) -> agent_pb2.StageProgress:
    first = request.assignments[0]
    report = worker_pb2.LoadProgress(phase="fetch", bytes_loaded=done, bytes_total=total)
    return agent_pb2.StageProgress(stage=first.stage, rank=first.rank, progress=report)


def _started(
    worker: Worker, trust: Trust, begun_step: int = 0, place: tuple[int, int] | None = None
) -> agent_pb2.StartedWorker:
    status = worker.status or worker_pb2.WorkerStatus()
    stage, rank = place or (worker.stage, worker.rank)
    started = agent_pb2.StartedWorker(
        stage=stage,
        rank=rank,
        pid=worker.child.pid,
        address=worker.address,
        port=status.port,
        group_port=status.group_port,
        group_host=status.group_host,
        means=status.means,
        begun_step=begun_step,
    )
    started.means.rdma_devices[:] = trusted_devices(status.means.rdma_devices, trust)
    return started
