"""Patch of an instance that lost workers: new ones take their places, and the others get new neighbours.

The other workers keep their process, weights and compiled code. It takes two phases. First, every rank that stays ends
what it waits for and drops its steps; one that does not answer is lost too. When the new ranks are loaded, those that
stay open their links and enter the new epoch. Stages behind the last lost one keep KV of interrupted requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

from mlx_ring.cluster.agent_link import Report
from mlx_ring.cluster.deployment import (
    Site,
    Started,
    WorkerPlace,
    blaming,
    fill_in,
    fill_in_group,
    load_all,
    place_for_head,
    start_on,
    together,
)
from mlx_ring.core.errors import RingError
from mlx_ring.core.types import RankId
from mlx_ring.rpc.backends import joined_ranks
from mlx_ring.rpc.protos import hello_pb2, worker_pb2

Assignments = Sequence[worker_pb2.StageAssignment]
WaitUntilLeft = Callable[[str], Awaitable[None]]
"""Function that returns when a node has left the cluster."""
Result = TypeVar("Result")


def with_their_groups(lost: Collection[RankId], assignments: Assignments) -> frozenset[RankId]:
    """Return the lost ranks, and the others of their groups, which MLX cannot join again."""
    groups = [
        {RankId(*place) for place in joined_ranks(one)} or {RankId(one.stage, one.rank)}
        for one in assignments
    ]
    return frozenset[RankId]().union(*(group for group in groups if group & set(lost)))


async def prepare(
    sites: Mapping[RankId, Site],
    assignments: Assignments,
    staying: AbstractSet[RankId],
    hello: hello_pb2.Hello,
    wait_until_left: WaitUntilLeft | None = None,
) -> Started:
    """Prepare the ranks that stay, and end every other worker of the instance on their nodes.

    Args:
        sites: The site of every rank; new ranks may be on other sites than before.
        assignments: The assignments of all ranks, of the next epoch.
        staying: The ranks that stay.
        hello: The head's greeting.
        wait_until_left: Returns when a node has left the cluster; its workers do not answer then. None: no node leaves.

    Returns:
        The workers that answered.
    """
    ours = [_with_neighbour(one, sites) for one in assignments if _place(one) in staying]
    found = await asyncio.gather(
        *(
            _prepare_on(
                site, [one for one in ours if sites[_place(one)].node == site.node], hello, wait_until_left
            )
            for site in _once(sites[place] for place in staying)
        )
    )
    return {place: worker for of_site in found for place, worker in of_site.items()}


async def patch(
    sites: Mapping[RankId, Site],
    assignments: Assignments,
    prepared: Started,
    hello: hello_pb2.Hello,
    report: Report,
    kept: worker_pb2.KeptKv | None = None,
) -> list[WorkerPlace]:
    """Start and load the lost ranks, and link the prepared ones with them.

    Args:
        sites: The site of every rank.
        assignments: The assignments of all ranks, of the next epoch.
        prepared: The ranks that stay.
        hello: The head's greeting.
        report: The callback for each worker's loading progress.
        kept: The KV that prepared ranks keep; none by default.

    Raises:
        RingError: A node's failure. Workers may be left, for the caller to stop.
    """
    new = [one for one in assignments if _place(one) not in prepared]
    on = {
        site.node: [one for one in new if sites[_place(one)].node == site.node]
        for site in _once(sites.values())
    }
    by_node = {site.node: site for site in sites.values()}
    started = await together(start_on(by_node[node], own, hello) for node, own in on.items() if own)
    workers: Started = {**prepared, **{place: one for of_site in started for place, one in of_site.items()}}
    filled: dict[RankId, worker_pb2.StageAssignment] = {}
    for one in assignments:
        site = sites[_place(one)]
        filled[_place(one)] = fill_in(one, site, workers)
        if _place(one) not in prepared:
            fill_in_group(filled[_place(one)], workers)
    await load_all(
        ((by_node[node], [filled[_place(one)] for one in own]) for node, own in on.items()), hello, report
    )
    await together(
        _commit_on(site, [filled[place] for place in prepared if sites[place].node == site.node], hello, kept)
        for site in _once(sites[place] for place in prepared)
    )
    return [place_for_head(worker, site) for _, (worker, site) in sorted(workers.items())]


async def unless_left(
    node: str, work: Awaitable[Result], wait_until_left: WaitUntilLeft | None
) -> asyncio.Future[Result]:
    """Wait for work of a node, but no longer once the node has left; return the work, which then continues."""
    working = asyncio.ensure_future(work)
    if wait_until_left is None:
        await asyncio.wait((working,))
        return working
    left = asyncio.ensure_future(wait_until_left(node))
    try:
        await asyncio.wait((working, left), return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()
    return working


async def _prepare_on(
    site: Site, assignments: Assignments, hello: hello_pb2.Hello, wait_until_left: WaitUntilLeft | None
) -> Started:
    relinking = asyncio.ensure_future(site.link.relink(hello, assignments, commit=False))
    try:
        await unless_left(site.node, relinking, wait_until_left)
        workers = relinking.result() if relinking.done() else ()
    except RingError:
        return {}
    finally:
        relinking.cancel()
    return {RankId(worker.stage, worker.rank): (worker, site) for worker in workers}


async def _commit_on(
    site: Site, assignments: Assignments, hello: hello_pb2.Hello, kept: worker_pb2.KeptKv | None
) -> None:
    with blaming(site):
        await site.link.relink(hello, assignments, commit=True, kept=kept)


def _with_neighbour(
    assignment: worker_pb2.StageAssignment, sites: Mapping[RankId, Site]
) -> worker_pb2.StageAssignment:
    """Return the assignment with the node of the stage before, which a worker needs before its links are opened."""
    filled = worker_pb2.StageAssignment()
    filled.CopyFrom(assignment)
    before = sites[RankId((assignment.stage - 1) % assignment.stages, 0)]
    filled.previous_node = "" if before.node == sites[_place(assignment)].node else before.node
    return filled


def _place(assignment: worker_pb2.StageAssignment) -> RankId:
    return RankId(assignment.stage, assignment.rank)


def _once(sites: Iterable[Site]) -> list[Site]:
    return [*{site.node: site for site in sites}.values()]
