"""Placement of a head's stages: on this machine alone, or on the nodes of the cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from mlx_ring.cluster.adoption import Adoptable
from mlx_ring.cluster.deployment import Site, Trusting
from mlx_ring.cluster.layer_split import Cut, balanced_split, even_split
from mlx_ring.cluster.link_survey import link_remarks
from mlx_ring.cluster.membership import Membership
from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.head.plan_requests import (
    LinkSurveys,
    broken_links,
    cpu_weights_of,
    node_profiles,
    plan_request,
    plan_request_for,
    proportional_stages,
    with_throughput,
)
from mlx_ring.head.rank_placements import (
    Node,
    RankPlacement,
    Stage,
    forecast_of,
    place_as_planned,
    place_ranks,
    share_stages,
    with_routes,
)
from mlx_ring.head.served_model import ServedModel, widens_half_precision
from mlx_ring.head.step_speeds import step_speeds
from mlx_ring.host.machine_profile import MachineProfile
from mlx_ring.host.process import usable_memory
from mlx_ring.models.model_folder import ModelFolder
from mlx_ring.models.tensor_shares import read_tensor_sizes, share_out
from mlx_ring.models.weights_manifest import WeightsManifest
from mlx_ring.planner.forecast import Forecast
from mlx_ring.planner.model_sizes import decode_bytes, profile_folder
from mlx_ring.planner.place import LoadedStages, place, plan_given
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile, measured_node
from mlx_ring.planner.replicas import place_replicas
from mlx_ring.planner.request import PlanRequest
from mlx_ring.rpc.link_profile import LinkProfile
from mlx_ring.settings.config import Settings
from mlx_ring.settings.rank_settings import rank_shares, shared_stages

if TYPE_CHECKING:
    from mlx_ring.cluster.control import Control

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of all stages, in the pipeline's order."""

    ranges: tuple[LayerRange, ...]
    ranks: tuple[Stage, ...]
    """Placements of each stage's ranks."""
    plan: Plan | None
    """Plan that explains the placement.

    None on one machine, and for stages of an earlier head that no longer fit a plan.
    """
    forecast: Forecast | None = None
    """Predicted times and memory of the stages; None if the machine or the model has no profile."""
    group_settings: Mapping[str, object] = field(default_factory=dict[str, object])
    """Link and backend to use instead of those in the settings."""
    model_digest: str = ""
    """Digest of the model that its ranks load; empty until an epoch begins to load it."""

    @property
    def nodes(self) -> tuple[Site, ...]:
        """Sites of all ranks, each once."""
        return tuple({placed.site.node: placed.site for stage in self.ranks for placed in stage}.values())

    @property
    def cut(self) -> Cut:
        """Layers of each stage, and the shares of its ranks."""
        return Cut(self.ranges, tuple(tuple(placed.share for placed in stage) for stage in self.ranks))


@dataclass(frozen=True, slots=True)
class Order:
    """Request for one instance."""

    served: ServedModel
    settings: Settings
    number: int
    """Smallest number for its epoch."""
    nodes: int
    """Number of nodes that must join first."""
    only: frozenset[str] | None
    """Nodes that it may use; None means any."""
    replicas: int = 1
    """Number of replicas that share the promised sequences, including this one."""
    replaces: str = ""
    """Instance that it takes the place of, and that serves until then."""
    pipeline_only: bool = False
    """True if no machines may share layers."""

    @property
    def group_settings(self) -> Mapping[str, object]:
        """Link and backend, as a placement keeps them."""
        return {name: getattr(self.settings, name) for name in ("link", "backend")}


@dataclass(frozen=True, slots=True)
class Others:
    """Nodes and memory of other instances."""

    siblings: frozenset[str]
    """Nodes of the same model's other instances, used only if no other nodes are left."""
    taken: Mapping[str, int]
    """Bytes of memory that their plans reserve, by node."""


def place_single_node(
    settings: Settings, served: ServedModel, site: Site, profile: MachineProfile | None
) -> Placement:
    """Place all requested stages on this machine; a profile adds a forecast."""
    ranges = cut_layers(served.folder, settings)
    shares = rank_shares(settings)
    ranks = place_ranks((site,) * (len(ranges) * len(shares)), [shares] * len(ranges))
    reserve = 1.0 - settings.memory_utilization
    if profile is None:
        memory = site.memory_limit_bytes or usable_memory().total_bytes
        weights = cpu_weights_of(settings) if widens_half_precision(settings.dtype) else "quantized"
        node = NodeProfile(site.node, memory, 1.0, 1.0, reserve, widens=True, cpu_weights=weights)
    else:
        node = measured_node(profile, site.node, reserve_share=reserve, cpu_weights=cpu_weights_of(settings))
        node = replace(node, ratios=step_speeds(settings).of(site.node, profile))
    # Other models and replicas have as much of its memory.
    instances = (1 + len(settings.more_models)) * (settings.replicas or 1)
    node = replace(node, memory_bytes=node.memory_bytes // instances)
    request = plan_request(settings, served, (node,))
    ranks, forecast = forecast_of(request, settings, served, ClusterProfile((node,)), ranges, ranks)
    return Placement(ranges, ranks, None, None if profile is None else forecast)


def place_as_loaded(
    order: Order,
    others: Others,
    control: Control,
    membership: Membership,
    found: Adoptable,
    sites: tuple[Site, ...],
    links: Mapping[frozenset[str], LinkProfile],
) -> Placement:
    """Place an instance as an earlier head loaded it.

    `sites` holds the sites of its workers, in order of stage and rank.
    """
    cluster = ClusterProfile(tuple(node_profiles(order.settings, control, membership, {})), links)
    ranks, expected = forecast_of(
        *(replica_request(order, cluster.nodes), order.settings, order.served, cluster, found.cut.ranges),
        place_ranks(sites, found.cut.shares),
    )
    plan = plan_of_cut(order, others, control, membership, found, links)
    return Placement(found.cut.ranges, ranks, plan, expected)


async def place_on_cluster(
    order: Order,
    others: Others,
    control: Control,
    membership: Membership,
    sites: Sequence[Site],
    surveys: LinkSurveys,
    avoided: Iterable[Sequence[str]],
) -> Placement:
    """Measure unknown links between the present members, then place the instance on them.

    Links in `avoided`, given by their ends, count as broken.

    Raises:
        PlanError: the machines cannot hold the model as promised.
    """
    found, links = await surveys.take_all(membership, sites)
    links |= broken_links(avoided)
    nodes = node_profiles(order.settings, control, membership, others.taken)
    allowed = [node for node in nodes if order.only is None or node.name in order.only]
    # If siblings use every node, instances share nodes.
    apart = [node for node in allowed or nodes if node.name not in others.siblings]
    cluster = ClusterProfile(tuple(apart or allowed or nodes), links)
    by_node = {site.node: with_throughput(site, found) for site in sites}
    if len(rank_shares(order.settings)) > 1:
        return await asyncio.to_thread(_place_shared, order, cluster, by_node)
    plan = await asyncio.to_thread(_plan_separately, order, cluster)
    plan = replace(plan, remarks=(*plan.remarks, *link_remarks([stage.node for stage in plan.stages], links)))
    ranks = with_routes(place_as_planned(plan, by_node), order.settings.link)
    ranges = tuple(stage.layers for stage in plan.stages)
    whole = replace(cluster, nodes=tuple(nodes))
    request = replica_request(order, nodes)
    ranks, expected = forecast_of(request, order.settings, order.served, whole, ranges, ranks)
    return Placement(ranges, ranks, plan, expected)


def plan_as_at_start(
    settings: Settings,
    folder: ModelFolder,
    model: ModelProfile,
    request: PlanRequest,
    cluster: ClusterProfile,
    nodes: Mapping[str, Trusting],
    least: int = 1,
) -> Plan:
    """Return the plan by which a model would be loaded on these machines.

    Args:
        settings: settings of the model.
        folder: the model.
        model: sizes of the model.
        request: one replica's share of the request.
        cluster: the machines, in order of preference.
        nodes: the machines by their names in `cluster`.
        least: smallest number of machines.

    Raises:
        PlanError: the machines cannot hold the model as promised.
    """
    if len(rank_shares(settings)) > 1:
        return _plan_shared(settings, folder, model, request, cluster, nodes, least)[-1]
    return _plan_in_reach(settings, model, request, cluster, least, level=logging.DEBUG)


def _plan_separately(order: Order, cluster: ClusterProfile) -> Plan:
    model = profile_folder(order.served.folder, order.served.names[0])
    return _plan_in_reach(order.settings, model, replica_request(order, cluster.nodes), cluster, order.nodes)


def _plan_in_reach(
    settings: Settings,
    model: ModelProfile,
    request: PlanRequest,
    cluster: ClusterProfile,
    least: int,
    *,
    level: int = logging.WARNING,
) -> Plan:
    """Plan without some machines if a strategy cannot use all because of broken links."""

    def plan(cluster: ClusterProfile) -> Plan:
        in_order, of_nodes = plan_request_for(settings, request, cluster.nodes)
        return place(model, replace(cluster, nodes=in_order), of_nodes)

    try:
        return plan(cluster)
    except PlanError as error:
        smaller = cluster.in_reach(max(1, least))
        if len(smaller.nodes) == len(cluster.nodes):
            raise
        left = [node.name for node in cluster.nodes if node not in smaller.nodes]
        log.log(level, "Planning without %s, because otherwise: %s", " and ".join(left), error)
        return plan(smaller)


def _place_shared(order: Order, cluster: ClusterProfile, sites: Mapping[str, Site]) -> Placement:
    settings, served, request = order.settings, order.served, replica_request(order, cluster.nodes)
    model = profile_folder(served.folder, served.names[0])
    cut, nodes, plan = _plan_shared(
        settings, served.folder, model, request, cluster, sites, min(order.nodes, len(cluster.nodes))
    )
    ranks = with_routes(place_ranks([*chain.from_iterable(nodes)], cut.shares), settings.link)
    placed, forecast = forecast_of(request, settings, served, cluster, cut.ranges, ranks)
    return Placement(cut.ranges, placed, plan, forecast)


def _plan_shared(
    settings: Settings,
    folder: ModelFolder,
    model: ModelProfile,
    request: PlanRequest,
    cluster: ClusterProfile,
    nodes: Mapping[str, Node],
    least: int,
) -> tuple[Cut, Sequence[Sequence[Node]], Plan]:
    """Plan equally many `--tp` ranks on each machine, on as many machines as have room for them.

    Returns:
        The stages and shares, the machines of each stage's ranks, and the plan.
    """
    stages = shared_stages(settings)
    cut = Cut.alike(cut_layers(folder, settings.model_copy(update={"stages": stages})), rank_shares(settings))
    share_out(read_tensor_sizes(folder), cut.shares[0])
    problem, names = None, {node.node: name for name, node in nodes.items()}
    for spread in share_stages(cut, settings.link, [nodes[node.name] for node in cluster.nodes], least):
        places = [[names[node.node] for node in stage] for stage in spread]
        try:
            return cut, spread, _plan_ranks(model, request, cluster, cut, places, "as --tp asks for them")
        except PlanError as error:
            problem = problem or error
    raise problem or PlanError("There is no machine to plan for.")


def plan_given_ranks(
    order: Order, cluster: ClusterProfile, cut: Cut, places: Sequence[Sequence[str]], how: str
) -> Plan:
    """Plan ranks whose nodes are already chosen.

    Raises:
        PlanError: a node has no room for its ranks.
    """
    model = profile_folder(order.served.folder, order.served.names[0])
    return _plan_ranks(model, replica_request(order, cluster.nodes), cluster, cut, places, how)


def _plan_ranks(
    model: ModelProfile,
    request: PlanRequest,
    cluster: ClusterProfile,
    cut: Cut,
    places: Sequence[Sequence[str]],
    how: str,
) -> Plan:
    by_name = {node.name: node for node in cluster.nodes}
    stages = [
        (layers, [(by_name[node], share) for node, share in zip(nodes, shares, strict=True)])
        for layers, nodes, shares in zip(cut.ranges, places, cut.shares, strict=True)
    ]
    return plan_given(model, cluster, request, stages, how)


async def offered(placement: Placement, offer: Callable[[], Awaitable[WeightsManifest]]) -> Placement:
    """Add the weights' digest to the sites of other machines, so that they can fetch them.

    `offer` makes the weights available, and is called only if other machines have stages.
    """
    if all(site.is_local for site in placement.nodes):
        return placement
    digest = (await offer()).digest
    # The ranks of a node share one site object, which identifies them as a group.
    fetching = {
        site.node: site if site.is_local else replace(site, source=replace(site.source, weights=digest))
        for site in placement.nodes
    }
    ranks = tuple(
        tuple(replace(placed, site=fetching[placed.site.node]) for placed in stage)
        for stage in placement.ranks
    )
    return replace(placement, ranks=ranks)


def plan_replicas(
    settings: Settings,
    served: ServedModel,
    control: Control,
    membership: Membership,
    taken: Mapping[str, int],
    links: Mapping[frozenset[str], LinkProfile],
) -> tuple[Plan, ...]:
    """Plan the requested number of replicas, or the number with the highest throughput.

    Raises:
        PlanError: the machines cannot hold that many.
    """
    found = node_profiles(settings, control, membership, taken)
    nodes, request = plan_request_for(settings, plan_request(settings, served, found), found)
    return place_replicas(
        profile_folder(served.folder, served.names[0]),
        ClusterProfile(nodes, links),
        request,
        settings.replicas,
    )


def plan_of_cut(
    order: Order,
    others: Others,
    control: Control,
    membership: Membership,
    found: Adoptable,
    links: Mapping[frozenset[str], LinkProfile],
) -> Plan | None:
    """Return the plan of stages that are already loaded; None if they do not fit the current request."""
    by_name = {node.name: node for node in node_profiles(order.settings, control, membership, others.taken)}
    if any(len(stage) > 1 for stage in found.nodes):
        cluster = ClusterProfile(tuple(by_name.values()), links)
        try:
            return plan_given_ranks(order, cluster, found.cut, found.nodes, "as they were loaded")
        except PlanError:
            return None
    nodes = tuple(by_name[node] for (node,) in found.nodes)
    request = replace(
        replica_request(order, nodes), strategy="custom", counts=tuple(map(len, found.cut.ranges))
    )
    try:
        return place(
            profile_folder(order.served.folder, order.served.names[0]), ClusterProfile(nodes, links), request
        )
    except PlanError:
        return None


def replica_request(order: Order, nodes: Iterable[NodeProfile]) -> PlanRequest:
    """Return one replica's share of the request."""
    request = plan_request(order.settings, order.served, nodes)
    share = -(-request.demand.sequences // order.replicas)
    tensor = request.allows_tensor and not order.pipeline_only
    return replace(request, demand=replace(request.demand, sequences=share), allows_tensor=tensor)


def cut_layers(folder: ModelFolder, settings: Settings) -> tuple[LayerRange, ...]:
    """Cut the layers into stages that each read about as many bytes in a decode step.

    If the sizes of layers are unknown, or with the strategy `uniform`, each stage has about as many. The custom strategy cuts
    by its proportions.
    """
    if settings.strategy == "custom":
        return proportional_stages(folder.num_layers, settings.stages, settings.proportions)
    if settings.strategy == "uniform":
        return even_split(folder.num_layers, settings.stages)
    read = decode_bytes(folder, widened=widens_half_precision(settings.dtype))
    if read is None:
        return even_split(folder.num_layers, settings.stages)
    return balanced_split(read.layers, read.head, settings.stages)


def placed_stages(placement: Placement, names: Mapping[str, str]) -> LoadedStages:
    """Return the stages of a placement, with the readable names of machines. The shares of a stage add up to 1."""

    def rank(placed: RankPlacement, whole: float) -> tuple[str, float]:
        return names.get(placed.site.node, placed.site.node), placed.share / whole

    return tuple(
        (layers, tuple(rank(placed, sum(each.share for each in ranks)) for placed in ranks))
        for layers, ranks in zip(placement.ranges, placement.ranks, strict=True)
    )
