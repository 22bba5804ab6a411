"""Moves of instances to other machines while they serve: a machine is wanted back, or another split is faster.

Where memory allows, the next instance is loaded beside the present one, whose requests move without a pause. Where it
does not, workers load only the layers that they gain for another split, and answers pause while they change over. Of a
machine that is wanted back, only the layers are loaded elsewhere. Otherwise, the model is loaded again in a pause.

A move ends when its loads have failed several times, or its model is unloaded by force. Models move in the order of
`MoveOrder`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from mlx_ring.api.service import Moved
from mlx_ring.core.errors import Conflict, NotReady, PlanError, RingError
from mlx_ring.head.model import HostedModel, Ready
from mlx_ring.head.move_order import FailedLoads, MoveOrder, NoRoomYet, Turn, Unloaded, epoch_of, first_of
from mlx_ring.head.nodes import Machines
from mlx_ring.head.plan_requests import find_node
from mlx_ring.head.replica import Replica
from mlx_ring.planner.replan import MoveWay, UnchangeableWorkers

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Choice:
    """Move of one replica to a better split."""

    replica: Replica
    way: MoveWay
    nodes: AbstractSet[str] = frozenset()
    """Machines of the better split."""
    refusal: Conflict | None = None
    """Reason why it may not pause answers; None if it may, or does not."""


Choose = Callable[[], Awaitable[Choice | None]]


class MakeReplica(Protocol):
    """Maker of a replica that takes the place of another one."""

    def __call__(self, hosted: HostedModel, old: Replica) -> Replica: ...


class Moves:
    """Moves of the instances of a head."""

    def __init__(
        self,
        machines: Callable[[], Machines],
        hosted: Callable[[], Sequence[HostedModel]],
        make_replica: MakeReplica,
        order: MoveOrder,
        ready: Ready,
    ) -> None:
        """Start without a move.

        Args:
            machines: returns the machines, once there are some.
            hosted: returns all models.
            make_replica: makes a replica that takes the place of another one.
            order: order of loads and moves.
            ready: receives each instance that serves.
        """
        self._machines, self._hosted, self._make_replica = machines, hosted, make_replica
        self._order, self._ready = order, ready
        self._moving: set[asyncio.Task[Any]] = set()
        self._queued: set[str] = set()
        """Machines whose drains wait for their turn."""

    def stop(self) -> None:
        """Cancel moves, and refuse new ones, because the head ends. Requests continue where they are."""
        self._order.has_ended = True
        for moving in self._moving:
            moving.cancel()

    async def drain(self, node: str, *, force: bool) -> Sequence[Moved]:
        """Move all layers away from a machine, given by id or name, which gets none until it leaves or is readmitted.

        The move continues if the caller is cancelled.
        """
        self._check_running()
        machines = self._machines()
        return await self._to_its_end(
            self._drain(machines, find_node(machines.cluster_view(), node), node, force=force),
            f"drain {node}",
        )

    async def split_again(self, hosted: HostedModel, choose: Choose, *, may_pause: bool) -> Moved | None:
        """Move a replica of a model to the best split of its layers. The move continues if the caller is cancelled.

        Args:
            hosted: the model.
            choose: returns the replica and its way to move, once nothing else is loaded; None: there is no better split.
            may_pause: True to load the model again if the machines turn out to have no room for both.

        Raises:
            NotReady: loads have failed several times, and others are tried without the move.
            RingError: the other split cannot be loaded. The present one serves, or the model is loaded again.
        """
        self._check_running()
        return await self._to_its_end(
            self._split_again(hosted, choose, may_pause=may_pause), f"replan {hosted.model_id}"
        )

    def _check_running(self) -> None:
        if self._order.has_ended:
            raise NotReady("The server is shutting down.")

    async def _to_its_end(self, work: Coroutine[Any, Any, Result], name: str) -> Result:
        return await asyncio.shield(self._begin(work, name))

    def _begin(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        moving = asyncio.create_task(work, name=name)
        self._moving.add(moving)
        moving.add_done_callback(self._ended)
        return moving

    def _ended(self, moving: asyncio.Task[Any]) -> None:
        self._moving.discard(moving)
        if not moving.cancelled() and (error := moving.exception()) is not None:
            log.debug("The attempt to %s has failed: %s", moving.get_name(), error)

    async def _split_again(self, hosted: HostedModel, choose: Choose, *, may_pause: bool) -> Moved | None:
        while True:
            async with self._order.turn(hosted) as turn:
                freed = self._order.freed
                choice = await choose()
                if choice is None:
                    return None
                # It may need no pause once another move has ended.
                if choice.way == "beside" or not self._order.may_free(
                    choice.nodes | nodes_of(choice.replica)
                ):
                    if choice.refusal is not None:
                        raise choice.refusal
                    with contextlib.suppress(NoRoomYet):
                        work = self._move_to_split(hosted, choice, turn, may_pause=may_pause)
                        return await self._order.move(hosted, turn, work)
            log.info("%s moves to another split once another move has ended", hosted.model_id)
            await freed.wait()

    async def _beside(self, hosted: HostedModel, replica: Replica, turn: Turn) -> Moved:
        """Load another replica beside one, and let it continue all requests. Others may load while these wait.

        Raises:
            NoRoomYet: it does not fit, but may once another move has ended.
            RingError: it could not be loaded, or was lost meanwhile.
        """
        started, frees = time.monotonic(), nodes_of(replica)
        try:
            new = self._make_replica(hosted, replica)
            with turn.ends_after(self._machines().wait_until_lacking, 1):
                moved = await hosted.replace(replica, new, self._ready, lambda: turn.end(frees))
        except PlanError as error:
            usable = self._machines().cluster_view().membership.usable.members
            if turn.is_held and self._order.may_free(usable.keys()):
                raise NoRoomYet(str(error)) from error
            raise
        return Moved(hosted.model_id, "beside", moved, time.monotonic() - started)

    async def _move_to_split(
        self, hosted: HostedModel, choice: Choice, turn: Turn, *, may_pause: bool
    ) -> Moved:
        replica, way, why = choice.replica, choice.way, ""
        if way == "beside":
            try:
                return await self._beside(hosted, replica, turn)
            except NoRoomYet:
                raise
            except PlanError as error:
                if not may_pause:
                    raise
                why = str(error)
                await turn.resume()
        if way != "after":
            try:
                return await self._change_stages(hosted, replica, why, turn, may_pause=may_pause)
            except UnchangeableWorkers as error:
                if not may_pause or replica.service.error is not None:
                    raise
                why = f"{why} {error}".strip()
        return await self._load_again(hosted, replica, why, turn)

    async def _change_stages(
        self, hosted: HostedModel, replica: Replica, why: str, turn: Turn, *, may_pause: bool
    ) -> Moved:
        """Let workers load the layers that they gain, and change over."""
        started, before = time.monotonic(), epoch_of(replica)
        reshaping = await replica.split_again(
            f"Workers of {hosted.model_id} change to another split.", may_pause=may_pause
        )
        paused, requests = time.monotonic(), reshaping.paused_requests
        log.warning("%s pauses while its workers change to another split. %s", hosted.model_id, why)
        await self._until_served(hosted, replica, before, turn)
        if reshaping.problem is not None:
            raise reshaping.problem
        now = time.monotonic()
        # After a loss in the pause, it may have been loaded as a whole.
        way: MoveWay = "ranges" if epoch_of(replica)[0] == before[0] else "after"
        log.warning(
            "%s has changed to another split: it loaded %.1f MB, and paused for %.1f s",
            *(hosted.model_id, reshaping.loaded_bytes / 1e6, now - paused),
        )
        moved = Moved(hosted.model_id, way, requests, now - started, why, now - paused)
        return replace(moved, loaded_bytes=reshaping.loaded_bytes)

    async def _load_again(self, hosted: HostedModel, replica: Replica, why: str, turn: Turn) -> Moved:
        """End the present instance, and load another one."""
        started, requests = time.monotonic(), len(replica.service.engine.requests())
        log.warning("%s pauses while it is loaded again with another split. %s", hosted.model_id, why)
        before = epoch_of(replica)
        replica.drain(nodes_of(replica), f"The layers of {hosted.model_id} are split again.")
        await self._until_served(hosted, replica, before, turn)
        seconds = time.monotonic() - started
        return Moved(hosted.model_id, "after", requests, seconds, why, seconds)

    async def _until_served(
        self, hosted: HostedModel, replica: Replica, before: tuple[str, int], turn: Turn
    ) -> None:
        """Wait until a replica serves in a later epoch, or as another instance. Its turn ends if machines are missing.

        Raises:
            PlanError: it does not fit.
            NotReady: too many loads have failed.
        """
        failed = FailedLoads(hosted.model_id, replica)
        with turn.ends_after(self._machines().wait_until_lacking, 1):
            while (error := replica.service.error) is not None or epoch_of(replica) == before:
                changed = replica.service.changed
                if isinstance(error, PlanError):
                    raise error
                failed.check()
                await changed.wait()

    async def _drain(self, machines: Machines, node: str, name: str, *, force: bool) -> Sequence[Moved]:
        session = _session(machines, node)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._order.change_drains)
            await stack.enter_async_context(self._order.of_machine(node))
            was_drained = _is_drained(machines, node)
            # Before it is marked, because a load in progress may need this machine.
            self._check_drain(machines, node, name, session)
            # At once, so that the layers of another machine that leaves do not go there.
            await machines.drain(node)
            try:
                self._queued.add(node)
                self._order.change_drains()
                try:
                    async with self._order.turn():
                        self._check_drain(machines, node, name, session)
                        if not _is_drained(machines, node):
                            raise Conflict(f"{name} was readmitted before its layers could move.")
                finally:
                    self._queued.discard(node)
                log.warning("%s is drained: its layers move to other machines", name)
                moved = await self._move_all(machines, node, name, force=force)
            except BaseException as error:
                if not was_drained:
                    await machines.drain(node, is_drained=False)
                    why = "the server ends" if isinstance(error, asyncio.CancelledError) else error
                    log.warning("%s is not drained: %s", name, why)
                raise
        if _is_drained(machines, node):
            log.warning("%s has no layers any more", name)
        return moved

    @staticmethod
    def _check_drain(machines: Machines, node: str, name: str, session: int | None) -> None:
        """Raise `Conflict` if a machine was disconnected since this session, or no other one may have layers."""
        if _session(machines, node) != session:
            raise Conflict(f"{name} has left the cluster, or joined it again, before its layers could move.")
        membership = machines.cluster_view().membership.without({node})
        if not membership.members:
            raise Conflict(f"{name} is the only machine of this server, so its layers cannot move elsewhere.")
        if not membership.usable.members:
            raise Conflict(f"{name} is the only machine that may have layers, so they cannot move elsewhere.")

    async def _move_all(self, machines: Machines, node: str, name: str, *, force: bool) -> Sequence[Moved]:
        """Move all models away from a machine. None waits for the answers of another one, unless it needs its room."""
        moved: list[Moved] = []
        failed: dict[Replica, FailedLoads] = {}
        moving: dict[HostedModel, asyncio.Task[Sequence[Moved]]] = {}
        while True:
            # Once it has left, recoveries place its layers.
            for hosted in self._hosted() if _is_drained(machines, node) else ():
                if hosted not in moving and self._using(hosted, node, failed) is not None:
                    work = self._move_away(machines, hosted, node, name, failed, force=force)
                    moving[hosted] = self._begin(work, f"move {hosted.model_id} away from {node}")
            if not moving:
                return moved
            await asyncio.wait(moving.values(), return_when=asyncio.FIRST_COMPLETED)
            # If one fails, those that have begun still move to their end.
            for hosted in [hosted for hosted, task in moving.items() if task.done()]:
                moved += moving.pop(hosted).result()

    async def _move_away(
        self,
        machines: Machines,
        hosted: HostedModel,
        node: str,
        name: str,
        failed: dict[Replica, FailedLoads],
        *,
        force: bool,
    ) -> Sequence[Moved]:
        """Move the replicas of a model away from a machine, one after the other."""
        moved: list[Moved] = []
        while True:
            has_room = True
            async with self._order.turn(hosted) as turn:
                freed = self._order.freed
                replica = self._using(hosted, node, failed) if _is_drained(machines, node) else None
                if replica is None:
                    return moved
                loads = failed.setdefault(replica, FailedLoads(hosted.model_id, replica))
                loaded = replica.service.changed
                try:
                    work = self._move(hosted, replica, node, loads, turn, force=force)
                    moved += await self._order.move(hosted, turn, work)
                except Unloaded as error:
                    log.warning("%s has no layers of %s any more: %s", name, hosted.model_id, error)
                except NoRoomYet as error:
                    log.info("%s moves once another move has ended: %s", hosted.model_id, error)
                    has_room = False
            if not has_room:
                await freed.wait()
            elif self._using(hosted, node, failed) is replica and replica.service.error is not None:
                # It was planned before, perhaps with this node.
                await first_of(loaded.wait(), machines.wait_until_undrained(node), freed.wait())

    async def readmit(self, node: str) -> None:
        """Let plans use a drained machine again, once its drain has ended.

        A drain that waits for its turn, or for a machine that may have layers, is given up instead.
        """
        machines = self._machines()
        found = find_node(machines.cluster_view(), node)
        draining = self._order.of_machine(found)
        while draining.locked() and found not in self._queued and not machines.lacks(1):
            await first_of(self._order.drains_changed.wait(), machines.wait_until_lacking(1))
        await machines.drain(found, is_drained=False)
        self._order.change_drains()

    @staticmethod
    def _using(hosted: HostedModel, node: str, failed: Mapping[Replica, FailedLoads]) -> Replica | None:
        """Return a replica with layers on a node, or about to have some; None without one.

        Those that do not fit, or whose loads have failed too often, have none.
        """
        return next(
            (
                replica
                for replica in hosted.replicas
                if node in nodes_of(replica)
                and not isinstance(replica.service.error, PlanError)
                and not (replica in failed and failed[replica].is_over)
            ),
            None,
        )

    async def _move(
        self,
        hosted: HostedModel,
        replica: Replica,
        node: str,
        failed: FailedLoads,
        turn: Turn,
        *,
        force: bool,
    ) -> Sequence[Moved]:
        """Move a replica away from a node. While it is being loaded, return nothing."""
        if replica.service.error is not None:
            try:
                failed.check()
            except NotReady as error:
                if not force:
                    raise
                log.warning("It has no layers to move: %s", error)
            return ()
        started, requests = time.monotonic(), len(replica.service.engine.requests())
        try:
            return (await self._beside(hosted, replica, turn),)
        except NoRoomYet:
            raise
        except RingError as error:
            why = str(error)
        await turn.resume()
        if not force:
            await replica.check_drain(frozenset({node}))
        log.warning(
            "%s pauses while it is loaded again, because no second instance could be loaded: %s",
            hosted.model_id,
            why,
        )
        paused = time.monotonic()
        try:
            await self._until_left(replica, node, failed, turn)
        except (PlanError, NotReady) as error:
            if not force:
                raise
            log.warning("Answers of %s wait until it can be loaded: %s", hosted.model_id, error)
            why = f"{why} It does not serve yet: {error}"
        now = time.monotonic()
        return (Moved(hosted.model_id, "after", requests, now - started, why, now - paused),)

    async def _until_left(self, replica: Replica, node: str, failed: FailedLoads, turn: Turn) -> None:
        """Replace the ranks on a drained node, and wait until all serve, as `_until_served` does."""
        machines = self._machines()
        with turn.ends_after(machines.wait_until_lacking, 1):
            while (error := replica.service.error) is not None or (
                node in nodes_of(replica) and _is_drained(machines, node)
            ):
                changed = replica.service.changed
                if isinstance(error, PlanError):
                    raise error
                failed.check()
                if error is None:
                    replica.drain(frozenset({node}), f"{node} is needed for something else.")
                await first_of(changed.wait(), machines.wait_until_undrained(node))


def _session(machines: Machines, node: str) -> int | None:
    member = machines.cluster_view().membership.members.get(node)
    return None if member is None else member.session


def _is_drained(machines: Machines, node: str) -> bool:
    return node in machines.cluster_view().membership.drained


def nodes_of(replica: Replica) -> frozenset[str]:
    """Return the machines of a replica's present or last instance."""
    placement = replica.placement
    return frozenset(() if placement is None else (site.node for site in placement.nodes))
