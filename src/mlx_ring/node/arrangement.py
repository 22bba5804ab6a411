"""Where a head's stages go: on this machine alone, or on the nodes that attend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mlx_ring.cluster.adoption import Adoptable
from mlx_ring.cluster.agent_link import AgentLink, Source, WeightsPeer
from mlx_ring.cluster.control import Control
from mlx_ring.cluster.decode_bytes import decode_bytes
from mlx_ring.cluster.deployment import Site, address_of
from mlx_ring.cluster.membership import Member, Membership
from mlx_ring.cluster.placement import balanced_split, even_split
from mlx_ring.cluster.planner.measured import measured_node
from mlx_ring.cluster.planner.model_sizes import profile_folder
from mlx_ring.cluster.planner.place import Wish, place
from mlx_ring.cluster.planner.plan import Plan
from mlx_ring.cluster.planner.profiles import ClusterProfile, NodeProfile
from mlx_ring.cluster.planner.replicas import place_replicas
from mlx_ring.cluster.planner.stage_tables import Demand
from mlx_ring.core.config import Settings
from mlx_ring.core.errors import PlanError
from mlx_ring.core.model_folder import ModelFolder
from mlx_ring.core.types import LayerRange
from mlx_ring.core.weights_manifest import WeightsManifest
from mlx_ring.engine.served_model import ServedModel, widens_half_precision
from mlx_ring.rpc.channels import open_aio_channel
from mlx_ring.rpc.tls.names import node_name

_PROMISED_TOKENS, _PROMISED_TOKENS_EACH = 8192, 2048
"""The context that a plan leaves room for, where none is asked for; more sequences share what memory is left."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The stages, in the pipeline's order."""

    ranges: tuple[LayerRange, ...]
    sites: tuple[Site, ...]
    """Of each stage."""
    plan: Plan | None
    """Why; None on one machine."""

    @property
    def nodes(self) -> tuple[Site, ...]:
        """Each site once."""
        return tuple({site.node: site for site in self.sites}.values())


@dataclass(frozen=True, slots=True)
class Order:
    """An instance that is wanted."""

    served: ServedModel
    settings: Settings
    number: int
    """Of its epoch, at least."""
    nodes: int
    """That must be there first."""
    only: frozenset[str] | None
    """Nodes that it may have; None: any."""
    avoid: frozenset[str]
    """Nodes that it may not have, where there are others."""
    taken: Mapping[str, int]
    """Bytes of memory that others' plans count on, by node."""


def arrange_here(settings: Settings, served: ServedModel, site: Site) -> Arrangement:
    """Everything on this machine, as many stages as were asked for."""
    ranges = cut_layers(served.folder, settings)
    return Arrangement(ranges, (site,) * len(ranges), None)


async def arrange_cluster(
    order: Order,
    control: Control,
    membership: Membership,
    sites: Sequence[Site],
    offer: Callable[[ServedModel], Awaitable[WeightsManifest]],
) -> Arrangement:
    """Plan for the members that are there. `offer` makes the model's weights available to others, where they need them.

    Raises:
        PlanError: the machines cannot hold the model as promised.
    """
    nodes = _nodes(control, membership, order.taken)
    allowed = [node for node in nodes if order.only is None or node.name in order.only]
    # Where others have every node, they share them.
    apart = [node for node in allowed or nodes if node.name not in order.avoid]
    plan = await asyncio.to_thread(_plan, order.settings, order.served, apart or allowed or nodes)
    by_node = {site.node: site for site in sites}
    chosen = [by_node[stage.node] for stage in plan.stages]
    if not all(site.is_local for site in chosen):
        digest = (await offer(order.served)).digest
        chosen = [
            site if site.is_local else replace(site, source=replace(site.source, weights=digest))
            for site in chosen
        ]
    return Arrangement(tuple(stage.layers for stage in plan.stages), tuple(chosen), plan)


def plan_replicas(
    settings: Settings,
    served: ServedModel,
    control: Control,
    membership: Membership,
    taken: Mapping[str, int],
) -> tuple[Plan, ...]:
    """As many as are asked for, or as give most.

    Raises:
        PlanError: the machines cannot hold so many.
    """
    nodes = _nodes(control, membership, taken)
    return place_replicas(
        profile_folder(served.folder, served.names[0]),
        ClusterProfile(tuple(nodes)),
        _wish(settings, served),
        settings.replicas,
    )


def plan_of_cut(order: Order, control: Control, membership: Membership, found: Adoptable) -> Plan | None:
    """What is to be expected of stages that are loaded already; None where they are not what would be promised now."""
    by_name = {node.name: node for node in _nodes(control, membership, order.taken)}
    nodes = tuple(by_name[node] for node, _ in found.workers)
    wish = replace(
        _wish(order.settings, order.served), strategy="custom", counts=tuple(map(len, found.ranges))
    )
    try:
        return place(profile_folder(order.served.folder, order.served.names[0]), ClusterProfile(nodes), wish)
    except PlanError:
        return None


def cluster_sites(control: Control, membership: Membership, head_port: int, *, path: str = "") -> list[Site]:
    """Every member, with a channel to its agent; others fetch the model from the head and from each other.

    Args:
        control: the head's.
        membership: who is there.
        head_port: where others reach the head.
        path: of the model on the head's machine, where one is to be loaded.
    """
    members = list(membership.members.values())
    others = [member for member in members if member.node != control.node]
    sites: list[Site] = []
    for member in members:
        address = address_of(member.host, member.port)
        channel = open_aio_channel(address, control.credentials, node_name(member.node))
        link = AgentLink(channel, f"the agent of {member.node}")
        is_local = member.node == control.node
        if is_local:
            hosts = {other.node: other.head_host for other in others}
            source = Source(path)
        else:
            hosts = {"": member.host}
            source = Source(peers=_weights_peers(member, others, head_port))
        reserve_share = 1.0 - member.memory_utilization
        sites.append(Site(member.node, link, is_local, hosts, source, reserve_share))
    return sites


def _weights_peers(member: Member, others: Sequence[Member], head_port: int) -> tuple[WeightsPeer, ...]:
    """Where a member may find weights: at the head's, and at every other."""
    return (
        WeightsPeer(address_of(member.head_host, head_port)),
        *(
            WeightsPeer(address_of(other.host, other.port), other.node)
            for other in others
            if other is not member
        ),
    )


def _nodes(control: Control, membership: Membership, taken: Mapping[str, int]) -> list[NodeProfile]:
    """Who is there, the head's own first, without the memory that is promised to others."""
    members = sorted(
        membership.members.values(), key=lambda member: (member.node != control.node, member.node)
    )
    return [_node_profile(member, taken.get(member.node, 0)) for member in members]


def _node_profile(member: Member, taken: int) -> NodeProfile:
    profile = measured_node(member.profile, member.node, reserve_share=1.0 - member.memory_utilization)
    left = profile.memory_bytes - int(taken / member.memory_utilization)
    return replace(profile, memory_bytes=max(0, left))


def _wish(settings: Settings, served: ServedModel) -> Wish:
    """What is promised: to one stream a long context; where throughput is asked for, a shorter one to all at once."""
    promised, sequences = _PROMISED_TOKENS, 1
    if settings.aim == "throughput":
        promised, sequences = _PROMISED_TOKENS_EACH, settings.max_num_seqs
    context = settings.max_model_len or min(promised, served.folder.context_length)
    demand = Demand(context, sequences, 16 if settings.kv_bits == "off" else int(settings.kv_bits))
    return Wish(demand, strategy=settings.strategy, aim=settings.aim)


def _plan(settings: Settings, served: ServedModel, nodes: Sequence[NodeProfile]) -> Plan:
    profile = profile_folder(served.folder, served.names[0])
    return place(profile, ClusterProfile(tuple(nodes)), _wish(settings, served))


def cut_layers(folder: ModelFolder, settings: Settings) -> tuple[LayerRange, ...]:
    """The stages: each reads about as much in a step; as many layers each where the files don't tell what a layer is."""
    read = decode_bytes(folder, widened=widens_half_precision(settings.dtype))
    if read is None:
        return even_split(folder.num_layers, settings.stages)
    return balanced_split(read.layers, read.head, settings.stages)
