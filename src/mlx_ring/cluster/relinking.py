"""Patch of an instance that lost workers: new ones take their places, and the others get new neighbours.

The other workers keep their process, weights and compiled code. It takes two phases. First, every rank that stays ends
what it waits for and drops its steps; one that does not answer is lost too. When the new ranks are loaded, those that
stay open their links and enter the new epoch. Stages behind the last lost one keep KV of interrupted requests.

Lost workers that are only silent are left until the links are opened. If they answer again before, they stay, too, and
the new ones are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from mlx_ring.cluster.adoption import present_epoch
from mlx_ring.cluster.agent_link import STOP_WAIT_S, Report
from mlx_ring.cluster.deployment import (
    Site,
    StartedWorkers,
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
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2

Assignments = Sequence[worker_pb2.StageAssignment]
WaitUntilLeft = Callable[[str], Awaitable[None]]
"""Function that returns when a node has left the cluster."""
Result = TypeVar("Result")
_LOOK_AGAIN_S = 0.5
_GROUP_WAIT_S = 5.0
"""Time in which a rank finishes its steps after another one of its group, with which it computes them."""
_FREE_WAIT_S = 2.0
"""Time in which a rank that has finished its steps answers."""
ANSWERS_S = 1.5
"""Silence within which a worker answers as usual."""


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
    pids: Mapping[RankId, int] | None = None,
    *,
    leaves_others: bool = False,
) -> StartedWorkers:
    """Prepare the ranks that stay, and end every other worker of the instance on their nodes.

    Args:
        sites: the site of every rank; new ranks may be on other sites than before.
        assignments: the assignments of all ranks, of the next epoch.
        staying: the ranks that stay.
        hello: the head's greeting.
        wait_until_left: returns when a node has left the cluster; its workers do not answer then. None: no node leaves.
        pids: the process ids of the ranks that stay, as far as they are known.
        leaves_others: True to end no other worker.

    Returns:
        The workers that answered, except ranks of groups in which another one did not.
    """
    ours = [_with_neighbour(one, sites) for one in assignments if _place(one) in staying]
    known = pids or {}

    async def ask(
        site: Site, own: Assignments, until: Mapping[RankId, int] | None, *, again: bool = False
    ) -> StartedWorkers:
        """Halt workers of a node, or prepare them, perhaps again; return those that answered."""
        own_pids = [known[_place(one)] for one in own if _place(one) in known]
        relinking = asyncio.ensure_future(
            site.link.relink(
                hello,
                own,
                commit=False,
                pids=own_pids if len(own_pids) == len(own) else (),
                leaves_others=leaves_others or again,
                halt=until is None,
                until_steps=[until.get(_place(one), 0) for one in own] if until else (),
            )
        )
        return await _answered(site, relinking, wait_until_left)

    # Ranks of a group compute a step together, so each must execute the steps that another one has begun.
    grouped = [one for one in ours if joined_ranks(one)]
    halted = _of_all(await asyncio.gather(*(ask(site, own, None) for site, own in _on_sites(sites, grouped))))
    begun = {place: worker.begun_step for place, (worker, _) in halted.items()}
    until = {_place(one): max(begun.get(RankId(*place), 0) for place in joined_ranks(one)) for one in grouped}
    missing = with_their_groups({_place(one) for one in grouped} - halted.keys(), assignments)
    asked = [one for one in ours if _place(one) not in missing]
    prepared = await _Groups(
        lambda site, own: ask(site, own, until),
        lambda site, one: ask(site, [one], until, again=True),
    ).ask_all(_on_sites(sites, asked))
    missing = with_their_groups({_place(one) for one in asked} - prepared.keys(), assignments)
    return {place: worker for place, worker in prepared.items() if place not in missing}


class _Groups:
    """Requests to prepare the ranks that stay. None waits long for a rank whose group has lost another one."""

    def __init__(
        self,
        ask: Callable[[Site, Assignments], Coroutine[None, None, StartedWorkers]],
        ask_again: Callable[[Site, worker_pb2.StageAssignment], Coroutine[None, None, StartedWorkers]],
    ) -> None:
        """Start without requests.

        Args:
            ask: prepares ranks on one site, and returns those that answered.
            ask_again: prepares one rank again, and leaves all others as they are.
        """
        self._ask, self._ask_again = ask, ask_again
        self._asked: list[tuple[Assignments, asyncio.Task[StartedWorkers]]] = []

    async def ask_all(self, on_sites: Iterable[tuple[Site, Assignments]]) -> StartedWorkers:
        """Prepare all ranks; return those that answered."""
        self._asked = [(own, asyncio.create_task(self._ask_on(site, own))) for site, own in on_sites]
        return _of_all(await asyncio.gather(*(task for _, task in self._asked)))

    async def _ask_on(self, site: Site, own: Assignments) -> StartedWorkers:
        answering = asyncio.ensure_future(self._ask(site, own))
        waits = [asyncio.ensure_future(self._until_lost(site, one, own)) for one in own if joined_ranks(one)]
        try:
            await asyncio.wait((answering, *waits), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            lost = with_their_groups([wait.result() for wait in waits if wait.done()], own)
        finally:
            for work in (answering, *waits):
                work.cancel()
            await asyncio.wait((answering, *waits))
        # The others on this site have finished their steps, or do so now.
        rest = [one for one in own if _place(one) not in lost]
        return await self._ask_on(site, rest) if rest else {}

    async def _until_lost(self, site: Site, one: worker_pb2.StageAssignment, own: Assignments) -> RankId:
        """Return a rank once it counts as lost: others of its group are, or have finished their steps long before it.

        A site answers once all its ranks have finished. So another stage may be the one that still computes.
        """
        members = {RankId(*place) for place in joined_ranks(one)} - {_place(other) for other in own}
        elsewhere = {
            task: members & {_place(other) for other in of_site}
            for of_site, task in self._asked
            if members & {_place(other) for other in of_site}
        }
        is_lost = False
        if elsewhere:
            done, _ = await asyncio.wait(elsewhere, return_when=asyncio.FIRST_COMPLETED)
            is_lost = not all(elsewhere[task] <= task.result().keys() for task in done)
            if not is_lost:
                await asyncio.sleep(_GROUP_WAIT_S)
                is_lost = not await self._has_finished(site, one)
        if not is_lost:
            await asyncio.Future[None]()
        return _place(one)

    async def _has_finished(self, site: Site, one: worker_pb2.StageAssignment) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(_FREE_WAIT_S):
                return bool(await self._ask_again(site, one))
        return False


@dataclass(frozen=True, slots=True)
class LoadedRanks:
    """All ranks of a patched instance before their links are opened."""

    workers: StartedWorkers
    assignments: Mapping[RankId, worker_pb2.StageAssignment]
    """With addresses."""


async def load_lost(
    sites: Mapping[RankId, Site],
    assignments: Assignments,
    prepared: StartedWorkers,
    hello: hello_pb2.Hello,
    report: Report,
) -> LoadedRanks:
    """Start and load the lost ranks; the prepared ones are left as they are.

    Args:
        sites: the site of every rank.
        assignments: the assignments of all ranks, of the next epoch.
        prepared: the ranks that stay.
        hello: the head's greeting.
        report: the callback for each worker's loading progress.

    Raises:
        RingError: a node's failure. Workers may be left, for the caller to stop.
    """
    new = [one for one in assignments if _place(one) not in prepared]
    on = {
        site.node: [one for one in new if sites[_place(one)].node == site.node]
        for site in _once(sites.values())
    }
    by_node = {site.node: site for site in sites.values()}
    started = await together(start_on(by_node[node], own, hello) for node, own in on.items() if own)
    workers: StartedWorkers = {
        **prepared,
        **{place: one for of_site in started for place, one in of_site.items()},
    }
    filled: dict[RankId, worker_pb2.StageAssignment] = {}
    for one in assignments:
        site = sites[_place(one)]
        filled[_place(one)] = fill_in(one, site, workers)
        if _place(one) not in prepared:
            fill_in_group(filled[_place(one)], workers)
    await load_all(
        ((by_node[node], [filled[_place(one)] for one in own]) for node, own in on.items()), hello, report
    )
    return LoadedRanks(workers, filled)


async def link(
    loaded: LoadedRanks,
    prepared: StartedWorkers,
    hello: hello_pb2.Hello,
    kept: worker_pb2.KeptKv | None = None,
) -> list[WorkerPlace]:
    """Link the prepared ranks with all others. They enter the new epoch.

    Args:
        loaded: all ranks.
        prepared: the ranks that stayed.
        hello: the head's greeting.
        kept: the KV that they keep; none by default.

    Raises:
        RingError: a node's failure. Workers may be left, for the caller to stop.
    """
    on = {place: site for place, (_, site) in prepared.items()}
    await together(
        _commit_on(
            site,
            [loaded.assignments[place] for place in on if on[place].node == site.node],
            [prepared[place][0].pid for place in on if on[place].node == site.node],
            hello,
            kept,
        )
        for site in _once(on.values())
    )
    return [place_for_head(worker, site) for _, (worker, site) in sorted(loaded.workers.items())]


async def wait_for_answers(site: Site, pids: AbstractSet[int], epoch: int, hello: hello_pb2.Hello) -> None:
    """Wait until silent workers on a node answer again; for ever if one of them has ended or entered a later epoch.

    Args:
        site: the node.
        pids: the process ids of the workers.
        epoch: their epoch.
        hello: the head's greeting.
    """
    while True:
        with suppress(RingError):
            async for event in site.link.watch(hello):
                answering = {state.pid for state in event.workers if _answers(state, epoch)}
                if pids <= answering:
                    return
        await asyncio.sleep(_LOOK_AGAIN_S)


def _answers(state: agent_pb2.WorkerState, epoch: int) -> bool:
    return state.alive and state.silent_s < ANSWERS_S and present_epoch(state) <= epoch


_late_stops: set[asyncio.Task[None]] = set()
"""Requests to nodes that may no longer answer, to stop their workers."""


@dataclass(frozen=True, slots=True)
class EpochWorkers:
    """Workers of an epoch and of earlier ones of its instance, to end them."""

    hello: hello_pb2.Hello
    """The head's greeting, with the instance and the epoch."""
    sites: Sequence[Site]
    closes_links: bool
    """True if the connections to the agents are used no more."""

    def stop_late(self, site: Site) -> asyncio.Task[None]:
        """Ask a node to end them, in a task of its own."""
        task = asyncio.create_task(self._stop_on(site), name=f"stop on {site.node}")
        _late_stops.add(task)
        task.add_done_callback(_late_stops.discard)
        return task

    async def leave(self, used: Collection[str]) -> None:
        """Leave them to the next epoch, which uses some nodes. The other nodes are asked to end theirs."""
        for site in self.sites:
            if site.node not in used:
                self.stop_late(site)
            elif self.closes_links:
                await site.link.close()

    async def _stop_on(self, site: Site) -> None:
        await site.link.stop(self.hello.instance, STOP_WAIT_S, self.hello)
        if self.closes_links:
            await site.link.close()


class Superseded:
    """Epochs whose workers are left until those of another one are linked, because silent ones may answer again."""

    def __init__(self, *epochs: EpochWorkers) -> None:
        self._epochs = list(epochs)

    def with_epoch(self, epoch: EpochWorkers) -> Superseded:
        """Return these and another one."""
        return Superseded(*self._epochs, epoch)

    def end(self) -> dict[str, list[asyncio.Task[None]]]:
        """Ask all nodes, once, to end what is left of these epochs; return the requests by node."""
        epochs, self._epochs = self._epochs, []
        stops: dict[str, list[asyncio.Task[None]]] = {}
        for epoch in epochs:
            for site in epoch.sites:
                stops.setdefault(site.node, []).append(epoch.stop_late(site))
        return stops


async def unless_returned(
    returning: asyncio.Task[None] | None, work: Coroutine[object, object, Result]
) -> Result | None:
    """Do work, and return its result; None if lost workers answer again before its end."""
    working = asyncio.ensure_future(work)
    try:
        if returning is not None:
            await asyncio.wait((working, returning), return_when=asyncio.FIRST_COMPLETED)
            if returning.done() and not returning.cancelled():
                returning.result()
                return None
        return await working
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


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


async def _answered(
    site: Site,
    relinking: asyncio.Future[Sequence[agent_pb2.StartedWorker]],
    wait_until_left: WaitUntilLeft | None,
) -> StartedWorkers:
    """Return the workers on a site that could be prepared."""
    try:
        await unless_left(site.node, relinking, wait_until_left)
        workers = relinking.result() if relinking.done() else ()
    except RingError:
        return {}
    finally:
        relinking.cancel()
    return {RankId(worker.stage, worker.rank): (worker, site) for worker in workers}


async def _commit_on(
    site: Site,
    assignments: Assignments,
    pids: Sequence[int],
    hello: hello_pb2.Hello,
    kept: worker_pb2.KeptKv | None,
) -> None:
    with blaming(site):
        await site.link.relink(hello, assignments, commit=True, kept=kept, pids=pids)


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


def _on_sites(sites: Mapping[RankId, Site], of: Assignments) -> list[tuple[Site, Assignments]]:
    """Return each site of these ranks once, with its ranks."""
    return [
        (site, [one for one in of if sites[_place(one)].node == site.node])
        for site in _once(sites[_place(one)] for one in of)
    ]


def _of_all(found: Iterable[StartedWorkers]) -> StartedWorkers:
    return {place: worker for of_site in found for place, worker in of_site.items()}


def _once(sites: Iterable[Site]) -> list[Site]:
    return [*{site.node: site for site in sites}.values()]
