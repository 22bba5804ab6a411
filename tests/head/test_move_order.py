"""Moves of several models at once, and loads beside them, with replicas and machines that only record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from tests.eventually import run_tasks_until
from tests.head.moving_heads import NO_ROOM, FakeHosted, Head, begin_split, drain, named

from mlx_ring.api.service import Moved
from mlx_ring.core.errors import Conflict, ContextKept, NodeLost, NotReady, PlanError, WorkerLost
from mlx_ring.head import move_order as subject
from mlx_ring.head.move_order import MoveOrder, RoomAmongModels, unload_for


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


def test_no_machine_that_is_to_be_drained_gets_the_layers_of_another_one() -> None:
    first = named("first", "b")
    head = Head(first, "a", "b", "c")

    async def run() -> None:
        async with head.order.turn():
            draining = [asyncio.create_task(head.moves.drain(node, force=False)) for node in ("b", "c")]
            await run_tasks_until(lambda: len(head.membership.drained) == 2)
        await asyncio.gather(*draining)
        await head.moves.readmit("b")
        async with head.order.turn():
            refused = asyncio.create_task(head.moves.drain("a", force=False))
            await run_tasks_until(lambda: "a" in head.membership.drained)
            await head.drain("b")
        with pytest.raises(Conflict, match="a is the only machine"):
            await refused
        assert head.membership.drained == {"b", "c"}

    asyncio.run(run())


def loads_on_usable_machines(head: Head, hosted: FakeHosted, begun: asyncio.Event) -> None:
    """Let a model move to a machine that plans may use, once there is one."""

    async def replace(_old: object, new: Any, _ready: object, loaded: Callable[[], None]) -> int:
        begun.set()
        for _ in range(20):  # as while it is planned and loaded
            await asyncio.sleep(0)
        await run_tasks_until(lambda: not head.lacks(1))
        new.place(*sorted(head.membership.usable.members)[:1])
        loaded()
        hosted.replicas = [new]
        return 0

    hosted.replace = replace


def test_the_machine_that_a_drain_needs_is_not_drained() -> None:
    first = named("first", "b")
    head = Head(first, "a", "b")

    async def run() -> None:
        begun = asyncio.Event()
        loads_on_usable_machines(head, first, begun)
        draining = asyncio.create_task(head.moves.drain("b", force=False))
        await begun.wait()
        with pytest.raises(Conflict, match="a is the only machine"):
            await head.moves.drain("a", force=False)
        assert ([moved.way for moved in await draining], head.membership.drained) == (["beside"], {"b"})

    asyncio.run(run())


def test_a_drain_is_undone_while_it_waits_for_its_turn() -> None:
    first = named("first", "b")
    head = Head(first, "a", "b")

    async def run() -> None:
        async with head.order.turn():
            draining = asyncio.create_task(head.moves.drain("b", force=False))
            await run_tasks_until(lambda: head.membership.drained)
            await head.moves.readmit("b")
            assert (draining.done(), head.membership.drained) == (False, set())
        with pytest.raises(Conflict, match="b was readmitted before its layers could move"):
            await draining

    asyncio.run(run())


@pytest.mark.parametrize("way", ["beside", "after"])
def test_a_move_whose_machines_have_left_lets_others_load_and_is_undone(way: str) -> None:
    first = named("first", "b", problem=None if way == "beside" else NO_ROOM)
    head = Head(first, "a", "b")

    async def run() -> None:
        begun = asyncio.Event()
        (replica,) = first.replicas
        if way == "beside":
            loads_on_usable_machines(head, first, begun)
        else:

            def lose(nodes: object, why: str) -> None:
                del nodes, why
                replica.service.error = NodeLost("a was lost.")
                begun.set()

            replica.drain = lose
        draining = asyncio.create_task(head.moves.drain("b", force=False))
        await begun.wait()
        await head.leave("a")
        async with head.order.turn():  # others may load
            assert not draining.done()
        await head.moves.readmit("b")
        replica.service.error = None
        await draining
        assert head.membership.drained == set()

    asyncio.run(run())


@pytest.mark.parametrize("work", ["drain", "split"])
def test_a_move_without_room_begins_again_if_another_one_ends_at_the_same_moment(work: str) -> None:
    first, second = named("first", "a", "b"), named("second", "a", "b")
    head = Head(first, "a", "b", others=[second])
    attempts: list[str] = []

    async def run() -> None:
        first.answers, ends = asyncio.Event(), asyncio.Event()

        async def replace(_old: object, new: Any, _ready: object, loaded: Callable[[], None]) -> int:
            attempts.append("attempt")
            if len(attempts) == 1:
                await ends.wait()
                raise NO_ROOM
            second.replicas = [new]
            loaded()
            return 0

        second.replace = replace
        moving = begin_split(head, first, "beside")
        await first.is_waiting.wait()
        other = (
            begin_split(head, second, "beside")
            if work == "split"
            else asyncio.create_task(head.moves.drain("b", force=False))
        )
        await run_tasks_until(lambda: attempts)
        first.answers.set()
        ends.set()
        await asyncio.gather(moving, other)
        assert len(attempts) == 2

    asyncio.run(run())


def test_a_machine_is_readmitted_while_something_is_loaded() -> None:
    head = Head(named("first", "a"), "a", "b")

    async def run() -> None:
        await head.drain("b")
        async with head.order.turn():
            await head.moves.readmit("b")

    asyncio.run(run())
    assert head.membership.drained == set()


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

    async def load(_turn: object) -> None:
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


def idle(name: str) -> FakeHosted:
    """Return a model that serves and has no requests."""
    hosted = named(name, "a")
    hosted.open_requests, hosted.is_idle = 0, True
    return hosted


def test_a_lost_model_gets_the_room_of_an_idle_one_that_serves() -> None:
    lost, down, serving, busy = named("lost", "a"), idle("down"), idle("serving"), named("busy", "a")
    down.error, lost.error = NodeLost("b was lost."), NO_ROOM
    models: Any = [lost, down, serving, busy]
    lost.open_requests = 0

    async def run() -> None:
        order = MoveOrder()
        room, freed = RoomAmongModels(order, cast("Any", lost), lambda: models), order.freed
        assert not await room.make(ContextKept("The context is kept."), insists=True)
        assert not await room.make(NO_ROOM, insists=False), "no request waits"
        assert not serving.stopped
        lost.open_requests = 1
        assert await room.make(NO_ROOM, insists=False)
        assert freed.is_set()
        assert not await room.make(NO_ROOM, insists=True), "nothing idle is left"

    asyncio.run(run())
    assert (down.stopped, busy.stopped) == ([], [])
    assert serving.stopped == ["serving was unloaded for another model."]


def test_a_lost_model_unloads_nothing_if_another_one_was_unloaded_while_it_waited() -> None:
    lost, first, second = named("lost", "a"), idle("first"), idle("second")
    models: Any = [lost, first, second]

    async def run() -> None:
        order = MoveOrder()
        room = RoomAmongModels(order, cast("Any", lost), lambda: models)
        async with order.turn():
            unloading = asyncio.create_task(order.unload(cast("Any", first), force=True))
            await asyncio.sleep(0)  # it is the first to wait for the turn
            making = asyncio.create_task(room.make(NO_ROOM, insists=True))
            await asyncio.sleep(0)
        assert await making
        await unloading

    asyncio.run(run())
    assert (len(first.stopped), second.stopped) == (1, [])


@pytest.mark.parametrize("ends", [True, False])
def test_a_load_beside_busy_models_waits_for_a_while_until_one_is_idle(
    monkeypatch: pytest.MonkeyPatch, *, ends: bool
) -> None:
    monkeypatch.setattr(subject, "_LOOK_S", 0.0)
    if not ends:
        monkeypatch.setattr(subject, "_BUSY_WAIT_S", 0.0)
    loaded, busy = named("second"), named("first", "a")
    models: Any = [loaded, busy]

    async def load(_turn: object) -> None:
        if busy.replicas:
            raise NO_ROOM

    async def run() -> None:
        order = MoveOrder()
        loading = asyncio.create_task(order.load(cast("Any", loaded), load, lambda: models, may_evict=True))
        if not ends:
            with pytest.raises(NotReady, match=r"second was not loaded, because first is busy: .* no room"):
                await loading
            return
        for _ in range(20):
            await asyncio.sleep(0)
        async with order.turn():  # others may load meanwhile
            assert not loading.done()
        busy.open_requests, busy.is_idle = 0, True
        await loading

    asyncio.run(run())
    assert len(busy.stopped) == ends


def test_a_load_is_tried_again_if_room_was_freed_while_it_was_planned() -> None:
    loaded, other, loads = named("second"), idle("first"), list[str]()

    async def run() -> None:
        order = MoveOrder()

        async def load(turn: Any) -> None:
            loads.append("load")
            if len(loads) == 1:
                turn.end()  # as while machines are missing
                await order.unload(cast("Any", other), force=False)
                raise NO_ROOM

        await order.load(cast("Any", loaded), load, list, may_evict=False)

    asyncio.run(run())
    assert len(loads) == 2
