"""Composition root: builds a head from settings, and takes it down again.

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
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn

from mlx_ring.api.app import build_app
from mlx_ring.api.service import InstanceInfo, SamplingDefaults, ServingEngine, WorkerInfo
from mlx_ring.api.settings import ApiSettings
from mlx_ring.cluster.decode_bytes import decode_bytes
from mlx_ring.cluster.local_agent import HEARTBEAT_S, LocalAgent, Report
from mlx_ring.cluster.placement import balanced_split, even_split, make_assignments
from mlx_ring.core.config import Settings
from mlx_ring.core.errors import NotReady, RingError, WorkerLost
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
from mlx_ring.engine.served_model import ServedModel, describe_model, widens_half_precision
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2

log = logging.getLogger(__name__)

FIRST_EPOCH = 1
_LOADING = "The model is being loaded; ask again in a moment."


@dataclass(frozen=True, slots=True)
class Running:
    """What there is to tell once a head serves."""

    url: str
    served: ServedModel
    instance: InstanceInfo
    load_s: float


class HeadService:
    """The served model as the API sees it: an engine, or the reason why there is none."""

    def __init__(
        self, served: ServedModel, ranges: Sequence[LayerRange], instance: str, *, kv_bits: int = 0
    ) -> None:
        self._served = served
        self._kv_bits = kv_bits
        self._ranges = ranges
        self._instance = instance
        self._engine: Engine | None = None
        self._lost: RingError | None = None
        self._workers: tuple[WorkerInfo, ...] = ()
        self._metadata = describe_model(served.folder)
        self.created = int(time.time())
        self.default_sampling = _sampling_defaults(served.folder.generation_config)

    @property
    def model_id(self) -> str:
        return self._served.names[0]

    @property
    def aliases(self) -> Sequence[str]:
        return self._served.names[1:]

    @property
    def tokenizer(self) -> Any:
        return self._served.tokenizer

    @property
    def context_length(self) -> int:
        limits = self._served.limits
        return limits.context_length if self._engine is None else self._engine.context_length

    @property
    def vocab_size(self) -> int:
        return self._served.limits.vocab_size

    @property
    def metadata(self) -> Mapping[str, object]:
        return self._metadata

    @property
    def engine(self) -> ServingEngine:
        if self._engine is None:
            raise NotReady(_LOADING)
        return self._engine

    @property
    def error(self) -> RingError | None:
        if self._lost is not None:
            return self._lost
        return NotReady(_LOADING) if self._engine is None else self._engine.error

    def instance(self) -> InstanceInfo:
        layers = self._served.folder.num_layers
        return InstanceInfo(self._instance, FIRST_EPOCH, layers, self._workers, self._kv_bits)

    @property
    def is_serving(self) -> bool:
        return self._engine is not None

    def serve(self, engine: Engine) -> None:
        """From now on requests are answered."""
        self._engine = engine

    def lose(self, error: RingError) -> None:
        """End what is being answered, and say why nothing more is."""
        if self._lost is None:
            log.error("%s", error)
            self._lost = error
        if self._engine is not None:
            self._engine.fail(error)

    def hear(self, event: agent_pb2.AgentEvent) -> None:
        """Take in what the agent tells of the workers."""
        ours = [state for state in event.workers if state.instance == self._instance]
        self._workers = tuple(
            _worker_info(state, self._ranges[state.stage], event.hello.node) for state in ours
        )
        for state in ours:
            if not state.alive:
                self.lose(
                    WorkerLost(
                        f"The worker of stage {state.stage}, rank {state.rank} (pid {state.pid}) "
                        f"{state.exit_reason}. Restart the server."
                    )
                )


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
        with _signals(self._stop), make_run_folder(self._settings.run_dir) as run_dir:
            async with contextlib.AsyncExitStack() as cleanup:
                server = _Server(self._http_config())
                serving = asyncio.create_task(server.serve([self._listener]), name="http")
                cleanup.push_async_callback(_end_http, server, serving)
                threads = self._settings.blas_threads or share_cores(self._settings.stages)
                agent = await LocalAgent.start(
                    self._settings, node=node_name(), run_dir=run_dir, blas_threads=threads
                )
                cleanup.push_async_callback(agent.stop)
                work = asyncio.create_task(self._load_and_watch(agent, report, announce, cleanup))
                await _first_of(asyncio.create_task(self._stop.wait()), serving, work)
                log.info("stopping")

    def _http_config(self) -> uvicorn.Config:
        settings = self._settings
        app = build_app(
            self._service,
            ApiSettings(
                host=settings.host,
                allowed_hosts=settings.allowed_hosts,
                allowed_origins=settings.allowed_origins,
                default_max_tokens=settings.default_max_tokens,
                max_body_bytes=settings.max_request_mb << 20,
            ),
        )
        return uvicorn.Config(
            app, log_config=None, proxy_headers=False, server_header=False, timeout_graceful_shutdown=2
        )

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
            hello=_head_hello(assignments[0]), model_path=str(folder.path), assignments=assignments
        )

    def _running(self, load_s: float) -> Running:
        host, port = self._listener.getsockname()[:2]
        return Running(_url(host, port), self._served, self._service.instance(), load_s)


def _spare_the_collector() -> None:
    """Take what is here for good out of garbage collection: going through it holds every stream up."""
    gc.collect()
    gc.freeze()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the head ends it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def _end_http(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    server.should_exit = True
    await asyncio.wait((serving,))


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
def _signals(stop: asyncio.Event) -> Generator[None]:
    loop = asyncio.get_running_loop()
    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in caught:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


def _head_hello(assignment: worker_pb2.StageAssignment) -> hello_pb2.Hello:
    return make_hello(
        instance=assignment.instance,
        epoch=assignment.epoch,
        model_digest=assignment.model_digest,
        plan_digest=assignment.plan_digest,
        node=node_name(),
        fencing_id=time.time_ns() // 1_000_000,
    )


def _url(host: str, port: int) -> str:
    """Where a person on this machine reaches the server."""
    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{local}:{port}"


def _worker_info(state: agent_pb2.WorkerState, layers: LayerRange, node: str) -> WorkerInfo:
    status = state.status
    return WorkerInfo(
        stage=state.stage,
        rank=state.rank,
        layers=layers,
        node=node,
        pid=state.pid,
        device=status.device,
        dtype=status.dtype,
        alive=state.alive,
        phase=status.phase,
        weight_bytes=status.weight_bytes,
        device_memory_bytes=status.device_memory_bytes,
        peak_memory_bytes=status.peak_memory_bytes,
        rss_bytes=status.rss_bytes,
        kv_bytes=status.kv_bytes,
        blas=status.blas,
    )


def _sampling_defaults(config: Mapping[str, Any]) -> SamplingDefaults:
    """What the model's makers advise, where their file gives numbers."""
    fallback = SamplingDefaults()

    def number(name: str, otherwise: float) -> float:
        value: object = config.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return otherwise
        return float(value) if value >= 0 else otherwise

    return SamplingDefaults(
        temperature=0.0 if config.get("do_sample") is False else number("temperature", fallback.temperature),
        top_p=number("top_p", fallback.top_p),
        top_k=int(number("top_k", fallback.top_k)),
        min_p=number("min_p", fallback.min_p),
        repetition_penalty=number("repetition_penalty", fallback.repetition_penalty),
    )
