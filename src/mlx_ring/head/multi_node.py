"""Cluster of several machines, as a head uses it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TypeVar

from mlx_ring.api.service import LinkInfo
from mlx_ring.cluster.adoption import Adoptable, find_adoptable, highest_epoch, next_head
from mlx_ring.cluster.control import Control
from mlx_ring.cluster.deployment import Site, Started, WorkerPlace, address_of, close_sites
from mlx_ring.cluster.head_member import OwnAgent, stale_trust
from mlx_ring.cluster.link_survey import as_they_are
from mlx_ring.cluster.membership import Event, Joined, Left, Membership, Reported
from mlx_ring.cluster.placement import Cut
from mlx_ring.cluster.quarantine import QuarantineList
from mlx_ring.core.cluster_folders import authority_folder
from mlx_ring.core.errors import LinkLost, PlanError, RingError
from mlx_ring.head.instance import Epoch
from mlx_ring.head.link_survey import LinkSurveys, link_info
from mlx_ring.head.nodes import Declared, LiveInstances, NodeListener, new_instance
from mlx_ring.head.patching import Remains, Room, patch_ranks
from mlx_ring.head.placing import (
    Order,
    Placement,
    cluster_sites,
    node_profiles,
    offered,
    place_as_loaded,
    place_on_cluster,
    plan_replicas,
    with_throughput,
)
from mlx_ring.head.rank_placements import assign
from mlx_ring.head.served_model import ServedModel
from mlx_ring.head.status import ClusterView
from mlx_ring.head.step_down import StepDown
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.models.weights_manifest import WeightsManifest
from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import agent_pb2, worker_pb2
from mlx_ring.settings.config import Settings, state_folder

log = logging.getLogger(__name__)

_STOP_WAIT_S, _LOOK_WAIT_S, _LOOK_AGAIN_S = 8.0, 3.0, 1.0
_OWN_WAIT_S = 3.0
"""Time to wait for the agent of the head's machine before a plan without it."""

Planned = TypeVar("Planned")


class Cluster:
    """Several machines, this one included.

    Their agents outlive a killed head. The next head adopts their workers.
    """

    def __init__(
        self,
        settings: Settings,
        declared: Sequence[Declared],
        control: Control,
        address: HeadAddress,
        offer: Callable[[ServedModel], Awaitable[WeightsManifest]],
    ) -> None:
        """Prepare a cluster; it contacts no node before the first order.

        Args:
            settings: settings of the head.
            declared: the head's first models.
            control: the head's control server.
            address: address of the control server.
            offer: makes a model's weights available to other machines.
        """
        self._settings = settings
        self._declared = declared
        self._control = control
        self._address = address
        self._offer = offer
        self._step_down = StepDown()
        self._quarantine = QuarantineList(authority_folder(state_folder(settings)))
        self._one_at_a_time = asyncio.Lock()
        self._planning = asyncio.Lock()
        """Lock for planning, because two plans must not count on the same memory."""
        self._live = LiveInstances()
        self._tending: asyncio.Task[None] | None = None
        self._has_looked = asyncio.Event()
        self._is_first = True
        self._left: dict[str, list[Adoptable]] = {}
        """Instances that an earlier head left loaded, by model."""
        self._highest_epoch, self._number = 0, 1
        self._own_agent = OwnAgent(settings, control, address)
        self._surveys = LinkSurveys(control.node)
        self._warned: set[str] = set()
        self._awaited = 0
        """Number of nodes to wait for, this one included; 0 without a wait."""

    @property
    def links(self) -> Sequence[LinkInfo]:
        return tuple(map(link_info, as_they_are(self._surveys.found, self._control.membership.members)))

    @property
    def missing(self) -> int:
        others = self._control.membership.members.keys() - {self._control.node}
        return max(0, self._awaited - 1 - len(others))

    async def candidate_nodes(self, declared: Declared, nodes: int) -> Sequence[frozenset[str] | None]:
        membership = await self._attending(nodes)
        sites = cluster_sites(self._control, membership, self._address.port)
        try:
            await self._look_once(sites)
            left = self._adoptable(declared.served, membership)
            if left:
                loaded = [frozenset(node for node, _ in found.workers) for found in left]
                missing = (declared.settings.replicas or len(left)) - len(left)
                return [*loaded, *[None] * missing]
            if declared.settings.replicas == 1 or (
                declared.settings.replicas is None and declared.settings.optimize_for == "latency"
            ):
                return [None]
            _, links = await self._surveys.take_all(membership, sites)
        finally:
            await close_sites(sites)
        plans = await self._steadily(
            membership,
            lambda members: asyncio.to_thread(
                plan_replicas,
                declared.settings,
                declared.served,
                self._control,
                members,
                self._live.others("").taken,
                links,
            ),
        )
        return [frozenset(rank.node for stage in plan.stages for rank in stage.ranks) for plan in plans]

    def _adoptable(self, served: ServedModel, membership: Membership) -> list[Adoptable]:
        """Return a model's adoptable instances whose nodes are all present."""
        left = [
            found
            for found in self._left.get(served.names[0], [])
            if all(node in membership.members for node, _ in found.workers)
        ]
        self._left[served.names[0]] = left
        return left

    async def _attending(self, nodes: int) -> Membership:
        """Wait for this many nodes, this one included; start its own agent if none runs."""
        self._awaited = nodes
        control = self._control
        if self._tending is None:
            self._tending = asyncio.create_task(self._tend_joining_nodes(), name="nodes that come")
        await self._own_agent.ensure()
        await control.settle()
        # After the first instance, other machines do without this one's agent.
        own = control.node if nodes > 1 or await self._own_agent.attends(_OWN_WAIT_S) else ""
        membership = await control.wait_for(nodes, including=own)
        self._awaited = 0
        if not self._own_agent.is_own and own:
            self._warn_of(stale_trust(membership.members[own].trusted, self._settings.trusted_interface))
        return membership

    def _warn_of(self, problem: str) -> None:
        """Log each problem only once."""
        if problem and problem not in self._warned:
            self._warned.add(problem)
            log.warning("%s", problem)

    async def next_epoch(self, order: Order) -> Epoch:
        membership = await self._attending(order.nodes)
        sites = cluster_sites(
            self._control, membership, self._address.port, path=str(order.served.folder.path)
        )
        instance = ""
        try:
            await self._look_once(sites)
            number = max(order.number, self._highest_epoch + 1)
            async with self._planning:
                adopted = await self._adopt(order, membership, sites, number)
                if adopted is not None:
                    return adopted
                placement = await self._place(order, membership, sites)
                instance = new_instance(order.served)
                self._live.add(instance, order, placement)
            # Release the lock first: reading a large model takes minutes.
            placement = await offered(placement, partial(self._offer, order.served))
        except BaseException:
            self._live.remove(instance)
            await close_sites(sites)
            raise
        used = {site.node for site in placement.nodes}
        await close_sites([site for site in sites if site.node not in used])
        return self._epoch(instance, number, placement)

    async def patch(self, order: Order, remains: Remains) -> Epoch:
        control = self._control
        if control.node in remains.silent_nodes:
            self._own_agent.replace_soon()
        await control.settle(remains.silent_nodes)
        membership = control.membership.without(remains.silent_nodes)
        sites = cluster_sites(control, membership, self._address.port, path=str(order.served.folder.path))
        number = max(order.number, remains.epoch + 1)
        hello = make_hello(node=control.node)
        try:
            await self._surveys.take_distrusted(membership, sites)
            known = [with_throughput(site, self._surveys.found) for site in sites]
            links = self._surveys.profiles(sites)
            async with self._planning:
                taken = self._live.others(order.served.names[0], besides=remains.instance).taken
                cluster = ClusterProfile(tuple(node_profiles(control, membership, taken)), links)
                room = Room(cluster, self._steady(membership).members, known)
                placement, prepared = await patch_ranks(order, remains, number, room, hello)
                self._live.add(remains.instance, order, placement)
            placement = await offered(placement, partial(self._offer, order.served))
        except BaseException:
            await close_sites(sites)
            raise
        used = {site.node for site in placement.nodes}
        await close_sites([site for site in sites if site.node not in used])
        return self._epoch(remains.instance, number, placement, prepared=prepared)

    def _epoch(
        self,
        instance: str,
        number: int,
        placement: Placement,
        *,
        loaded: tuple[WorkerPlace, ...] = (),
        prepared: Started | None = None,
    ) -> Epoch:
        node, trust = self._control.node, self._control.credentials
        return Epoch(instance, number, placement, node, trust, loaded, prepared, self._number)

    async def _place(self, order: Order, membership: Membership, sites: Sequence[Site]) -> Placement:
        others, control, surveys = self._live.others(order.served.names[0]), self._control, self._surveys
        place = partial(place_on_cluster, others=others, control=control, sites=sites, surveys=surveys)
        return await self._step_down.place(
            order, lambda order: self._steadily(membership, lambda members: place(order, membership=members))
        )

    async def _steadily(
        self, membership: Membership, plan: Callable[[Membership], Awaitable[Planned]]
    ) -> Planned:
        """Plan without quarantined nodes if possible, else with all."""
        steady = self._steady(membership)
        try:
            return await plan(steady)
        except PlanError as error:
            if steady is membership:
                raise
            log.warning("using quarantined nodes, because without them: %s", error)
            return await plan(membership)

    def _steady(self, membership: Membership) -> Membership:
        """Return the members without quarantined nodes; all members if none or all are quarantined."""
        held = self._quarantine.held()
        steady = membership.without(held)
        return steady if steady.members and held.keys() & membership.members.keys() else membership

    def record_failure(self, error: RingError | None, begun_s: float) -> None:
        self._step_down.record(error, begun_s)
        if isinstance(error, LinkLost):
            self._surveys.distrust(error.ends)
        if error is None or not error.node:
            return
        held = self._quarantine.note(error.node, str(error), begun_s)
        if held is not None:
            log.error(
                "%s is excluded from plans until %s. %s To use it earlier, run: mlx-ring node readmit %s",
                error.node,
                time.strftime("%H:%M", time.localtime(held.until_s)),
                held.reason,
                error.node,
            )

    def cluster_view(self) -> ClusterView:
        hung, own = self._step_down.states(), self._control
        return ClusterView(own.node, own.membership, self._quarantine.held(), hung)

    async def _look_once(self, sites: Sequence[Site]) -> None:
        """Find the workers that earlier heads left, and end those of no use."""
        async with self._one_at_a_time:
            if not self._is_first:
                return
            hello = make_hello(node=self._control.node)
            found = await asyncio.gather(*(site.link.look(hello, _LOOK_WAIT_S) for site in sites))
            events = [event for event in found if event is not None]
            self._highest_epoch = highest_epoch(events)
            self._number = next_head(authority_folder(state_folder(self._settings)), events)
            for declared in self._declared:
                most = declared.settings.replicas or (
                    len(sites) if declared.settings.optimize_for == "throughput" else 1
                )
                adoptable = find_adoptable(events, partial(_expect, declared))
                self._left[declared.served.names[0]] = adoptable[:most]
            wanted = {found.instance for of_model in self._left.values() for found in of_model}
            await self._end_unwanted(sites, events, wanted)
            self._is_first = False
            self._has_looked.set()

    async def _end_unwanted(
        self, sites: Sequence[Site], events: Iterable[agent_pb2.AgentEvent], wanted: AbstractSet[str]
    ) -> None:
        """End unwanted workers of earlier heads, or of a node that was disconnected."""
        by_node = {site.node: site for site in sites}
        unwanted = {
            (event.hello.node, state.instance)
            for event in events
            for state in event.workers
            if state.instance not in wanted or not self._live.may_have(state.instance, event.hello.node)
        }
        await asyncio.gather(
            *(
                by_node[node].link.stop(instance, _STOP_WAIT_S)
                for node, instance in unwanted
                if node in by_node
            )
        )

    async def _adopt(
        self, order: Order, membership: Membership, sites: Sequence[Site], number: int
    ) -> Epoch | None:
        """Take over an instance of an earlier head; end those that cannot be taken over."""
        while left := self._adoptable(order.served, membership):
            found = left.pop(0)
            try:
                return self._adopted(found, order, membership, sites, number)
            except RingError as error:
                log.warning("%s of an earlier head is ended: %s", found.instance, error)
                own = [site for site in sites if site.node in dict(found.workers)]
                await asyncio.gather(*(site.link.stop(found.instance, _STOP_WAIT_S) for site in own))
        return None

    def _adopted(
        self, found: Adoptable, order: Order, membership: Membership, sites: Sequence[Site], number: int
    ) -> Epoch:
        by_node = {site.node: site for site in sites}
        log.info("adopting the loaded workers of %s", found.instance)
        places = [
            WorkerPlace(state.stage, state.rank, "", state.address)
            if by_node[node].is_local
            else WorkerPlace(
                state.stage, state.rank, node, address_of(by_node[node].host_for(""), state.status.port)
            )
            for node, state in found.workers
        ]
        own = tuple(by_node[node] for node, _ in found.workers)
        links = self._surveys.profiles(sites)
        others = self._live.others(order.served.names[0])
        placement = place_as_loaded(order, others, self._control, membership, found, own, links)
        self._live.add(found.instance, order, placement)
        return self._epoch(found.instance, number, placement, loaded=tuple(places))

    async def stop(self) -> None:
        """End this machine's agent; agents of other machines stay, without workers."""
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.wait((self._tending,))
        membership = self._control.membership
        if self._control.node in membership.members:
            sites = cluster_sites(self._control, membership, self._address.port)
            ending = [asyncio.create_task(site.link.end(_STOP_WAIT_S)) for site in sites if site.is_local]
            # It is disconnected when it has ended, or if it hangs.
            absent = asyncio.create_task(self._control.wait_until_absent(self._control.node))
            await asyncio.wait((*ending, absent), return_when=asyncio.FIRST_COMPLETED)
            absent.cancel()
            await close_sites(sites)
        await self._own_agent.end()

    @contextlib.contextmanager
    def watching(self, instance: str, listener: NodeListener) -> Generator[None]:
        def on_event(event: Event) -> None:
            match event:
                case Joined(member):
                    listener.on_node_message(member.node)
                case Reported(node):
                    listener.on_node_message(node)
                case Left(node, _, reason, is_final=is_final):
                    listener.on_node_left(node, reason, is_final=is_final)

        try:
            with self._control.watching(on_event):
                for node in self._live.nodes_of(instance) - self._control.membership.members.keys():
                    listener.on_node_left(node, "it left while the model was placed", is_final=False)
                yield
        finally:
            self._live.remove(instance)

    async def wait_for_node(self, timeout_s: float) -> None:
        joined = asyncio.Event()

        def on_event(event: Event) -> None:
            if isinstance(event, Joined):
                joined.set()

        with self._control.watching(on_event), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await joined.wait()

    async def _tend_joining_nodes(self) -> None:
        """End the stale workers of each node that joins, and measure its links for the next plan."""
        came: asyncio.Queue[str] = asyncio.Queue()

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
        sites = cluster_sites(self._control, membership, self._address.port)
        hello = make_hello(node=self._control.node)
        try:
            new = [site for site in sites if site.node in nodes]
            found = await asyncio.gather(*(site.link.look(hello, _LOOK_WAIT_S) for site in new))
            silent = {site.node for site, event in zip(new, found, strict=True) if event is None}
            wanted = self._live.names | {left.instance for each in self._left.values() for left in each}
            await self._end_unwanted(new, [event for event in found if event is not None], wanted)
            await self._surveys.take(membership, sites)
        except RingError as error:
            log.warning("%s joined, but could not be prepared: %s", ", ".join(sorted(nodes)), error)
        finally:
            await close_sites(sites)
        return silent


def _expect(declared: Declared, instance: str, cut: Cut) -> Sequence[worker_pb2.StageAssignment]:
    return assign(declared.settings, declared.served, instance, 0, cut)
