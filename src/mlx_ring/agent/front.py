"""What an agent answers: start a plan's workers, tell how they are, stop them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine

import grpc

from mlx_ring.agent.loading import failed_start, start_workers
from mlx_ring.agent.supervisor import Supervisor
from mlx_ring.core.errors import ProtocolError, RingError
from mlx_ring.core.logs import set_log_epoch
from mlx_ring.core.process_limits import usable_memory
from mlx_ring.rpc.hello import check_hello, make_hello
from mlx_ring.rpc.methods import AGENT_SERVICE, START, STOP, WATCH, service_handler
from mlx_ring.rpc.protos import agent_pb2

log = logging.getLogger(__name__)

_DEFAULT_HEARTBEAT_S = 2.0


class AgentFront:
    """One node's agent, as the head sees it."""

    def __init__(self, node: str, supervisor: Supervisor, load_timeout_s: float) -> None:
        self._node = node
        self._supervisor = supervisor
        self._load_timeout_s = load_timeout_s
        self._tasks: set[asyncio.Task[int]] = set()
        self.asked_to_stop = asyncio.Event()
        """Set by a Stop of every instance: the agent has nothing left to do."""

    def handler(self) -> grpc.GenericRpcHandler:
        return service_handler(AGENT_SERVICE, ((START, self.start), (WATCH, self.watch), (STOP, self.stop)))

    async def start(
        self, request: agent_pb2.StartRequest, _context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[agent_pb2.StartProgress]:
        """Start and load. The stream ends when all are ready, or with a failure; then none of them is left."""
        try:
            instance = self._check_start(request)
        except RingError as error:
            yield failed_start(error)
            return
        try:
            async for progress in start_workers(self._supervisor, request, self._load_timeout_s):
                yield progress
        except (RingError, OSError) as error:
            log.error("%s could not be started: %s", instance, error)  # noqa: TRY400 - the sentence is the point
            await self._supervisor.stop(instance)
            yield failed_start(error)
        except BaseException:
            # The head left in the middle, and this call is being cancelled: go on in a task of its own.
            self._spawn(self._supervisor.stop(instance))
            raise

    def _check_start(self, request: agent_pb2.StartRequest) -> str:
        """The request's one instance. Raises where it cannot be started."""
        check_hello(request.hello, make_hello(node=self._node), "the head")
        instances = {assignment.instance for assignment in request.assignments}
        if len(instances) != 1:
            raise ProtocolError(f"A start is of one instance; {len(instances)} were named.")
        (instance,) = instances
        if any(worker.instance == instance for worker in self._supervisor.workers):
            raise ProtocolError(f"Instance {instance} runs here already: stop it first.")
        set_log_epoch(request.assignments[0].epoch)
        return instance

    async def watch(
        self, request: agent_pb2.WatchRequest, _context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[agent_pb2.AgentEvent]:
        """The state now, then at each change at once, and at each heartbeat with fresh figures."""
        heartbeat_s = request.heartbeat_s or _DEFAULT_HEARTBEAT_S
        with self._supervisor.changes() as changed:
            await self._supervisor.refresh()
            while True:
                changed.clear()
                yield self._event()
                try:
                    await asyncio.wait_for(changed.wait(), heartbeat_s)
                except TimeoutError:
                    await self._supervisor.refresh()

    def _event(self) -> agent_pb2.AgentEvent:
        memory = usable_memory()
        return agent_pb2.AgentEvent(
            hello=make_hello(node=self._node),
            workers=[worker.state() for worker in self._supervisor.workers],
            memory_bytes=memory.total_bytes,
            memory_free_bytes=memory.available_bytes,
        )

    async def stop(
        self, request: agent_pb2.StopRequest, _context: grpc.aio.ServicerContext[object, object]
    ) -> agent_pb2.StopReply:
        """End an instance's workers; without a name every worker, and then the agent itself."""
        stopped = await self._supervisor.stop(request.instance)
        if not request.instance:
            self.asked_to_stop.set()
        return agent_pb2.StopReply(stopped=stopped)

    def _spawn(self, work: Coroutine[object, object, int]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
