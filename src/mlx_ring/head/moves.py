"""Moves of instances to other machines while they serve: a machine is wanted back, or another split is faster.

Where memory allows, the next instance is loaded beside the present one, whose requests move without a pause. Where it
does not, workers load only the layers that they gain for another split, and answers pause while they change over. Of a
machine that is wanted back, only the layers are loaded elsewhere. Otherwise, the model is loaded again in a pause.

A move ends when its loads have failed several times, or its model is unloaded by force. Then others may load.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from mlx_ring.api.service import Moved
from mlx_ring.core.errors import Conflict, NodeDrained, NotReady, PlanError, RequestError, RingError
from mlx_ring.head.model import HostedModel, Ready
from mlx_ring.head.nodes import Machines
from mlx_ring.head.plan_requests import readable_names
from mlx_ring.head.replica import Replica
from mlx_ring.planner.replan import MoveWay, UnchangeableWorkers

log = logging.getLogger(__name__)

_LOOK_S = 0.05
_MOST_FAILED_LOADS = 5
"""Failed loads after which a move ends. Of the losses of workers, some are mended first without a whole load."""
Result = TypeVar("Result")
Choose = Callable[[], Awaitable[MoveWay | None]]


class MakeReplica(Protocol):
    """Maker of a replica that takes the place of another one."""

    def __call__(self, hosted: HostedModel, old: Replica) -> Replica: ...


class _Unloaded(Conflict):
    """The model was unloaded while it moved."""


class FailedLoads:
    """Failed loads of a replica during a move."""

    def __init__(self, model: str, replica: Replica) -> None:
        self._model, self._replica = model, replica
        self._last: RingError | None = None
        self._epoch: tuple[str, int] | None = None
        """Epoch of the last failure that was counted. It may have several errors, of which the last is the best."""
        self._count = 0

    @property
    def is_over(self) -> bool:
        """True if the move waits no longer for the replica."""
        return self._count >= _MOST_FAILED_LOADS

    def check(self) -> None:
        """Count the failure of the last load, unless it was counted. Raises `NotReady` after too many."""
        error = self._replica.service.error
        if error is None or error is self._last or isinstance(error, NotReady | NodeDrained):
            return
        counted, self._last, self._epoch = self._epoch, error, _epoch_of(self._replica)
        if counted == self._epoch:
            return
        self._count += 1
        if self.is_over:
            raise NotReady(
                f"{self._model} could not be loaded in {self._count} attempts, and is tried again later: {error}"
            )


@dataclass
class _Step:
    """Move of one model in progress."""

    hosted: HostedModel
    work: asyncio.Task[Any]
    reason: str = ""
    """Reason why the model is unloaded instead; empty if it is not."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Moves:
    """Moves of the instances of a head, one at a time, and unloading, which may end a move."""

    def __init__(
        self,
        machines: Callable[[], Machines],
        hosted: Callable[[], Sequence[HostedModel]],
        make_replica: MakeReplica,
        one_at_a_time: asyncio.Lock,
        ready: Ready,
    ) -> None:
        """Start without a move.

        Args:
            machines: returns the machines, once there are some.
            hosted: returns all models.
            make_replica: makes a replica that takes the place of another one.
            one_at_a_time: lock for loads.
            ready: receives each instance that serves.
        """
        self._machines, self._hosted, self._make_replica = machines, hosted, make_replica
        self._one_at_a_time, self._ready = one_at_a_time, ready
        self._has_ended = False
        self._moving: set[asyncio.Task[Any]] = set()
        self._step: _Step | None = None
        self._to_unload: list[HostedModel] = []
        """Models whose unloading by force has been requested; none of them begins to move."""

    def stop(self) -> None:
        """Cancel moves, and refuse new ones, because the head ends. Requests continue where they are."""
        self._has_ended = True
        for moving in self._moving:
            moving.cancel()

    async def drain(self, node: str, *, force: bool) -> Sequence[Moved]:
        """Move all layers away from a machine, given by id or name, which gets none until it leaves or is readmitted.

        The move continues if the caller is cancelled.
        """
        self._check_running()
        machines = self._machines()
        return await self._to_its_end(
            self._drain(machines, find_node(machines, node), node, force=force), f"drain {node}"
        )

    async def split_again(self, hosted: HostedModel, choose: Choose, *, may_pause: bool) -> Moved | None:
        """Move a model with one replica to the best split of its layers. The move continues if the caller is cancelled.

        Args:
            hosted: the model.
            choose: returns the way to move, once no other load or move is in progress; None: there is no better split.
            may_pause: True to load the model again if the machines turn out to have no room for both.

        Raises:
            NotReady: loads have failed several times, and others are tried without the move.
            RingError: the other split cannot be loaded. The present one serves, or the model is loaded again.
        """
        self._check_running()
        return await self._to_its_end(
            self._split_again(hosted, choose, may_pause=may_pause), f"replan {hosted.model_id}"
        )

    async def unload(self, hosted: HostedModel, *, force: bool) -> None:
        """Unload a model. By force, end its requests, and its move in progress.

        Raises:
            Conflict: it answers requests, and `force` is False.
        """
        step = self._step
        if not force:
            await self._unload(hosted, force=False)
        else:
            self._to_unload.append(hosted)
            try:
                if step is not None and step.hosted is hosted:
                    # The move may wait for long answers, or for loads, and no other load begins before its end.
                    if not step.reason:
                        step.reason = _unload_reason(hosted)
                        step.work.cancel()
                    await step.ended.wait()
                if step is None or not step.reason or hosted.replicas:
                    await self._unload(hosted, force=True)
            finally:
                self._to_unload.remove(hosted)
        log.info("Unloaded %s", hosted.model_id)

    async def _unload(self, hosted: HostedModel, *, force: bool) -> None:
        async with self._one_at_a_time:
            busy = hosted.open_requests
            if busy and not force:
                raise Conflict(
                    f"{hosted.model_id} is answering {busy} request{'s' * (busy > 1)}: wait for them, "
                    'or unload it with "force": true, which ends them.'
                )
            await hosted.stop(_unload_reason(hosted))

    async def _unless_unloaded(self, hosted: HostedModel, work: Coroutine[Any, Any, Result]) -> Result:
        """Move one model. Raises `_Unloaded` if it is unloaded instead."""
        if hosted in self._to_unload:
            work.close()
            await hosted.stop(_unload_reason(hosted))
            raise _Unloaded(f"{hosted.model_id} was unloaded before it moved.")
        step = self._step = _Step(hosted, asyncio.create_task(work))
        try:
            try:
                moved = await step.work
            except (asyncio.CancelledError, RingError):
                if not step.reason or self._has_ended:
                    raise
            else:
                if not step.reason:
                    return moved
            await hosted.stop(step.reason)
        finally:
            self._step = None
            step.ended.set()
        raise _Unloaded(f"{hosted.model_id} was unloaded while it moved.")

    def _check_running(self) -> None:
        if self._has_ended:
            raise NotReady("The server is shutting down.")

    async def _to_its_end(self, work: Coroutine[Any, Any, Result], name: str) -> Result:
        moving = asyncio.create_task(work, name=name)
        self._moving.add(moving)
        moving.add_done_callback(self._moving.discard)
        return await asyncio.shield(moving)

    async def _split_again(self, hosted: HostedModel, choose: Choose, *, may_pause: bool) -> Moved | None:
        async with self._one_at_a_time:
            way = await choose()
            if way is None:
                return None
            (replica,) = hosted.replicas
            return await self._unless_unloaded(
                hosted, self._move_to_split(hosted, replica, way, may_pause=may_pause)
            )

    async def _move_to_split(
        self, hosted: HostedModel, replica: Replica, way: MoveWay, *, may_pause: bool
    ) -> Moved:
        why = ""
        if way == "beside":
            started = time.monotonic()
            try:
                moved = await hosted.replace(replica, self._make_replica(hosted, replica), self._ready)
            except PlanError as error:
                if not may_pause:
                    raise
                why = str(error)
            else:
                return Moved(hosted.model_id, "beside", moved, time.monotonic() - started)
        if way != "after":
            try:
                return await self._change_stages(hosted, replica, why, may_pause=may_pause)
            except UnchangeableWorkers as error:
                if not may_pause or replica.service.error is not None:
                    raise
                why = f"{why} {error}".strip()
        return await self._load_again(hosted, replica, why)

    async def _change_stages(
        self, hosted: HostedModel, replica: Replica, why: str, *, may_pause: bool
    ) -> Moved:
        """Let workers load the layers that they gain, and change over."""
        started, before = time.monotonic(), _epoch_of(replica)
        reshaping = await replica.split_again(
            f"Workers of {hosted.model_id} change to another split.", may_pause=may_pause
        )
        paused, requests = time.monotonic(), reshaping.paused_requests
        log.warning("%s pauses while its workers change to another split. %s", hosted.model_id, why)
        await self._until_served(hosted, replica, before)
        if reshaping.problem is not None:
            raise reshaping.problem
        now = time.monotonic()
        # After a loss in the pause, it may have been loaded as a whole.
        way: MoveWay = "ranges" if _epoch_of(replica)[0] == before[0] else "after"
        log.warning(
            "%s has changed to another split: it loaded %.1f MB, and paused for %.1f s",
            *(hosted.model_id, reshaping.loaded_bytes / 1e6, now - paused),
        )
        moved = Moved(hosted.model_id, way, requests, now - started, why, now - paused)
        return replace(moved, loaded_bytes=reshaping.loaded_bytes)

    async def _load_again(self, hosted: HostedModel, replica: Replica, why: str) -> Moved:
        """End the present instance, and load another one."""
        started, requests = time.monotonic(), len(replica.service.engine.requests())
        log.warning("%s pauses while it is loaded again with another split. %s", hosted.model_id, why)
        before = _epoch_of(replica)
        sites = () if replica.placement is None else replica.placement.nodes
        why_lost = f"The layers of {hosted.model_id} are split again."
        replica.drain(frozenset(site.node for site in sites), why_lost)
        await self._until_served(hosted, replica, before)
        seconds = time.monotonic() - started
        return Moved(hosted.model_id, "after", requests, seconds, why, seconds)

    @staticmethod
    async def _until_served(hosted: HostedModel, replica: Replica, before: tuple[str, int]) -> None:
        """Wait until a replica serves in a later epoch, or as another instance.

        Raises:
            PlanError: it does not fit.
            NotReady: too many loads have failed.
        """
        failed = FailedLoads(hosted.model_id, replica)
        while (error := replica.service.error) is not None or _epoch_of(replica) == before:
            if isinstance(error, PlanError):
                raise error
            failed.check()
            await asyncio.sleep(_LOOK_S)

    async def _drain(self, machines: Machines, node: str, name: str, *, force: bool) -> Sequence[Moved]:
        moved: list[Moved] = []
        failed: dict[Replica, FailedLoads] = {}
        session = _session(machines, node)
        async with self._one_at_a_time:
            if _session(machines, node) != session:
                raise Conflict(
                    f"{name} has left the cluster, or joined it again, before its layers could move."
                )
            if not machines.cluster_view().membership.usable.without({node}).members:
                raise Conflict(
                    f"{name} is the only machine that may have layers, so they cannot move elsewhere."
                )
            await machines.drain(node)
            log.warning("%s is drained: its layers move to other machines", name)
            try:
                # Once it has left, recoveries place its layers.
                while _is_drained(machines, node) and (found := self._using(node, failed)) is not None:
                    hosted, replica = found
                    loads = failed.setdefault(replica, FailedLoads(hosted.model_id, replica))
                    try:
                        work = self._move(hosted, replica, node, loads, force=force)
                        moved += await self._unless_unloaded(hosted, work)
                    except _Unloaded as error:
                        log.warning("%s has no layers of %s any more: %s", name, hosted.model_id, error)
            except BaseException as error:
                await machines.drain(node, is_drained=False)
                log.warning("%s is not drained: %s", name, error)
                raise
        log.warning("%s has no layers any more", name)
        return moved

    async def readmit(self, node: str) -> None:
        """Let plans use a drained machine again."""
        machines = self._machines()
        async with self._one_at_a_time:
            await machines.drain(find_node(machines, node), is_drained=False)

    def _using(self, node: str, failed: Mapping[Replica, FailedLoads]) -> tuple[HostedModel, Replica] | None:
        """Return a replica with layers on a node, or about to have some; None without one.

        Those that do not fit, or whose loads have failed too often, have none.
        """
        return next(
            (
                (hosted, replica)
                for hosted in self._hosted()
                for replica in hosted.replicas
                if _uses(replica, node)
                and not isinstance(replica.service.error, PlanError)
                and not (replica in failed and failed[replica].is_over)
            ),
            None,
        )

    async def _move(
        self, hosted: HostedModel, replica: Replica, node: str, failed: FailedLoads, *, force: bool
    ) -> Sequence[Moved]:
        """Move a replica away from a node. While it is being loaded, wait a moment, and return nothing."""
        if replica.service.error is not None:
            # It was planned before, perhaps with this node.
            try:
                failed.check()
            except NotReady as error:
                if not force:
                    raise
                log.warning("It has no layers to move: %s", error)
            else:
                await asyncio.sleep(_LOOK_S)
            return ()
        started, requests = time.monotonic(), len(replica.service.engine.requests())
        try:
            moved = await hosted.replace(replica, self._make_replica(hosted, replica), self._ready)
        except RingError as error:
            why = str(error)
        else:
            return (Moved(hosted.model_id, "beside", moved, time.monotonic() - started),)
        if not force:
            await replica.check_drain(frozenset({node}))
        log.warning(
            "%s pauses while it is loaded again, because no second instance could be loaded: %s",
            hosted.model_id,
            why,
        )
        paused = time.monotonic()
        try:
            await self._until_left(replica, node, failed)
        except (PlanError, NotReady) as error:
            if not force:
                raise
            log.warning("Answers of %s wait until it can be loaded: %s", hosted.model_id, error)
            why = f"{why} It does not serve yet: {error}"
        now = time.monotonic()
        return (Moved(hosted.model_id, "after", requests, now - started, why, now - paused),)

    @staticmethod
    async def _until_left(replica: Replica, node: str, failed: FailedLoads) -> None:
        """Replace the ranks on a node, and wait until all serve. Raises what `_until_served` raises."""
        while (error := replica.service.error) is not None or _uses(replica, node):
            if isinstance(error, PlanError):
                raise error
            failed.check()
            if error is None:
                replica.drain(frozenset({node}), f"{node} is needed for something else.")
            await asyncio.sleep(_LOOK_S)


def _epoch_of(replica: Replica) -> tuple[str, int]:
    """Return the name and the epoch of a replica's instance."""
    info = replica.service.info
    return info.name, info.epoch


def _session(machines: Machines, node: str) -> int | None:
    member = machines.cluster_view().membership.members.get(node)
    return None if member is None else member.session


def _unload_reason(hosted: HostedModel) -> str:
    return f"{hosted.model_id} was unloaded."


def _is_drained(machines: Machines, node: str) -> bool:
    return node in machines.cluster_view().membership.drained


def _uses(replica: Replica, node: str) -> bool:
    placement = replica.placement
    return placement is not None and node in {site.node for site in placement.nodes}


def find_node(machines: Machines, name: str) -> str:
    """Return the id of a connected machine, given by its id or name.

    Raises:
        RequestError: none or several are called so.
    """
    view = machines.cluster_view()
    members = view.membership.members
    found = [node for node, member in members.items() if name in (node, member.machine)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(sorted(readable_names(view).values())) or "none"
    problem = f"Several machines are called {name}; give an id" if found else f"No machine is called {name}"
    raise RequestError(f"{problem}: connected are {names}.", param="node")
