"""Replica of a model, which loads a new instance after each loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Protocol

from mlx_ring.cluster.deployment import close_sites
from mlx_ring.cluster.relinking import unless_left, unless_returned
from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import NodeDrained, NotReady, PlanError, RingError, WorkerLost, WorkerStuck
from mlx_ring.core.logs import set_log_epoch
from mlx_ring.core.traces import Tracing
from mlx_ring.engine.live_request import Hold, InProgress, LiveRequest, judge
from mlx_ring.engine.resumption import FIRST_KEPT, KeptKv, LeftKv
from mlx_ring.engine.takeover import settle
from mlx_ring.head.instance import Epoch, Instance, stop_workers
from mlx_ring.head.instance_view import FIRST_EPOCH, InstanceService, Recoveries
from mlx_ring.head.kv_memory import KvShares
from mlx_ring.head.nodes import CurrentWatch, Machines, ModelRoom
from mlx_ring.head.patching import EarlyPlan, Remains, can_be_patched
from mlx_ring.head.placing import Order, Placement, placed_stages
from mlx_ring.head.reshaping import Reshaping
from mlx_ring.head.served_model import ServedModel
from mlx_ring.head.step_down import FirstLoads
from mlx_ring.planner.replan import with_loaded
from mlx_ring.rpc.protos import agent_pb2
from mlx_ring.settings.config import Settings

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
"""Pauses between a failed load and the next attempt. After a loss there is none, until losses are frequent."""
_MOST_FAILED_PATCHES = 3
"""Number of patches in a row that may be lost before they serve, until the model is loaded as a whole."""


class Watcher(Protocol):
    """Observer of the loading of instances."""

    def planned(self, instance: str, placement: Placement) -> None:
        """Report the placement of an instance."""
        ...

    def loading(self, instance: str, progress: agent_pb2.StageProgress) -> None:
        """Report the loading progress of a worker."""
        ...

    def ended(self, instance: str) -> None:
        """Report that an instance has ended, which may not have served."""
        ...


class Replica:
    """Replica of a model, which runs until it is cancelled."""

    def __init__(
        self,
        settings: Settings,
        served: ServedModel,
        machines: Machines,
        shares: KvShares,
        watcher: Watcher,
        *,
        nodes: int,
        candidates: frozenset[str] | None,
        replicas: int,
        meter: Meter,
        tracing: Tracing | None,
        hold: Hold | None,
        room: ModelRoom,
        replaces: str = "",
    ) -> None:
        """Prepare a replica.

        Args:
            settings: settings of the model.
            served: the model.
            machines: the machines to use.
            shares: shares of KV memory.
            watcher: observer of loading.
            nodes: number of nodes that must be present for the first instance.
            candidates: the nodes that the first instance may have; None: any.
            replicas: number of replicas of the model.
            meter: measurements of its instances.
            tracing: destination of traces.
            hold: receives the requests of a lost instance; None: they end with an error.
            room: memory for it.
            replaces: instance of another replica that its first one takes the place of; empty: none.
        """
        self._hold, self._room, self._replaces = hold, room, replaces
        self._running: Instance | None = None
        self._order: Order | None = None
        self._reshaping: Reshaping | None = None
        """Change to the next plan, whose layers are loaded as far as there is room."""
        self._in_progress: InProgress = {}
        """Requests that were in progress when the last instance was lost."""
        self._left: Mapping[LiveRequest, LeftKv] = {}
        """KV that the last instance left of its requests."""
        self._kept_ids = count(FIRST_KEPT)
        self.had: Mapping[str, frozenset[int]] = {}
        """Layers with which each node has served."""
        self.meter, self._tracing = meter, tracing
        self._settings, self._served, self._machines = settings, served, machines
        self._shares, self._watcher = shares, watcher
        self._nodes, self._candidates, self._replicas = nodes, candidates, replicas
        self._retries = False
        """True once an instance of the model has served. From then on each failed load is repeated, on any nodes."""
        self._begun_s = 0.0
        """Unix time at which its last instance, or the last patch of it, began to load."""
        self._failed_patches = 0
        """Number of patches in a row that were lost before they served."""
        self._next_number = FIRST_EPOCH
        """Smallest number of its next epoch."""
        kv_bits = 0 if settings.kv_bits == "off" else int(settings.kv_bits)
        self._recoveries = Recoveries(served.names[0], meter)
        self.service = InstanceService(served.folder.num_layers, kv_bits, self._recoveries)

    async def run(self, ready: Callable[[float], None], others_serve: Callable[[], bool]) -> None:
        """Run one instance after the other.

        Args:
            ready: receives each instance's load time in seconds.
            others_serve: called when the first instance is lost before it serves. If other replicas have served, it is
                loaded again.

        Raises:
            RingError: the first instance could not be loaded, also if that was tried again after the loss of a worker.
        """
        pause_s = _FIRST_PAUSE_S
        first_loads = FirstLoads(self._served.names[0], self._settings, is_beside=bool(self._replaces))
        while True:
            self._begun_s, is_adopted, lacks_room = time.time(), False, False
            started, freed = time.monotonic(), self._room.freed
            try:
                order = Order(
                    self._served,
                    self._settings,
                    self._next_number,
                    # After the first instance, use the nodes that are present.
                    nodes=1 if self._retries else self._nodes,
                    only=None if self._retries else self._candidates,
                    replicas=self._replicas,
                    replaces="" if self._retries else self._replaces,
                )
                self._order = order
                epoch = await self._machines.next_epoch(order)
                self._next_number, is_adopted = epoch.number + 1, bool(epoch.loaded)
                # The machines may have been awaited for long.
                started = time.monotonic()
                try:
                    await self._run(order, epoch, ready)
                finally:
                    self._watcher.ended(epoch.instance)
                # Interrupted answers wait for the next load.
                pause_s = 0.0
            except RingError as error:
                self.meter.count_loss(error)
                if is_adopted and not self._retries:
                    log.warning("The workers of an earlier head cannot be adopted: %s", error)
                    continue
                if isinstance(error, WorkerLost | WorkerStuck) and not self._retries:
                    self._retries = others_serve()
                if not self._retries:
                    first_loads.check(error, time.monotonic() - started)
                self.service.lose(error)
                if self._hold is not None:
                    # Those that wait already give up with the newest reason.
                    self._hold((), error)
                self._machines.record_failure(error, self._begun_s)
                lacks_room = isinstance(error, PlanError)
                if isinstance(error, PlanError) and await self._make_room(error, freed, insists=not pause_s):
                    continue
                pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * pause_s))
            limit_s = self._recoveries.pause_s
            longest_s = max(pause_s, limit_s)
            wait = f" in {longest_s:g} s" if longest_s else ""
            log.warning("Loading %s again%s", self._served.names[0], wait)
            await asyncio.sleep(limit_s)
            changed = (freed.wait(),) if lacks_room else ()
            await self._wait_for_change(longest_s - limit_s, *changed)

    async def _make_room(self, error: PlanError, freed: asyncio.Event, *, insists: bool) -> bool:
        """Make room. Return True if there may be some, also because a machine has joined while others load."""
        making = asyncio.create_task(self._room.make(error, insists=insists))
        await self._wait_for_change(_LONGEST_PAUSE_S, making, freed.wait())
        return not making.done() or making.result()

    async def _wait_for_change(self, timeout_s: float, *changes: Awaitable[object]) -> None:
        """Wait until another machine joins, or one of these changes, at most this long. The others are cancelled."""
        waits = [*map(asyncio.ensure_future, (*changes, self._machines.wait_for_node(timeout_s)))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    @property
    def placement(self) -> Placement | None:
        """Placement of its present or last instance; None before the first one."""
        return self.service.placement

    async def check_drain(self, nodes: frozenset[str]) -> None:
        """Check that other nodes have room for the ranks on these, which plans may no longer use.

        Raises:
            PlanError: they have not.
        """
        if self._running is None or self._order is None:
            return
        remains = self._running.without_drained(nodes)
        order = self._patch_order(self._order, remains)
        if can_be_patched(self._settings.link, remains):
            with contextlib.suppress(PlanError):
                plan = await self._machines.plan_patch(order, remains)
                await close_sites(() if plan is None else plan.room.sites)
                return
        # All of its ranks may give their memory.
        await self._machines.check_whole(order, remains)

    def drain(self, nodes: frozenset[str], why: str) -> None:
        """Replace the ranks on these nodes, which answer; load the model as a whole if they are all. Answers pause meanwhile."""
        if self._running is not None:
            self._running.drain(nodes, why)

    async def split_again(self, why: str, *, may_pause: bool) -> Reshaping:
        """Load the layers that workers gain for the best plan, and let answers pause while they change to it.

        Args:
            why: reason of the pause.
            may_pause: True if more may be loaded in the pause than the plan predicts.

        Returns:
            The change, which follows in a moment.

        Raises:
            RingError: it could not be loaded. The present plan serves, unless it was lost meanwhile.
        """
        running, order = self._running, self._order
        if running is None or order is None or self.service.error is not None:
            raise NotReady(f"{self._served.names[0]} is being loaded; ask again in a moment.")
        remains = running.without_drained(frozenset())
        order = self._patch_order(order, remains)
        self._next_number = order.number + 1
        plan = await self._machines.plan_again(order, remains)
        try:
            make = partial(Reshaping, order, remains, plan, self._shares, may_pause=may_pause)
            reshaping = await asyncio.to_thread(make)
        except BaseException:
            await close_sites(plan.room.sites)
            raise
        try:
            await reshaping.load()
            await settle(engine := self.service.engine)
            running.check_serves()
        except BaseException:
            await reshaping.abandon()
            raise
        reshaping.leave(engine)
        self._reshaping, reshaping.paused_requests = reshaping, len(engine.requests())
        running.drain(frozenset(), why)
        return reshaping

    def _keep(self, lives: Iterable[LiveRequest], loss: RingError) -> None:
        interrupted = list(lives)
        self._in_progress = {live: live.unanswered for live in interrupted if live.unanswered}
        self._left = {live: live.left for live in interrupted if live.left is not None}
        if self._hold is not None:
            self._hold(interrupted, loss)

    async def _run(self, order: Order, epoch: Epoch, ready: Callable[[float], None]) -> None:
        """Run an instance, and after each loss what is left of it with new workers in place of the lost ones."""
        current, self._failed_patches = CurrentWatch(self._machines), 0
        remains: Remains | None = None
        early = EarlyPlan(
            lambda remains: self._machines.plan_patch(self._patch_order(order, remains), remains)
        )
        with self._machines.watching(epoch.instance, current), contextlib.closing(early):
            while True:
                set_log_epoch(epoch.number)
                before = self._in_progress, self._left
                running = self._begin(epoch, early)
                current.follow(running.watch)
                try:
                    loss = await self._serve(running, epoch, ready)
                except asyncio.CancelledError:
                    if self._reshaping is not None:
                        await self._reshaping.abandon()
                    raise
                if running.is_dropped:
                    self._in_progress, self._left = before
                    remains = remains and epoch.all_stay(remains)
                else:
                    if not isinstance(loss, NodeDrained):
                        self.meter.count_loss(loss)
                    if loss is None or not judge(self._in_progress, loss, running.lost_ranks):
                        self._machines.record_failure(loss, self._begun_s)
                    remains = running.remains
                reshaping, self._reshaping = self._reshaping, None
                current.lost_nodes.clear()
                patched = await self._change(order, epoch, remains, early, reshaping)
                if patched is None:
                    return
                epoch, self._begun_s = patched, time.time()

    def _patch_order(self, order: Order, remains: Remains) -> Order:
        """Return the order of the epoch that follows a lost one."""
        settings = self._settings.model_copy(update=dict(remains.placement.group_settings))
        number = max(self._next_number, remains.epoch + 1)
        return replace(order, settings=settings, number=number, nodes=1, only=None)

    async def _serve(
        self, running: Instance, epoch: Epoch, ready: Callable[[float], None]
    ) -> RingError | None:
        """Run an instance, and return its loss. A patch that is lost before it serves may be patched again.

        Raises:
            RingError: it was lost before it served, and must be loaded as a whole.
        """

        def serves(load_s: float) -> None:
            self.had = with_loaded(self.had, (placed_stages(epoch.placement, {}),))
            self._machines.release(epoch.instance)
            ready(load_s)

        try:
            await running.run(serves)
        except RingError as error:
            if running.is_dropped:
                return None
            self._failed_patches += 1
            if running.remains is None:
                raise
            if self._failed_patches == _MOST_FAILED_PATCHES:
                await self._stop(epoch, running.remains)
                raise
            if error is not running.loss:
                self.service.lose(error)
            return error
        finally:
            if epoch.returning is not None:
                epoch.returning.cancel()
        self._retries, self._failed_patches = True, 0
        return running.loss

    def _begin(self, epoch: Epoch, early: EarlyPlan) -> Instance:
        self._in_progress, self._left = {}, {}
        self.service.begin(epoch.instance, epoch.number, epoch.placement)
        self._watcher.planned(epoch.instance, epoch.placement)

        def loading(progress: agent_pb2.StageProgress) -> None:
            self.service.record_loading(progress)
            self._watcher.loading(epoch.instance, progress)

        self._running = Instance(
            self._settings,
            self._served,
            self.service,
            epoch,
            loading,
            self._shares,
            self.meter,
            self._tracing,
            None if self._hold is None else self._keep,
            early.follow,
            is_beside=bool(self._replaces) and not self._retries,
        )
        return self._running

    async def _stop(self, epoch: Epoch, remains: Remains) -> None:
        """Stop what is left of an instance. Do not wait for nodes that do not answer, or leave meanwhile."""

        async def wait(node: str, work: Awaitable[None]) -> None:
            if node not in remains.silent_nodes:
                await unless_left(node, work, self._machines.wait_until_left)

        await stop_workers(epoch, wait)

    async def _change(
        self,
        order: Order,
        epoch: Epoch,
        remains: Remains | None,
        early: EarlyPlan,
        reshaping: Reshaping | None,
    ) -> Epoch | None:
        """Return the epoch that follows a lost one, of its plan or the next one; None if all workers have ended."""
        if reshaping is None:
            return remains and await self._patch(order, epoch, remains, early)
        patched: Epoch | None = None
        try:
            if remains is not None:
                patched = await self._patch(order, epoch, reshaping.left(remains), early)
        finally:  # also if the server ends meanwhile
            await (reshaping.abandon() if patched is None else reshaping.close())
        left = patched and reshaping.left_kv(patched.prepared or {}, self._left)
        return patched and replace(patched, kept={}, reshaping=reshaping, left=left)

    async def _patch(self, order: Order, epoch: Epoch, remains: Remains, early: EarlyPlan) -> Epoch | None:
        """Replace the lost ranks, unless all answer again. If that is impossible, stop the others and return None."""
        returned = self._machines.wait_for_return(remains) if remains.may_return else None
        returning = None if returned is None else asyncio.create_task(returned, name="return of workers")
        try:
            patched = await unless_returned(returning, self._place_again(order, remains, early))
            if patched is None:
                log.warning("The lost workers of %s answer again: all of them stay", epoch.instance)
                remains, returning = remains.as_whole(), None
                patched = await self._place_again(order, remains, early)
        except BaseException as error:
            if returning is not None:
                returning.cancel()
            await self._stop(epoch, remains)
            if not isinstance(error, RingError):
                raise
            log.warning("%s is loaded as a whole: %s", self._served.names[0], error)
            return None
        superseded = epoch.superseded
        if remains.leaves_others:
            superseded = superseded.with_epoch(epoch.workers)
        else:
            await epoch.workers.leave({site.node for site in patched.placement.nodes})
        staying = (patched.prepared or {}).keys()
        log.warning(
            "Patching %s: %d of %d workers stay", self._served.names[0], len(staying), len(remains.places)
        )
        behind = 1 + max((place.stage for place in remains.places - staying), default=-1)
        kept = dict(self._choose_kept(behind))
        return replace(patched, kept=kept, returning=returning, superseded=superseded)

    async def _place_again(self, order: Order, remains: Remains, early: EarlyPlan) -> Epoch:
        await asyncio.sleep(self._recoveries.pause_s)
        plan = await early.take(remains)
        order = self._patch_order(order, remains)
        self._next_number = order.number + 1
        return await self._machines.patch(order, remains, plan)

    def _choose_kept(self, first_stage: int) -> Iterator[tuple[LiveRequest, KeptKv]]:
        """Yield the KV that the stages from `first_stage` on keep of requests that still wait."""
        for live, left in self._left.items():
            kept = left.keep(live.sequence, first_stage, next(self._kept_ids))
            # Another replica may have taken it over since.
            if kept is not None and live.left is left and not live.has_ended:
                yield live, kept
