"""Where a head's stages go: on this machine alone, or on the nodes that attend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from mlx_ring.cluster.agent_link import AgentLink, Source, WeightsPeer
from mlx_ring.cluster.control import Control
from mlx_ring.cluster.decode_bytes import decode_bytes
from mlx_ring.cluster.deployment import Site, address_of
from mlx_ring.cluster.membership import Membership
from mlx_ring.cluster.placement import balanced_split, even_split
from mlx_ring.cluster.planner.measured import measured_node
from mlx_ring.cluster.planner.model_sizes import profile_folder
from mlx_ring.cluster.planner.place import Wish, place
from mlx_ring.cluster.planner.plan import Plan
from mlx_ring.cluster.planner.profiles import ClusterProfile, NodeProfile
from mlx_ring.cluster.planner.stage_tables import Demand
from mlx_ring.core.config import Settings
from mlx_ring.core.machine_profile import MachineProfile
from mlx_ring.core.model_folder import ModelFolder
from mlx_ring.core.types import LayerRange
from mlx_ring.core.weights_manifest import WeightsManifest
from mlx_ring.engine.served_model import ServedModel, widens_half_precision
from mlx_ring.node.wishes import proportional_stages, wished
from mlx_ring.rpc.channels import open_aio_channel
from mlx_ring.rpc.tls.names import node_name

_PROMISED_TOKENS = 8192
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


def arrange_here(settings: Settings, served: ServedModel, site: Site) -> Arrangement:
    """Everything on this machine, as many stages as were asked for."""
    ranges = cut_layers(served.folder, settings)
    return Arrangement(ranges, (site,) * len(ranges), None)


async def arrange_cluster(
    settings: Settings,
    served: ServedModel,
    control: Control,
    membership: Membership,
    sites: Sequence[Site],
    offer: Callable[[], Awaitable[WeightsManifest]],
) -> Arrangement:
    """Plan for the members that are there. `offer` makes the model's weights available to others, where they need them.

    Raises:
        PlanError: the machines cannot hold the model as promised.
    """
    members = sorted(
        membership.members.values(), key=lambda member: (member.node != control.node, member.node)
    )
    profiles = [_node_profile(member.profile, member.node, member.memory_utilization) for member in members]
    plan = await asyncio.to_thread(_plan, settings, served, profiles)
    by_node = {site.node: site for site in sites}
    chosen = [by_node[stage.node] for stage in plan.stages]
    if not all(site.is_local for site in chosen):
        digest = (await offer()).digest
        chosen = [
            site if site.is_local else replace(site, source=replace(site.source, weights=digest))
            for site in chosen
        ]
    return Arrangement(tuple(stage.layers for stage in plan.stages), tuple(chosen), plan)


def cluster_sites(
    served: ServedModel, control: Control, membership: Membership, head_port: int
) -> list[Site]:
    """Every member, with a channel to its agent; others fetch the model from the head and from each other."""
    members = list(membership.members.values())
    others = [member for member in members if member.node != control.node]
    sites: list[Site] = []
    for member in members:
        address = address_of(member.host, member.port)
        channel = open_aio_channel(address, control.credentials, node_name(member.node))
        link = AgentLink(channel, f"the agent of {member.node}")
        if member.node == control.node:
            hosts = {other.node: other.head_host for other in others}
            source = Source(str(served.folder.path))
            sites.append(Site(member.node, link, is_local=True, hosts=hosts, source=source))
            continue
        peers = [
            WeightsPeer(address_of(member.head_host, head_port)),
            *(
                WeightsPeer(address_of(other.host, other.port), other.node)
                for other in others
                if other is not member
            ),
        ]
        source = Source(peers=tuple(peers))
        sites.append(Site(member.node, link, is_local=False, hosts={"": member.host}, source=source))
    return sites


def _node_profile(profile: MachineProfile, name: str, utilization: float) -> NodeProfile:
    return measured_node(profile, name, reserve_share=1.0 - utilization)


def _plan(settings: Settings, served: ServedModel, nodes: Sequence[NodeProfile]) -> Plan:
    profile = profile_folder(served.folder, served.names[0])
    context = settings.max_model_len or min(_PROMISED_TOKENS, profile.context_tokens)
    demand = Demand(context, 1, 16 if settings.kv_bits == "off" else int(settings.kv_bits))
    in_order, wish = wished(settings, Wish(demand, strategy=settings.strategy), nodes)
    return place(profile, ClusterProfile(in_order), wish)


def cut_layers(folder: ModelFolder, settings: Settings) -> tuple[LayerRange, ...]:
    """The stages: each reads about as much in a step; as many layers each where the files don't tell what a layer is."""
    if settings.strategy == "custom":
        return proportional_stages(folder.num_layers, settings.stages, settings.proportions)
    read = decode_bytes(folder, widened=widens_half_precision(settings.dtype))
    if read is None:
        return even_split(folder.num_layers, settings.stages)
    return balanced_split(read.layers, read.head, settings.stages)
