"""Heads whose replicas and machines only record what a move asks of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from mlx_ring.api.service import Moved
from mlx_ring.cluster.membership import Drained, Membership
from mlx_ring.core.errors import Conflict, PlanError, RingError
from mlx_ring.head.move_order import MoveOrder
from mlx_ring.head.moves import Choice, Moves
from mlx_ring.planner.replan import MoveWay, UnchangeableWorkers

NO_ROOM = PlanError("There is no room for 4 layers.")


class FakeService(SimpleNamespace):
    """Service of a replica, which reports changes as the real one does."""

    changed: asyncio.Event

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in ("error", "info"):
            self.change()

    def change(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class FakeReplica:
    """Replica with layers on some nodes."""

    def __init__(self, *nodes: str) -> None:
        self.service: Any = FakeService(
            changed=asyncio.Event(),
            error=None,
            engine=SimpleNamespace(requests=lambda: [1, 2]),
            info=SimpleNamespace(name="demo-1", epoch=1),
        )
        self.place(*nodes)
        self.refusal: RingError | None = None
        self.drained: list[frozenset[str]] = []
        self.has_scope, self.has_changed = True, False
        self.problem: RingError | None = None
        """Reason why its workers go back to their stages."""

    def place(self, *nodes: str) -> None:
        self.placement = SimpleNamespace(nodes=[SimpleNamespace(node=node) for node in nodes])

    async def check_drain(self, nodes: frozenset[str]) -> None:
        del nodes
        if self.refusal is not None:
            raise self.refusal

    def drain(self, nodes: frozenset[str], why: str) -> None:
        self.drained.append(nodes)
        if why == "The layers of demo are split again.":
            self.service.info.name = "demo-2"
        else:
            assert why == "b is needed for something else."
        self.place("a")
        self.service.change()

    async def split_again(self, why: str, *, may_pause: bool) -> Any:
        """Change to another plan, whose layers are as many bytes as machines, unless only the whole model can be loaded."""
        del why, may_pause
        if not self.has_scope:
            raise UnchangeableWorkers("One machine has several stages.")
        self.has_changed, self.service.info.epoch = True, 2
        return SimpleNamespace(paused_requests=2, loaded_bytes=2, problem=self.problem)


class FakeHosted:
    """Model with one replica; a second one may not fit."""

    model_id = "demo"

    def __init__(self, replica: FakeReplica, problem: RingError | None = None) -> None:
        self.replicas, self.problem = [replica], problem
        self.open_requests = 2
        self.stopped: list[str] = []
        self.is_moving, self.is_idle, self.last_requested = False, False, 0.0
        self.error: RingError | None = None
        self.answers: asyncio.Event | None = None
        """End of answers for which a move waits; None if there are none."""
        self.is_waiting = asyncio.Event()

    async def stop(self, reason: str) -> None:
        self.stopped.append(reason)
        self.replicas = []

    async def replace(
        self, old: FakeReplica, new: FakeReplica, ready: object, loaded: Callable[[], None], /
    ) -> int:
        del ready
        if self.problem is not None:
            raise self.problem
        assert self.replicas == [old]
        loaded()
        if self.answers is not None:
            self.is_waiting.set()
            await self.answers.wait()
        self.replicas = [new]
        return 2


def replacement(*_: object) -> FakeReplica:
    return FakeReplica("a")


class Head:
    """Moves between machines, of which `b` is drained."""

    def __init__(self, hosted: FakeHosted, *nodes: str, others: Sequence[FakeHosted] = ()) -> None:
        members: Any = {
            node: SimpleNamespace(node=node, machine=f"{node}-machine", session=1) for node in nodes
        }
        self.membership, self.changed = Membership(members), asyncio.Condition()
        self.order = MoveOrder()
        moves = Moves(
            lambda: cast("Any", self),
            lambda: cast("Any", [hosted, *others]),
            cast("Any", replacement),
            self.order,
            cast("Any", print),
        )
        self.moves = moves

    def cluster_view(self) -> Any:
        return SimpleNamespace(membership=self.membership)

    async def drain(self, node: str, *, is_drained: bool = True) -> None:
        async with self.changed:
            self.membership = self.membership.apply(Drained(node, is_drained))
            self.changed.notify_all()

    def lacks(self, nodes: int) -> bool:
        return len(self.membership.usable.members) < nodes

    async def wait_until_lacking(self, nodes: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.lacks(nodes))

    async def wait_until_undrained(self, node: str) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: node not in self.membership.drained)

    async def leave(self, node: str) -> None:
        async with self.changed:
            left = self.membership.without({node})
            self.membership = replace(left, drained=left.drained - {node})
            self.changed.notify_all()


def drain(head: Head, *, force: bool = False) -> list[Moved]:
    return list(asyncio.run(head.moves.drain("b-machine", force=force)))


def choice(hosted: FakeHosted, way: MoveWay, *nodes: str, refusal: Conflict | None = None) -> Choice:
    (replica,) = hosted.replicas
    return Choice(cast("Any", replica), way, frozenset(nodes), refusal)


def split_again(hosted: FakeHosted, way: MoveWay | None, *, may_pause: bool = False) -> Moved | None:
    async def choose() -> Choice | None:
        return None if way is None else choice(hosted, way)

    moves = Head(hosted, "a", "b").moves
    return asyncio.run(moves.split_again(cast("Any", hosted), choose, may_pause=may_pause))


def named(name: str, *nodes: str, problem: RingError | None = None) -> FakeHosted:
    hosted = FakeHosted(FakeReplica(*nodes), problem)
    hosted.model_id = name
    return hosted


def begin_split(
    head: Head, hosted: FakeHosted, way: MoveWay, *nodes: str, refusal: Conflict | None = None
) -> asyncio.Task[Moved | None]:
    async def choose() -> Choice:
        return choice(hosted, way, *nodes, refusal=refusal)

    return asyncio.create_task(head.moves.split_again(cast("Any", hosted), choose, may_pause=True))
