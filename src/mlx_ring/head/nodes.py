"""Contract of the machines on which a head serves."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from mlx_ring.api.service import LinkInfo
from mlx_ring.cluster.agent_link import AgentLink, Source, WeightsPeer
from mlx_ring.cluster.deployment import Site, address_of
from mlx_ring.cluster.membership import Member, Membership
from mlx_ring.core.errors import NodeDrained, PlanError, RingError
from mlx_ring.head.instance import Epoch
from mlx_ring.head.instance_watch import InstanceWatch
from mlx_ring.head.patching import PatchPlan, Presence, Remains
from mlx_ring.head.placing import Order, Others, Placement
from mlx_ring.head.reshaping import NextPlan
from mlx_ring.head.served_model import ServedModel
from mlx_ring.head.status import ClusterView
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.host.interfaces import join_lines, lan_addresses
from mlx_ring.rpc.channels import AGENT_MESSAGE_BYTES, keep_alive, open_aio_channel
from mlx_ring.rpc.link_profile import LinkProfile
from mlx_ring.rpc.tls.peers import node_name
from mlx_ring.settings.config import Settings

if TYPE_CHECKING:
    from mlx_ring.cluster.control import Control


class NodeListener(Protocol):
    """Receiver of what happens to the nodes."""

    def on_node_message(self, node: str) -> None:
        """Receive that a node lives."""
        ...

    def on_node_left(self, node: str, reason: str, *, is_final: bool) -> None:
        """Receive that a node was disconnected. If it is not final, it may be back in a moment."""
        ...


@dataclass(frozen=True, slots=True)
class Declared:
    """A model to serve, with its settings."""

    served: ServedModel
    settings: Settings


@dataclass(frozen=True, slots=True)
class _Live:
    """Instance that is loaded or being loaded."""

    model: str
    nodes: frozenset[str]
    promised: Mapping[str, int]
    """Bytes of memory that its plan counts on, by node."""
    may_return: frozenset[str] = frozenset()
    """Other nodes that have silent workers of it."""


class LiveInstances:
    """Instances of a head that are loaded or being loaded, by name."""

    def __init__(self) -> None:
        self._live: dict[str, _Live] = {}

    @property
    def names(self) -> AbstractSet[str]:
        return self._live.keys()

    def add(
        self,
        instance: str,
        order: Order,
        placement: Placement,
        may_return: frozenset[str] = frozenset(),
    ) -> None:
        """Add an instance, or change its placement. Other nodes may have silent workers of it until `release`."""
        promised = Counter[str]()
        for stage in () if placement.plan is None else placement.plan.stages:
            for rank in stage.ranks:
                promised[rank.node] += rank.memory_bytes
        nodes = frozenset(site.node for site in placement.nodes)
        self._live[instance] = _Live(order.served.names[0], nodes, promised, may_return - nodes)

    def remove(self, instance: str) -> None:
        """Remove an instance, if it is there."""
        self._live.pop(instance, None)

    def leave(self, instance: str, nodes: Container[str]) -> None:
        """Remove nodes from an instance, if it is there."""
        if (live := self._live.get(instance)) is not None:
            kept = frozenset(node for node in live.nodes if node not in nodes)
            self._live[instance] = replace(live, nodes=kept)

    def release(self, instance: str) -> frozenset[str]:
        """Remove nodes that have silent workers of an instance, which others have replaced; return them."""
        live = self._live.get(instance)
        if live is None or not live.may_return:
            return frozenset()
        self._live[instance] = replace(live, may_return=frozenset())
        return live.may_return

    def awaits(self, node: str) -> bool:
        """Report whether an instance has workers on a node, or silent ones there may still come back."""
        return any(node in live.nodes | live.may_return for live in self._live.values())

    def others(self, model: str, besides: str = "", replaced: str = "") -> Others:
        """Return the nodes of a model's instances and the memory of all instances, except for one.

        An instance that is about to be replaced takes memory, but others may use its nodes.
        """
        taken = Counter[str]()
        others = {name: live for name, live in self._live.items() if name != besides}
        for live in others.values():
            taken.update(live.promised)
        siblings = [live.nodes for name, live in others.items() if live.model == model and name != replaced]
        return Others(frozenset[str]().union(*siblings), taken)

    def nodes_of(self, instance: str) -> frozenset[str]:
        """Return the nodes of an instance; none of one that is not live."""
        live = self._live.get(instance)
        return frozenset() if live is None else live.nodes

    def may_have(self, instance: str, node: str) -> bool:
        """Report whether a node may have workers of an instance; True of an instance that is not live."""
        live = self._live.get(instance)
        return live is None or node in live.nodes | live.may_return


class Machines(Presence, Protocol):
    """The machines of a head."""

    def lacks(self, nodes: int) -> bool:
        """Report whether fewer nodes are connected that may have layers."""
        ...

    async def attend(self, nodes: int) -> None:
        """Wait until so many nodes are connected that may have layers."""
        ...

    async def wait_until_lacking(self, nodes: int) -> None:
        """Wait until `lacks` is true."""
        ...

    async def wait_until_undrained(self, node: str) -> None:
        """Wait until a node is not drained, because it was readmitted or has left for good."""
        ...

    async def candidate_nodes(self, declared: Declared, nodes: int) -> Sequence[frozenset[str] | None]:
        """Choose the nodes that each replica of a model may use, once enough are present; None means any.

        Raises:
            PlanError: there is no room for it.
        """
        ...

    async def next_epoch(self, order: Order) -> Epoch:
        """Place an instance.

        Raises:
            PlanError: there is no room for it.
        """
        ...

    async def plan_patch(self, order: Order, remains: Remains) -> PatchPlan | None:
        """Place the ranks of an instance that may be lost soon; return None if there is nothing to choose.

        The caller passes the plan to `patch`, or closes its sites.

        Raises:
            RingError: the instance would have to be loaded as a whole.
        """
        ...

    async def check_whole(self, order: Order, remains: Remains) -> None:
        """Check that an instance could be loaded as a whole, without what remains of it.

        Raises:
            PlanError: there is no room for it.
        """
        ...

    async def plan_again(self, order: Order, remains: Remains) -> NextPlan:
        """Place an instance that serves again, with the memory that it would leave.

        The caller closes the plan's sites.

        Raises:
            PlanError: there is no room for it, or no other machine.
        """
        ...

    async def patch(self, order: Order, remains: Remains, early: PatchPlan | None) -> Epoch:
        """Place the lost ranks of an instance again, and prepare those that are left.

        Args:
            order: order of the next epoch.
            remains: ranks of the lost instance.
            early: plan that was made before the loss; it is used if nothing has changed since. None: there is none.

        Raises:
            RingError: it must be loaded as a whole.
        """
        ...

    async def wait_for_return(self, remains: Remains) -> None:
        """Wait until all lost ranks answer again, of which each was only silent, with their workers of that epoch."""
        ...

    def release(self, instance: str) -> None:
        """End what silent nodes may still have of an instance, when they return: other workers have replaced theirs."""
        ...

    def watching(self, instance: str, listener: NodeListener) -> AbstractContextManager[None]:
        """Report what happens to the nodes while an instance lives."""
        ...

    @property
    def links(self) -> Sequence[LinkInfo]:
        """Known links between the machines."""
        ...

    @property
    def link_profiles(self) -> Mapping[frozenset[str], LinkProfile]:
        """Links with which the next plan is made, by the IDs of their ends. Nothing passes those that plans avoid."""
        ...

    @property
    def missing(self) -> int:
        """Number of machines that must still join before anything is loaded."""
        ...

    async def wait_for_node(self, timeout_s: float) -> None:
        """Wait until another machine joins, at most this long."""
        ...

    async def drain(self, node: str, *, is_drained: bool = True) -> None:
        """Let no plan use a node until it leaves; with False, let plans use it again.

        Raises:
            Conflict: there are no other machines.
        """
        ...

    def record_failure(self, error: RingError | None, begun_s: float) -> None:
        """Record the loss or failed load of an instance that began at this Unix time.

        A node that fails repeatedly is quarantined. A link that was lost is measured again.
        """
        ...

    def cluster_view(self) -> ClusterView:
        """Return the state of the machines."""
        ...

    def join_commands(self, life_s: float) -> Sequence[str]:
        """Make a token with which one machine can join within this time, and return the commands for it.

        Raises:
            Conflict: other machines cannot join.
        """
        ...


class CurrentWatch:
    """Watch over the instance of a replica that runs now, which receives what happens to the nodes."""

    def __init__(self, machines: Machines) -> None:
        """Start without an instance."""
        self._machines = machines
        self._watch: InstanceWatch | None = None
        self.lost_nodes: dict[str, tuple[str, bool]] = {}
        """Nodes that have left since the last patch was begun, with the reason and whether it is final."""

    def follow(self, watch: InstanceWatch) -> None:
        """Pass on what happens to another watch, and which nodes have left already."""
        self._watch = watch
        for node, (reason, is_final) in self.lost_nodes.items():
            watch.on_node_left(node, reason, is_final=is_final or self._machines.has_left(node))

    def on_node_message(self, node: str) -> None:
        """Pass on that a node lives."""
        self.lost_nodes.pop(node, None)
        if self._watch is not None:
            self._watch.on_node_message(node)

    def on_node_left(self, node: str, reason: str, *, is_final: bool) -> None:
        """Pass on that a node was disconnected."""
        self.lost_nodes[node] = reason, is_final
        if self._watch is not None:
            self._watch.on_node_left(node, reason, is_final=is_final)


class ModelRoom(Protocol):
    """Memory for a model, which it shares with others."""

    @property
    def freed(self) -> asyncio.Event:
        """Event that is set when there may be more: a model was unloaded, or a move has ended."""
        ...

    async def make(self, error: PlanError, *, insists: bool) -> bool:
        """Unload another model that is idle for this one, which was lost and does not fit; return False if none is.

        Args:
            error: reason why it does not fit.
            insists: True to unload one also if no request waits for this model.
        """
        ...


class MakeToken(Protocol):
    """Maker of a token with which a number of machines can join within a time."""

    def __call__(self, *, life_s: float, uses: int | None = None) -> str: ...


def invite_one(make_token: MakeToken, address: HeadAddress, life_s: float) -> Sequence[str]:
    """Make a token with which one machine can join, and return the commands for each address of the head."""
    return join_lines(address, lan_addresses(), make_token(life_s=life_s, uses=1))


def check_not_drained(placement: Placement, membership: Membership, before: Placement | None = None) -> None:
    """Check that a placement has no layers on drained nodes, except for those that had some before.

    Raises:
        NodeDrained: it has; a drain that has looked for layers meanwhile did not find these.
    """
    had = frozenset(() if before is None else (site.node for site in before.nodes))
    if drained := {site.node for site in placement.nodes} & membership.drained - had:
        raise NodeDrained(f"{' and '.join(sorted(drained))} was drained while its layers were planned.")


def drained_remark(membership: Membership) -> str:
    """Return what to do if all connected machines are drained; empty if they are not."""
    members = membership.members
    if not members or membership.usable.members:
        return ""
    names, first = " and ".join(member.machine for member in members.values()), next(iter(members))
    return (
        f"No model can be loaded: all connected machines are drained ({names}). To use one again, run: "
        f"mlx-ring node drain {first} --undo"
    )


def new_instance(served: ServedModel) -> str:
    """Make a unique name of an instance."""
    return f"{served.local.name.rsplit('/', 1)[-1]}-{secrets.token_hex(3)}"


def cluster_sites(control: Control, membership: Membership, head_port: int, *, path: str = "") -> list[Site]:
    """Return a site for every member, with a channel to its agent.

    Other machines fetch the model from the head and from each other.

    Args:
        control: the head's control of the cluster.
        membership: the present members.
        head_port: port on which other machines reach the head.
        path: Path of the model on the head's machine, if one is to be loaded.
    """
    members = list(membership.members.values())
    others = [member for member in members if member.node != control.node]
    sites: list[Site] = []
    for member in members:
        address, name = address_of(member.host, member.port), node_name(member.node)
        channel = open_aio_channel(
            address, control.credentials, name, max_message_bytes=AGENT_MESSAGE_BYTES, more=keep_alive()
        )
        link = AgentLink(channel, f"the agent of {member.node}")
        is_local = member.node == control.node
        hosts = _hosts_of(control, member, others)
        if is_local:
            source = Source(path)
        else:
            hosts = {"": member.host} | hosts
            source = Source(peers=_weights_peers(member, others, head_port))
        reserve_share = 1.0 - member.memory_utilization
        limit = member.profile.memory_bytes
        sites.append(
            Site(
                *(member.node, link, is_local, hosts, source, reserve_share, limit),
                trusted=member.trusted,
                trusted_problem=member.trusted_problem,
                present_hosts=partial(_present_hosts, control, member),
                other_agents=partial(_other_agents, control, member),
            )
        )
    return sites


def _hosts_of(control: Control, member: Member, others: Iterable[Member]) -> dict[str, str]:
    """Return the hosts at which other members reach one, by node."""
    return {other.node: _host_from(control, other, member) for other in others if other.node != member.node}


def _present_hosts(control: Control, member: Member) -> dict[str, str]:
    return _hosts_of(control, member, control.membership.members.values())


def _host_from(control: Control, member: Member, other: Member) -> str:
    """Return the host at which a member reaches another one."""
    return member.head_host if other.node == control.node else member.host_of(other)


def _other_agents(control: Control, member: Member) -> dict[str, str]:
    """Return the addresses at which a member reaches the agents of the present other ones, by node."""
    return {
        other.node: address_of(_host_from(control, member, other), other.port)
        for other in control.membership.members.values()
        if other.node != member.node
    }


def _weights_peers(member: Member, others: Sequence[Member], head_port: int) -> tuple[WeightsPeer, ...]:
    """Return the peers from which a member may fetch weights: the head and every other member."""
    return (
        WeightsPeer(address_of(member.head_host, head_port)),
        *(
            WeightsPeer(address_of(member.host_of(other), other.port), other.node)
            for other in others
            if other is not member
        ),
    )
