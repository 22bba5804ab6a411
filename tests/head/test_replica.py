"""Instances of a replica, one after the other, without machines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.engine.engines import make_engine
from tests.engine.twin import TwinExecutor
from tests.eventually import run_tasks_until
from tests.head.replicas import PLACEMENT, FakeInstance, FakeMachines, FakeRoom, make_replica

from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import (
    GroupStuck,
    NodeLost,
    NotReady,
    PlanError,
    RingError,
    WorkerLost,
    WorkerStuck,
)
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import LayerRange, RankId, SamplingParams
from mlx_ring.engine.moved_kv import KvMoves
from mlx_ring.head import replica as subject
from mlx_ring.head.instance import Epoch
from mlx_ring.head.model import HostedModel
from mlx_ring.head.patching import Remains
from mlx_ring.head.placing import Placement
from mlx_ring.head.served_model import prepare_model
from mlx_ring.head.step_down import FirstLoads
from mlx_ring.settings.config import Settings


class SuspectInstance(FakeInstance):
    """First instance that is suspect, answers, is suspect again, and is lost with that worker or another one."""

    lost = RankId(1, 0)

    async def run(self, ready: Callable[[float], None]) -> None:
        ready(1.0)
        if self._epoch.number > 1:
            await asyncio.get_running_loop().create_future()
        for lost in (RankId(0, 0), RankId(1, 0)):
            self._on_suspects(None)
            await asyncio.sleep(0)
            self._on_suspects(Remains("demo-1", 1, PLACEMENT, frozenset({lost}), frozenset()))
            await asyncio.sleep(0)
        self.loss = WorkerStuck("It has not answered for 3 s.")
        self.remains = Remains("demo-1", 1, PLACEMENT, frozenset({self.lost}), frozenset())


def test_a_head_that_cannot_adopt_the_workers_of_an_earlier_one_loads_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subject, "Instance", FakeInstance)
    machines, meter = FakeMachines(adoptable=2), Meter()

    async def run() -> None:
        ready = asyncio.Event()
        running = asyncio.create_task(make_replica(machines, meter).run(lambda _: ready.set(), lambda: False))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        assert waiting.done(), running.exception()
        running.cancel()

    asyncio.run(run())
    assert meter.losses == {"WorkerStuck": 2}
    assert machines.failures == [], "no machine is blamed"


@pytest.mark.parametrize(("stage", "early"), [(1, "as planned"), (0, "None")])
def test_a_patch_uses_the_plan_that_was_made_while_the_lost_worker_was_suspect(
    stage: int, early: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "Instance", SuspectInstance)
    monkeypatch.setattr(SuspectInstance, "lost", RankId(stage, 0))
    machines = FakeMachines()

    async def run() -> None:
        running = asyncio.create_task(make_replica(machines, Meter()).run(lambda _: None, lambda: False))
        await run_tasks_until(lambda: running.done() or machines.calls[-1:] == [f"patch 2 {early}"])
        assert not running.done(), running.exception()
        running.cancel()

    asyncio.run(run())
    assert machines.calls == [
        "release demo-1",
        "plan 2 without [RankId(stage=0, rank=0)]",
        "plan 2 without [RankId(stage=1, rank=0)]",
        f"patch 2 {early}",
    ]


class ReturningInstance(FakeInstance):
    """First instance that is lost by silence, second one that is dropped when the lost worker answers, and a third one."""

    async def run(self, ready: Callable[[float], None]) -> None:
        if self._epoch.number == 1:
            ready(1.0)
            self.loss = WorkerStuck("It has not answered for 3 s.")
            lost = frozenset({RankId(1, 0)})
            self.remains = Remains("demo-1", 1, PLACEMENT, lost, frozenset({"n2"}), may_return=True)
            return
        if self._epoch.returning is not None:
            await self._epoch.returning
            self.is_dropped = True
            raise NotReady("The lost workers answer again.")
        ready(1.0)
        await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("is_slow", [False, True], ids=["while others load", "while others are placed"])
def test_all_ranks_stay_if_silent_ones_answer_again(
    monkeypatch: pytest.MonkeyPatch, *, is_slow: bool
) -> None:
    monkeypatch.setattr(subject, "Instance", ReturningInstance)
    machines, meter = FakeMachines(), Meter()
    machines.is_slow = is_slow

    async def run() -> None:
        running = asyncio.create_task(make_replica(machines, meter).run(lambda _: None, lambda: False))
        await run_tasks_until(lambda: machines.remains)
        machines.returned.set()
        await run_tasks_until(lambda: machines.calls.count("release demo-1") == 2)
        running.cancel()

    asyncio.run(run())
    first, second = machines.remains
    assert (first.may_return, second) == (True, first.as_whole())
    assert (second.lost, second.silent_nodes, second.epoch) == (frozenset(), frozenset(), 1)
    patches = ["patch 2 None"] * (not is_slow) + ["patch 3 None"]
    assert [call for call in machines.calls if call.startswith("patch")] == patches
    assert meter.losses == {"WorkerStuck": 1}
    assert [str(error) for error in machines.failures] == ["It has not answered for 3 s."]


class BrokenInstance(FakeInstance):
    """Instance that serves for a moment, and is lost before it serves each time when it is patched."""

    def __init__(self, *made: Any, is_beside: bool) -> None:
        super().__init__(*made, is_beside=is_beside)
        self.loss: RingError | None = None
        self.remains: Remains | None = None

    async def run(self, ready: Callable[[float], None]) -> None:
        self.loss = WorkerStuck(f"Lost in epoch {self._epoch.number}.")
        self.remains = Remains("demo-1", self._epoch.number, PLACEMENT, frozenset(), frozenset())
        if self._epoch.prepared is not None:
            raise self.loss
        ready(1.0)


def test_a_patch_that_fails_is_patched_again_and_then_loaded_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machines, meter, stopped = FakeMachines(), Meter(), list[int]()

    async def stop(epoch: Epoch, _wait: object) -> None:
        stopped.append(epoch.number)

    async def run() -> None:
        replica = make_replica(machines, meter)
        running = asyncio.create_task(replica.run(lambda _: None, lambda: False))
        await run_tasks_until(lambda: stopped)
        running.cancel()

    monkeypatch.setattr(subject, "Instance", BrokenInstance)
    monkeypatch.setattr(subject, "stop_workers", stop)
    asyncio.run(run())
    assert (machines.loads, machines.patches, stopped) == (1, 3, [4])
    assert [str(error) for error in machines.failures] == [
        f"Lost in epoch {number}." for number in (1, 2, 3, 4)
    ]


def test_stops_of_a_failed_patch_do_not_wait_for_a_node_that_left_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []

    async def stop(_epoch: Epoch, wait: Callable[[str, Awaitable[None]], Awaitable[None]]) -> None:
        async def work(node: str) -> None:
            if node == "n1":
                ended.append(node)
            else:
                await asyncio.get_running_loop().create_future()

        # The second one was silent before, and the last one left a moment ago.
        for node in ("n1", "n8", "n9"):
            await wait(node, asyncio.ensure_future(work(node)))
        ended.append("all")

    async def run() -> None:
        remains = Remains("demo-1", 1, PLACEMENT, frozenset(), frozenset({"n8"}))
        replica: Any = make_replica(FakeMachines(), Meter())
        await replica._stop(Epoch("demo-1", 1, PLACEMENT, "n1"), remains)

    monkeypatch.setattr(subject, "stop_workers", stop)
    asyncio.run(run())
    assert ended == ["n1", "all"]


class UnluckyInstance(FakeInstance):
    """First instance whose worker dies while it loads, and second one that has no place."""

    async def run(self, ready: Callable[[float], None]) -> None:
        if self._epoch.number == 1:
            raise WorkerLost("The worker of stage 0 was killed.")
        if self._epoch.number == 2:
            raise PlanError("No machine has room.")
        await super().run(ready)


@pytest.mark.parametrize("others_serve", [False, True])
def test_a_replica_without_a_place_after_its_first_loss_is_loaded_again_if_others_serve(
    monkeypatch: pytest.MonkeyPatch, *, others_serve: bool
) -> None:
    monkeypatch.setattr(subject, "Instance", UnluckyInstance)
    machines = FakeMachines()

    async def run() -> None:
        ready = asyncio.Event()
        replica = make_replica(machines, Meter())
        running = asyncio.create_task(replica.run(lambda _: ready.set(), lambda: others_serve))
        await run_tasks_until(lambda: running.done() or ready.is_set())
        assert ready.is_set() == others_serve
        running.cancel()
        if not others_serve:
            with pytest.raises(PlanError):
                await running

    asyncio.run(run())
    assert machines.loads == (3 if others_serve else 2)


class KilledInstance(FakeInstance):
    """Instance whose worker dies while it loads, in the first loads."""

    killed = 0

    def __init__(self, *made: Any, is_beside: bool) -> None:
        super().__init__(*made, is_beside=False)
        del is_beside

    async def run(self, ready: Callable[[float], None]) -> None:
        if self._epoch.number <= self.killed:
            raise WorkerLost(f"The worker of epoch {self._epoch.number} was killed.").blamed_on("n2")
        await super().run(ready)


def run_first_loads(
    killed: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    replaces: str = "",
    machines: FakeMachines | None = None,
) -> FakeMachines:
    """Run a replica until it serves, whose worker dies in so many loads. Raise the error that ends it."""
    monkeypatch.setattr(subject, "Instance", KilledInstance)
    monkeypatch.setattr(KilledInstance, "killed", killed)
    here = FakeMachines() if machines is None else machines

    async def run() -> None:
        ready = asyncio.Event()
        replica = make_replica(here, Meter(), replaces=replaces)
        running = asyncio.create_task(replica.run(lambda _: ready.set(), lambda: False))
        await run_tasks_until(lambda: running.done() or ready.is_set())
        if running.done():
            await running
        running.cancel()

    asyncio.run(run())
    return here


def test_the_first_load_is_repeated_after_the_loss_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = run_first_loads(2, monkeypatch)
    assert machines.loads == 3
    assert [error and error.node for error in machines.failures] == ["n2", "n2"]
    assert machines.ended[:2] == ["demo-1", "demo-2"]


class LateMachines(FakeMachines):
    """Machines of which the last one is started after an hour."""

    now_s = 0.0

    async def next_epoch(self, order: Any) -> Epoch:
        self.now_s += 3600.0
        return await super().next_epoch(order)


def test_the_first_load_is_repeated_although_machines_were_awaited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machines = LateMachines()
    clock = SimpleNamespace(time=lambda: machines.now_s, monotonic=lambda: machines.now_s)
    monkeypatch.setattr(subject, "time", clock)
    assert run_first_loads(1, monkeypatch, machines=machines).loads == 2


def test_the_first_load_ends_with_the_reason_after_three_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        WorkerLost,
        match=r"^demo could not be loaded in 3 attempts\. The last reason: The worker of epoch 3 was killed\.$",
    ) as raised:
        run_first_loads(3, monkeypatch)
    assert raised.value.node == "n2"


def test_the_load_of_a_replica_that_takes_the_place_of_another_one_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(WorkerLost, match=r"^The worker of epoch 1 was killed\.$"):
        run_first_loads(1, monkeypatch, replaces="demo-0")


@pytest.mark.parametrize(
    "error",
    [
        PlanError("There is no room."),
        WorkerStuck("The model was not loaded within 600 s."),
        GroupStuck("It hangs."),
    ],
)
def test_the_first_load_is_not_repeated_for_a_reason_that_stays(error: RingError) -> None:
    settings = Settings.model_validate({"model": "demo", "model_load_timeout": 600, "backend": "ring"})
    loads = FirstLoads("demo", settings, is_beside=False)
    loads.check(WorkerStuck("It has not answered for 3 s."), 599.0)
    with pytest.raises(type(error)) as raised:
        loads.check(error, 600.0)
    assert raised.value is error


def test_a_replica_keeps_the_layers_with_which_each_node_has_served(monkeypatch: pytest.MonkeyPatch) -> None:
    class MovedMachines(FakeMachines):
        async def next_epoch(self, order: Any) -> Epoch:
            epoch = await super().next_epoch(order)
            node = f"n{epoch.number}"
            rank: Any = SimpleNamespace(site=SimpleNamespace(node=node), share=1.0)
            return replace(epoch, placement=Placement((LayerRange(0, 4),), ((rank,),), None))

    monkeypatch.setattr(subject, "Instance", BrieflyServingInstance)

    async def run() -> None:
        replica = make_replica(MovedMachines(), Meter())
        running = asyncio.create_task(replica.run(lambda _: None, lambda: False))
        await run_tasks_until(lambda: running.done() or len(replica.had) == 2)
        running.cancel()
        assert replica.had == {"n1": frozenset(range(4)), "n2": frozenset(range(4))}

    asyncio.run(run())


class BrieflyServingInstance(FakeInstance):
    """First instance that serves, and is lost with its machine, and later ones that serve."""

    async def run(self, ready: Callable[[float], None]) -> None:
        ready(1.0)
        if self._epoch.number > 1:
            await asyncio.get_running_loop().create_future()
        self.loss = NodeLost("n2 was lost.")


class FullMachines(FakeMachines):
    """Machines that have room for the first instance, and later only once some was made."""

    def __init__(self, room: FakeRoom, *, may_make: bool) -> None:
        super().__init__()
        self.room, self.may_make, self.joined = room, may_make, asyncio.Event()

    async def next_epoch(self, order: Any) -> Epoch:
        has_room = bool(self.room.made) if self.may_make else self.room.freed.is_set()
        if order.number > 1 and not has_room:
            raise PlanError("There is no room for 4 layers.")
        return await super().next_epoch(order)

    async def wait_for_node(self, _timeout_s: float) -> None:
        if self.loads > 1 or self.room.made:
            await self.joined.wait()


@pytest.mark.parametrize("may_make", [True, False], ids=["unloads another one", "another one is unloaded"])
def test_a_lost_model_without_room_is_loaded_again_once_there_is_some(
    monkeypatch: pytest.MonkeyPatch, *, may_make: bool
) -> None:
    monkeypatch.setattr(subject, "Instance", BrieflyServingInstance)
    served, reasons = list[float](), list[str]()

    async def run() -> None:
        room = FakeRoom(can_make=may_make)
        machines = FullMachines(room, may_make=may_make)
        replica = make_replica(machines, Meter(), room, lambda _, error: reasons.append(str(error)))
        running = asyncio.create_task(replica.run(served.append, lambda: False))
        await run_tasks_until(lambda: room.made)
        if not may_make:
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(served) == 1
            room.freed.set()
        await run_tasks_until(lambda: len(served) == 2)
        assert room.made == [("There is no room for 4 layers.", True)]
        running.cancel()

    asyncio.run(run())
    assert reasons == ["There is no room for 4 layers."], "requests that wait learn why"


class WaitingRoom(FakeRoom):
    """Room for which another model's load is awaited, without end."""

    async def make(self, error: PlanError, *, insists: bool) -> bool:
        await super().make(error, insists=insists)
        await asyncio.get_running_loop().create_future()
        raise AssertionError


@pytest.mark.parametrize("change", ["a machine joins", "memory is freed"])
def test_a_lost_model_without_room_is_loaded_again_while_another_model_loads(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "Instance", BrieflyServingInstance)
    served = list[float]()

    async def run() -> None:
        room = WaitingRoom()
        machines = FullMachines(room, may_make=change == "a machine joins")
        replica = make_replica(machines, Meter(), room)
        running = asyncio.create_task(replica.run(served.append, lambda: False))
        await run_tasks_until(lambda: room.made)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(served) == 1
        (machines.joined if change == "a machine joins" else room.freed).set()
        await run_tasks_until(lambda: len(served) == 2)
        running.cancel()

    asyncio.run(run())


class FakeReplica:
    """Replica that serves at once, or is lost while it loads."""

    def __init__(self, *, serves: bool) -> None:
        engine = SimpleNamespace(take_over=len, fail=str)
        recoveries = SimpleNamespace(record_resumed=len, refusal=None)
        error = None if serves else NotReady("It is being loaded.")
        self.service = SimpleNamespace(
            engine=engine, recoveries=recoveries, info=None, error=error, runs=callable
        )
        self.others_serve: list[bool] = []

    async def run(self, ready: Callable[[float], None], others_serve: Callable[[], bool]) -> None:
        if self.service.error is None:
            ready(1.0)
        else:
            await asyncio.sleep(0)
            self.others_serve.append(others_serve())
        await asyncio.get_running_loop().create_future()


def test_a_model_continues_if_one_replica_is_lost_while_it_loads_and_another_one_serves() -> None:
    settings, served = Settings.model_validate({"model": "demo"}), list[object]()
    hosted = HostedModel(settings, prepare_model(settings), served.append, lambda: 0)
    lost = FakeReplica(serves=False)

    def ready(*_: object) -> None:
        served.append("ready")

    async def run() -> None:
        await hosted.run(cast("Any", [lost, FakeReplica(serves=True)]), ready)
        assert hosted.error is None
        await hosted.stop("It is unloaded.")

    asyncio.run(run())
    assert (lost.others_serve, served) == ([True], ["ready"])


@pytest.mark.parametrize("resume", ["on", "off"])
def test_new_requests_wait_for_a_lost_model_only_if_answers_are_resumed(resume: str) -> None:
    settings = Settings.model_validate({"model": "demo", "resume": resume})
    hosted = HostedModel(settings, prepare_model(settings), list[object]().append, lambda: 0)
    replica = FakeReplica(serves=True)

    def ready(*_: object) -> None:
        """Do nothing."""

    async def run() -> None:
        await hosted.run(cast("Any", [replica]), ready)
        replica.service.error = WorkerLost("The worker of stage 0 was killed.")
        request = GenerateRequest("r", (5, 6, 7), SamplingParams())
        if resume == "off":
            with pytest.raises(NotReady):
                hosted.engine.submit_all(request)
        else:
            hosted.engine.submit_all(request)
        assert len(hosted.held_requests) == (resume == "on")
        await hosted.stop("It is unloaded.")

    asyncio.run(run())


def test_a_request_that_waits_in_vain_for_the_next_load_is_refused_with_the_newest_reason() -> None:
    settings = Settings.model_validate({"model": "demo", "resume_within_s": 0.01})
    hosted = HostedModel(settings, prepare_model(settings), list[object]().append, lambda: 0)
    replica = FakeReplica(serves=True)

    def ready(*_: object) -> None:
        """Do nothing."""

    async def run() -> None:
        await hosted.run(cast("Any", [replica]), ready)
        replica.service.error = NodeLost("n2 was lost.")
        hosted.hold((), replica.service.error)
        (stream,) = hosted.engine.submit_all(GenerateRequest("r", (5, 6, 7), SamplingParams()))
        hosted.hold((), PlanError("There is no room for 4 layers."))
        with pytest.raises(
            NotReady, match=r"^There is no room for 4 layers\. The model was not loaded again"
        ):
            async for _ in stream:
                pass
        await hosted.stop("It is unloaded.")

    asyncio.run(run())


class SlowlyEndingReplica(FakeReplica):
    """Replica that serves without requests, and whose workers end when a test says so."""

    def __init__(self) -> None:
        super().__init__(serves=True)
        self.service.engine = make_engine(TwinExecutor())
        self.meter, self.is_ending, self.may_end = Meter(), asyncio.Event(), asyncio.Event()

    async def run(self, ready: Callable[[float], None], others_serve: Callable[[], bool]) -> None:
        try:
            await super().run(ready, others_serve)
        finally:
            self.is_ending.set()
            while not self.may_end.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await self.may_end.wait()


def test_a_move_is_cancelled_at_once_and_unloading_waits_for_the_workers_that_were_ending() -> None:
    settings = Settings.model_validate({"model": "demo"})
    hosted = HostedModel(settings, prepare_model(settings), list[object]().append, lambda: 0)

    def ready(*_: object) -> None:
        """Do nothing."""

    async def run() -> None:
        old, new = SlowlyEndingReplica(), SlowlyEndingReplica()
        new.may_end.set()
        await hosted.run(cast("Any", [old]), ready)
        moving = asyncio.create_task(hosted.replace(cast("Any", old), cast("Any", new), ready))
        await old.is_ending.wait()
        assert hosted.is_moving
        moving.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert (moving.done(), hosted.is_moving) == (True, False)
        stopping = asyncio.create_task(hosted.stop("It is unloaded."))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not stopping.done()
        old.may_end.set()
        await stopping
        assert hosted.replicas == []

    asyncio.run(run())


def test_the_present_instance_serves_on_if_the_next_one_is_lost_while_the_prefix_cache_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings.model_validate({"model": "demo"})
    hosted = HostedModel(settings, prepare_model(settings), list[object]().append, lambda: 0)
    old, new = SlowlyEndingReplica(), SlowlyEndingReplica()
    old.may_end.set()
    new.may_end.set()

    async def lose_new(_self: KvMoves, *_: object) -> int:
        new.service.error = WorkerLost("The worker of stage 0 was killed.")
        return 0

    def ready(*_: object) -> None:
        """Do nothing."""

    async def run() -> None:
        monkeypatch.setattr(KvMoves, "bring_kept", lose_new)
        await hosted.run(cast("Any", [old]), ready)
        with pytest.raises(WorkerLost):
            await hosted.replace(cast("Any", old), cast("Any", new), ready)
        assert (hosted.error, hosted.replicas, hosted.is_moving) == (None, [old], False)
        await hosted.stop("It is unloaded.")

    asyncio.run(run())


def test_a_model_whose_workers_are_ending_counts_as_unloaded_and_is_loaded_once_they_have_ended() -> None:
    settings = Settings.model_validate({"model": "demo"})
    hosted = HostedModel(settings, prepare_model(settings), list[object]().append, lambda: 0)

    def ready(*_: object) -> None:
        """Do nothing."""

    async def run() -> None:
        old, new = SlowlyEndingReplica(), FakeReplica(serves=True)
        await hosted.run(cast("Any", [old]), ready)
        stopping = asyncio.create_task(hosted.stop("It is unloaded."))
        await old.is_ending.wait()
        assert (hosted.state, hosted.error, hosted.is_loaded) == ("unloaded", None, False)
        stopping.cancel()
        loading = asyncio.create_task(hosted.run(cast("Any", [new]), ready))
        for _ in range(10):
            await asyncio.sleep(0)
        assert (stopping.done(), loading.done(), hosted.replicas) == (True, False, [old])
        old.may_end.set()
        await loading
        assert (hosted.state, hosted.replicas) == ("ready", [new])
        await hosted.stop("It is unloaded.")

    asyncio.run(run())


def test_a_model_is_loaded_once_all_ends_of_its_instances_are_over() -> None:
    settings = Settings.model_validate({"model": "demo"})
    hosted = HostedModel(settings, prepare_model(settings), list[object]().append, lambda: 0)

    def ready(*_: object) -> None:
        """Do nothing."""

    async def run() -> None:
        old, new = SlowlyEndingReplica(), FakeReplica(serves=True)
        await hosted.run(cast("Any", [old]), ready)
        first_end = asyncio.create_task(hosted.stop("It is unloaded."))
        await old.is_ending.wait()
        loading = asyncio.create_task(hosted.run(cast("Any", [new]), ready))
        await asyncio.sleep(0)
        second_end = asyncio.create_task(hosted.stop("It is unloaded."))
        await asyncio.sleep(0)
        old.may_end.set()
        await asyncio.gather(loading, first_end, second_end)
        for _ in range(10):
            await asyncio.sleep(0)
        assert (hosted.state, hosted.replicas) == ("ready", [new])
        await hosted.stop("It is unloaded.")

    asyncio.run(run())


def test_metrics_find_the_meter_of_each_instance() -> None:
    meter = Meter()
    assert make_replica(FakeMachines(), meter).service.meter is meter
