"""Plans after a loss: patches, and plans without the MLX backends that hung.

In a patch, the ranks that are left stay, and only the lost ones are placed and loaded again.

Two hangs bar a backend (`cluster/quarantine.py`). Links between stages then use the ring, or gRPC if the ring is barred.
Tensor-parallel groups use the ring, or the layers are split into more stages instead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import product

from mlx_ring.cluster.deployment import Site, Started
from mlx_ring.cluster.placement import Cut
from mlx_ring.cluster.quarantine import HANGS, WINDOW_S, Hang, HungBackend, HungBackends, pair_of
from mlx_ring.cluster.relinking import prepare, with_their_groups
from mlx_ring.core.errors import GroupStuck, NotReady, PlanError, RingError
from mlx_ring.core.types import RankId
from mlx_ring.head.placing import Order, Placement, forecast_of, plan_given_ranks, replica_request
from mlx_ring.head.rank_placements import RankPlacement, Stage, assign_all, with_routes
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.rpc.backends import AUTO, BACKENDS, is_collective
from mlx_ring.rpc.protos import hello_pb2, worker_pb2
from mlx_ring.settings.config import Settings
from mlx_ring.settings.rank_settings import rank_shares

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
    clearing = asyncio.gather(*(site.link.stop(remains.instance, _STOP_WAIT_S) for site in cleared))
    prepared = await prepare(sites, assignments, staying, hello)
    await clearing
    return prepared


# ---- hung groups

_RING = "ring"

Group = Sequence[RankId]
"""Ranks that MLX joins, in the order of the group."""


def groups_of(placement: Placement) -> Sequence[Group]:
    """Return the groups of an instance: the ranks of each shared stage, or all stages that a collective links.

    An instance that a head adopts has no collectives between its stages.
    """
    shared = [
        [RankId(stage, rank) for rank in range(len(placed))]
        for stage, placed in enumerate(placement.ranks)
        if len(placed) > 1
    ]
    link = str(placement.group_settings.get("link", "grpc"))
    if shared or not is_collective(link) or len(placement.ranks) == 1:
        return shared
    return [[RankId(stage, 0) for stage in range(len(placement.ranks))]]


def node_of(place: RankId, placement: Placement) -> str:
    """Return the node of a rank."""
    return placement.ranks[place.stage][place.rank].site.node


def nodes_of(group: Group, placement: Placement) -> list[str]:
    """Return the node of each rank of a group."""
    return [node_of(place, placement) for place in group]


Place = Callable[[Order], Awaitable[Placement]]
"""Function that places an instance; it raises `PlanError` if there is no room."""


def may_step_down(settings: Settings) -> bool:
    """Return True if another backend, or none, may replace one that is barred."""
    mode = settings.link_step_down
    return mode == "auto" or (mode == "implicit" and settings.backend == AUTO)


class StepDown:
    """Backends that hung on the machines of a head, and the plans that avoid them."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._hung = HungBackends()
        self._clock = clock
        self._kept: set[float] = set()
        """Ends of the times for which a barred backend is used all the same, each logged once."""

    def states(self) -> Sequence[HungBackend]:
        """Return the record of each backend that hung."""
        return self._hung.states(self._clock())

    def record(self, error: RingError | None, begun_s: float) -> None:
        """Record the loss or failed load of an instance that began at this Unix time, if a group hung."""
        if not isinstance(error, GroupStuck) or not error.backend:
            return
        now_s = self._clock()
        hang = Hang(error.backend, pair_of(error.nodes), str(error), now_s, begun_s)
        state = self._hung.record(hang)
        if state.until_s is not None:
            log.error(
                "MLX's backend %s is barred %s until %s, because it hung %d times within %.0f minutes",
                state.backend,
                where(state),
                time.strftime("%H:%M", time.localtime(state.until_s)),
                HANGS,
                WINDOW_S / 60,
            )

    async def place(self, order: Order, place: Place) -> Placement:
        """Place an instance without barred backends.

        If nothing else can be planned, the barred ones are used all the same.

        Raises:
            PlanError: there is no room for it.
        """
        may, settings = may_step_down(order.settings), order.settings
        placement = await _placed(order, place)
        while barred := self._barred(order, placement):
            if not may:
                self._warn_of(settings, barred)
                break
            lower = _next_order(order, placement, barred)
            try:
                placement = await _placed(lower, place)
            except PlanError as error:
                log.warning("using MLX's backend %s, because without it: %s", ", ".join(barred), error)
                break
            order = lower
        return placement

    def _barred(self, order: Order, placement: Placement) -> AbstractSet[str]:
        """Return the barred backends that the placement may use."""
        asked, now_s = _asked(order.settings, placement), self._clock()
        barred = set[str]()
        for group in groups_of(placement):
            barred |= self._hung.barred(nodes_of(group, placement), now_s)
        return barred if asked == AUTO else barred & {asked}

    def _warn_of(self, settings: Settings, barred: AbstractSet[str]) -> None:
        """Log once for each time for which a backend is barred that it is used all the same."""
        for state in self.states():
            if state.backend in barred and state.until_s is not None and state.until_s not in self._kept:
                self._kept.add(state.until_s)
                log.warning(
                    "MLX's backend %s hung %d times %s, and is used again because of --%s. To use another link or "
                    "split then, set --link-step-down auto.",
                    state.backend,
                    state.hangs,
                    where(state),
                    "link-step-down off"
                    if settings.link_step_down == "off"
                    else f"backend {settings.backend}",
                )


async def _placed(order: Order, place: Place) -> Placement:
    """Place the order, with its link and backend."""
    settings = {name: getattr(order.settings, name) for name in ("link", "backend")}
    return replace(await place(order), group_settings=settings)


def where(state: HungBackend) -> str:
    """Return the place where a backend hung, for messages."""
    if state.pair is None:
        return "everywhere"
    one, other = state.pair
    return f"on {one}" if one == other else f"between {one} and {other}"


def _asked(settings: Settings, placement: Placement) -> str:
    """Return the backend that the settings request for the groups of a placement; `auto` if none."""
    is_shared = any(len(stage) > 1 for stage in placement.ranks)
    if settings.backend != AUTO or is_shared or settings.link not in BACKENDS:
        return settings.backend
    return settings.link


def _next_order(order: Order, placement: Placement, barred: AbstractSet[str]) -> Order:
    """Return the order with the ring instead of barred backends, or without groups if the ring is barred."""
    settings, changes = order.settings, dict[str, object]()
    if _RING not in barred and _asked(settings, placement) != _RING:
        changes["backend"] = _RING
        if settings.link in BACKENDS:
            changes["link"] = _RING
        log.info("using MLX's backend ring for %s instead of %s", order.served.names[0], ", ".join(barred))
        return replace(order, settings=settings.model_copy(update=changes))
    changes["backend"] = AUTO
    if is_collective(settings.link):
        changes["link"] = "grpc"
        log.info("linking the stages of %s by gRPC instead of %s", order.served.names[0], settings.link)
        return replace(order, settings=settings.model_copy(update=changes))
    ranks = len(rank_shares(settings))
    log.info("splitting %s into stages, without tensor parallelism", order.served.names[0])
    stages = 1 if settings.nodes > 1 else min(settings.stages * ranks, order.served.folder.num_layers)
    changes |= {"tp": 1, "tp_shares": (), "stages": stages, "strategy": "auto", "proportions": ()}
    return replace(order, settings=settings.model_copy(update=changes), pipeline_only=True)
