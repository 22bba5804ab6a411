"""Brings a plan to life: starts workers on every node, tells each where its neighbours listen, loads them together."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from mlx_ring.cluster.agent_link import AgentLink, Report, Source
from mlx_ring.cluster.group_backend import settle_backend
from mlx_ring.core.errors import RingError
from mlx_ring.core.trusted_interfaces import TrustedInterface
from mlx_ring.rpc.joined_ranks import joined_ranks
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2

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
