"""Brings a plan to life: starts workers on every node, tells each where its neighbours listen, loads them together.

Which backend joins the ranks of a group, once each rank has told with what it can be joined.

Where ranks that MLX joins listen for each other: on loopback, or on interfaces whose owners trust them with it. Pure.

MLX's ring is spoken from each rank to the one after it, and from the last to the first. Every such hop between machines goes from a trusted
interface of the one to a trusted interface of the other that has the same network, or the group is not made.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import Awaitable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from mlx_ring.cluster.agent_link import AgentLink, Report, Source
from mlx_ring.core.errors import PlanError, RingError
from mlx_ring.host.trusted_interfaces import FLAG, LOOPBACK, TrustedInterface
from mlx_ring.rpc.backends import (
    RankCapabilities,
    asked_backend,
    backend_option,
    choose_backend,
    joined_ranks,
)
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2

log = logging.getLogger(__name__)


def settle_backend(
    assignment: worker_pb2.StageAssignment, ranks: Sequence[tuple[agent_pb2.StartedWorker, str]]
) -> None:
    """Write into the assignment which backend joins its group, and why.

    Args:
        assignment: of one rank of the group; all get the same.
        ranks: each with the node that it is on, in their order in the group; none where there is no group.

    Raises:
        ConfigError: the backend that was asked for cannot join them.
    """
    if not ranks:
        return
    rdma = json.loads(assignment.rdma) if assignment.rdma else None
    means = [_means(worker, node) for worker, node in ranks]
    choice = choose_backend(asked_backend(assignment), means, option=backend_option(assignment), rdma=rdma)
    assignment.backend, assignment.backend_why = choice.backend, choice.why
    if (assignment.stage, assignment.rank) == joined_ranks(assignment)[0]:
        log.info("%d workers are joined by MLX's backend %s: %s", len(ranks), choice.backend, choice.why)


def _means(worker: agent_pb2.StartedWorker, node: str) -> RankCapabilities:
    told = worker.means
    return RankCapabilities(node, frozenset(told.backends), told.gpu, frozenset(told.rdma_devices))


_STOP_WAIT_S = 8.0

Result = TypeVar("Result")
Place = tuple[int, int]
"""Stage and rank."""


@dataclass(frozen=True, slots=True)
class Site:
    """A node that stages can be on."""

    node: str
    """Its id; what its certificate names."""
    link: AgentLink
    is_local: bool
    """Whether it is the head's own machine."""
    hosts: Mapping[str, str]
    """Where other nodes reach it, by their id; "" is for the head and for everyone else."""
    source: Source
    """Where its workers find the model."""
    reserve_share: float = 0.1
    """Of its memory, what is kept free."""
    memory_limit_bytes: int | None = None
    """That its owner grants, where that is less than it has."""
    bytes_per_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """That it sends to other nodes, by their id, as measured."""
    trusted: tuple[TrustedInterface, ...] = ()
    """Where its owner lets collectives go to other nodes."""
    trusted_problem: str = ""
    """Why one that was named is not among them."""

    def host_for(self, node: str) -> str:
        return self.hosts.get(node) or self.hosts.get("", "")


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where the head reaches a worker."""

    stage: int
    rank: int
    node: str
    """Whose certificate answers; empty on this machine."""
    address: str


async def deploy(
    sites: Sequence[Site],
    assignments: Sequence[worker_pb2.StageAssignment],
    hello: hello_pb2.Hello,
    report: Report,
) -> list[WorkerPlace]:
    """Start and load an instance.

    Args:
        sites: of each assignment, in the same order.
        assignments: of one instance, in order of stage and rank.
        hello: the head's greeting.
        report: told how far each worker has loaded.

    Raises:
        RingError: what a node could not do; then no node has anything of it left.
    """
    instance = assignments[0].instance
    by_site = {
        site.node: (site, [one for place, one in zip(sites, assignments, strict=True) if place is site])
        for site in sites
    }
    try:
        started = await _together(_start(site, own, hello) for site, own in by_site.values())
        workers = {place: found for of_site in started for place, found in of_site.items()}
        filled = {
            node: [_filled(assignment, site, workers) for assignment in own]
            for node, (site, own) in by_site.items()
        }
        if _waits_for_others(assignments, sites):
            await _together(
                _load(site, filled[node], hello, report, only_fetch=True)
                for node, (site, _) in by_site.items()
                if site.source.weights
            )
        await _together(_load(site, filled[node], hello, report) for node, (site, _) in by_site.items())
    except BaseException:
        await asyncio.gather(*(site.link.stop(instance, _STOP_WAIT_S) for site, _ in by_site.values()))
        raise
    return [_place_for_head(worker, site) for worker, site in workers.values()]


_Started = dict[Place, tuple[agent_pb2.StartedWorker, Site]]


async def _start(
    site: Site, assignments: Sequence[worker_pb2.StageAssignment], hello: hello_pb2.Hello
) -> _Started:
    with _blaming(site):
        workers = await site.link.start(hello, assignments)
    return {(worker.stage, worker.rank): (worker, site) for worker in workers}


def _waits_for_others(assignments: Sequence[worker_pb2.StageAssignment], sites: Sequence[Site]) -> bool:
    """Whether MLX joins ranks of several nodes: they look for each other for a while only, so all must be ready to load at once."""
    on = {(one.stage, one.rank): site.node for one, site in zip(assignments, sites, strict=True)}
    return any(len({on[place] for place in joined_ranks(one)}) > 1 for one in assignments)


async def _load(
    site: Site,
    assignments: Sequence[worker_pb2.StageAssignment],
    hello: hello_pb2.Hello,
    report: Report,
    *,
    only_fetch: bool = False,
) -> None:
    with _blaming(site):
        await site.link.load(hello, site.source, assignments, report, only_fetch=only_fetch)


@contextlib.contextmanager
def _blaming(site: Site) -> Generator[None]:
    """Errors are the site's doing."""
    try:
        yield
    except RingError as error:
        error.blamed_on(site.node)
        raise


async def _together(work: Iterable[Awaitable[Result]]) -> list[Result]:
    """All of it; the first error ends the rest and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _filled(
    assignment: worker_pb2.StageAssignment, site: Site, workers: _Started
) -> worker_pb2.StageAssignment:
    """With where its group's ranks listen, and where it reaches those of the next stage and of the first."""
    filled = worker_pb2.StageAssignment()
    filled.CopyFrom(assignment)
    following = workers.get((assignment.stage + 1, 0))
    if following is not None:
        filled.next_address, filled.next_node = _reached_from(site, *following)
        filled.next_bytes_per_s = site.bytes_per_s.get(filled.next_node, 0.0)
        filled.next_ranks.extend(_other_ranks(site, assignment.stage + 1, workers))
    filled.first_address, filled.first_node = _reached_from(site, *workers[0, 0])
    filled.first_ranks.extend(_other_ranks(site, 0, workers))
    before = workers[(assignment.stage - 1) % assignment.stages, 0][1]
    if before is not site:
        filled.previous_node = before.node
    joined = [workers[place] for place in joined_ranks(assignment)]
    if not filled.group:
        filled.group.extend(_group_address(worker) for worker, _ in joined)
    settle_backend(filled, [(worker, other.node) for worker, other in joined])
    return filled


def _other_ranks(site: Site, stage: int, workers: _Started) -> Iterator[worker_pb2.RankEnd]:
    """Of a stage, behind rank 0."""
    for rank in itertools.count(1):
        if (stage, rank) not in workers:
            return
        address, node = _reached_from(site, *workers[stage, rank])
        yield worker_pb2.RankEnd(address=address, node=node)


def _group_address(worker: agent_pb2.StartedWorker) -> str:
    """Where a rank listens for those that MLX joins with it."""
    return f"{worker.group_host}:{worker.group_port}"


def _reached_from(site: Site, worker: agent_pb2.StartedWorker, other: Site) -> tuple[str, str]:
    """The address, and whose certificate answers there: nobody's on one machine."""
    if other is site:
        return worker.address, ""
    return address_of(other.host_for(site.node), worker.port), other.node


def _place_for_head(worker: agent_pb2.StartedWorker, site: Site) -> WorkerPlace:
    if site.is_local:
        return WorkerPlace(worker.stage, worker.rank, "", worker.address)
    return WorkerPlace(worker.stage, worker.rank, site.node, address_of(site.host_for(""), worker.port))


def address_of(host: str, port: int) -> str:
    """A gRPC target."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Trusting(Protocol):
    """A node, and where its owner lets collectives go to others."""

    @property
    def node(self) -> str: ...
    @property
    def trusted(self) -> tuple[TrustedInterface, ...]: ...
    @property
    def trusted_problem(self) -> str: ...


@dataclass(frozen=True, slots=True)
class GroupWay:
    """From the rank before to a rank."""

    listens: str = LOOPBACK
    """The rank's address."""
    comes_from: str = LOOPBACK
    """The other's."""


def group_ways(nodes: Sequence[Trusting], wish: str) -> tuple[GroupWay, ...]:
    """To each rank of a group, whose ranks are on these nodes.

    Args:
        nodes: by rank.
        wish: what was asked for, as a person wrote it.

    Raises:
        PlanError: between two of them there is no way that both trust.
    """
    return tuple(_way(nodes[rank - 1], node, wish) for rank, node in enumerate(nodes))


def _way(before: Trusting, node: Trusting, wish: str) -> GroupWay:
    if before.node == node.node:
        return GroupWay()
    for one in (before, node):
        if not one.trusted:
            raise PlanError(f"{wish} joins {before.node} and {node.node}: {_untrusting(one)}")
    if (way := way_between(before, node)) is not None:
        return way
    raise PlanError(
        f"{wish} joins {before.node} and {node.node}, and the interfaces that they trust have no network in common: "
        f"{before.node} has {_told(before)}, {node.node} has {_told(node)}. Name others with {FLAG}."
    )


def way_between(before: Trusting, node: Trusting) -> GroupWay | None:
    """From one machine to another, by interfaces that both trust; None where they trust none in one network."""
    for theirs in before.trusted:
        for ours in node.trusted:
            if theirs.network == ours.network:
                return GroupWay(ours.address, theirs.address)
    return None


def _untrusting(node: Trusting) -> str:
    told = "MLX's collectives are neither encrypted nor authenticated, so they go to other machines on an interface alone that"
    if node.trusted_problem:
        return f"{told} its owner trusts, and of {node.node} there is none: {node.trusted_problem}"
    return f"{told} its owner trusts, and {node.node} names none. Start it with {FLAG} NAME, a Thunderbolt cable's say."


def _told(node: Trusting) -> str:
    return ", ".join(f"{trusted} in {trusted.network}" for trusted in node.trusted)
