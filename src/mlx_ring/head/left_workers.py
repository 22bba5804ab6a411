"""Workers that earlier heads left, or that a node kept while it was disconnected: some are adopted, others ended."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from mlx_ring.cluster.adoption import Adoptable, find_adoptable, highest_epoch, next_head, present_epoch
from mlx_ring.cluster.agent_link import STOP_WAIT_S
from mlx_ring.cluster.control import Control
from mlx_ring.cluster.deployment import Site, close_sites, place_at
from mlx_ring.cluster.layer_split import Cut
from mlx_ring.cluster.membership import Event, Joined, Membership
from mlx_ring.cluster.relinking import wait_for_answers
from mlx_ring.core.errors import RingError
from mlx_ring.core.folders import authority_folder, state_folder
from mlx_ring.core.types import RankId
from mlx_ring.head.instance import Epoch
from mlx_ring.head.nodes import Declared, LiveInstances, cluster_sites
from mlx_ring.head.patching import Remains, wait_until_whole
from mlx_ring.head.placing import Order, place_as_loaded
from mlx_ring.head.plan_requests import LinkSurveys
from mlx_ring.head.rank_placements import assign
from mlx_ring.head.served_model import ServedModel
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2
from mlx_ring.settings.config import Settings

log = logging.getLogger(__name__)

_LOOK_WAIT_S, _LOOK_AGAIN_S = 3.0, 1.0


class LeftWorkers:
    """Workers in a cluster that do not belong to an instance of this head.

    Instances of an earlier head are kept until a model adopts them. All other workers are ended.
    """

    def __init__(
        self,
        settings: Settings,
        declared: Sequence[Declared],
        control: Control,
        head_port: int,
        live: LiveInstances,
        surveys: LinkSurveys,
    ) -> None:
        """Prepare; it contacts no node before `look_once` or `tend_joining_nodes`.

        Args:
            settings: settings of the head.
            declared: the head's first models.
            control: the head's control server.
            head_port: port of the control server.
            live: instances of this head.
            surveys: measured links, which are taken of nodes that join.
        """
        self._settings = settings
        self._declared = declared
        self._control = control
        self._head_port = head_port
        self._live = live
        self._surveys = surveys
        self._one_at_a_time = asyncio.Lock()
        self._has_looked = asyncio.Event()
        self._to_tend: asyncio.Queue[str] = asyncio.Queue()
        """Nodes that joined, or returned after others had replaced their workers."""
        self._left: dict[str, list[Adoptable]] = {}
        """Instances that an earlier head left loaded, by model."""
        self.highest_epoch = 0
        """Highest epoch of the workers that were found."""
        self.head_number = 1
        """Number of this head, which is higher than those of earlier ones."""

    @property
    def _hello(self) -> hello_pb2.Hello:
        """Greeting of this head, for any instance."""
        return make_hello(node=self._control.node, fencing_id=self.head_number)

    async def wait_until_whole(self, remains: Remains) -> None:
        """Wait until the lost ranks of an instance, which are only silent, answer again."""
        await wait_until_whole(remains, partial(self._wait_for_answers, epoch=remains.epoch))

    async def _wait_for_answers(self, site: Site, pids: frozenset[int], *, epoch: int) -> None:
        """Wait for workers of a node, which may have to connect again."""
        while True:
            await self._control.wait_until_present(site.node)
            sites = cluster_sites(self._control, self._control.membership, self._head_port)
            left = asyncio.create_task(self._control.wait_until_absent(site.node))
            answering = [
                asyncio.create_task(wait_for_answers(each, pids, epoch, self._hello))
                for each in sites
                if each.node == site.node
            ]
            try:
                await asyncio.wait((left, *answering), return_when=asyncio.FIRST_COMPLETED)
                if any(task.done() for task in answering):
                    return
            finally:
                for task in (left, *answering):
                    task.cancel()
                await asyncio.wait((left, *answering))
                await close_sites(sites)

    def adoptable(self, served: ServedModel, membership: Membership) -> list[Adoptable]:
        """Return a model's adoptable instances whose nodes are all present."""
        left = [
            found
            for found in self._left.get(served.names[0], [])
            if all(node in membership.members for node, _ in found.workers)
        ]
        self._left[served.names[0]] = left
        return left

    async def look_once(self, sites: Sequence[Site]) -> None:
        """Find the workers that earlier heads left, and end those of no use."""
        async with self._one_at_a_time:
            if self._has_looked.is_set():
                return
            found = await asyncio.gather(*(site.link.look(self._hello, _LOOK_WAIT_S) for site in sites))
            events = [event for event in found if event is not None]
            self.highest_epoch = highest_epoch(events)
            self.head_number = next_head(authority_folder(state_folder(self._settings.state_dir)), events)
            for declared in self._declared:
                most = declared.settings.replicas or (
                    len(sites) if declared.settings.optimize_for == "throughput" else 1
                )
                digest = await asyncio.to_thread(declared.served.read_digest)
                adoptable = find_adoptable(events, partial(_expect, declared, digest))
                self._left[declared.served.names[0]] = adoptable[:most]
            wanted = {
                (node, found.instance)
                for of_model in self._left.values()
                for found in of_model
                for node, _ in found.workers
            }
            await self._end_unwanted(sites, events, lambda node, name: (node, name) in wanted)
            self._has_looked.set()

    async def _end_unwanted(
        self,
        sites: Sequence[Site],
        events: Iterable[agent_pb2.AgentEvent],
        is_wanted: Callable[[str, str], bool],
    ) -> None:
        """End unwanted workers, by node and instance, of earlier heads, or of a node that was disconnected."""
        by_node = {site.node: site for site in sites}
        epochs: dict[tuple[str, str], int] = defaultdict(int)
        for event in events:
            for state in event.workers:
                place = event.hello.node, state.instance
                if not is_wanted(*place) or not self._live.may_have(state.instance, event.hello.node):
                    epochs[place] = max(epochs[place], present_epoch(state))
        await asyncio.gather(
            *(
                self._stop(by_node[node], instance, epoch)
                for (node, instance), epoch in epochs.items()
                if node in by_node
            )
        )

    async def _stop(self, site: Site, instance: str, epoch: int) -> None:
        """End the workers of an instance on a node; if the request arrives late, none of a later epoch."""
        hello = make_hello(node=self._control.node, epoch=epoch, fencing_id=self.head_number)
        await site.link.stop(instance, STOP_WAIT_S, hello)

    async def adopt(
        self, order: Order, membership: Membership, sites: Sequence[Site], number: int
    ) -> Epoch | None:
        """Take over an instance of an earlier head; end those that cannot be taken over."""
        while left := self.adoptable(order.served, membership):
            found = left.pop(0)
            try:
                return self._adopted(found, order, membership, sites, number)
            except RingError as error:
                log.warning("%s of an earlier head is ended: %s", found.instance, error)
                own = [site for site in sites if site.node in dict(found.workers)]
                epoch = max(present_epoch(state) for _, state in found.workers)
                await asyncio.gather(*(self._stop(site, found.instance, epoch) for site in own))
        return None

    def _adopted(
        self, found: Adoptable, order: Order, membership: Membership, sites: Sequence[Site], number: int
    ) -> Epoch:
        by_node = {site.node: site for site in sites}
        log.info("Adopting the loaded workers of %s", found.instance)
        places = [
            place_at(RankId(state.stage, state.rank), state.address, state.status.port, by_node[node])
            for node, state in found.workers
        ]
        own = tuple(by_node[node] for node, _ in found.workers)
        links = self._surveys.profiles(sites)
        others = self._live.others(order.served.names[0])
        placement = place_as_loaded(order, others, self._control, membership, found, own, links)
        self._live.add(found.instance, order, placement)
        node, trust = self._control.node, self._control.credentials
        return Epoch(
            found.instance, number, placement, node, trust, loaded=tuple(places), head=self.head_number
        )

    def tend_soon(self, nodes: Iterable[str]) -> None:
        """End the stale workers of nodes that are connected."""
        for node in nodes:
            self._to_tend.put_nowait(node)

    async def tend_joining_nodes(self) -> None:
        """End the stale workers of each node that joins, and measure its links for the next plan."""
        came = self._to_tend

        def on_event(event: Event) -> None:
            if isinstance(event, Joined):
                came.put_nowait(event.member.node)

        with self._control.watching(on_event):
            while True:
                nodes = {await came.get()}
                while not came.empty():
                    nodes.add(came.get_nowait())
                await self._has_looked.wait()
                if silent := await self._tend(nodes) & self._control.membership.members.keys():
                    # A busy member may hold workers of an ended instance: ask until it answers.
                    await asyncio.sleep(_LOOK_AGAIN_S)
                    for node in silent:
                        came.put_nowait(node)

    async def _tend(self, nodes: AbstractSet[str]) -> AbstractSet[str]:
        """End stale workers on these nodes and survey links; return the nodes that did not answer."""
        silent = nodes
        membership = self._control.membership
        sites = cluster_sites(self._control, membership, self._head_port)
        try:
            new = [site for site in sites if site.node in nodes]
            found = await asyncio.gather(*(site.link.look(self._hello, _LOOK_WAIT_S) for site in new))
            silent = {site.node for site, event in zip(new, found, strict=True) if event is None}
            wanted = self._live.names | {left.instance for each in self._left.values() for left in each}
            events = [event for event in found if event is not None]
            await self._end_unwanted(new, events, lambda _, instance: instance in wanted)
            # Links for collectives, too: a group of machines that share layers may be proposed.
            await self._surveys.take_all(membership, sites)
        except RingError as error:
            log.warning("%s joined, but could not be prepared: %s", ", ".join(sorted(nodes)), error)
        finally:
            await close_sites(sites)
        return silent


def _expect(declared: Declared, digest: str, instance: str, cut: Cut) -> Sequence[worker_pb2.StageAssignment]:
    return assign(declared.settings, declared.served, digest, instance, 0, cut)
