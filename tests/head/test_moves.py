"""Moves of layers away from a machine, with replicas and machines that only record what is asked of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.eventually import run_tasks_until

from mlx_ring.api.service import Moved
from mlx_ring.cluster.membership import Drained, Membership
from mlx_ring.core.errors import (
    Conflict,
    NotReady,
    PlanError,
    RequestError,
    RingError,
    StepFailed,
    WorkerLost,
)
from mlx_ring.head.move_order import MoveOrder, unload_for
from mlx_ring.head.moves import Choice, FailedLoads, Moves
from mlx_ring.planner.replan import MoveWay, UnchangeableWorkers

NO_ROOM = PlanError("There is no room for 4 layers.")


class FakeReplica:
    """Replica with layers on some nodes."""

    def __init__(self, *nodes: str) -> None:
        self.service: Any = SimpleNamespace(
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
        self.membership = Membership(members)
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
        self.membership = self.membership.apply(Drained(node, is_drained))


def drain(head: Head, *, force: bool = False) -> list[Moved]:
    return list(asyncio.run(head.moves.drain("b-machine", force=force)))


def test_second_instance_takes_the_place_of_the_first() -> None:
    head = Head(FakeHosted(FakeReplica("a", "b")), "a", "b")
    (moved,) = drain(head)
    assert (moved.way, moved.requests, moved.why) == ("beside", 2, "")
    assert head.membership.drained == {"b"}
    assert drain(head) == []


def test_answers_pause_where_no_second_instance_fits() -> None:
    replica = FakeReplica("a", "b")
    (moved,) = drain(Head(FakeHosted(replica, NO_ROOM), "a", "b"))
    assert (moved.way, moved.requests, moved.why) == ("after", 2, str(NO_ROOM))
    assert replica.drained == [frozenset("b")]


def test_machine_is_not_drained_if_the_others_have_no_room() -> None:
    replica = FakeReplica("a", "b")
    replica.refusal = NO_ROOM
    head = Head(FakeHosted(replica, NO_ROOM), "a", "b")
    with pytest.raises(PlanError, match="no room for 4 layers"):
        drain(head)
    assert not head.membership.drained
    assert not replica.drained
    assert [moved.way for moved in drain(head, force=True)] == ["after"]


def test_only_usable_machine_keeps_its_layers() -> None:
    head = Head(FakeHosted(FakeReplica("b")), "b")
    with pytest.raises(Conflict, match="b-machine is the only machine"):
        drain(head)
    with pytest.raises(RequestError, match="No machine is called c: connected are b-machine"):
        asyncio.run(head.moves.drain("c", force=False))
    assert not head.membership.drained


def test_layers_that_are_being_loaded_move_once_they_serve() -> None:
    replica = FakeReplica("a", "b")
    replica.service.error = NotReady("The model is being loaded.")
    head = Head(FakeHosted(replica), "a", "b")

    async def run() -> list[Moved]:
        draining = asyncio.create_task(head.moves.drain("b", force=False))
        await run_tasks_until(lambda: "b" in head.membership.drained)
        assert not draining.done()
        replica.service.error = None
        return list(await draining)

    assert [moved.way for moved in asyncio.run(run())] == ["beside"]


def test_no_layers_move_while_the_head_ends() -> None:
    head = Head(FakeHosted(FakeReplica("a", "b")), "a", "b")
    head.moves.stop()
    with pytest.raises(NotReady):
        drain(head)


def choice(hosted: FakeHosted, way: MoveWay, *nodes: str, refusal: Conflict | None = None) -> Choice:
    (replica,) = hosted.replicas
    return Choice(cast("Any", replica), way, frozenset(nodes), refusal)


def split_again(hosted: FakeHosted, way: MoveWay | None, *, may_pause: bool = False) -> Moved | None:
    async def choose() -> Choice | None:
        return None if way is None else choice(hosted, way)

    moves = Head(hosted, "a", "b").moves
    return asyncio.run(moves.split_again(cast("Any", hosted), choose, may_pause=may_pause))


def test_a_better_split_is_loaded_beside_the_present_one_or_instead_of_it() -> None:
    replica = FakeReplica("a", "b")
    hosted = FakeHosted(replica)
    assert split_again(hosted, None) is None
    moved = split_again(hosted, "after", may_pause=True)
    assert moved is not None
    assert (moved.way, moved.requests, replica.drained) == ("after", 2, [frozenset("ab")])
    assert hosted.replicas == [replica]
    moved = split_again(hosted, "beside")
    assert moved is not None
    assert moved.way == "beside"
    assert hosted.replicas != [replica]


def test_only_a_lack_of_room_makes_answers_pause_instead() -> None:
    replica = FakeReplica("a", "b")
    hosted = FakeHosted(replica, NO_ROOM)
    with pytest.raises(PlanError, match="no room for 4 layers"):
        split_again(hosted, "beside")
    assert not replica.drained
    replica.has_scope = False
    moved = split_again(hosted, "beside", may_pause=True)
    assert moved is not None
    assert (moved.way, moved.why) == ("after", f"{NO_ROOM} One machine has several stages.")
    broken = FakeReplica("a", "b")
    with pytest.raises(WorkerLost, match="A worker died"):
        split_again(FakeHosted(broken, WorkerLost("A worker died.")), "beside", may_pause=True)
    assert not broken.drained


def test_workers_change_their_stages_where_no_second_instance_fits() -> None:
    replica = FakeReplica("a", "b")
    cases: list[tuple[MoveWay, bool, str]] = [("ranges", False, ""), ("beside", True, str(NO_ROOM))]
    for way, may_pause, why in cases:
        replica.service.info.epoch = 1
        moved = split_again(FakeHosted(replica, NO_ROOM), way, may_pause=may_pause)
        assert moved is not None
        assert (moved.way, moved.requests, moved.loaded_bytes, moved.why) == ("ranges", 2, 2, why)
    assert not replica.drained
    replica.has_scope = False
    with pytest.raises(UnchangeableWorkers, match="several stages"):
        split_again(FakeHosted(replica), "ranges")
    moved = split_again(FakeHosted(replica), "ranges", may_pause=True)
    assert moved is not None
    assert (moved.way, moved.loaded_bytes) == ("after", None)


def test_a_move_that_leaves_the_present_split_says_why() -> None:
    replica = FakeReplica("a", "b")
    replica.problem = StepFailed("No memory is left.")
    with pytest.raises(StepFailed, match="No memory is left"):
        split_again(FakeHosted(replica), "ranges")
    assert not replica.drained


def test_a_machine_that_has_left_meanwhile_is_not_drained_when_it_is_back() -> None:
    head = Head(FakeHosted(FakeReplica("a", "b")), "a", "b")

    async def run() -> None:
        async with head.order.turn():
            draining = asyncio.create_task(head.moves.drain("b", force=False))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            cast("Any", head.membership.members["b"]).session = 2
        with pytest.raises(Conflict, match="b has left the cluster, or joined it again"):
            await draining

    asyncio.run(run())
    assert not head.membership.drained


def test_layers_of_a_machine_that_leaves_during_a_move_are_left_to_the_recovery() -> None:
    replica = FakeReplica("a", "b")
    hosted = FakeHosted(replica)
    head = Head(hosted, "a", "b")

    async def replace(*_: object) -> int:
        # It has layers again, as it has left and joined.
        head.membership = head.membership.apply(Drained("b", is_drained=False))
        return 2

    hosted.replace = replace
    assert [moved.way for moved in drain(head)] == ["beside"]
    assert hosted.replicas == [replica]


class FailingService:
    """Service of a replica whose every load fails for another reason, until a test says otherwise."""

    def __init__(self) -> None:
        self.engine = SimpleNamespace(requests=lambda: [1, 2])
        self.fails, self.loads = False, 0

    @property
    def info(self) -> SimpleNamespace:
        return SimpleNamespace(name="demo-1", epoch=1 + self.loads)

    @property
    def error(self) -> RingError | None:
        if not self.fails:
            return None
        self.loads += 1
        return WorkerLost(f"Worker {self.loads} was killed: out of memory.")


class FailingReplica(FakeReplica):
    """Replica that serves until its layers are to move. No later load succeeds."""

    def __init__(self, *nodes: str) -> None:
        super().__init__(*nodes)
        self.service = FailingService()

    def drain(self, nodes: frozenset[str], why: str) -> None:
        del why
        self.drained.append(nodes)
        self.service.fails = True


def test_errors_of_one_loss_and_those_of_instances_that_served_later_count_once() -> None:
    replica = FakeReplica("a", "b")
    failed = FailedLoads("demo", cast("Any", replica))
    for epoch in range(1, 5):
        replica.service.info = SimpleNamespace(name="demo-1", epoch=epoch)
        for error in (WorkerLost("A stream broke."), WorkerLost("A worker was killed.")):
            replica.service.error = error
            failed.check()
        failed.check()
    replica.service.info = SimpleNamespace(name="demo-1", epoch=5)
    failed.check()  # the error of the epoch before, while the next one is loaded
    replica.service.error = WorkerLost("Another worker was killed.")
    with pytest.raises(NotReady, match=r"in 5 attempts, .*Another worker"):
        failed.check()


GIVES_UP = "demo could not be loaded in 5 attempts, and is tried again later: Worker .* out of memory"


def test_a_move_whose_loads_keep_failing_ends_and_lets_others_load() -> None:
    replica = FailingReplica("a", "b")
    hosted = FakeHosted(replica)
    head = Head(hosted, "a", "b")

    async def choose() -> Choice:
        return choice(hosted, "after")

    async def run() -> None:
        with pytest.raises(NotReady, match=GIVES_UP):
            await head.moves.split_again(cast("Any", hosted), choose, may_pause=True)
        assert hosted.replicas == [replica]
        await head.order.unload(cast("Any", hosted), force=True)
        assert hosted.stopped == ["demo was unloaded."]

    asyncio.run(run())


def test_a_machine_whose_layers_cannot_be_loaded_elsewhere_is_drained_by_force_only() -> None:
    head = Head(FakeHosted(FailingReplica("a", "b"), NO_ROOM), "a", "b")
    with pytest.raises(NotReady, match=GIVES_UP):
        drain(head)
    assert not head.membership.drained
    head = Head(FakeHosted(FailingReplica("a", "b"), NO_ROOM), "a", "b")
    (moved,) = drain(head, force=True)
    assert (moved.way, moved.requests) == ("after", 2)
    assert moved.why.startswith(f"{NO_ROOM} It does not serve yet: demo could not be loaded in 5 attempts")
    assert head.membership.drained == {"b"}


def test_a_model_that_is_loaded_in_vain_already_does_not_hold_up_a_drain() -> None:
    replica = FailingReplica("a", "b")
    replica.service.fails = True
    head = Head(FakeHosted(replica), "a", "b")
    with pytest.raises(NotReady, match=GIVES_UP):
        drain(head)
    assert not head.membership.drained
    assert drain(head, force=True) == []
    assert head.membership.drained == {"b"}


def test_unloading_by_force_ends_the_move_of_the_model() -> None:
    hosted = FakeHosted(FakeReplica("a", "b"))
    head = Head(hosted, "a", "b")
    is_loading = asyncio.Event()

    async def replace(*_: object) -> int:
        # An answer is longer than the other instance's context.
        is_loading.set()
        return await asyncio.get_running_loop().create_future()

    async def choose() -> Choice:
        return choice(hosted, "beside")

    async def run() -> None:
        moving = asyncio.create_task(head.moves.split_again(cast("Any", hosted), choose, may_pause=True))
        await is_loading.wait()
        await head.order.unload(cast("Any", hosted), force=True)
        assert (hosted.stopped, hosted.replicas) == (["demo was unloaded."], [])
        with pytest.raises(Conflict, match="demo was unloaded while it moved"):
            await moving
        async with asyncio.timeout(5), head.order.turn():
            """Others may load."""

    hosted.replace = replace
    asyncio.run(run())


def test_a_model_that_is_being_unloaded_by_force_begins_no_move() -> None:
    hosted = FakeHosted(FakeReplica("a", "b"))
    head = Head(hosted, "a", "b")
    is_choosing, has_chosen = asyncio.Event(), asyncio.Event()

    async def choose() -> Choice:
        is_choosing.set()
        await has_chosen.wait()
        return choice(hosted, "beside")

    async def replace(*_: object) -> int:
        raise AssertionError("It moves.")

    async def run() -> None:
        moving = asyncio.create_task(head.moves.split_again(cast("Any", hosted), choose, may_pause=True))
        await is_choosing.wait()
        unloading = asyncio.create_task(head.order.unload(cast("Any", hosted), force=True))
        await asyncio.sleep(0)
        has_chosen.set()
        with pytest.raises(Conflict, match="demo was unloaded before it moved"):
            await moving
        await unloading
        assert hosted.replicas == []

    hosted.replace = replace
    asyncio.run(run())


def test_a_second_unload_by_force_waits_for_the_clean_up_of_the_first() -> None:
    hosted = FakeHosted(FakeReplica("a", "b"))
    head = Head(hosted, "a", "b")
    is_loading, is_cleaning, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    cleaned: list[str] = []

    async def choose() -> Choice:
        return choice(hosted, "beside")

    async def replace(*_: object) -> int:
        is_loading.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            is_cleaning.set()
            await may_end.wait()
            cleaned.append("new workers")

    async def run() -> None:
        moving = asyncio.create_task(head.moves.split_again(cast("Any", hosted), choose, may_pause=True))
        await is_loading.wait()
        unloads = [asyncio.create_task(head.order.unload(cast("Any", hosted), force=True))]
        await is_cleaning.wait()
        unloads.append(asyncio.create_task(head.order.unload(cast("Any", hosted), force=True)))
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(*unloads)
        with pytest.raises(Conflict):
            await moving
        assert cleaned == ["new workers"]

    hosted.replace = replace
    asyncio.run(run())


def test_a_drain_goes_on_without_a_model_that_is_unloaded_by_force() -> None:
    hosted, other = FakeHosted(FakeReplica("a", "b")), FakeHosted(FakeReplica("b"))
    other.model_id = "other"
    head = Head(hosted, "a", "b", others=[other])
    is_loading = asyncio.Event()

    async def replace(*_: object) -> int:
        is_loading.set()
        return await asyncio.get_running_loop().create_future()

    async def run() -> list[Moved]:
        draining = asyncio.create_task(head.moves.drain("b", force=False))
        await is_loading.wait()
        await head.order.unload(cast("Any", hosted), force=True)
        assert hosted.stopped == ["demo was unloaded."]
        return list(await draining)

    hosted.replace = replace
    assert [(moved.model, moved.way) for moved in asyncio.run(run())] == [("other", "beside")]
    assert head.membership.drained == {"b"}


def test_a_model_that_answers_is_unloaded_by_force_only() -> None:
    hosted = FakeHosted(FakeReplica("a"))
    order = Head(hosted, "a").order
    with pytest.raises(Conflict, match="demo is answering 2 requests: wait for them"):
        asyncio.run(order.unload(cast("Any", hosted), force=False))
    assert not hosted.stopped
    asyncio.run(order.unload(cast("Any", hosted), force=True))
    assert hosted.stopped


# ---- moves of several models


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


def test_a_model_moves_while_another_one_waits_for_long_answers() -> None:
    first, second = named("first", "a", "b"), named("second", "b")
    head = Head(first, "a", "b", others=[second])

    async def run() -> None:
        first.answers = asyncio.Event()
        moving = begin_split(head, first, "beside")
        await first.is_waiting.wait()
        moved = await begin_split(head, second, "beside")
        assert (moved is not None, moving.done()) == (True, False)
        first.answers.set()
        assert await moving is not None

    asyncio.run(run())


def test_a_drain_moves_each_model_without_waiting_for_the_answers_of_others() -> None:
    first, second = named("first", "b"), named("second", "b")
    head = Head(first, "a", "b", others=[second])

    async def run() -> list[Moved]:
        first.answers = asyncio.Event()
        draining = asyncio.create_task(head.moves.drain("b", force=False))
        await first.is_waiting.wait()
        before = second.replicas
        await run_tasks_until(lambda: second.replicas != before)
        assert not draining.done()
        first.answers.set()
        return list(await draining)

    assert {(moved.model, moved.way) for moved in asyncio.run(run())} == {
        ("first", "beside"),
        ("second", "beside"),
    }


def test_machines_are_drained_at_the_same_time() -> None:
    first, second = named("first", "b"), named("second", "c")
    head = Head(first, "a", "b", "c", others=[second])

    async def run() -> None:
        first.answers = asyncio.Event()
        draining = asyncio.create_task(head.moves.drain("b", force=False))
        await first.is_waiting.wait()
        assert [moved.model for moved in await head.moves.drain("c", force=False)] == ["second"]
        # The machine is readmitted once its drain has ended.
        readmitting = asyncio.create_task(head.moves.readmit("b"))
        await asyncio.sleep(0)
        assert (draining.done(), readmitting.done(), head.membership.drained) == (False, False, {"b", "c"})
        first.answers.set()
        await asyncio.gather(draining, readmitting)
        assert head.membership.drained == {"c"}

    asyncio.run(run())


def test_a_model_without_room_waits_for_the_end_of_another_move_and_does_not_pause() -> None:
    first, second = named("first", "a", "b"), named("second", "b", problem=NO_ROOM)
    head = Head(first, "a", "b", others=[second])

    async def run() -> None:
        first.answers = asyncio.Event()
        moving = begin_split(head, first, "beside")
        await first.is_waiting.wait()
        splitting = begin_split(head, second, "beside")
        draining = asyncio.create_task(head.moves.drain("b", force=False))
        await run_tasks_until(lambda: "b" in head.membership.drained)
        for _ in range(20):  # neither of both frees anything for the other one
            await asyncio.sleep(0)
        assert (splitting.done(), draining.done()) == (False, False)
        second.problem = None
        first.answers.set()
        assert await moving is not None
        ways = [*(await draining), await splitting]
        assert {moved.way for moved in ways if moved is not None} == {"beside"}
        assert not second.replicas[0].drained

    asyncio.run(run())


def test_a_model_waits_for_no_room_on_machines_that_plans_do_not_use() -> None:
    first, second = named("first", "b"), named("second", "b", problem=NO_ROOM)
    head = Head(first, "a", "b", others=[second])

    async def run() -> list[Moved]:
        first.answers = asyncio.Event()
        draining = asyncio.create_task(head.moves.drain("b", force=False))
        await run_tasks_until(lambda: second.replicas[0].drained)
        assert not first.answers.is_set()
        first.answers.set()
        return list(await draining)

    assert {(moved.model, moved.way) for moved in asyncio.run(run())} == {
        ("first", "beside"),
        ("second", "after"),
    }


def test_without_a_move_to_wait_for_a_model_pauses_where_it_finds_no_room() -> None:
    hosted = named("second", "b", problem=NO_ROOM)
    assert [moved.way for moved in drain(Head(hosted, "a", "b"))] == ["after"]


@pytest.mark.parametrize(("nodes", "waits"), [(("c", "d"), False), (("b", "c"), True)])
def test_a_move_that_would_pause_waits_for_moves_of_its_machines_alone(
    nodes: Sequence[str], *, waits: bool
) -> None:
    first, second = named("first", "a", "b"), named("second", "c")
    head = Head(first, "a", "b", "c", "d", others=[second])

    async def run() -> None:
        first.answers = asyncio.Event()
        moving = begin_split(head, first, "beside")
        await first.is_waiting.wait()
        refusal = Conflict("Answers would pause.") if waits else None
        splitting = begin_split(head, second, "ranges", *nodes, refusal=refusal)
        if not waits:
            assert await splitting is not None
        for _ in range(20):
            await asyncio.sleep(0)
        assert (splitting.done(), second.replicas[0].has_changed) == (not waits, not waits)
        first.answers.set()
        await moving
        if waits:
            with pytest.raises(Conflict, match="would pause"):
                await splitting

    asyncio.run(run())


def test_a_model_has_one_move_at_a_time() -> None:
    hosted = named("first", "b")
    head = Head(hosted, "a", "b")

    async def run() -> None:
        hosted.answers = asyncio.Event()
        moving = begin_split(head, hosted, "beside")
        await hosted.is_waiting.wait()
        draining = asyncio.create_task(head.moves.drain("b", force=False))
        again = begin_split(head, hosted, "beside")
        await run_tasks_until(lambda: "b" in head.membership.drained)
        with pytest.raises(Conflict, match="first is answering 2 requests"):
            await head.order.unload(cast("Any", hosted), force=False)
        assert (draining.done(), again.done()) == (False, False)
        hosted.answers.set()
        assert [*map(bool, await asyncio.gather(moving, again))] == [True, True]
        assert await draining == []

    asyncio.run(run())


def test_a_move_that_fails_while_it_waits_pauses_in_a_turn_of_its_own() -> None:
    hosted = named("first", "b")
    head = Head(hosted, "a", "b")
    is_waiting, is_lost = asyncio.Event(), asyncio.Event()

    async def replace(_old: object, _new: object, _ready: object, loaded: Callable[[], None]) -> int:
        loaded()
        is_waiting.set()
        await is_lost.wait()
        raise WorkerLost("A worker died.")

    async def run() -> None:
        draining = asyncio.create_task(head.moves.drain("b", force=False))
        await is_waiting.wait()
        async with head.order.turn():
            is_lost.set()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not hosted.replicas[0].drained
        assert [(moved.way, moved.why) for moved in await draining] == [("after", "A worker died.")]

    hosted.replace = replace
    asyncio.run(run())


def test_a_drain_that_fails_for_one_model_lets_the_move_of_another_one_end() -> None:
    first, second = named("first", "b"), named("second", "b", problem=WorkerLost("A worker died."))
    second.replicas[0].refusal = NO_ROOM
    head = Head(first, "a", "b", others=[second])

    async def run() -> None:
        first.answers = asyncio.Event()
        with pytest.raises(PlanError, match="no room for 4 layers"):
            await head.moves.drain("b", force=False)
        assert (head.membership.drained, first.is_waiting.is_set()) == (set(), True)
        before = first.replicas
        first.answers.set()
        await run_tasks_until(lambda: first.replicas != before)
        async with head.order.turn(cast("Any", first)):
            assert not second.replicas[0].drained

    asyncio.run(run())


def test_a_load_without_room_waits_for_the_end_of_a_move_or_fails_if_there_is_none() -> None:
    first, loaded = named("first", "a", "b"), named("second")
    loaded.replicas = []
    head = Head(first, "a", "b")
    loads: list[str] = []

    async def load() -> None:
        loads.append("first waits" if first.answers is not None and not first.answers.is_set() else "free")
        if len(loads) < 3:
            raise NO_ROOM

    def begin() -> asyncio.Task[None]:
        models: Any = list
        return asyncio.create_task(head.order.load(cast("Any", loaded), load, models, may_evict=True))

    async def run() -> None:
        with pytest.raises(PlanError):
            await begin()
        first.answers = asyncio.Event()
        moving = begin_split(head, first, "beside")
        await first.is_waiting.wait()
        loading = begin()
        await run_tasks_until(lambda: len(loads) == 2)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not loading.done()
        first.answers.set()
        await asyncio.gather(moving, loading)
        assert loads == ["free", "first waits", "free"]

    asyncio.run(run())


def test_no_model_that_moves_is_unloaded_for_another_one() -> None:
    moving, idle = named("first", "a"), named("second", "a")
    for place, each in enumerate((moving, idle)):
        each.open_requests, each.is_idle, each.last_requested = 0, True, place
    moving.is_moving = True
    models: Any = [moving, idle]
    assert asyncio.run(unload_for(cast("Any", named("third")), models))
    assert (moving.stopped, len(idle.stopped)) == ([], 1)
