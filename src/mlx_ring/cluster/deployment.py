"""Deployment of a plan: start workers on all nodes, connect them to their neighbours, and load them together.

The backend of a tensor-parallel group is chosen once all its ranks have reported their capabilities. In MLX's ring, each
rank sends to the next one, and the last to the first. A hop between machines must go from a trusted interface to another one
in the same network; otherwise the group is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from mlx_ring.cluster.agent_link import AgentLink, Report, Source
from mlx_ring.core.errors import GroupStuck, PlanError, RingError
from mlx_ring.core.types import RankId
from mlx_ring.host.interfaces import LOOPBACK, TRUST_FLAG, TrustedInterface
from mlx_ring.rpc.backends import (
    RankCapabilities,
    backend_of,
    backend_option,
    choose_backend,
    joined_ranks,
    requested_backend,
)
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2

log = logging.getLogger(__name__)


def settle_backend(
    assignment: worker_pb2.StageAssignment, ranks: Sequence[tuple[agent_pb2.StartedWorker, str]]
) -> None:
    """Choose the backend of a rank's group, and write it and the reason into the assignment.

    Args:
        assignment: the assignment of one rank of the group; all ranks get the same backend.
        ranks: the ranks with their nodes, in the order of the group; none without a group.

    Raises:
        ConfigError: a requested backend that cannot join them.
    """
    if not ranks:
        return
    rdma = json.loads(assignment.rdma) if assignment.rdma else None
    means = [_means(worker, node) for worker, node in ranks]
    choice = choose_backend(
        requested_backend(assignment), means, option=backend_option(assignment), rdma=rdma
    )
    assignment.backend, assignment.backend_why = choice.backend, choice.why
    if (assignment.stage, assignment.rank) == joined_ranks(assignment)[0]:
        log.info("%d workers are joined by MLX's backend %s: %s", len(ranks), choice.backend, choice.why)


def _means(worker: agent_pb2.StartedWorker, node: str) -> RankCapabilities:
    means = worker.means
    return RankCapabilities(node, frozenset(means.backends), means.gpu, frozenset(means.rdma_devices))


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Site:
    """A node that can hold stages."""

    node: str
    """Its ID, which its certificate names."""
    link: AgentLink
    is_local: bool
    """True for the head's own machine."""
    hosts: Mapping[str, str]
    """Hosts at which other nodes reached it when this was made, by their ID; "" for the head and all others."""
    source: Source
    """Source from which its workers load the model."""
    reserve_share: float = 0.1
    """Share of its memory to keep free."""
    memory_limit_bytes: int | None = None
    """Memory limit set by its owner; None for all its memory."""
    bytes_per_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Measured bandwidth to other nodes, by their ID."""
    trusted: tuple[TrustedInterface, ...] = ()
    """Interfaces on which its owner allows collectives with other nodes."""
    trusted_problem: str = ""
    """Reason why a named interface is not among them."""
    present_hosts: Callable[[], Mapping[str, str]] = dict[str, str]
    """Function that returns the hosts at which the present other nodes reach it, also those that have joined later."""
    other_agents: Callable[[], Mapping[str, str]] = dict[str, str]
    """Function that returns the addresses of the present other nodes' agents for this one, by node."""

    def host_for(self, node: str) -> str:
        """Return the host at which a node reaches this one; empty if it is unknown.

        A node that has joined again may do so over another interface than before.
        """
        return self.present_hosts().get(node) or self.hosts.get(node) or self.hosts.get("", "")


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Address at which the head reaches a worker."""

    stage: int
    rank: int
    node: str
    """Node whose certificate answers; empty on this machine."""
    address: str
    own_address: str = ""
    """Address for its own machine."""
    port: int = 0
    """Port for other machines; 0: none."""

    def reached_from(self, node: str, site: Site) -> tuple[str, str]:
        """Return its address for workers of a node, and the node whose certificate answers there; no node on its own.

        The address is empty if they cannot reach it.
        """
        if node == site.node:
            return self.own_address, ""
        host = site.host_for(node)
        return (address_of(host, self.port) if host and self.port else ""), site.node


async def deploy(
    sites: Sequence[Site],
    assignments: Sequence[worker_pb2.StageAssignment],
    hello: hello_pb2.Hello,
    report: Report,
) -> list[WorkerPlace]:
    """Start and load an instance.

    Args:
        sites: the site of each assignment, in the same order.
        assignments: the assignments of one instance, in order of stage and rank.
        hello: the head's greeting.
        report: the callback for each worker's loading progress.

    Raises:
        RingError: a node's failure, after which the caller stops the instance.
    """
    by_site = {
        site.node: (site, [one for place, one in zip(sites, assignments, strict=True) if place is site])
        for site in sites
    }
    started = await together(start_on(site, own, hello) for site, own in by_site.values())
    workers = {place: found for of_site in started for place, found in of_site.items()}
    filled = {
        node: [fill_in_group(fill_in(assignment, site, workers), workers) for assignment in own]
        for node, (site, own) in by_site.items()
    }
    await load_all(((site, filled[node]) for node, (site, _) in by_site.items()), hello, report)
    return [place_for_head(worker, site) for worker, site in workers.values()]


async def load_all(
    wanted: Iterable[tuple[Site, Sequence[worker_pb2.StageAssignment]]],
    hello: hello_pb2.Hello,
    report: Report,
) -> None:
    """Load the started workers of all sites.

    Ranks that MLX joins on several nodes wait for each other only for a limited time, so all nodes fetch their weights
    before.

    Raises:
        RingError: a node's failure, after which none of its started workers is left there.
    """
    loads = [(site, assignments) for site, assignments in wanted if assignments]
    if _waits_for_others(loads):
        await together(
            load_on(site, assignments, hello, report, only_fetch=True)
            for site, assignments in loads
            if site.source.weights
        )
    await together(load_on(site, assignments, hello, report) for site, assignments in loads)


StartedWorkers = dict[RankId, tuple[agent_pb2.StartedWorker, Site]]
"""Workers and their sites."""


async def start_on(
    site: Site,
    assignments: Sequence[worker_pb2.StageAssignment],
    hello: hello_pb2.Hello,
    *,
    waits: bool = True,
) -> StartedWorkers:
    """Start workers on a site. `waits` is for `AgentLink.start`.

    Raises:
        RingError: the node's failure, after which none of these workers is left.
    """
    with blaming(site):
        workers = await site.link.start(hello, assignments, waits=waits)
    return {RankId(worker.stage, worker.rank): (worker, site) for worker in workers}


def _waits_for_others(loads: Sequence[tuple[Site, Sequence[worker_pb2.StageAssignment]]]) -> bool:
    """Return True if MLX joins ranks on several nodes."""
    on = {(one.stage, one.rank): site.node for site, assignments in loads for one in assignments}
    return any(
        len({on[place] for place in joined_ranks(one)}) > 1 for _, assignments in loads for one in assignments
    )


async def load_on(
    site: Site,
    assignments: Sequence[worker_pb2.StageAssignment],
    hello: hello_pb2.Hello,
    report: Report,
    *,
    only_fetch: bool = False,
) -> None:
    """Load the workers that were started on a site, or only fetch their weights.

    Raises:
        RingError: the node's failure, after which no worker of the instance is left there.
    """
    with blaming(site):
        try:
            await site.link.load(hello, site.source, assignments, report, only_fetch=only_fetch)
        except GroupStuck as error:
            waiting = [one for one in assignments if (one.stage, one.rank) == error.place]
            raise error.of_group(backend_of(waiting[0]) if waiting else "", ()) from None


@contextlib.contextmanager
def blaming(site: Site) -> Generator[None]:
    """Blame errors on a site. Name its machine in those of another machine that do not."""
    try:
        yield
    except RingError as error:
        error.blamed_on(site.node)
        if not site.is_local and error.node == site.node and site.node not in str(error):
            error.args = (f"{site.node}: {error}",)
        raise


async def together(work: Iterable[Awaitable[Result]]) -> list[Result]:
    """Do all work in parallel; cancel the rest at the first error and raise it."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def fill_in(
    assignment: worker_pb2.StageAssignment, site: Site, workers: StartedWorkers
) -> worker_pb2.StageAssignment:
    """Return the assignment with the addresses of the next stage and of the first stage."""
    filled = worker_pb2.StageAssignment()
    filled.CopyFrom(assignment)
    following = workers.get(RankId(assignment.stage + 1, 0))
    if following is not None:
        filled.next_address, filled.next_node = _reached_from(site, *following)
        filled.next_bytes_per_s = site.bytes_per_s.get(filled.next_node, 0.0)
        filled.next_ranks.extend(_other_ranks(site, assignment.stage + 1, workers))
    filled.first_address, filled.first_node = _reached_from(site, *workers[RankId(0, 0)])
    filled.first_ranks.extend(_other_ranks(site, 0, workers))
    before = workers[RankId((assignment.stage - 1) % assignment.stages, 0)][1]
    if before.node != site.node:
        filled.previous_node = before.node
    return filled


def fill_in_group(
    assignment: worker_pb2.StageAssignment, workers: StartedWorkers
) -> worker_pb2.StageAssignment:
    """Write the addresses and the backend of its group into an assignment, and return it.

    Raises:
        ConfigError: a requested backend that cannot join them.
    """
    joined = [workers[RankId(*place)] for place in joined_ranks(assignment)]
    if not assignment.group:
        assignment.group.extend(_group_address(worker) for worker, _ in joined)
    settle_backend(assignment, [(worker, other.node) for worker, other in joined])
    return assignment


def _other_ranks(site: Site, stage: int, workers: StartedWorkers) -> Iterator[worker_pb2.RankEnd]:
    """Yield a stage's ranks after rank 0."""
    for rank in itertools.count(1):
        if RankId(stage, rank) not in workers:
            return
        address, node = _reached_from(site, *workers[RankId(stage, rank)])
        yield worker_pb2.RankEnd(address=address, node=node)


def _group_address(worker: agent_pb2.StartedWorker) -> str:
    """Return the address at which a rank listens for the others of its MLX group."""
    return f"{worker.group_host}:{worker.group_port}"


def _reached_from(site: Site, worker: agent_pb2.StartedWorker, other: Site) -> tuple[str, str]:
    """Return the address, and the node whose certificate answers there; no node on the same machine."""
    if other.node == site.node:
        return worker.address, ""
    return address_of(other.host_for(site.node), worker.port), other.node


def place_for_head(worker: agent_pb2.StartedWorker, site: Site) -> WorkerPlace:
    """Return the address at which the head reaches a worker."""
    return place_at(RankId(worker.stage, worker.rank), worker.address, worker.port, site)


def place_at(rank: RankId, own_address: str, port: int, site: Site) -> WorkerPlace:
    """Return the address at which the head reaches a worker, given its address on its machine, and its port."""
    node, address = ("", own_address) if site.is_local else (site.node, address_of(site.host_for(""), port))
    return WorkerPlace(*rank, node, address, own_address, port)


async def close_sites(sites: Iterable[Site]) -> None:
    """Close the connections to nodes."""
    await asyncio.gather(*(site.link.close() for site in sites))


def unused(sites: Iterable[Site], used: Iterable[Site]) -> list[Site]:
    """Return the sites of nodes that are not used."""
    nodes = {site.node for site in used}
    return [site for site in sites if site.node not in nodes]


def address_of(host: str, port: int) -> str:
    """Return a gRPC target."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Trusting(Protocol):
    """A node and the interfaces on which its owner allows collectives."""

    @property
    def node(self) -> str: ...
    @property
    def trusted(self) -> tuple[TrustedInterface, ...]: ...
    @property
    def trusted_problem(self) -> str: ...


@dataclass(frozen=True, slots=True)
class GroupRoute:
    """A route from the previous rank of a group to a rank."""

    listens: str = LOOPBACK
    """Address of the rank."""
    comes_from: str = LOOPBACK
    """Address of the previous rank."""


def group_routes(nodes: Sequence[Trusting], requirement: str) -> tuple[GroupRoute, ...]:
    """Return the route to each rank of a group.

    Args:
        nodes: the nodes by rank.
        requirement: the option or stage that requires the group, for messages.

    Raises:
        PlanError: two nodes without a common trusted network.
    """
    return tuple(_route(nodes[rank - 1], node, requirement) for rank, node in enumerate(nodes))


def _route(before: Trusting, node: Trusting, requirement: str) -> GroupRoute:
    if before.node == node.node:
        return GroupRoute()
    for one in (before, node):
        if not one.trusted:
            raise PlanError(f"{requirement} joins {before.node} and {node.node}: {_untrusting(one)}")
    if (route := route_between(before, node)) is not None:
        return route
    raise PlanError(
        f"{requirement} joins {before.node} and {node.node}, but their trusted interfaces have no network in common: "
        f"{before.node} has {_interfaces(before)}, {node.node} has {_interfaces(node)}. Name others with {TRUST_FLAG}."
    )


def route_between(before: Trusting, node: Trusting) -> GroupRoute | None:
    """Return the route from one machine to another, or None without trusted interfaces in the same network."""
    for theirs in before.trusted:
        for ours in node.trusted:
            if theirs.network == ours.network:
                return GroupRoute(ours.address, theirs.address)
    return None


def _untrusting(node: Trusting) -> str:
    reason = "MLX's collectives are neither encrypted nor authenticated, so they use only interfaces that the owner trusts"
    if node.trusted_problem:
        return f"{reason}, and {node.node} has none: {node.trusted_problem}"
    return f"{reason}, and {node.node} names none. Start it with {TRUST_FLAG} NAME, for example a Thunderbolt cable's."


def _interfaces(node: Trusting) -> str:
    return ", ".join(f"{trusted} in {trusted.network}" for trusted in node.trusted)
