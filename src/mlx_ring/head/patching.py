"""Patch of a lost instance: the ranks that are left stay, and only the lost ones are placed and loaded again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from mlx_ring.cluster.deployment import Site, Started
from mlx_ring.cluster.placement import Cut
from mlx_ring.cluster.relinking import prepare, with_their_groups
from mlx_ring.core.errors import NotReady, PlanError
from mlx_ring.core.types import RankId
from mlx_ring.head.placing import Order, Placement, forecast_of, plan_given_ranks, replica_request
from mlx_ring.head.rank_placements import RankPlacement, Stage, assign_all, with_routes
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.rpc.backends import is_collective
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import hello_pb2, worker_pb2

log = logging.getLogger(__name__)

_MOST_CHOICES = 64
"""Limit of the placements that are compared."""
_STOP_WAIT_S = 3.0
"""Time for a node to end workers that a patch cannot use."""


@dataclass(frozen=True, slots=True)
class Remains:
    """Ranks that a lost instance leaves loaded."""

    instance: str
    epoch: int
    placement: Placement
    lost: frozenset[RankId]
    """Ranks that are known to be lost."""
    silent_nodes: frozenset[str]
    """Nodes that no longer answer."""

    @property
    def places(self) -> frozenset[RankId]:
        """All ranks of the instance."""
        return frozenset(sites_of(self.placement))

    async def wait_unless_silent(self, node: str, work: Awaitable[None]) -> None:
        """Wait for work of a node, but not of one that no longer answers."""
        if node not in self.silent_nodes:
            await work


def sites_of(placement: Placement) -> dict[RankId, Site]:
    """Return the site of each rank."""
    return {
        RankId(stage, rank): placed.site
        for stage, ranks in enumerate(placement.ranks)
        for rank, placed in enumerate(ranks)
    }


@dataclass(frozen=True, slots=True)
class Room:
    """Nodes for lost ranks."""

    cluster: ClusterProfile
    """Nodes, with the memory that other instances leave."""
    steady: Collection[str]
    """Nodes that may get lost ranks."""
    sites: Sequence[Site]
    """Sites of all nodes that are there."""


def place_again(order: Order, remains: Remains, lost: frozenset[RankId], room: Room) -> Placement:
    """Place lost ranks: on their own node if it is steady, else on the one with the best predicted speed.

    Raises:
        PlanError: No node has room for them.
    """
    before = remains.placement
    homes = {place: site.node for place, site in sites_of(before).items()}
    gone = sorted({homes[place] for place in lost if homes[place] not in room.steady})
    present = [
        node.name
        for node in room.cluster.nodes
        if node.name in room.steady and (order.only is None or node.name in order.only)
    ]
    best: tuple[Plan, Sequence[Sequence[str]]] | None = None
    problem = PlanError(f"{' and '.join(gone)} left, and no other machine may have the model's layers.")
    for _, chosen in zip(range(_MOST_CHOICES), product(present, repeat=len(gone)), strict=False):
        moved = dict(zip(gone, chosen, strict=True))
        now = homes | {place: moved.get(homes[place], homes[place]) for place in lost}
        places = [
            [now[RankId(stage, rank)] for rank in range(len(ranks))]
            for stage, ranks in enumerate(before.ranks)
        ]
        try:
            plan = plan_given_ranks(order, room.cluster, before.cut, places, "as they were before a loss")
        except PlanError as error:
            problem = error
            continue
        if best is None or _merit(order, plan) > _merit(order, best[0]):
            best = plan, places
    if best is None:
        raise problem
    plan, places = best
    ranks = _placed_at(before.cut, places, {site.node: site for site in room.sites}, order.settings.link)
    expected = forecast_of(replica_request(order), order.served, room.cluster, before.ranges, ranks)
    return Placement(before.ranges, ranks, plan, expected, before.group_settings)


def _merit(order: Order, plan: Plan) -> tuple[int, float]:
    """Return the merit of a plan, the higher the better: its predicted speed, with the number of machines before it.

    The number counts unless the plan is to be the fastest for one stream. Stages on one machine share its processors.
    """
    if order.settings.strategy == "auto" and plan.objective == "latency":
        return 0, 1.0 / plan.prediction.token_s
    return len({rank.node for stage in plan.stages for rank in stage.ranks}), plan.prediction.tokens_per_s


def _placed_at(
    cut: Cut, places: Sequence[Sequence[str]], sites: Mapping[str, Site], link: str
) -> tuple[Stage, ...]:
    ranks = tuple(
        tuple(RankPlacement(sites[node], share) for node, share in zip(nodes, shares, strict=True))
        for nodes, shares in zip(places, cut.shares, strict=True)
    )
    return with_routes(ranks, link)


def can_be_patched(link: str, remains: Remains) -> bool:
    """Report whether ranks may be left that gRPC links."""
    return not is_collective(link) and bool(remains.places - remains.lost)


async def patch_ranks(
    order: Order,
    remains: Remains,
    number: int,
    room: Room | None,
    hello: hello_pb2.Hello,
) -> tuple[Placement, Started]:
    """Place the lost ranks, and prepare the others for them.

    Args:
        order: The order of the next epoch.
        remains: The ranks of the lost instance.
        number: The number of the next epoch.
        room: The nodes for lost ranks; None on a single machine.
        hello: The head's greeting.

    Returns:
        The placement, and the ranks that stay.

    Raises:
        RingError: No rank can stay, or the lost ones have no place.
    """
    there = {site.node for site in (remains.placement.nodes if room is None else room.sites)}
    homes = sites_of(remains.placement)
    lost = remains.lost | {place for place, site in homes.items() if site.node not in there}
    # Each round finds more lost ranks.
    for _ in remains.places:
        placement = (
            remains.placement
            if room is None
            else await asyncio.to_thread(place_again, order, remains, lost, room)
        )
        assignments = assign_all(
            order.settings, order.served, remains.instance, number, placement.cut, placement.ranks
        )
        lost = with_their_groups(lost, assignments)
        prepared = await _prepare_left(remains, placement, lost, assignments, hello)
        silent = remains.places - lost - prepared.keys()
        if not silent:
            return placement, prepared
        log.warning("%d more workers of %s do not answer", len(silent), remains.instance)
        lost |= silent
    raise NotReady(f"No worker of {remains.instance} is left.")


async def _prepare_left(
    remains: Remains,
    placement: Placement,
    lost: frozenset[RankId],
    assignments: Sequence[worker_pb2.StageAssignment],
    hello: hello_pb2.Hello,
) -> Started:
    """Prepare the ranks that are left. Nodes without any end their workers, if they answer."""
    sites = sites_of(placement)
    staying = remains.places - lost
    if not staying:
        raise NotReady(f"No worker of {remains.instance} is left.")
    in_use = {sites[place].node for place in staying}
    cleared = [site for site in remains.placement.nodes if site.node not in in_use | remains.silent_nodes]
    earlier = make_hello(instance=remains.instance, epoch=remains.epoch, fencing_id=hello.fencing_id)
    clearing = asyncio.gather(*(site.link.stop(remains.instance, _STOP_WAIT_S, earlier) for site in cleared))
    prepared = await prepare(sites, assignments, staying, hello)
    await clearing
    return prepared


# ---- hung groups
