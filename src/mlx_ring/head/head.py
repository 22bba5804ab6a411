"""Run of a head: HTTP server, machines, and models.

A head listens first, so that a busy port fails before any load. Then it starts its machine's agent and loads
its models. Its own agent and workers always end with it.

The HTTP server runs in the head's event loop. Only the head ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from uvicorn.server import Server

from mlx_ring.agent.weights.serving import WeightsService
from mlx_ring.api.app import build_app
from mlx_ring.api.journal import Journal
from mlx_ring.api.middleware.guard import Admission
from mlx_ring.api.service import ModelCatalog
from mlx_ring.api.settings import ApiSettings
from mlx_ring.core.environment import package_version
from mlx_ring.core.errors import AddressInUse
from mlx_ring.core.folders import journal_folder, manifests_folder, state_folder
from mlx_ring.core.traces import Tracing, open_tracing
from mlx_ring.core.worker_status import InstanceInfo
from mlx_ring.head.http_connections import HttpConfig
from mlx_ring.head.instance_watch import end_tasks
from mlx_ring.head.models import Catalog
from mlx_ring.head.nodes import Machines
from mlx_ring.head.replica import Watcher
from mlx_ring.head.served_model import ServedModel
from mlx_ring.head.single_node import USES_ONE_MACHINE, SingleNode, profile_command, workers_here
from mlx_ring.head.uvicorn_connection import ConnectionLimits
from mlx_ring.host.addresses import HeadAddress, is_loopback, listening_url, scoped_host
from mlx_ring.host.head_announcement import HeadAnnouncement
from mlx_ring.host.interfaces import lan_addresses, lan_urls, own_names
from mlx_ring.host.machine import make_run_folder, node_name, raise_descriptor_limit
from mlx_ring.host.power import KeepAwake
from mlx_ring.host.process import ending_signals, usable_cores
from mlx_ring.models.weights_manifest import WeightsManifest, manifest_beside
from mlx_ring.settings.config import Settings
from mlx_ring.settings.rank_settings import crowding_remark
from mlx_ring.settings.settings_sources import api_keys, bodies_mb


def open_journal(settings: Settings) -> Journal | None:
    """Return the journal of the settings; None if they have none."""
    if settings.journal is None:
        return None
    folder = settings.journal_dir or journal_folder(state_folder(settings.state_dir))
    return Journal(folder, settings.journal, api_keys(settings))


class HttpServer(Server):
    """Uvicorn server without signal handlers, because the head ends it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def end_http(server: Server, serving: asyncio.Task[None]) -> None:
    server.should_exit = True
    await asyncio.wait((serving,))


def http_config(
    catalog: ModelCatalog,
    settings: Settings,
    urls: Callable[[], Sequence[str]],
    admission: Admission,
    tls: ssl.SSLContext | None,
    tracing: Tracing | None,
    journal: Journal | None = None,
) -> HttpConfig:
    """Build the HTTP server's configuration from the settings."""
    app = build_app(catalog, api_settings(settings, urls, len(catalog.models)), tracing, admission, journal)
    limits = ConnectionLimits(
        settings.max_connections, settings.http_timeout_keep_alive, settings.client_timeout_s
    )
    return HttpConfig(app, limits, tls)


def api_settings(
    settings: Settings, urls: Callable[[], Sequence[str]] = tuple, models: int = 1
) -> ApiSettings:
    """Return the settings of the HTTP API.

    Args:
        settings: settings of the head.
        urls: returns the URLs by which other machines reach it.
        models: number of models with which it starts.

    Raises:
        ConfigError: The file of API keys cannot be read.
    """
    return ApiSettings(
        host=settings.host,
        own_names=tuple if is_loopback(settings.host) else own_names,
        allowed_hosts=settings.allowed_hosts,
        allowed_origins=settings.allowed_origins,
        api_keys=api_keys(settings),
        default_max_tokens=settings.default_max_tokens,
        max_body_bytes=settings.max_request_mb << 20,
        max_bodies_bytes=bodies_mb(settings) << 20,
        client_timeout_s=settings.client_timeout_s,
        open_schemas=settings.additional_properties == "on",
        escapes_special_tokens=settings.special_tokens_in_chats == "escape",
        access_log=settings.access_log == "on",
        urls=urls,
        join_refusal=USES_ONE_MACHINE if settings.nodes == 1 else "",
        profile_command=profile_command(settings, models),
    )


log = logging.getLogger(__name__)

_TOKEN_LIFE_S = 24 * 3600.0
_AWAKE_LOOK_S = 1.0
LAN_LOOK_S = 30.0
"""Interval at which addresses for other machines are looked for."""


@dataclass(frozen=True, slots=True)
class StartReport:
    """Facts to report once an instance serves."""

    url: str
    served: ServedModel
    instance: InstanceInfo
    load_s: float
    is_first: bool
    """True for the head's first instance."""
    asks_for_key: bool = False
    certificate: Path | None = None
    """Certificate for HTTPS; None for HTTP."""
    lan_urls: tuple[str, ...] = ()
    """URLs by which other machines reach the server; empty if they cannot."""


class Audience(Watcher, Protocol):
    """Observer of a head's start."""

    @property
    def invites(self) -> bool:
        """True if other machines should get a token to join; otherwise the head makes none."""
        ...

    def joining(self, address: HeadAddress, token: str, missing: int) -> None:
        """Report the number of missing machines, and the address and token with which they join."""
        ...

    def serving(self, running: StartReport) -> None:
        """Report that an instance serves requests."""
        ...


class LanUrls:
    """URLs by which other machines reach a server. A service may start before its network, and routers give other addresses."""

    def __init__(self, listener: socket.socket, scheme: str) -> None:
        """Find the present ones of a server's socket for HTTP."""
        self._host, self._port = listener.getsockname()[:2]
        self._scheme = scheme
        self.present = self._find()
        """Empty if other machines cannot reach it."""

    async def follow(self) -> None:
        """Look for changes until cancelled."""
        while True:
            await asyncio.sleep(LAN_LOOK_S)
            with contextlib.suppress(OSError):  # the system does not list its interfaces just now
                self.present = await asyncio.to_thread(self._find)

    def _find(self) -> tuple[str, ...]:
        if is_loopback(self._host):
            return ()
        return tuple(lan_urls(self._host, self._port, self._scheme, lan_addresses(), own_names()))


class Head:
    """One run of `mlx-ring serve`."""

    def __init__(
        self,
        settings: Settings,
        served: Sequence[tuple[Settings, ServedModel]],
        listener: socket.socket,
        audience: Audience,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Prepare a head, inside the event loop.

        Args:
            settings: settings of the head.
            served: the models, each with its settings.
            listener: socket for HTTP.
            audience: observer of the start.
            tls: TLS context for HTTPS; None for HTTP.
        """
        self._settings = settings
        self._tls = tls
        self._admission = Admission()
        self._listener = listener
        self._lan_urls = LanUrls(listener, self._scheme)
        self._audience = audience
        self._has_announced = False
        self._tracing = open_tracing(settings.otlp_traces_endpoint, node_name(), package_version("mlx-ring"))
        self._catalog = Catalog(settings, served, audience, self._announce, self._tracing)
        self._weights = WeightsService(node_name(), None)
        self._journal = open_journal(settings)

    async def run(self) -> None:
        """Load and serve until SIGINT, SIGTERM or SIGHUP; finish open requests before returning.

        Raises:
            RingError: the first model could not be loaded.
        """
        raise_descriptor_limit(self._settings.file_descriptor_limit)
        with end_signals() as end:
            async with contextlib.AsyncExitStack() as cleanup:
                if self._tracing is not None:
                    cleanup.push_async_callback(asyncio.to_thread, self._tracing.close)
                server = HttpServer(
                    http_config(
                        self._catalog,
                        self._settings,
                        lambda: self._lan_urls.present,
                        self._admission,
                        self._tls,
                        self._tracing,
                        self._journal,
                    )
                )
                if self._journal is not None:
                    await self._journal.open()
                serving = asyncio.create_task(server.serve([self._listener]), name="http")
                cleanup.push_async_callback(end_http, server, serving)
                machines = await self._machines(cleanup)
                cleanup.push_async_callback(self._catalog.end)
                if self._journal is not None:
                    self._journal.begin()
                    cleanup.push_async_callback(self._journal.close)
                cleanup.push_async_callback(end_tasks, asyncio.create_task(self._catalog.keep_learning()))
                cleanup.push_async_callback(
                    end_tasks, asyncio.create_task(self._catalog.replanning.keep_looking())
                )
                cleanup.push_async_callback(end_tasks, asyncio.create_task(self._keep_awake()))
                cleanup.push_async_callback(end_tasks, asyncio.create_task(self._lan_urls.follow()))
                work = asyncio.create_task(self._keep_serving(machines))
                cleanup.push_async_callback(end_tasks, work)
                await _first_of(end.requested.wait(), serving, work)
                await self._drain(end, serving, work)
                log.info("Stopping")

    async def _drain(self, end: EndSignals, *running: asyncio.Task[None]) -> None:
        """Refuse new requests and finish open ones, until the timeout or a second signal."""
        self._admission.close()
        self._catalog.stop_fetching()
        self._catalog.moves.stop()
        left, within_s = self._admission.open, self._settings.shutdown_timeout_s
        if not left or not within_s:
            return
        log.info("Finishing %d requests within %g s; a second signal ends them at once", left, within_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await _first_of(self._admission.drained(), end.insisted.wait(), *running)
        if self._admission.open:
            log.warning("Ending %d unfinished requests", self._admission.open)

    async def _keep_awake(self) -> None:
        """Keep this machine awake while requests are open. A look once a second spares short ones a process."""
        awake = KeepAwake(self._settings.keep_awake)
        try:
            while True:
                has_work = self._journal is not None and self._journal.has_work
                awake.hold(has_work=has_work or self._admission.open > 0)
                await asyncio.sleep(_AWAKE_LOOK_S)
        finally:
            awake.release()

    async def _keep_serving(self, machines: Machines) -> None:
        await self._catalog.begin(machines)
        await self._catalog.crashed

    @property
    def _scheme(self) -> str:
        return "http" if self._tls is None else "https"

    def _announce(self, served: ServedModel, instance: InstanceInfo, load_s: float) -> None:
        is_first, self._has_announced = not self._has_announced, True
        settings = self._settings
        asks_for_key = bool(settings.api_key or settings.api_key_file)
        security = asks_for_key, settings.ssl_certfile
        report = StartReport(
            listening_url(self._listener, self._scheme),
            served,
            instance,
            load_s,
            is_first,
            *security,
            self._lan_urls.present,
        )
        self._audience.serving(report)

    async def _machines(self, cleanup: contextlib.AsyncExitStack) -> Machines:
        """Return the head's own machine, or open the cluster's ports and return its machines."""
        settings, declared = self._settings, self._catalog.declared
        if settings.nodes == 1:
            run_dir = cleanup.enter_context(make_run_folder(settings.run_dir))
            if remark := crowding_remark(settings, usable_cores()):
                log.warning("%s", remark)
            single_node = SingleNode(settings, run_dir, workers_here(settings, len(declared)))
            cleanup.push_async_callback(single_node.stop)
            return single_node
        # A single machine starts without them.
        from mlx_ring.cluster.announcement import announcing
        from mlx_ring.cluster.control import open_control
        from mlx_ring.head.multi_node import Cluster

        address = HeadAddress(scoped_host(settings.cluster_host, "--cluster-host"), settings.cluster_port)
        try:
            control = await cleanup.enter_async_context(
                open_control(state_folder(settings.state_dir), address, self._weights.handler())
            )
        except AddressInUse as error:
            raise AddressInUse(
                f"{error} The cluster needs port {address.port} and the one after it: choose others with --cluster-port."
            ) from error
        if not _is_loopback(address.host):
            announcement = HeadAnnouncement(
                node_name(), control.node, package_version("mlx-ring"), control.fingerprint.hex()[:16]
            )
            await cleanup.enter_async_context(announcing(announcement, address.port))
        cluster = Cluster(settings, declared, control, address, self._offered_manifest)
        control.let_go = self._let_go
        cleanup.push_async_callback(cluster.stop)
        if self._audience.invites:
            self._audience.joining(address, control.make_token(life_s=_TOKEN_LIFE_S), settings.nodes - 1)
        return cluster

    async def _let_go(self, node: str) -> None:
        """Move all layers away from a machine that wants to leave."""
        await self._catalog.moves.drain(node, force=False)

    async def _offered_manifest(self, served: ServedModel) -> WeightsManifest:
        """Make a model's manifest by reading it once, and offer the model to other nodes."""
        folder = served.folder
        log.info("Reading %s for the checksums with which other machines verify their downloads", folder.path)
        manifest = await manifest_beside(folder, manifests_folder(state_folder(self._settings.state_dir)))
        self._weights.offer(folder.path, manifest)
        return manifest


async def _first_of(first: Awaitable[object], *others: Awaitable[object]) -> None:
    """Wait for the first to end, and raise its error, if any. Cancel all others except tasks."""
    tasks = [asyncio.ensure_future(each) for each in (first, *others)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            if task not in (first, *others):
                task.cancel()


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class EndSignals:
    """Requests, by signal, to end a head that serves."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        """Event of the first signal: end after open requests."""
        self.insisted = asyncio.Event()
        """Event of a second signal: end at once."""

    def on_signal(self) -> None:
        (self.insisted if self.requested.is_set() else self.requested).set()


@contextlib.contextmanager
def end_signals() -> Generator[EndSignals]:
    loop, signals = asyncio.get_running_loop(), EndSignals()
    caught = ending_signals()
    for number in caught:
        loop.add_signal_handler(number, signals.on_signal)
    try:
        yield signals
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
