"""One run of a head.

A head listens first, so that a busy port costs no loading; then it starts the agent,
loads, connects, and serves. Whatever way it ends, agent and workers end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import secrets
import signal
import socket
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_ring.api.service import InstanceInfo
from mlx_ring.cluster.decode_bytes import decode_bytes
from mlx_ring.cluster.local_agent import HEARTBEAT_S, LocalAgent, Report
from mlx_ring.cluster.placement import balanced_split, even_split, make_assignments
from mlx_ring.core.config import Settings
from mlx_ring.core.errors import WorkerLost
from mlx_ring.core.logs import set_log_epoch
from mlx_ring.core.machine import make_run_folder, node_name, raise_descriptor_limit, share_cores
from mlx_ring.core.model_folder import ModelFolder
from mlx_ring.core.types import LayerRange
from mlx_ring.engine.detokenizer import Vocabulary
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.executor import RankId
from mlx_ring.engine.grpc_executor import GrpcExecutor
from mlx_ring.engine.kv_limits import Place, fitting_context, rank_limits
from mlx_ring.engine.policy import Policy
from mlx_ring.engine.served_model import ServedModel, widens_half_precision
from mlx_ring.node.http import HttpServer, end_http, http_config, local_url
from mlx_ring.node.service import FIRST_EPOCH, HeadService
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Running:
    """What there is to tell once a head serves."""

    url: str
    served: ServedModel
    instance: InstanceInfo
    load_s: float


class Head:
    """One run of `mlx-ring serve`."""

    def __init__(self, settings: Settings, served: ServedModel, listener: socket.socket) -> None:
        self._settings = settings
        self._served = served
        self._listener = listener
        self._ranges = cut_layers(served.folder, settings)
        self._instance = f"{served.local.name.rsplit('/', 1)[-1]}-{secrets.token_hex(3)}"
        self._kv_bits = 0 if settings.kv_bits == "off" else int(settings.kv_bits)
        self._service = HeadService(served, self._ranges, self._instance, kv_bits=self._kv_bits)
        self._stop = asyncio.Event()

    async def run(self, report: Report, announce: Callable[[Running], None]) -> None:
        """Load, serve, and return after Ctrl-C, SIGTERM or a hang-up.

        Args:
            report: told how far each worker has loaded.
            announce: called once requests can be answered.

        Raises:
            RingError: the model could not be loaded.
        """
        raise_descriptor_limit(self._settings.file_descriptor_limit)
        set_log_epoch(FIRST_EPOCH)
        with end_signals(self._stop), make_run_folder(self._settings.run_dir) as run_dir:
            async with contextlib.AsyncExitStack() as cleanup:
                server = HttpServer(http_config(self._service, self._settings))
                serving = asyncio.create_task(server.serve([self._listener]), name="http")
                cleanup.push_async_callback(end_http, server, serving)
                threads = self._settings.blas_threads or share_cores(self._settings.stages)
                agent = await LocalAgent.start(
                    self._settings, node=node_name(), run_dir=run_dir, blas_threads=threads
                )
                cleanup.push_async_callback(agent.stop)
                work = asyncio.create_task(self._load_and_watch(agent, report, announce, cleanup))
                await _first_of(asyncio.create_task(self._stop.wait()), serving, work)
                log.info("stopping")

    async def _load_and_watch(
        self,
        agent: LocalAgent,
        report: Report,
        announce: Callable[[Running], None],
        cleanup: contextlib.AsyncExitStack,
    ) -> None:
        started = time.monotonic()
        request = self._start_request()
        addresses = await agent.load(request, report)
        executor = await GrpcExecutor.connect(
            [(RankId(*place), addresses[place]) for place in sorted(addresses)], request.hello
        )
        cleanup.push_async_callback(executor.close)
        try:
            async for event in agent.watch(
                agent_pb2.WatchRequest(hello=request.hello, heartbeat_s=HEARTBEAT_S)
            ):
                self._service.hear(event)
                workers = ready_workers(event, self._instance)
                if workers is not None and not self._service.is_serving:
                    engine = self._make_engine(executor, workers)
                    cleanup.push_async_callback(engine.close)
                    self._service.serve(engine)
                    _spare_the_collector()
                    announce(self._running(time.monotonic() - started))
        except WorkerLost:
            reason = await agent.wait()
            self._service.lose(
                WorkerLost(
                    f"The agent (pid {agent.pid}), and every worker with it, {reason}. Restart the server."
                )
            )
        await self._stop.wait()

    def _make_engine(
        self, executor: GrpcExecutor, workers: Mapping[Place, worker_pb2.WorkerStatus]
    ) -> Engine:
        """The engine for what the workers say of their memory."""
        kv = rank_limits(workers, self._settings.kv_cache_memory)
        limits = self._served.limits
        insisted = self._settings.max_model_len is not None
        context = fitting_context(kv, limits.context_length, insisted=insisted)
        if context < limits.context_length:
            log.warning(
                "The KV cache has room for %d tokens of one request, so the context is that long, not %d.",
                context,
                limits.context_length,
            )
        return Engine(
            executor,
            Vocabulary.of(self._served.tokenizer),
            limits.within(context),
            instance=self._instance,
            epoch=FIRST_EPOCH,
            policy=policy_of(self._settings),
            kv=kv,
        )

    def _start_request(self) -> agent_pb2.StartRequest:
        folder = self._served.folder
        assignments = make_assignments(
            self._ranges,
            instance=self._instance,
            epoch=FIRST_EPOCH,
            dtype=self._settings.dtype,
            model_digest=folder.digest,
            max_model_len=self._served.limits.context_length,
            kv_bits=self._kv_bits,
        )
        return agent_pb2.StartRequest(
            hello=head_hello(assignments[0]), model_path=str(folder.path), assignments=assignments
        )

    def _running(self, load_s: float) -> Running:
        host, port = self._listener.getsockname()[:2]
        return Running(local_url(host, port), self._served, self._service.instance(), load_s)


def policy_of(settings: Settings) -> Policy:
    """What the settings say about scheduling."""
    return Policy(
        max_num_seqs=settings.max_num_seqs,
        max_waiting=settings.max_waiting,
        prefill_chunk=settings.prefill_chunk,
        max_itl_ratio=settings.max_itl_ratio,
        prefix_cache=settings.prefix_cache == "on",
        draft_tokens=settings.draft_tokens,
        request_timeout_s=settings.request_timeout_s,
    )


def ready_workers(event: agent_pb2.AgentEvent, instance: str) -> dict[Place, worker_pb2.WorkerStatus] | None:
    """What an instance's workers say of themselves; None while one, busy as it may be, has not said that it is ready."""
    ours = [state for state in event.workers if state.instance == instance]
    if not ours or any(state.status.phase != "ready" for state in ours):
        return None
    return {(event.hello.node, RankId(state.stage, state.rank)): state.status for state in ours}


def cut_layers(folder: ModelFolder, settings: Settings) -> tuple[LayerRange, ...]:
    """The stages: each reads about as much in a step; as many layers each where the files don't tell what a layer is."""
    read = decode_bytes(folder, widened=widens_half_precision(settings.dtype))
    if read is None:
        return even_split(folder.num_layers, settings.stages)
    return balanced_split(read.layers, read.head, settings.stages)


def _spare_the_collector() -> None:
    """Take what is here for good out of garbage collection: going through it holds every stream up."""
    gc.collect()
    gc.freeze()


async def _first_of(*tasks: asyncio.Task[Any]) -> None:
    """Wait for the first to end; its error, where it has one, is raised."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        work = tasks[-1]
        work.cancel()
        tasks[0].cancel()
        await asyncio.wait((work,))


@contextlib.contextmanager
def end_signals(stop: asyncio.Event) -> Generator[None]:
    loop = asyncio.get_running_loop()
    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in caught:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


def head_hello(assignment: worker_pb2.StageAssignment) -> hello_pb2.Hello:
    return make_hello(
        instance=assignment.instance,
        epoch=assignment.epoch,
        model_digest=assignment.model_digest,
        plan_digest=assignment.plan_digest,
        node=node_name(),
        fencing_id=time.time_ns() // 1_000_000,
    )
