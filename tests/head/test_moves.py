"""Moves of layers away from a machine, with replicas and machines that only record what is asked of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.eventually import LeapingLoop, run_tasks_until
from tests.head.moving_heads import (
    NO_ROOM,
    FakeHosted,
    FakeReplica,
    Head,
    begin_split,
    choice,
    drain,
    split_again,
)

from mlx_ring.api.service import Moved
from mlx_ring.cluster.membership import Drained
from mlx_ring.core.errors import (
    Conflict,
    NotReady,
    PlanError,
    RequestError,
    RingError,
    StepFailed,
    WorkerLost,
)
from mlx_ring.head import moves as subject
from mlx_ring.head.move_order import FailedLoads
from mlx_ring.head.moves import Choice
from mlx_ring.planner.replan import MoveWay, UnchangeableWorkers


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
    with pytest.raises(RequestError, match=r"No machine is called '': connected are b-machine"):
        asyncio.run(head.moves.drain("", force=False))
    with pytest.raises(RequestError, match=r"No machine is called c{,400}: connected"):
        asyncio.run(head.moves.drain("c" * 9999, force=False))
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


@pytest.mark.parametrize("work", ["drain", "split", "loading"])
def test_moves_look_at_a_replica_only_when_it_has_changed(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = FakeReplica("a", "b")
    hosted = FakeHosted(replica, NO_ROOM)
    head, checks = Head(hosted, "a", "b"), list[object]()

    class Counted(FailedLoads):
        def check(self) -> None:
            checks.append(replica.service.error)
            super().check()

    def lose(nodes: object, why: object) -> None:
        replica.service.error = WorkerLost(f"{nodes} {why}")

    monkeypatch.setattr(subject, "FailedLoads", Counted)
    replica.drain = lose
    if work == "loading":
        lose("", "It is loaded.")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, LeapingLoop)
        if work == "split":
            moving = begin_split(head, hosted, "after")
        else:
            moving = asyncio.create_task(head.moves.drain("b", force=False))
        await run_tasks_until(lambda: checks)
        for _ in range(200):
            loop.leapt_s += 1.0
            await asyncio.sleep(0)
        assert len(checks) <= 2
        hosted.problem = None
        replica.place("a")
        replica.service.info = SimpleNamespace(name="demo-2", epoch=1)
        replica.service.error = None
        await moving

    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        runner.run(run())


def test_no_layers_move_while_the_head_ends() -> None:
    head = Head(FakeHosted(FakeReplica("a", "b")), "a", "b")
    head.moves.stop()
    with pytest.raises(NotReady):
        drain(head)


def test_the_log_says_why_a_drain_ends_with_the_head(caplog: pytest.LogCaptureFixture) -> None:
    head = Head(FakeHosted(FakeReplica("a", "b")), "a", "b")

    async def run() -> None:
        async with head.order.turn():
            draining = asyncio.create_task(head.moves.drain("b", force=False))
            await run_tasks_until(lambda: "b" in head.membership.drained)
            head.moves.stop()
            with pytest.raises(asyncio.CancelledError):
                await draining

    asyncio.run(run())
    assert "b is not drained: the server ends" in caplog.text
    assert not head.membership.drained


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
        # Each load fails at once.
        self.changed = asyncio.Event()
        self.changed.set()

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


def test_a_drain_ends_when_the_machine_leaves_while_nothing_can_be_loaded() -> None:
    replica = FakeReplica("a", "b")
    replica.service.error = NotReady("It loads.")
    head = Head(FakeHosted(replica), "a", "b")

    async def run() -> None:
        draining = asyncio.create_task(head.moves.drain("b", force=False))
        await run_tasks_until(lambda: "b" in head.membership.drained)
        for _ in range(50):  # until the drain waits for the replica
            await asyncio.sleep(0)
        await head.leave("b")
        await draining

    asyncio.run(run())
    assert not head.membership.drained


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
