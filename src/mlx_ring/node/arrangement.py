"""Where a head's stages go: on this machine alone, or on the nodes that attend."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_ring.agent.profile_store import ProfileStore, recall_or_measure
from mlx_ring.agent.profiling import ProfileOptions
from mlx_ring.cluster.agent_link import AgentLink
from mlx_ring.cluster.control import Control
from mlx_ring.cluster.decode_bytes import decode_bytes
from mlx_ring.cluster.deployment import Site
from mlx_ring.cluster.membership import Member
from mlx_ring.cluster.placement import balanced_split, even_split
from mlx_ring.cluster.planner.measured import measured_node
from mlx_ring.cluster.planner.model_sizes import profile_folder
from mlx_ring.cluster.planner.place import Wish, place
from mlx_ring.cluster.planner.plan import Plan
from mlx_ring.cluster.planner.profiles import ClusterProfile, NodeProfile
from mlx_ring.cluster.planner.stage_tables import Demand
from mlx_ring.core.config import Settings, state_folder
from mlx_ring.core.machine_profile import MachineProfile
from mlx_ring.core.model_folder import ModelFolder
from mlx_ring.core.types import LayerRange
from mlx_ring.engine.served_model import ServedModel, widens_half_precision
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
    settings: Settings, served: ServedModel, here: AgentLink, control: Control, nodes: int
) -> Arrangement:
    """Wait for so many nodes, this one included, and plan with all that are there.

    Raises:
        PlanError: the machines cannot hold the model as promised.
    """
    options = ProfileOptions(blas=settings.blas, blas_threads=settings.blas_threads or 1)
    own = await recall_or_measure(ProfileStore(state_folder(settings)), options)
    membership = await control.wait_for(nodes - 1)
    members = [membership.members[node] for node in sorted(membership.members)]
    profiles = [
        _node_profile(own, control.node, settings.memory_utilization),
        *(_node_profile(member.profile, member.node, member.memory_utilization) for member in members),
    ]
    plan = await asyncio.to_thread(_plan, settings, served, profiles)
    path = str(served.folder.path)
    sites = {member.node: _remote_site(member, control, path) for member in members}
    hosts = {member.node: member.head_host for member in members}
    sites[control.node] = Site(control.node, here, is_local=True, hosts=hosts, model_path=path)
    return Arrangement(
        tuple(stage.layers for stage in plan.stages), tuple(sites[stage.node] for stage in plan.stages), plan
    )


def _node_profile(profile: MachineProfile, name: str, utilization: float) -> NodeProfile:
    return measured_node(profile, name, reserve_share=1.0 - utilization)


def _plan(settings: Settings, served: ServedModel, nodes: Sequence[NodeProfile]) -> Plan:
    profile = profile_folder(served.folder, served.names[0])
    context = settings.max_model_len or min(_PROMISED_TOKENS, profile.context_tokens)
    demand = Demand(context, 1, 16 if settings.kv_bits == "off" else int(settings.kv_bits))
    return place(profile, ClusterProfile(tuple(nodes)), Wish(demand, strategy=settings.strategy))


def _remote_site(member: Member, control: Control, model_path: str) -> Site:
    host = f"[{member.host}]" if ":" in member.host else member.host
    channel = open_aio_channel(f"{host}:{member.port}", control.credentials, node_name(member.node))
    link = AgentLink(channel, f"the agent of {member.node}")
    return Site(member.node, link, is_local=False, hosts={"": member.host}, model_path=model_path)


def cut_layers(folder: ModelFolder, settings: Settings) -> tuple[LayerRange, ...]:
    """The stages: each reads about as much in a step; as many layers each where the files don't tell what a layer is."""
    read = decode_bytes(folder, widened=widens_half_precision(settings.dtype))
    if read is None:
        return even_split(folder.num_layers, settings.stages)
    return balanced_split(read.layers, read.head, settings.stages)
