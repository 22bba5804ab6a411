"""Cluster of several machines, as a head uses it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Container, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from mlx_ring.api.service import LinkInfo
from mlx_ring.cluster.agent_link import STOP_WAIT_S
from mlx_ring.cluster.control import Control
from mlx_ring.cluster.deployment import Site, StartedWorkers, close_sites, unused
from mlx_ring.cluster.membership import Drained, Event, Joined, Membership, Reported, SessionEnded
from mlx_ring.cluster.own_agent import OwnAgent, stale_trust
from mlx_ring.cluster.quarantine import Pair, QuarantineList
from mlx_ring.core.errors import LinkLost, NodeDrained, PlanError, RingError
from mlx_ring.core.folders import authority_folder, state_folder
from mlx_ring.head.instance import Epoch
from mlx_ring.head.instance_watch import end_tasks
from mlx_ring.head.left_workers import LeftWorkers
from mlx_ring.head.nodes import (
    Declared,
    LiveInstances,
    NodeListener,
    check_not_drained,
    cluster_sites,
    drained_remark,
    invite_one,
    new_instance,
)
from mlx_ring.head.patching import PatchPlan, Remains, Room, patch_ranks, plan_patch
from mlx_ring.head.placing import (
    Order,
    Others,
    Placement,
    offered,
    place_on_cluster,
    plan_replicas,
)
from mlx_ring.head.plan_requests import LinkSurveys, broken_links, node_profiles, with_throughput
from mlx_ring.head.reshaping import NextPlan
from mlx_ring.head.served_model import ServedModel
from mlx_ring.head.status import ClusterView
from mlx_ring.head.step_down import StepDown
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.models.weights_manifest import WeightsManifest
from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.link_profile import LinkProfile
from mlx_ring.settings.config import Settings

log = logging.getLogger(__name__)

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
        self._settings, self._control = settings, control
        control.counted = {control.node, *settings.node_ids} if settings.node_ids else set()
        self._port, self._offer = address.port, offer
        self.has_left, self.wait_until_left = control.has_left, control.wait_until_left
        self.wait_until_lacking = control.wait_until_lacking
        self.wait_until_undrained = control.wait_until_undrained
        self.join_commands = partial(invite_one, control.make_token, address)
        self._step_down = StepDown()
        self._quarantine = QuarantineList(authority_folder(state_folder(settings.state_dir)))
        self._planning = asyncio.Lock()
        """Lock for planning, because two plans must not count on the same memory."""
        self._live = LiveInstances()
        self._tending: Sequence[asyncio.Task[None]] = ()
        self._own_agent = OwnAgent(settings, control, address)
        self._surveys = LinkSurveys(control.node, control.wait_for_reports)
        self._left = LeftWorkers(settings, declared, control, address.port, self._live, self._surveys)
        self._warned: set[str] = set()
        self._awaited: list[int] = []
        """Number of nodes that each wait is for, this one included."""

    @property
    def links(self) -> Sequence[LinkInfo]:
        return self._surveys.links(self._control.membership, self._quarantine.links())

    @property
    def link_profiles(self) -> Mapping[frozenset[str], LinkProfile]:
        return self._surveys.usable(self._control.membership, self._quarantine.links())

    @property
    def missing(self) -> int:
        others = self._control.membership.usable.without({self._control.node}).members.keys()
        return max(0, max(self._awaited, default=1) - 1 - len(others & (self._control.counted or others)))

    def lacks(self, nodes: int) -> bool:
        return self._control.lacks(nodes, self._control.node if nodes > 1 else "")

    async def attend(self, nodes: int) -> None:
        await self._attending(nodes)

    async def candidate_nodes(self, declared: Declared, nodes: int) -> Sequence[frozenset[str] | None]:
        membership = await self._attending(nodes)
        sites = cluster_sites(self._control, membership, self._port)
        try:
            await self._left.look_once(sites)
            left = self._left.adoptable(declared.served, membership)
            if left:
                loaded = [frozenset(node for node, _ in found.workers) for found in left]
                missing = (declared.settings.replicas or len(left)) - len(left)
                return [*loaded, *[None] * missing]
            if declared.settings.replicas == 1 or (
                declared.settings.replicas is None and declared.settings.optimize_for != "throughput"
            ):
                return [None]
            _, links = await self._surveys.take_all(membership, sites)
        finally:
            await close_sites(sites)
        plan = partial(plan_replicas, declared.settings, declared.served, self._control)
        plans = await self._avoiding(
            lambda avoided: self._steadily(
                membership,
                lambda members: asyncio.to_thread(
                    plan, members, self._live.others("").taken, {**links, **broken_links(avoided)}
                ),
            )
        )
        return [frozenset(rank.node for stage in plan.stages for rank in stage.ranks) for plan in plans]

    async def _attending(self, nodes: int) -> Membership:
        """Wait for this many nodes, this one included; start its own agent if none runs."""
        control = self._control
        if not self._tending:
            keeping = self._own_agent.keep(partial(self._live.awaits, control.node))
            self._tending = [asyncio.create_task(each) for each in (self._left.tend_joining_nodes(), keeping)]
        self._awaited.append(nodes)
        try:
            await self._own_agent.ensure()
            await control.settle()
            # After the first instance, other machines do without this one's agent.
            own = control.node if nodes > 1 or await self._own_agent.attends(_OWN_WAIT_S) else ""
            if not own and not control.membership.members:
                self._warn_of(
                    "This machine's agent does not answer, and no other machine is connected: waiting for one of them. "
                    "An agent that hangs is ended by `mlx-ring stop`."
                )
            if remark := drained_remark(control.membership):
                log.warning("%s", remark)
            membership = await control.wait_for(nodes, including=own)
        finally:
            self._awaited.remove(nodes)
        if not self._own_agent.is_own and own:
            self._warn_of(stale_trust(membership.members[own].trusted, self._settings.trusted_interface))
        return membership

    def _warn_of(self, problem: str) -> None:
        """Log each problem only once."""
        if problem and problem not in self._warned:
            self._warned.add(problem)
            log.warning("%s", problem)

    async def next_epoch(self, order: Order) -> Epoch:
        while True:
            with contextlib.suppress(NodeDrained):
                return await self._next_epoch(order)

    async def _next_epoch(self, order: Order) -> Epoch:
        """Place an instance. Raises `NodeDrained` if one of its machines was drained since it was planned."""
        membership = await self._attending(order.nodes)
        sites = cluster_sites(self._control, membership, self._port, path=str(order.served.folder.path))
        instance = ""
        try:
            await self._left.look_once(sites)
            number = max(order.number, self._left.highest_epoch + 1)
            async with self._planning:
                adopted = await self._left.adopt(order, membership, sites, number)
                if adopted is not None:
                    return adopted
                placement = await self._place(order, membership, sites)
                instance = new_instance(order.served)
                self._live.add(instance, order, placement)
            # Release the lock first: reading a large model takes minutes.
            placement = await offered(placement, partial(self._offer, order.served))
            await close_sites(unused(sites, placement.nodes))
            check_not_drained(placement, self._control.membership)
        except BaseException:
            self._live.remove(instance)
            await close_sites(sites)
            raise
        return self._epoch(instance, number, placement)

    async def plan_patch(self, order: Order, remains: Remains) -> PatchPlan:
        room, avoided = await self._room(order, remains), self._quarantine.links()
        try:
            try:
                return await plan_patch(order, remains, room.without(avoided))
            except PlanError:
                if not avoided:
                    raise
                try:
                    await self._place_whole(order, remains, room.sites, avoided)
                except PlanError:
                    return await plan_patch(order, remains, room)
                raise
        except BaseException:
            await close_sites(room.sites)
            raise

    async def plan_again(self, order: Order, remains: Remains) -> NextPlan:
        room, avoided = await self._room(order, remains), self._quarantine.links()
        try:
            placement = await self._place_whole(order, remains, room.sites, avoided)
            placement = await offered(placement, partial(self._offer, order.served))
        except BaseException:
            await close_sites(room.sites)
            raise
        return NextPlan(room, placement, self._control.node, self._left.head_number)

    async def _room(self, order: Order, remains: Remains) -> Room:
        """Return the room that nodes have for lost ranks, once no other node is silent."""
        control = self._control
        await control.settle(remains.silent_nodes)
        membership = control.membership.usable.without(remains.silent_nodes)
        sites = cluster_sites(control, membership, self._port, path=str(order.served.folder.path))
        try:
            await self._surveys.take_distrusted(membership, sites)
        except BaseException:
            await close_sites(sites)
            raise
        nodes = node_profiles(order.settings, control, membership, self._others(order, remains).taken)
        return Room(
            ClusterProfile(tuple(nodes), self._surveys.profiles(sites)),
            frozenset(self._steady(membership).members),
            [with_throughput(site, self._surveys.found) for site in sites],
            self._basis(order, remains),
        )

    def _others(self, order: Order, remains: Remains | None = None) -> Others:
        """Return all instances, except for one of which something is left."""
        besides = "" if remains is None else remains.instance
        return self._live.others(order.served.names[0], besides, order.replaces)

    def _basis(self, order: Order, remains: Remains) -> object:
        """Return facts on which a patch is planned, for comparison."""
        membership = self._control.membership.usable.without(remains.silent_nodes)
        sessions = {(node, member.session) for node, member in membership.members.items()}
        steady, taken = set(self._steady(membership).members), dict(self._others(order, remains).taken)
        return sessions, steady, taken, self._surveys.found, set(self._quarantine.links())

    async def patch(self, order: Order, remains: Remains, early: PatchPlan | None) -> Epoch:
        if not remains.may_return:
            # A node that returns must end its workers of the instance.
            self._live.leave(remains.instance, remains.silent_nodes)
            self._replace_own_agent(remains.silent_nodes)
        number = max(order.number, remains.epoch + 1)
        hello = make_hello(node=self._control.node, fencing_id=self._left.head_number)
        sites = () if early is None else early.room.sites
        try:
            order = self._step_down.without_barred(order, remains.placement)
            async with self._planning:
                if early is None or early.room.basis != self._basis(order, remains):
                    await close_sites(sites)
                    early = await self.plan_patch(order, remains)
                    sites = early.room.sites
                placement, prepared = await patch_ranks(order, remains, number, early, hello, self._control)
                may_return = remains.silent_nodes if remains.may_return else frozenset[str]()
                self._live.add(remains.instance, order, placement, may_return)
            placement = await offered(placement, partial(self._offer, order.served))
            await close_sites(unused(sites, placement.nodes))
            check_not_drained(placement, self._control.membership, remains.placement)
        except BaseException:
            await close_sites(sites)
            raise
        return self._epoch(remains.instance, number, placement, prepared=prepared)

    def _replace_own_agent(self, silent: Container[str]) -> None:
        if self._control.node in silent:
            self._own_agent.replace_soon()

    async def wait_for_return(self, remains: Remains) -> None:
        await self._left.wait_until_whole(remains)

    def release(self, instance: str) -> None:
        silent = self._live.release(instance)
        self._left.tend_soon(silent & self._control.membership.members.keys())
        self._replace_own_agent(silent)

    def _epoch(
        self, instance: str, number: int, placement: Placement, *, prepared: StartedWorkers | None = None
    ) -> Epoch:
        control, head = self._control, self._left.head_number
        return Epoch(
            instance, number, placement, control.node, control.credentials, prepared=prepared, head=head
        )

    async def _place(self, order: Order, membership: Membership, sites: Sequence[Site]) -> Placement:
        place = partial(self._place_without, order, membership, sites, self._others(order))
        return await self._avoiding(place)

    async def _avoiding(self, plan: Callable[[Iterable[Pair]], Awaitable[Planned]]) -> Planned:
        """Plan without links that were lost repeatedly if possible, else with all."""
        avoided = self._quarantine.links()
        try:
            return await plan(avoided)
        except PlanError as error:
            if not avoided:
                raise
            log.warning("Using links that were lost repeatedly, because without them: %s", error)
            return await plan(())

    async def check_whole(self, order: Order, remains: Remains) -> None:
        room = await self._room(order, remains)
        try:
            await self._place_whole(order, remains, room.sites, ())
        finally:
            await close_sites(room.sites)

    async def _place_whole(
        self, order: Order, remains: Remains, sites: Sequence[Site], avoided: Iterable[Pair]
    ) -> Placement:
        """Place an instance without some links, in place of what is left of it."""
        members = self._control.membership.usable.without(remains.silent_nodes)
        return await self._place_without(order, members, sites, self._others(order, remains), avoided)

    async def _place_without(
        self,
        order: Order,
        membership: Membership,
        sites: Sequence[Site],
        others: Others,
        avoided: Iterable[Pair],
    ) -> Placement:
        place = partial(
            place_on_cluster,
            others=others,
            control=self._control,
            sites=sites,
            surveys=self._surveys,
            avoided=avoided,
        )
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
            log.warning("Using quarantined nodes, because without them: %s", error)
            return await plan(membership)

    def _steady(self, membership: Membership) -> Membership:
        """Return the members without quarantined nodes; all members if none or all are quarantined."""
        held = self._quarantine.held()
        steady = membership.without(held)
        return steady if steady.members and held.keys() & membership.members.keys() else membership

    async def drain(self, node: str, *, is_drained: bool = True) -> None:
        await self._control.drain(node, is_drained=is_drained)

    def record_failure(self, error: RingError | None, begun_s: float) -> None:
        self._step_down.record(error, begun_s)
        if isinstance(error, LinkLost) and error.ends:
            self._surveys.distrust(error.ends)
            avoided = self._quarantine.note_link(error.ends, str(error), begun_s)
            if avoided is not None:
                ends, until = " and ".join(error.ends), avoided.until
                log.error("Plans avoid the link between %s until %s. %s", ends, until, avoided.reason)
        if error is None or not error.node:
            return
        held = self._quarantine.note(error.node, str(error), begun_s)
        if held is not None:
            log.error(
                "%s is excluded from plans until %s. %s To use it earlier, run: mlx-ring node readmit %s",
                *(error.node, held.until, held.reason, error.node),
            )

    def cluster_view(self) -> ClusterView:
        held, hung, known = self._quarantine.held(), self._step_down.states(), self._control.members.list()
        return ClusterView(self._control.node, self._control.membership, held, hung, self.missing, known)

    async def stop(self) -> None:
        """End this machine's agent; agents of other machines stay, without workers."""
        await end_tasks(*self._tending)
        membership = self._control.membership
        if self._control.node in membership.members:
            sites = cluster_sites(self._control, membership, self._port)
            ending = [asyncio.create_task(site.link.end(STOP_WAIT_S)) for site in sites if site.is_local]
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
                case SessionEnded(node, _, reason, is_final=is_final):
                    listener.on_node_left(node, reason, is_final=is_final)
                case Drained():
                    pass

        try:
            with self._control.watching(on_event):
                for node in self._live.nodes_of(instance) - self._control.membership.members.keys():
                    has_left = self._control.has_left(node)
                    listener.on_node_left(node, "it left while the model was placed", is_final=has_left)
                yield
        finally:
            self._live.remove(instance)

    async def wait_for_node(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._control.wait_for_joined()
