"""One run of a head.

A head listens first, so that a busy port costs no loading; then it starts its machine's agent,
and one instance of the model after another: what is lost is loaded again on what is there then.
Whatever way it ends, its own agent and workers end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import signal
import socket
from collections.abc import Generator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from mlx_ring.agent.weights.serving import WeightsFront
from mlx_ring.api.service import InstanceInfo
from mlx_ring.cluster.agent_link import Source
from mlx_ring.cluster.control import Control, open_control
from mlx_ring.cluster.deployment import Site
from mlx_ring.cluster.discovery import announcing
from mlx_ring.cluster.local_agent import LocalAgent
from mlx_ring.cluster.membership import Event, Went
from mlx_ring.core.addresses import HeadAddress
from mlx_ring.core.cluster_folders import manifests_folder, node_folder
from mlx_ring.core.config import Settings, state_folder
from mlx_ring.core.errors import RingError
from mlx_ring.core.head_announcement import HeadAnnouncement
from mlx_ring.core.logs import set_log_epoch
from mlx_ring.core.machine import make_run_folder, node_name, raise_descriptor_limit, share_cores
from mlx_ring.core.model_digests import manifest_of_folder
from mlx_ring.core.weights_manifest import WeightsManifest
from mlx_ring.engine.served_model import ServedModel
from mlx_ring.node.arrangement import Arrangement, arrange_cluster, arrange_here
from mlx_ring.node.http import HttpServer, end_http, http_config, local_url
from mlx_ring.node.instance import Epoch, Instance
from mlx_ring.node.service import FIRST_EPOCH, HeadService
from mlx_ring.rpc.hello import package_version
from mlx_ring.rpc.protos import agent_pb2

log = logging.getLogger(__name__)

_TOKEN_LIFE_S = 24 * 3600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
"""Between an instance's loss and the next attempt."""


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
        self._service = HeadService(served, kv_bits=0 if settings.kv_bits == "off" else int(settings.kv_bits))
        self._weights = WeightsFront(node_name(), None)
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Load, serve, and return after Ctrl-C, SIGTERM or a hang-up.

        Raises:
            RingError: the model could not be loaded at first.
        """
        raise_descriptor_limit(self._settings.file_descriptor_limit)
        with end_signals(self._stop), make_run_folder(self._settings.run_dir) as run_dir:
            async with contextlib.AsyncExitStack() as cleanup:
                server = HttpServer(http_config(self._service, self._settings))
                serving = asyncio.create_task(server.serve([self._listener]), name="http")
                cleanup.push_async_callback(end_http, server, serving)
                control = await self._open_control(cleanup)
                agents = OwnAgents(self._settings, run_dir, control)
                cleanup.push_async_callback(agents.stop)
                work = asyncio.create_task(self._keep_serving(agents, control))
                await _first_of(asyncio.create_task(self._stop.wait()), serving, work)
                log.info("stopping")

    async def _open_control(self, cleanup: contextlib.AsyncExitStack) -> Control | None:
        """The ports for other machines, where there are to be some."""
        settings = self._settings
        if settings.nodes == 1:
            return None
        address = HeadAddress(settings.cluster_host.strip("[]"), settings.cluster_port)
        state = state_folder(settings)
        control = await cleanup.enter_async_context(open_control(state, address, self._weights.handler()))
        if not _is_loopback(address.host):
            told = HeadAnnouncement(
                node_name(), control.node, package_version("mlx-ring"), control.fingerprint.hex()[:16]
            )
            await cleanup.enter_async_context(announcing(told, address.port))
        self._audience.joining(address, control.make_token(life_s=_TOKEN_LIFE_S), settings.nodes - 1)
        return control

    async def _offered_manifest(self) -> WeightsManifest:
        """The model's, made by reading it once; from now on nodes can fetch it here."""
        folder = self._served.folder
        log.info("reading %s, so that other machines can check what they fetch", folder.path)
        manifest = await asyncio.to_thread(
            manifest_of_folder,
            folder,
            manifests_folder(state_folder(self._settings)),
            lambda _done, _total: None,
        )
        self._weights.offer(folder.path, manifest)
        return manifest

    async def _keep_serving(self, agents: OwnAgents, control: Control | None) -> None:
        """One instance after the other: what is lost is loaded again on what is there then."""
        nodes, pause_s = self._settings.nodes, _FIRST_PAUSE_S
        for number in count(FIRST_EPOCH):
            set_log_epoch(number)
            try:
                instance = await self._arrange(await agents.alive(), control, number, nodes)
                await self._run(instance, control)
                # It has served: from now on with whoever is there.
                nodes, pause_s = 1, _FIRST_PAUSE_S
            except RingError as error:
                if nodes > 1 or number == FIRST_EPOCH:
                    raise
                self._service.lose(error)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
            log.warning("loading the model again in %g s", pause_s)
            await asyncio.sleep(pause_s)

    async def _arrange(self, agent: LocalAgent, control: Control | None, number: int, nodes: int) -> Instance:
        """Decide what goes where, once so many nodes are there."""
        node = node_name() if control is None else control.node
        if control is None:
            path = str(self._served.folder.path)
            site = Site(node, agent.link, is_local=True, hosts={}, source=Source(path))
            arrangement = arrange_here(self._settings, self._served, site)
        else:
            arrangement = await arrange_cluster(
                self._settings, self._served, agent.link, control, nodes, self._offered_manifest()
            )
        name = f"{self._served.local.name.rsplit('/', 1)[-1]}-{secrets.token_hex(3)}"
        self._service.begin(name, number, arrangement.ranges)
        self._audience.planned(arrangement)
        trust = None if control is None else control.credentials
        epoch = Epoch(name, number, arrangement, node, trust)
        return Instance(self._settings, self._served, self._service, epoch, self._audience.loading)

    async def _run(self, instance: Instance, control: Control | None) -> None:
        def heed(event: Event) -> None:
            if isinstance(event, Went):
                instance.heed_loss(event.node, event.reason)

        def ready(load_s: float) -> None:
            host, port = self._listener.getsockname()[:2]
            told = Running(local_url(host, port), self._served, self._service.instance(), load_s)
            self._audience.serving(told)

        with contextlib.ExitStack() as watching:
            if control is not None:
                watching.enter_context(control.watching(heed))
            await instance.run(ready)


class OwnAgents:
    """The agent of the head's machine, and another one whenever it has ended."""

    def __init__(self, settings: Settings, run_dir: Path, control: Control | None) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._control = control
        self._agent: LocalAgent | None = None
        self._serial = count()

    async def alive(self) -> LocalAgent:
        """One that runs."""
        if self._agent is None or self._agent.exit_reason:
            await self.stop()
            run_dir = self._run_dir / f"a{next(self._serial)}"
            run_dir.mkdir()
            settings, control = self._settings, self._control
            self._agent = await LocalAgent.start(
                settings,
                node=node_name() if control is None else control.node,
                run_dir=run_dir,
                blas_threads=settings.blas_threads or share_cores(settings.stages),
                credentials=None if control is None else node_folder(state_folder(settings)),
            )
        return self._agent

    async def stop(self) -> None:
        """End it, with every worker."""
        if self._agent is not None:
            await self._agent.stop()


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


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


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
