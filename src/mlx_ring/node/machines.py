"""The machines that a head serves with: its own alone, or a cluster's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import subprocess
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Protocol

from mlx_ring.cluster.adoption import Adoptable, find_adoptable, highest_epoch
from mlx_ring.cluster.agent_link import Source
from mlx_ring.cluster.control import Control
from mlx_ring.cluster.deployment import Site, WorkerPlace, address_of
from mlx_ring.cluster.head_member import ensure_head_member
from mlx_ring.cluster.link_survey import LinkSurvey
from mlx_ring.cluster.local_agent import LocalAgent
from mlx_ring.cluster.membership import Came, Event, Went
from mlx_ring.core.addresses import HeadAddress
from mlx_ring.core.config import Settings, state_folder
from mlx_ring.core.machine import node_name, share_cores
from mlx_ring.core.types import LayerRange
from mlx_ring.core.weights_manifest import WeightsManifest
from mlx_ring.engine.served_model import ServedModel
from mlx_ring.node.arrangement import (
    Arrangement,
    arrange_cluster,
    arrange_here,
    cluster_sites,
    link_ends,
)
from mlx_ring.node.instance import Epoch, assign
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import agent_pb2, worker_pb2

log = logging.getLogger(__name__)

_STOP_WAIT_S = 8.0
_LOOK_WAIT_S = 3.0

HeedLoss = Callable[[str, str], None]
"""A node is gone, and why."""


class Machines(Protocol):
    """What a head asks of them."""

    async def next_epoch(self, number: int, nodes: int) -> Epoch:
        """Where the model goes now, once so many nodes are there; `number` at least."""
        ...

    def watching(self, heed_loss: HeedLoss) -> AbstractContextManager[None]:
        """Meanwhile `heed_loss` is told of nodes that go."""
        ...


class Here:
    """One machine alone. Its agent is a child, which ends with the head; another is started whenever it has ended."""

    def __init__(self, settings: Settings, served: ServedModel, run_dir: Path) -> None:
        self._settings = settings
        self._served = served
        self._run_dir = run_dir
        self._agent: LocalAgent | None = None
        self._serial = count()

    async def next_epoch(self, number: int, nodes: int) -> Epoch:
        del nodes
        agent = await self._alive()
        source = Source(str(self._served.folder.path))
        site = Site(node_name(), agent.link, is_local=True, hosts={}, source=source)
        arrangement = arrange_here(self._settings, self._served, site)
        return Epoch(new_instance(self._served), number, arrangement, node_name())

    async def _alive(self) -> LocalAgent:
        if self._agent is None or self._agent.exit_reason:
            await self.stop()
            run_dir = self._run_dir / f"a{next(self._serial)}"
            run_dir.mkdir()
            self._agent = await LocalAgent.start(
                self._settings,
                node=node_name(),
                run_dir=run_dir,
                blas_threads=self._settings.blas_threads or share_cores(self._settings.stages),
            )
        return self._agent

    async def stop(self) -> None:
        """End the agent, with every worker."""
        if self._agent is not None:
            await self._agent.stop()

    @contextlib.contextmanager
    def watching(self, heed_loss: HeedLoss) -> Generator[None]:
        """The one agent's own reports say all."""
        del heed_loss
        yield


class Cluster:
    """Several machines. Their agents, this one's too, outlive a head that is killed; the next one goes on with their workers."""

    def __init__(
        self,
        settings: Settings,
        served: ServedModel,
        control: Control,
        address: HeadAddress,
        offer: Callable[[], Awaitable[WeightsManifest]],
    ) -> None:
        """`offer` makes the model's weights available to other machines."""
        self._settings = settings
        self._served = served
        self._control = control
        self._address = address
        self._offer = offer
        self._is_first = True
        self._own_agent: subprocess.Popen[bytes] | None = None
        self.survey = LinkSurvey(control.node)
        """What is known of the links between its nodes."""

    async def next_epoch(self, number: int, nodes: int) -> Epoch:
        control = self._control
        own_host = "127.0.0.1" if self._address.host in ("::", "0.0.0.0") else self._address.host  # noqa: S104 - as bound
        started = ensure_head_member(
            self._settings,
            state_folder(self._settings),
            control.node,
            HeadAddress(own_host, self._address.port),
        )
        self._own_agent = started or self._own_agent
        membership = await control.wait_for(nodes, including=control.node)
        sites = cluster_sites(self._served, control, membership, self._address.port)
        try:
            events = await self._look(sites)
            number = max(number, highest_epoch(events) + 1)
            found = find_adoptable(events, self._expect) if self._is_first else None
            await self._stop_others(sites, events, found)
            self._is_first = False
            if found is not None:
                return self._adopted(found, sites, number)
            arrangement = await arrange_cluster(
                self._settings, self._served, control, membership, sites, self._offer, self.survey
            )
        except BaseException:
            await _close(sites)
            raise
        used = {site.node for site in arrangement.nodes}
        await _close([site for site in sites if site.node not in used])
        return Epoch(new_instance(self._served), number, arrangement, control.node, trust=control.credentials)

    async def _look(self, sites: Sequence[Site]) -> list[agent_pb2.AgentEvent]:
        """How all of them stand."""
        hello = make_hello(node=self._control.node)
        found = await asyncio.gather(*(site.link.look(hello, _LOOK_WAIT_S) for site in sites))
        return [event for event in found if event is not None]

    def _expect(self, instance: str, ranges: Sequence[LayerRange]) -> Sequence[worker_pb2.StageAssignment]:
        return assign(self._settings, self._served, instance, 0, ranges)

    async def _stop_others(
        self, sites: Sequence[Site], events: Sequence[agent_pb2.AgentEvent], found: Adoptable | None
    ) -> None:
        """What earlier heads left and nobody wants."""
        by_node = {site.node: site for site in sites}
        left = {
            (event.hello.node, state.instance)
            for event in events
            for state in event.workers
            if found is None or state.instance != found.instance
        }
        await asyncio.gather(
            *(by_node[node].link.stop(instance, _STOP_WAIT_S) for node, instance in left if node in by_node)
        )

    def _adopted(self, found: Adoptable, sites: Sequence[Site], number: int) -> Epoch:
        by_node = {site.node: site for site in sites}
        log.info("going on with the workers of %s, which are loaded", found.instance)
        places = [
            WorkerPlace(state.stage, state.rank, "", state.address)
            if by_node[node].is_local
            else WorkerPlace(
                state.stage, state.rank, node, address_of(by_node[node].host_for(""), state.status.port)
            )
            for node, state in found.workers
        ]
        arrangement = Arrangement(found.ranges, tuple(by_node[node] for node, _ in found.workers), None)
        return Epoch(
            found.instance,
            number,
            arrangement,
            self._control.node,
            trust=self._control.credentials,
            loaded=tuple(places),
        )

    async def stop(self) -> None:
        """End this machine's agent; those of others stay, without workers."""
        membership = self._control.membership
        if self._control.node in membership.members:
            sites = cluster_sites(self._served, self._control, membership, self._address.port)
            await asyncio.gather(*(site.link.end(_STOP_WAIT_S) for site in sites if site.is_local))
            await _close(sites)
        elif self._own_agent is not None:
            # It has not come yet, or not come back.
            self._own_agent.terminate()
        if self._own_agent is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._own_agent.wait, _STOP_WAIT_S)

    @contextlib.contextmanager
    def watching(self, heed_loss: HeedLoss) -> Generator[None]:
        def heed(event: Event) -> None:
            if isinstance(event, Went):
                heed_loss(event.node, event.reason)
            elif isinstance(event, Came):
                came.set()

        came = asyncio.Event()
        came.set()
        measuring = asyncio.create_task(self._measure_whoever_comes(came), name="links")
        try:
            with self._control.watching(heed):
                yield
        finally:
            measuring.cancel()

    async def _measure_whoever_comes(self, came: asyncio.Event) -> None:
        """What joins while a model is served is used at the next plan; its links are known by then."""
        while True:
            await came.wait()
            came.clear()
            membership = self._control.membership
            sites = cluster_sites(self._served, self._control, membership, self._address.port)
            try:
                await self.survey.take(link_ends(membership, sites))
            finally:
                await _close(sites)


def new_instance(served: ServedModel) -> str:
    """A name that no other instance has."""
    return f"{served.local.name.rsplit('/', 1)[-1]}-{secrets.token_hex(3)}"


async def _close(sites: Sequence[Site]) -> None:
    await asyncio.gather(*(site.link.close() for site in sites))
