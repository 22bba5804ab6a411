"""Patch of a lost instance: the ranks that are left stay, and only the lost ones are placed and loaded again."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Protocol

from mlx_ring.cluster.deployment import Site, StartedWorkers, close_sites
from mlx_ring.cluster.layer_split import Cut
from mlx_ring.cluster.relinking import prepare, unless_left, with_their_groups
from mlx_ring.core.errors import NotReady, PlanError, RingError
from mlx_ring.core.types import RankId
from mlx_ring.head.placing import Order, Placement, plan_given_ranks, replica_request
from mlx_ring.head.plan_requests import broken_links
from mlx_ring.head.rank_placements import RankPlacement, Stage, assign_all, forecast_of, with_routes
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.rpc.backends import is_collective
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.link_profile import UNREACHABLE
from mlx_ring.rpc.protos import hello_pb2, worker_pb2

log = logging.getLogger(__name__)

_MOST_CHOICES = 64
"""Limit of the placements that are compared."""
_SAME_SPEED = 0.05
"""Relative difference below which predicted speeds count as equal, because they follow from measurements."""
_CLEAR_WAIT_S = 3.0
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
    pids: Mapping[RankId, int] = field(default_factory=dict[RankId, int])
    """Process ids of the ranks, as far as they are known."""
    may_return: bool = False
    """True if all lost ranks are only silent: they may answer again before others replace them."""
    is_whole_again: bool = False
    """True if the lost ranks answered again, so that none is lost; those that were to replace them may still run."""

    @property
    def leaves_others(self) -> bool:
        """True if other workers of the instance run where its ranks are left. They end once these are linked."""
        return self.may_return or self.is_whole_again

    def as_whole(self) -> Remains:
        """Return what is left once the lost ranks answer again."""
        return replace(
            self, lost=frozenset(), silent_nodes=frozenset(), may_return=False, is_whole_again=True
        )

    def is_same(self, other: Remains) -> bool:
        """Report whether the same ranks of the same epoch are left."""
        own = self.instance, self.epoch, self.lost, self.silent_nodes
        return own == (other.instance, other.epoch, other.lost, other.silent_nodes)

    @property
    def places(self) -> frozenset[RankId]:
        """All ranks of the instance."""
        return frozenset(sites_of(self.placement))


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
    basis: object = None
    """Facts on which it depends, for comparison with later ones."""

    def without(self, links: Iterable[Sequence[str]]) -> Room:
        """Return the room with broken links, given by their ends."""
        return replace(
            self, cluster=replace(self.cluster, links={**self.cluster.links, **broken_links(links)})
        )

    def without_nodes(self, left: Collection[str]) -> Room:
        """Return the room without nodes that have left."""
        return replace(
            self,
            steady=[node for node in self.steady if node not in left],
            sites=[site for site in self.sites if site.node not in left],
        )


class Presence(Protocol):
    """Nodes that are there, at any moment."""

    def has_left(self, node: str) -> bool:
        """Report whether a node is not connected, and will not be back in a moment."""
        ...

    async def wait_until_left(self, node: str) -> None:
        """Wait until that is so."""
        ...


@dataclass(frozen=True, slots=True)
class _Option:
    """Possible placement of lost ranks."""

    plan: Plan
    ranks: tuple[Stage, ...]
    lost: frozenset[RankId]
    """Ranks that it replaces."""
    at_home: int
    """Number of these that stay on their own node."""

    @property
    def machines(self) -> int:
        return len({placed.site.node for stage in self.ranks for placed in stage})

    def speed(self, *, of_one: bool) -> float:
        """Return the predicted tokens per second, of one stream or of all."""
        prediction = self.plan.prediction
        return 1.0 / prediction.token_s if of_one else prediction.tokens_per_s


def place_again(
    order: Order,
    remains: Remains,
    lost: frozenset[RankId],
    room: Room,
    dropped: threading.Event | None = None,
) -> tuple[Placement, frozenset[RankId]]:
    """Place lost ranks on their own node. If it has left, or has another stage, too, place them where they are fastest.

    If nodes of neighbours that are left do not reach each other, the stage on one of them moves.

    Returns:
        The placement, and all ranks that it replaces.

    Raises:
        PlanError: no node has room for them, or the placement was dropped meanwhile.
    """
    before = remains.placement
    homes = {place: site.node for place, site in sites_of(before).items()}
    present = [
        node.name
        for node in room.cluster.nodes
        if node.name in room.steady and (order.only is None or node.name in order.only)
    ]
    left = sorted({homes[place] for place in lost if homes[place] not in room.steady})
    problem = PlanError(f"{' and '.join(left)} left, and no other machine may have the model's layers.")
    sites, options = {site.node: site for site in room.sites}, list[_Option]()
    for _, (replaced, now) in zip(
        range(_MOST_CHOICES), _choices(before, homes, lost, present, room.cluster), strict=False
    ):
        if dropped is not None and dropped.is_set():
            raise PlanError("The plan was dropped.")
        places = [
            [now[RankId(stage, rank)] for rank in range(len(ranks))]
            for stage, ranks in enumerate(before.ranks)
        ]
        try:
            ranks = _placed_at(before.cut, places, sites, order.settings.link)
            plan = plan_given_ranks(order, room.cluster, before.cut, places, "as they were before a loss")
        except PlanError as error:
            problem = error
            continue
        at_home = sum(now[place] == homes[place] for place in replaced)
        options.append(_Option(plan, ranks, replaced, at_home))
    if not options:
        raise problem
    best = _best(order, options)
    request, cluster = replica_request(order, room.cluster.nodes), room.cluster
    ranks, expected = forecast_of(request, order.settings, order.served, cluster, before.ranges, best.ranks)
    return Placement(before.ranges, ranks, best.plan, expected, before.group_settings), best.lost


def _choices(
    before: Placement,
    homes: Mapping[RankId, str],
    lost: frozenset[RankId],
    present: Sequence[str],
    cluster: ClusterProfile,
) -> Iterator[tuple[frozenset[RankId], Mapping[RankId, str]]]:
    """Yield ranks to replace, and the node of every rank then. The lost ranks of a stage on one node stay together."""
    stages_on = Counter(node for _, node in {(place.stage, node) for place, node in homes.items()})
    for moved in _to_move(before, lost, cluster):
        replaced = lost | moved
        parts = sorted({(place.stage, homes[place]) for place in replaced})
        nodes = [
            [home]
            if home in present and stages_on[home] == 1 and not moved
            else sorted(present, key=lambda node, home=home: node != home)
            for _, home in parts
        ]
        for chosen in product(*nodes):
            new_home = dict(zip(parts, chosen, strict=True))
            now = {place: new_home[place.stage, homes[place]] for place in replaced}
            yield replaced, {**homes, **now}


def _to_move(
    before: Placement, lost: frozenset[RankId], cluster: ClusterProfile
) -> Iterator[frozenset[RankId]]:
    """Yield sets of stages, by their ranks, without which all neighbours that are left reach each other."""
    names = [[placed.site.node for placed in ranks] for ranks in before.ranks]
    broken: list[tuple[int, int]] = []
    for stage, (sender, *_) in enumerate(names):
        following = (stage + 1) % len(names)
        out_of_reach = any(cluster.link(sender, node) == UNREACHABLE for node in names[following])
        if out_of_reach and not {stage, following} & {place.stage for place in lost}:
            broken.append((stage, following))
    for chosen in product(*broken):
        yield frozenset(RankId(stage, rank) for stage in chosen for rank in range(len(names[stage])))


def _best(order: Order, options: Sequence[_Option]) -> _Option:
    """Return the fastest of these options. Of equally fast ones, return one with many machines and few changes.

    Stages on one machine share its processors. Therefore the number of machines comes first, unless the plan is to be the
    fastest for one stream.
    """
    of_one = order.settings.strategy == "auto" and options[0].plan.objective == "latency"
    if not of_one:
        most = max(option.machines for option in options)
        options = [option for option in options if option.machines == most]
    limit = max(option.speed(of_one=of_one) for option in options) * (1 - _SAME_SPEED)
    fast = [option for option in options if option.speed(of_one=of_one) >= limit]

    def merit(option: _Option) -> tuple[float, ...]:
        return option.machines, option.at_home, -len(option.lost), option.speed(of_one=of_one)

    return max(fast, key=merit)


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


@dataclass(frozen=True, slots=True)
class PatchPlan:
    """Placement of lost ranks, before the others are asked."""

    room: Room
    placement: Placement
    lost: frozenset[RankId]
    """Ranks that it replaces."""


async def plan_patch(order: Order, remains: Remains, room: Room) -> PatchPlan:
    """Place the lost ranks of an instance.

    Raises:
        PlanError: no node has room for them.
    """
    there = {site.node for site in room.sites}
    lost = remains.lost | {
        place for place, site in sites_of(remains.placement).items() if site.node not in there
    }
    return await _plan_without(order, remains, lost, room)


async def _plan_without(order: Order, remains: Remains, lost: frozenset[RankId], room: Room) -> PatchPlan:
    dropped = threading.Event()
    try:
        return PatchPlan(room, *await asyncio.to_thread(place_again, order, remains, lost, room, dropped))
    finally:
        # A thread does not end with the task that waits for it.
        dropped.set()


async def wait_until_whole(remains: Remains, wait: Callable[[Site, frozenset[int]], Awaitable[None]]) -> None:
    """Wait until all lost ranks answer again; `wait` does so for workers on one node, by their process ids."""
    pids: dict[str, set[int]] = {}
    sites = {site.node: site for site in remains.placement.nodes}
    for place, site in sites_of(remains.placement).items():
        if place in remains.lost:
            pids.setdefault(site.node, set()).add(remains.pids[place])
    await asyncio.gather(*(wait(sites[node], frozenset(own)) for node, own in pids.items()))


class EarlyPlan:
    """Plan of a patch that is made while an instance is suspect, in case that what is silent is lost."""

    def __init__(self, plan: Callable[[Remains], Coroutine[None, None, PatchPlan | None]]) -> None:
        """Start without a plan; `plan` makes it."""
        self._plan = plan
        self._remains: Remains | None = None
        self._planning: asyncio.Task[PatchPlan | None] | None = None

    def follow(self, remains: Remains | None) -> None:
        """Plan for what would be left. None forgets it, because what was silent has answered."""
        if remains is None:
            self.close()
        elif self._remains is None or not remains.is_same(self._remains):
            self.close()
            self._remains = remains
            self._planning = asyncio.create_task(self._plan(remains), name=f"plan for {remains.instance}")

    def close(self) -> None:
        """Forget the plan."""
        if self._planning is not None:
            dropping = asyncio.create_task(_drop(self._planning), name="drop a plan")
            _dropping.add(dropping)
            dropping.add_done_callback(_dropping.discard)
        self._remains = self._planning = None

    async def take(self, remains: Remains) -> PatchPlan | None:
        """Return the plan, once it is made; None if there is none for what is left now."""
        planning = self._planning
        if planning is None or self._remains is None or not remains.is_same(self._remains):
            self.close()
            return None
        self._remains = self._planning = None
        try:
            return await planning
        except RingError as error:
            log.info("Nothing was planned for the loss of a part of %s: %s", remains.instance, error)
            return None


_dropping: set[asyncio.Task[None]] = set()


async def _drop(planning: asyncio.Task[PatchPlan | None]) -> None:
    planning.cancel()
    (plan,) = await asyncio.gather(planning, return_exceptions=True)
    if isinstance(plan, PatchPlan):
        await close_sites(plan.room.sites)


async def patch_ranks(
    order: Order,
    remains: Remains,
    number: int,
    plan: PatchPlan | None,
    hello: hello_pb2.Hello,
    presence: Presence | None = None,
) -> tuple[Placement, StartedWorkers]:
    """Prepare the ranks that are left for those that replace the lost ones. Place again those that do not answer.

    Nodes that leave meanwhile get no rank.

    Args:
        order: the order of the next epoch.
        remains: the ranks of the lost instance.
        number: the number of the next epoch.
        plan: the placement of the lost ranks; None on a single machine.
        hello: the head's greeting.
        presence: the presence of the nodes; None on a single machine.

    Returns:
        The placement, and the ranks that stay.

    Raises:
        RingError: no rank can stay, or the lost ones have no place.
    """
    lost, digest = remains.lost, await asyncio.to_thread(order.served.read_digest)
    # Each round finds more lost ranks or nodes.
    while True:
        placement = remains.placement
        if plan is not None:
            placement, lost = plan.placement, plan.lost
        placement = replace(placement, group_settings=order.group_settings, model_digest=digest)
        assignments = assign_all(
            order.settings, order.served, digest, remains.instance, number, placement.cut, placement.ranks
        )
        lost = with_their_groups(lost, assignments)
        prepared = await _prepare_left(remains, placement, lost, assignments, hello, presence)
        left = {
            site.node for site in placement.nodes if presence is not None and presence.has_left(site.node)
        }
        sites = sites_of(placement)
        silent = {
            place for place in remains.places - lost if place not in prepared or sites[place].node in left
        }
        if not silent and not left:
            return placement, prepared
        log.warning("%d more workers of %s do not answer", len(silent), remains.instance)
        lost |= silent
        if plan is not None:
            plan = await _plan_without(order, remains, lost, plan.room.without_nodes(left))


async def _prepare_left(
    remains: Remains,
    placement: Placement,
    lost: frozenset[RankId],
    assignments: Sequence[worker_pb2.StageAssignment],
    hello: hello_pb2.Hello,
    presence: Presence | None,
) -> StartedWorkers:
    """Prepare the ranks that are left. Nodes without any end their workers, if they answer."""
    sites = sites_of(placement)
    staying = remains.places - lost
    if not staying:
        raise NotReady(f"No worker of {remains.instance} is left.")
    spared = {sites[place].node for place in staying} | remains.silent_nodes
    # After a change was given up, workers of the next plan may run where lost ranks are started.
    nodes = {site.node: site for site in (*placement.nodes, *remains.placement.nodes)}
    cleared = [site for node, site in nodes.items() if node not in spared and not remains.leaves_others]
    before = assignments[0].epoch - 1
    earlier = make_hello(instance=remains.instance, epoch=before, fencing_id=hello.fencing_id)
    wait_until_left = None if presence is None else presence.wait_until_left
    stops = ((site.node, site.link.stop(remains.instance, _CLEAR_WAIT_S, earlier)) for site in cleared)
    clearing = asyncio.gather(*(unless_left(node, stop, wait_until_left) for node, stop in stops))
    pids = {place: pid for place, pid in remains.pids.items() if place in staying}
    prepared = await prepare(
        sites, assignments, staying, hello, wait_until_left, pids, leaves_others=remains.leaves_others
    )
    await clearing
    return prepared
