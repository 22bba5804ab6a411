"""Placement of each rank: its node, its share of the stage's layers, and its connection with its group. Pure.

This covers the RDMA devices of a hostfile.
It also covers stages whose ranks are on several machines (`--tp` with `--nodes`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import TypeVar

from mlx_ring.cluster.deployment import GroupRoute, Site, Trusting, WorkerPlace, group_routes, route_between
from mlx_ring.cluster.layer_split import Cut, make_assignments, shaping_settings
from mlx_ring.core.errors import ModelUnsupported, PlanError
from mlx_ring.core.types import CpuWeights, KvPlace, LayerRange, RankId
from mlx_ring.engine.in_flight import Predict, StepSize
from mlx_ring.head.served_model import ServedModel
from mlx_ring.models.tensor_shares import read_tensor_sizes, share_out
from mlx_ring.planner.forecast import Forecast, StageRanks, settle_weights
from mlx_ring.planner.model_sizes import profile_folder
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.planner.request import PlanRequest
from mlx_ring.rpc.backends import AUTO, is_collective, joined_ranks
from mlx_ring.rpc.link_profile import ETHERNET, UNREACHABLE, LinkProfile
from mlx_ring.rpc.protos import worker_pb2
from mlx_ring.settings.config import Settings
from mlx_ring.settings.hostfile import Hostfile, as_json, is_loopback, is_mesh, is_ring, part_of
from mlx_ring.settings.rank_settings import named_addresses, named_machines


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Placement of one rank."""

    site: Site
    share: float = 1.0
    """Share of every layer of its stage, relative to the other ranks."""
    route: GroupRoute = field(default_factory=GroupRoute)
    """Route from the previous rank of its MLX group."""
    cpu_weights: CpuWeights = "quantized"
    """Form of quantized weights if its worker computes on a CPU; `auto` is float32 where no native kernels run."""


Node = TypeVar("Node", bound=Trusting)
Stage = tuple[RankPlacement, ...]
"""The placements of the ranks of one stage, in order."""


def place_ranks(sites: Sequence[Site], shares: Sequence[Sequence[float]]) -> tuple[Stage, ...]:
    """Place ranks on sites, stage after stage."""
    places = iter(sites)
    return tuple(tuple(RankPlacement(next(places), share) for share in stage) for stage in shares)


def kv_places(
    ranges: Sequence[LayerRange], ranks: Sequence[Stage], places: Iterable[WorkerPlace]
) -> tuple[list[KvPlace], Callable[[], Iterator[worker_pb2.KvPeer]]]:
    """Return the places of the ranks' KV, by which it moves to other instances, and how to find saved KV of others."""
    found: list[KvPlace] = []
    for place in places:
        stage = ranks[place.stage]
        site = stage[place.rank].site
        found.append(
            KvPlace(
                RankId(place.stage, place.rank),
                ranges[place.stage],
                tuple(placed.share for placed in stage),
                site.node,
                partial(place.reached_from, site=site),
                site.bytes_per_s,
            )
        )
    return found, partial(_kv_peers, ranks)


def _kv_peers(ranks: Sequence[Stage]) -> Iterator[worker_pb2.KvPeer]:
    """Yield the agents from which the ranks may read saved KV, as each machine of ranks reaches them."""
    sites = {placed.site.node: placed.site for stage in ranks for placed in stage}
    for reader, site in sites.items():
        for node, address in site.other_agents().items():
            yield worker_pb2.KvPeer(
                reader=reader, address=address, node=node, bytes_per_s=site.bytes_per_s.get(node, 0.0)
            )


def place_as_planned(plan: Plan, sites: Mapping[str, Site]) -> tuple[Stage, ...]:
    """Place ranks as planned."""
    return tuple(
        tuple(RankPlacement(sites[rank.node], rank.share) for rank in stage.ranks) for stage in plan.stages
    )


def with_weights(
    ranks: Sequence[Stage], settled: Sequence[StageRanks], asked: CpuWeights
) -> tuple[Stage, ...]:
    """Add the form of each rank's quantized weights, as settled for its machine.

    Where the setting leaves the choice, float32 are loaded only if the worker finds no native kernels.
    """
    return tuple(
        tuple(
            replace(placed, cpu_weights=asked if node.cpu_weights == "float32" else "quantized")
            for placed, (node, _) in zip(stage, nodes, strict=True)
        )
        for stage, (_, nodes) in zip(ranks, settled, strict=True)
    )


def forecast_of(
    request: PlanRequest,
    settings: Settings,
    served: ServedModel,
    cluster: ClusterProfile,
    ranges: Sequence[LayerRange],
    ranks: tuple[Stage, ...],
) -> tuple[tuple[Stage, ...], Forecast | None]:
    """Predict these stages, with the form of each rank's weights; None if the sizes of the model's layers are unknown.

    Raises:
        PlanError, ModelUnsupported: the layers cannot be shared as asked.
    """
    _check_shares(served, [tuple(placed.share for placed in stage) for stage in ranks])
    by_name = {node.name: node for node in cluster.nodes}
    try:
        model = profile_folder(served.folder, served.names[0])
    except ModelUnsupported:
        return ranks, None
    shares = [[(by_name[placed.site.node], placed.share) for placed in stage] for stage in ranks]
    settled = settle_weights(model, request.demand, cluster, list(zip(ranges, shares, strict=True)))
    stages = [(nodes[0][0], layers) for layers, nodes in settled]
    forecast = Forecast(model, request.demand, cluster, stages, [nodes for _, nodes in settled])
    return with_weights(ranks, settled, settings.cpu_weights), forecast


def _spread_evenly(nodes: Sequence[Node], cut: Cut) -> tuple[tuple[Node, ...], ...]:
    """Return a machine for each rank of each stage, with equally many consecutive ranks on each machine."""
    ranks = sum(map(len, cut.shares))
    places = (nodes[rank * len(nodes) // ranks] for rank in range(ranks))
    return tuple(tuple(next(places) for _ in stage) for stage in cut.shares)


def even_numbers(ranks: int, most: int) -> Iterator[int]:
    """Return the numbers of sites that divide the ranks evenly, the largest first."""
    return (number for number in range(min(ranks, most), 0, -1) if ranks % number == 0)


def with_routes(ranks: tuple[Stage, ...], link: str) -> tuple[Stage, ...]:
    """Add the connections of each group: ranks that share layers, or all stages if a collective links them.

    Raises:
        PlanError: some machines have no trusted network in common.
    """
    routes = _routes([[placed.site for placed in stage] for stage in ranks], link)
    return tuple(
        tuple(replace(placed, route=route) for placed, route in zip(stage, of_stage, strict=True))
        for stage, of_stage in zip(ranks, routes, strict=True)
    )


def _routes(stages: Sequence[Sequence[Trusting]], link: str) -> Sequence[Sequence[GroupRoute]]:
    """Return the route to each rank of each stage; raise `PlanError` if there is none."""
    if is_collective(link) and len(stages) > 1:
        return [(route,) for route in group_routes([stage[0] for stage in stages], f"--link {link}")]
    return [
        group_routes(stage, f"A stage of {len(stage)} workers") if len(stage) > 1 else (GroupRoute(),)
        for stage in stages
    ]


def assign(
    settings: Settings, served: ServedModel, digest: str, instance: str, epoch: int, cut: Cut
) -> Sequence[worker_pb2.StageAssignment]:
    """Make the assignment of each rank of each stage; `digest` is that of the model.

    Raises:
        PlanError, ModelUnsupported: the layers cannot be shared as asked.
    """
    _check_shares(served, cut.shares)
    return make_assignments(
        cut,
        instance=instance,
        epoch=epoch,
        dtype=settings.dtype,
        model_digest=digest,
        max_model_len=served.limits.context_length,
        kv_bits=0 if settings.kv_bits == "off" else int(settings.kv_bits),
        link_compression=settings.link_compression,
        link=settings.link,
        backend=settings.backend if settings.backend != AUTO else "",
        group=named_addresses(settings),
        shaping=shaping_settings(settings),
    )


def _check_shares(served: ServedModel, stages: Iterable[tuple[float, ...]]) -> None:
    """Raise `PlanError` or `ModelUnsupported` if layers cannot be shared like this."""
    for shares in {shares for shares in stages if len(shares) > 1}:
        share_out(read_tensor_sizes(served.folder), shares)


def assign_all(
    settings: Settings,
    served: ServedModel,
    digest: str,
    instance: str,
    epoch: int,
    cut: Cut,
    ranks: Sequence[Stage],
) -> Sequence[worker_pb2.StageAssignment]:
    """Make the assignment of each rank, with its place in its group; `digest` is that of the model.

    Raises:
        PlanError, ModelUnsupported: the layers cannot be shared as asked.
    """
    assignments = assign(settings, served, digest, instance, epoch, cut)
    for assignment in assignments:
        assignment.cpu_weights = ranks[assignment.stage][assignment.rank].cpu_weights
    set_routes(assignments, ranks)
    if (machines := named_machines(settings)) is not None:
        set_rdma(assignments, ranks, machines)
    return assignments


def set_routes(assignments: Iterable[worker_pb2.StageAssignment], ranks: Sequence[Stage]) -> None:
    """Write into each rank's assignment the addresses of its group."""
    for assignment in assignments:
        route = ranks[assignment.stage][assignment.rank].route
        assignment.group_host, assignment.group_from = route.listens, route.comes_from


def set_rdma(
    assignments: Iterable[worker_pb2.StageAssignment], ranks: Sequence[Stage], hosts: Hostfile
) -> None:
    """Write the group's part of the RDMA matrix into each assignment.

    This requires that all machines of the group are in the file and connected.
    """
    if hosts.rdma is None:
        return
    for assignment in assignments:
        sites = [ranks[stage][rank].site for stage, rank in joined_ranks(assignment)]
        places = [place for site in sites if (place := _place_of(site, hosts)) is not None]
        if not len(set(places)) == len(sites) > 1:
            continue
        # Some machines of a ring may not be neighbours, so that nothing connects them.
        part = part_of(hosts.rdma, places)
        if is_mesh(part) or is_ring(part):
            assignment.rdma = json.dumps(as_json(part))
            assignment.group_environment.update(hosts.variables)


def _place_of(site: Site, hosts: Hostfile) -> int | None:
    """Return the hostfile's host of a site, found by the site's addresses."""
    addresses = {trusted.address for trusted in site.trusted} | set(site.hosts.values())
    for place, host in enumerate(hosts.hosts):
        if addresses & set(host.ips) or (site.is_local and is_loopback(host.ssh)):
            return place
    return None


def share_stages(
    cut: Cut, link: str, nodes: Sequence[Node], least: int
) -> list[tuple[tuple[Node, ...], ...]]:
    """Return the machines of each stage's ranks, for each number of machines with equally many ranks, the most first.

    Args:
        cut: stages and their ranks.
        link: kind of link between stages.
        nodes: the machines, in order of preference.
        least: smallest number of machines.

    Raises:
        PlanError: no trusted route exists.
    """
    ranks, spreads = sum(map(len, cut.shares)), list[tuple[tuple[Node, ...], ...]]()
    problem: PlanError | None = None
    for number in even_numbers(ranks, len(nodes)):
        if number < least:
            break
        # A machine without a trusted interface can only be used if no group needs one.
        for chosen in _choices(nodes, number):
            spread = _spread_evenly(chosen, cut)
            try:
                _routes(spread, link)
            except PlanError as error:
                problem = problem or error
            else:
                spreads.append(spread)
                break
    if not spreads:
        raise problem or PlanError(f"{ranks} workers cannot be spread evenly over {len(nodes)} machines.")
    return spreads


def _choices(nodes: Sequence[Node], number: int) -> list[Sequence[Node]]:
    trusting = [node for node in nodes if node.trusted]
    choices = [nodes[:number]]
    if len(trusting) >= number and trusting[:number] != choices[0]:
        choices.append(trusting[:number])
    return choices


def with_trust(
    links: Mapping[frozenset[str], LinkProfile],
    sites: Sequence[Trusting],
    measured: Mapping[frozenset[str], LinkProfile] | None = None,
) -> dict[frozenset[str], LinkProfile]:
    """Mark the links that collectives may use: both ends trust an interface in one network.

    Args:
        links: links for activations.
        sites: the machines.
        measured: links between trusted interfaces, if they are others.
    """
    known = dict(links)
    for one, other in combinations(sites, 2):
        pair = frozenset((one.node, other.node))
        link, own = known.get(pair, ETHERNET), (measured or {}).get(pair, UNREACHABLE)
        if link != UNREACHABLE and route_between(one, other) is not None:
            known[pair] = replace(link, trusted=True, collective=None if own == UNREACHABLE else own)
    return known


def predict_by(forecast: Forecast | None) -> Predict | None:
    """Return the prediction of steps' times for their deadlines; None without a profile."""
    if forecast is None:
        return None

    def predict(stage: int, size: StepSize) -> float:
        if size.is_decode:
            return forecast.decode_s(stage, size.tokens, size.context_tokens)
        return forecast.chunk_s(stage, size.tokens, size.context_tokens)

    return predict
