"""Order of loads, moves and unloads of a head's models, and what makes room for them.

Loads come one after the other, so that no two count on the same memory. A move has its turn until its next instance
serves. Then it may wait long for answers of the present one. Meanwhile other models load and move: the memory of both
instances is taken. Those without room, or with machines in common that would have to pause, wait until a move ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mlx_ring.core.errors import Conflict, ContextKept, NodeDrained, NotReady, PlanError, RingError
from mlx_ring.head.instance_view import InstanceService
from mlx_ring.head.model import JUST_NOW_S, HostedModel
from mlx_ring.head.replica import Replica

log = logging.getLogger(__name__)

_BUSY_WAIT_S, _LOOK_S = 30.0, 0.1
"""Longest wait of a load for the end of other models' requests, and interval of the looks at these."""
_MOST_FAILED_LOADS = 5
"""Failed loads after which a move ends. Of the losses of workers, some are mended first without a whole load."""
Result = TypeVar("Result")


class Unloaded(Conflict):
    """The model was unloaded while it moved."""


class NoRoomYet(PlanError):
    """There is no room, but there may be some once another move has ended."""


class Turn:
    """Turn to plan and load, which may end before its move does."""

    def __init__(self, loading: asyncio.Lock) -> None:
        """Hold the lock of loads."""
        self._loading = loading
        self.is_held = True
        self.frees: AbstractSet[str] = frozenset()
        """Machines of the instance that ends once its answers have; empty unless the move only waits for these."""

    def end(self, frees: AbstractSet[str] = frozenset()) -> None:
        """Let others load. `frees` are machines that have more room once the move has ended."""
        # The move of a turn that ended before still frees them.
        self.frees |= frees
        if self.is_held:
            self.is_held = False
            self._loading.release()

    @contextlib.contextmanager
    def ends_after(self, wait_until_lacking: Callable[[int], Awaitable[None]], nodes: int) -> Generator[None]:
        """Let others load once fewer machines are connected, because the load then waits for these."""

        async def end() -> None:
            await wait_until_lacking(nodes)
            self.end()

        lacking = asyncio.create_task(end())
        try:
            yield
        finally:
            lacking.cancel()

    async def resume(self) -> None:
        """Wait for another turn, if this one has ended."""
        self.frees = frozenset()
        if not self.is_held:
            await self._loading.acquire()
            self.is_held = True


@dataclass
class _Move:
    """Move of one model in progress."""

    work: asyncio.Task[Any]
    turn: Turn
    reason: str = ""
    """Reason why the model is unloaded instead; empty if it is not."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


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
        counted, self._last, self._epoch = self._epoch, error, epoch_of(self._replica)
        if counted == self._epoch:
            return
        self._count += 1
        if self.is_over:
            raise NotReady(
                f"{self._model} could not be loaded in {self._count} attempts, and is tried again later: {error}"
            )


class MoveOrder:
    """Turns of loads and moves, and unloading, which may end a move."""

    def __init__(self) -> None:
        """Start without a move."""
        self._loading = asyncio.Lock()
        self._moves: dict[HostedModel, _Move] = {}
        self._drains: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._to_unload: list[HostedModel] = []
        """Models whose unloading by force has been requested; none of them begins to move."""
        self.freed = asyncio.Event()
        """Event that is set, and replaced, when there may be more room: a move has ended, or a model was unloaded."""
        self.drains_changed = asyncio.Event()
        """Event that is set, and replaced, when a drain waits for its turn or has ended, or a machine is readmitted."""
        self.has_ended = False
        """True once the head ends, so that cancelled moves unload nothing."""

    @contextlib.asynccontextmanager
    async def turn(self, hosted: HostedModel | None = None) -> AsyncGenerator[Turn]:
        """Wait for a turn, after the end of a model's present move, if one is given and has one."""
        while True:
            await self._loading.acquire()
            move = None if hosted is None else self._moves.get(hosted)
            if move is None:
                break
            self._loading.release()
            await move.ended.wait()
        turn = Turn(self._loading)
        try:
            yield turn
        finally:
            turn.end()

    def of_machine(self, node: str) -> asyncio.Lock:
        """Return the lock of a machine that is drained or readmitted."""
        return self._drains[node]

    def may_free(self, nodes: AbstractSet[str] | None = None) -> bool:
        """Report whether moves that only wait for answers free memory, also if only that of some machines counts."""
        freed = [move.turn.frees for move in self._moves.values()]
        return any(each if nodes is None else each & nodes for each in freed)

    async def load(
        self,
        hosted: HostedModel,
        load: Callable[[Turn], Awaitable[None]],
        models: Callable[[], Iterable[HostedModel]],
        *,
        may_evict: bool,
    ) -> None:
        """Load a model. If it does not fit, unload others for it, or wait until a move has ended.

        If the others only answer requests, wait for a while until one has none.

        Args:
            hosted: the model.
            load: loads it in a turn, which ends earlier if machines are missing.
            models: returns all models.
            may_evict: True if others may be unloaded.

        Raises:
            PlanError: it does not fit.
            NotReady: it does not fit beside models that answer requests.
        """
        until_s: float | None = None
        while True:
            busy: list[HostedModel] = []
            async with self.turn(hosted) as turn:
                while True:
                    freed = self.freed
                    try:
                        return await load(turn)
                    except PlanError as error:
                        problem = error
                    await turn.resume()
                    # An explicit context reserves the memory: no model is unloaded for it.
                    may_unload = may_evict and not isinstance(problem, ContextKept)
                    if may_unload and await unload_for(hosted, models()) is not None:
                        log.info("Trying %s again, which did not fit before: %s", hosted.model_id, problem)
                        self._free()
                        continue
                    if freed.is_set() or self.may_free():
                        break
                    busy = [other for other in models() if may_unload and _may_give_room(other, hosted)]
                    if not busy:
                        raise problem
                    break
            if not busy:
                log.info("%s is loaded once a move has ended: %s", hosted.model_id, problem)
                await freed.wait()
                continue
            until_s = time.monotonic() + _BUSY_WAIT_S if until_s is None else until_s
            await self._wait_until_idle(hosted, busy, freed, until_s, problem)

    async def _wait_until_idle(
        self,
        hosted: HostedModel,
        busy: Sequence[HostedModel],
        freed: asyncio.Event,
        until_s: float,
        problem: PlanError,
    ) -> None:
        """Wait until one of these models may be unloaded for another one, or there may be more room.

        Raises:
            NotReady: none is idle in time.
        """
        names = " and ".join(other.model_id for other in busy)
        log.info("%s is loaded once %s is idle: %s", hosted.model_id, names, problem)
        while not freed.is_set() and all(_is_busy(other, hosted) for other in busy):
            if time.monotonic() >= until_s:
                raise NotReady(
                    f"{hosted.model_id} was not loaded, because {names} {'is' if len(busy) == 1 else 'are'} busy: "
                    f"try again once {'it has' if len(busy) == 1 else 'they have'} no requests. {problem}"
                )
            await asyncio.sleep(_LOOK_S)

    async def make_room(self, hosted: HostedModel, models: Callable[[], Iterable[HostedModel]]) -> bool:
        """Unload the least recently used idle model for one that is loaded again after a loss.

        Return True if there may be more room than at the call.
        """
        freed = self.freed
        async with self.turn():
            if not freed.is_set() and await unload_for(hosted, models()) is None:
                return False
        self._free()
        return True

    async def move(self, hosted: HostedModel, turn: Turn, work: Coroutine[Any, Any, Result]) -> Result:
        """Move one model, in its turn. Raises `Unloaded` if it is unloaded instead."""
        if hosted in self._to_unload:
            work.close()
            await hosted.stop(_unload_reason(hosted))
            raise Unloaded(f"{hosted.model_id} was unloaded before it moved.")
        move = self._moves[hosted] = _Move(asyncio.create_task(work), turn)
        has_begun = True
        try:
            try:
                moved = await move.work
            except (asyncio.CancelledError, RingError) as error:
                if not move.reason or self.has_ended:
                    has_begun = not isinstance(error, NoRoomYet)
                    raise
            else:
                if not move.reason:
                    has_begun = bool(moved)
                    return moved
            await hosted.stop(move.reason)
        finally:
            del self._moves[hosted]
            move.ended.set()
            if has_begun:
                self._free()
        raise Unloaded(f"{hosted.model_id} was unloaded while it moved.")

    async def unload(self, hosted: HostedModel, *, force: bool) -> None:
        """Unload a model. By force, end its requests, and its move in progress.

        Raises:
            Conflict: it answers requests, and `force` is False.
        """
        if not force:
            # At once, because it may be moving, and wait for answers, for long.
            _check_idle(hosted)
            async with self.turn(hosted):
                _check_idle(hosted)
                await hosted.stop(_unload_reason(hosted))
        else:
            self._to_unload.append(hosted)
            try:
                move = self._moves.get(hosted)
                if move is not None:
                    if not move.reason:
                        move.reason = _unload_reason(hosted)
                        move.work.cancel()
                    await move.ended.wait()
                if move is None or hosted.replicas:
                    async with self.turn(hosted):
                        await hosted.stop(_unload_reason(hosted))
            finally:
                self._to_unload.remove(hosted)
        self._free()
        log.info("Unloaded %s", hosted.model_id)

    def change_drains(self) -> None:
        """Set `drains_changed`, and replace it."""
        changed, self.drains_changed = self.drains_changed, asyncio.Event()
        changed.set()

    def _free(self) -> None:
        freed, self.freed = self.freed, asyncio.Event()
        freed.set()


def _check_idle(hosted: HostedModel) -> None:
    if busy := hosted.open_requests:
        raise Conflict(
            f"{hosted.model_id} is answering {busy} request{'s' * (busy > 1)}: wait for them, "
            'or unload it with "force": true, which ends them.'
        )


def _unload_reason(hosted: HostedModel) -> str:
    return f"{hosted.model_id} was unloaded."


def epoch_of(replica: Replica) -> tuple[str, int]:
    """Return the name and the epoch of a replica's instance."""
    info = replica.service.info
    return info.name, info.epoch


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait for one of these, and cancel the others."""
    waiting = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waiting:
            wait.cancel()


# ---- room


class RoomAmongModels:
    """Memory for a model, from others that are idle."""

    def __init__(
        self, order: MoveOrder, hosted: HostedModel, models: Callable[[], Iterable[HostedModel]]
    ) -> None:
        """Share the memory with `models`."""
        self._order, self._hosted, self._models = order, hosted, models

    @property
    def freed(self) -> asyncio.Event:
        return self._order.freed

    async def make(self, error: PlanError, *, insists: bool) -> bool:
        if isinstance(error, ContextKept) or not (insists or self._hosted.open_requests):
            return False
        return await self._order.make_room(self._hosted, self._models)


async def unload_for(hosted: HostedModel, models: Iterable[HostedModel]) -> HostedModel | None:
    """Unload the least recently used idle model for another one, and return it; None if there is none.

    A model that moves is not idle, although it may have no requests when its move ends. One that was lost stays: it is
    loaded again.
    """

    def is_quiet(other: HostedModel) -> bool:
        return _may_give_room(other, hosted) and not other.open_requests

    quiet = [other for other in models if is_quiet(other)]
    if quiet and not any(other.is_idle for other in quiet):
        # A request that waited for one of them may be about to begin.
        await asyncio.sleep(JUST_NOW_S)
    idle = [other for other in quiet if other.is_idle and is_quiet(other)]
    oldest = min(idle, key=lambda other: other.last_requested, default=None)
    if oldest is None:
        return None
    log.info("Unloading %s, the least recently used model, for %s", oldest.model_id, hosted.model_id)
    await oldest.stop(f"{oldest.model_id} was unloaded for another model.")
    return oldest


def _may_give_room(other: HostedModel, hosted: HostedModel) -> bool:
    """Report whether a model would be unloaded for another one, if it were idle."""
    return other is not hosted and bool(other.replicas) and other.error is None and not other.is_moving


def _is_busy(other: HostedModel, hosted: HostedModel) -> bool:
    return _may_give_room(other, hosted) and (bool(other.open_requests) or not other.is_idle)


def check_room(hosted: HostedModel, copies: int, models: Iterable[HostedModel], limit: int | None) -> None:
    """Check that the weights of all loaded models, with more copies of one, stay within --model-memory.

    Raises:
        PlanError: they do not.
    """
    if limit is None:
        return
    held = sum(len(other.replicas) * other.weight_bytes for other in models)
    wanted = copies * hosted.weight_bytes
    if held + wanted > limit:
        raise PlanError(
            f"{hosted.model_id} has {wanted / 1e9:.2f} GB of weights, {held / 1e9:.2f} GB are loaded already, "
            f"and --model-memory allows {limit / 1e9:.2f} GB: unload a model, or raise --model-memory."
        )


def promised_bytes(
    models: Iterable[HostedModel], without: InstanceService | None = None
) -> Mapping[str, int]:
    """Return the bytes that the plans of loaded models, except for one instance, count on, by node."""
    promised = Counter[str]()
    for hosted in models:
        for service in hosted.instances:
            view = None if service is without else service.view(hosted.model_id)
            if view is None or view.forecast is None:
                continue
            for stage, nodes in enumerate(view.nodes):
                for node, rank in zip(nodes, view.forecast.memory_of_ranks(stage), strict=True):
                    promised[node] += rank.total_bytes
    return promised
