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
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mlx_ring.api.service import InstanceInfo
from mlx_ring.cluster.control import Control, open_control
from mlx_ring.cluster.deployment import Site, deploy
from mlx_ring.cluster.local_agent import LocalAgent
from mlx_ring.cluster.membership import Event, Went
from mlx_ring.cluster.placement import make_assignments
from mlx_ring.core.addresses import HeadAddress
from mlx_ring.core.cluster_folders import node_folder
from mlx_ring.core.config import Settings, state_folder
from mlx_ring.core.errors import RingError, WorkerLost
from mlx_ring.core.logs import set_log_epoch
from mlx_ring.core.machine import make_run_folder, node_name, raise_descriptor_limit, share_cores
from mlx_ring.engine.detokenizer import Vocabulary
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.executor import RankId
from mlx_ring.engine.grpc_executor import GrpcExecutor, RankAddress
from mlx_ring.engine.kv_limits import Place, fitting_context, rank_limits
from mlx_ring.engine.policy import Policy
from mlx_ring.engine.served_model import ServedModel
from mlx_ring.node.arrangement import Arrangement, arrange_cluster, arrange_here
from mlx_ring.node.http import HttpServer, end_http, http_config, local_url
from mlx_ring.node.service import FIRST_EPOCH, HeadService
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2

log = logging.getLogger(__name__)

_STOP_WAIT_S = 8.0
_TOKEN_LIFE_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Running:
    """What there is to tell once a head serves."""

    url: str
    served: ServedModel
    instance: InstanceInfo
    load_s: float


class Audience(Protocol):
    """Who is told how a head comes up."""

    def joining(self, address: HeadAddress, token: str, missing: int) -> None:
        """So many machines are waited for; each can join at this port with this token."""
        ...

    def planned(self, arrangement: Arrangement) -> None:
        """Which stage goes where."""
        ...

    def loading(self, progress: agent_pb2.StageProgress) -> None:
        """How far a worker has loaded."""
        ...

    def serving(self, running: Running) -> None:
        """Requests can be answered."""
        ...


class Head:
    """One run of `mlx-ring serve`."""

    def __init__(
        self, settings: Settings, served: ServedModel, listener: socket.socket, audience: Audience
    ) -> None:
        self._settings = settings
        self._served = served
        self._listener = listener
        self._audience = audience
        self._instance = f"{served.local.name.rsplit('/', 1)[-1]}-{secrets.token_hex(3)}"
        self._kv_bits = 0 if settings.kv_bits == "off" else int(settings.kv_bits)
        self._service = HeadService(served, self._instance, kv_bits=self._kv_bits)
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Load, serve, and return after Ctrl-C, SIGTERM or a hang-up.

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
                control = await self._open_control(cleanup)
                agent = await self._start_agent(run_dir, control)
                cleanup.push_async_callback(agent.stop)
                work = asyncio.create_task(self._load_and_watch(agent, control, cleanup))
                await _first_of(asyncio.create_task(self._stop.wait()), serving, work)
                log.info("stopping")

    async def _open_control(self, cleanup: contextlib.AsyncExitStack) -> Control | None:
        """The ports for other machines, where there are to be some."""
        settings = self._settings
        if settings.nodes == 1:
            return None
        address = HeadAddress(settings.cluster_host.strip("[]"), settings.cluster_port)
        control = await cleanup.enter_async_context(open_control(state_folder(settings), address))
        self._audience.joining(address, control.make_token(life_s=_TOKEN_LIFE_S), settings.nodes - 1)
        return control

    async def _start_agent(self, run_dir: Path, control: Control | None) -> LocalAgent:
        settings = self._settings
        return await LocalAgent.start(
            settings,
            node=node_name() if control is None else control.node,
            run_dir=run_dir,
            blas_threads=settings.blas_threads or share_cores(settings.stages),
            credentials=None if control is None else node_folder(state_folder(settings)),
        )

    async def _load_and_watch(
        self, agent: LocalAgent, control: Control | None, cleanup: contextlib.AsyncExitStack
    ) -> None:
        arrangement = await self._arrange(agent, control)
        self._service.plan(arrangement.ranges)
        self._audience.planned(arrangement)
        started = time.monotonic()
        assignments = self._assignments(arrangement)
        hello = head_hello(assignments[0])
        places = await deploy(arrangement.sites, assignments, hello, self._audience.loading)
        for site in arrangement.nodes:
            if not site.is_local:
                cleanup.push_async_callback(site.link.close)
                cleanup.push_async_callback(site.link.stop, self._instance, _STOP_WAIT_S)
        executor = await GrpcExecutor.connect(
            [RankAddress(RankId(place.stage, place.rank), place.address, place.node) for place in places],
            hello,
            trust=None if control is None else control.credentials,
        )
        cleanup.push_async_callback(executor.close)
        if control is not None:
            control.watch(lambda event: self._heed(event, arrangement))
        watched = Watched(self._instance, len(arrangement.nodes))

        async def watch(site: Site) -> None:
            async for event in self._reports(site, agent, hello):
                self._service.hear(event)
                workers = watched.hear(event)
                if workers is not None and not self._service.is_serving:
                    engine = self._make_engine(executor, workers)
                    cleanup.push_async_callback(engine.close)
                    self._service.serve(engine)
                    _spare_the_collector()
                    self._audience.serving(self._running(time.monotonic() - started))

        await asyncio.gather(*map(watch, arrangement.nodes))
        await self._stop.wait()

    async def _arrange(self, agent: LocalAgent, control: Control | None) -> Arrangement:
        """On this machine, or on those that come; an agent that ends meanwhile ends the wait."""
        if control is None:
            path = str(self._served.folder.path)
            site = Site(node_name(), agent.link, is_local=True, hosts={}, model_path=path)
            return arrange_here(self._settings, self._served, site)
        return await arrange_cluster(self._settings, self._served, agent.link, control)

    async def _reports(
        self, site: Site, agent: LocalAgent, hello: hello_pb2.Hello
    ) -> AsyncIterator[agent_pb2.AgentEvent]:
        """What a node's agent tells, until it is gone: then nothing is served any more."""
        try:
            async for event in site.link.watch(hello):
                yield event
        except RingError as error:
            if not site.is_local:
                self._service.lose(WorkerLost(f"{error} Restart the server."))
                return
            reason = await agent.wait()
            self._service.lose(
                WorkerLost(
                    f"The agent (pid {agent.pid}), and every worker with it, {reason}. Restart the server."
                )
            )

    def _heed(self, event: Event, arrangement: Arrangement) -> None:
        """A node that has a stage is gone."""
        if isinstance(event, Went) and any(site.node == event.node for site in arrangement.nodes):
            stages = [str(stage) for stage, site in enumerate(arrangement.sites) if site.node == event.node]
            self._service.lose(
                WorkerLost(
                    f"Node {event.node}, which has stage {' and '.join(stages)}, is gone: {event.reason}. "
                    "Restart the server."
                )
            )

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

    def _assignments(self, arrangement: Arrangement) -> Sequence[worker_pb2.StageAssignment]:
        return make_assignments(
            arrangement.ranges,
            instance=self._instance,
            epoch=FIRST_EPOCH,
            dtype=self._settings.dtype,
            model_digest=self._served.folder.digest,
            max_model_len=self._served.limits.context_length,
            kv_bits=self._kv_bits,
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


class Watched:
    """What an instance's workers say of themselves, on all its nodes."""

    def __init__(self, instance: str, nodes: int) -> None:
        self._instance = instance
        self._nodes = nodes
        self._by_node: dict[str, dict[Place, worker_pb2.WorkerStatus]] = {}

    def hear(self, event: agent_pb2.AgentEvent) -> dict[Place, worker_pb2.WorkerStatus] | None:
        """All of it, with the event; None while one, busy as it may be, has not said that it is ready."""
        node = event.hello.node
        ours = [state for state in event.workers if state.instance == self._instance]
        if ours and all(state.status.phase == "ready" for state in ours):
            self._by_node[node] = {(node, RankId(state.stage, state.rank)): state.status for state in ours}
        if len(self._by_node) < self._nodes:
            return None
        return {place: status for statuses in self._by_node.values() for place, status in statuses.items()}


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
