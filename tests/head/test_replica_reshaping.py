"""Workers of a replica that change their stages, without machines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pytest
from tests.eventually import run_tasks_until
from tests.head.replicas import PLACEMENT, FakeInstance, FakeMachines, make_replica

from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import NodeDrained, NotReady, PlanError, RingError, StepFailed, WorkerLost
from mlx_ring.core.types import RankId
from mlx_ring.head import replica as subject
from mlx_ring.head.instance import Epoch
from mlx_ring.head.patching import Remains
from mlx_ring.head.placing import Placement
from mlx_ring.head.replica import Replica


class ChangingInstance(FakeInstance):
    """Instance that serves until its workers change their stages; the next one serves, too."""

    def __init__(
        self, _settings: object, _served: object, service: Any, epoch: Epoch, *others: Any, **more: Any
    ) -> None:
        super().__init__(None, None, None, epoch, *others, **more)
        self.service, self.ending = service, asyncio.Event()

    async def run(self, ready: Callable[[float], None]) -> None:
        engine = SimpleNamespace(
            error=None,
            requests=lambda: [1, 2],
            lose=print,
            oldest_unanswered=lambda: None,
            pause=lambda: None,
            resume=lambda: None,
            is_settled=True,
        )
        if self._epoch.reshaping is not None and self._epoch.reshaping.problem is not None:
            self.is_dropped = True
            raise NotReady("The workers go back.")
        self.service.serve(engine)
        ready(1.0)
        await self.ending.wait()
        self.loss = NodeDrained("Workers change.")
        self.service.lose(self.loss)
        self.remains = self.without_drained(frozenset())

    def without_drained(self, nodes: frozenset[str]) -> Remains:
        return Remains("demo-1", self._epoch.number, PLACEMENT, frozenset(), nodes)

    def check_serves(self) -> None:
        """Do nothing, because it serves."""

    def drain(self, nodes: frozenset[str], why: str) -> None:
        assert (nodes, why) == (frozenset(), "Workers change.")
        self.ending.set()


class FakeReshaping:
    """Change to a next plan, which may fail to load."""

    late: Mapping[RankId, int] = MappingProxyType({})

    def __init__(self, problem: RingError | None, late_problem: RingError | None = None) -> None:
        self._problem, self.calls, self.paused_requests = problem, list[str](), 0
        self.problem = late_problem

    async def load(self) -> None:
        self.calls.append("load")
        if self._problem is not None:
            raise self._problem

    def leave(self, _engine: object) -> None:
        self.calls.append("leave")

    def left(self, remains: Remains) -> Remains:
        return replace(remains, epoch=7)

    def left_kv(self, _prepared: object, _lives: object) -> None:
        return None

    def back(self, remains: Remains, _now: Placement) -> Remains:
        return remains

    async def abandon(self) -> None:
        self.calls.append("abandon")

    async def close(self) -> None:
        self.calls.append("close")


@pytest.mark.parametrize("fault", ["", "load", "patch"])
def test_workers_change_their_stages_and_the_present_ones_stay_if_that_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(subject, "Instance", ChangingInstance)
    machines, meter, stopped = FakeMachines(), Meter(), list[int]()
    reshaping = FakeReshaping(WorkerLost("No memory is left.") if fault == "load" else None)

    def make(*_given: object, may_pause: bool) -> Any:
        assert not may_pause
        return reshaping

    monkeypatch.setattr(subject, "Reshaping", make)

    async def stop(epoch: Epoch, _wait: object) -> None:
        stopped.append(epoch.number)

    monkeypatch.setattr(subject, "stop_workers", stop)
    if fault == "patch":

        async def refuse(*_: object) -> Epoch:
            raise PlanError("There is no room.")

        monkeypatch.setattr(machines, "patch", refuse)

    async def run() -> Replica:
        replica = make_replica(machines, meter)
        running = asyncio.create_task(replica.run(lambda _: None, lambda: False))
        await run_tasks_until(lambda: replica.service.error is None)
        changing = replica.split_again("Workers change.", may_pause=False)
        if fault == "load":
            with pytest.raises(WorkerLost, match="No memory"):
                await changing
        else:
            assert await changing is cast("Any", reshaping)
            await run_tasks_until(lambda: replica.service.error is None and replica.service.info.epoch > 1)
        running.cancel()
        return replica

    replica = asyncio.run(run())
    if fault == "load":
        assert (reshaping.calls, replica.service.info.epoch) == (["load", "abandon"], 1)
    else:
        assert reshaping.calls == ["load", "leave", "abandon" if fault else "close"]
        assert reshaping.paused_requests == 2
    # The number 2 was that of workers that were started for the change.
    assert [remains.epoch for remains in machines.remains] == ([] if fault else [7])
    assert [call for call in machines.calls if call.startswith("patch")] == (
        [] if fault else ["patch 8 None"]
    )
    assert (stopped, machines.loads) == (([1], 2) if fault == "patch" else ([], 1))
    assert not meter.losses


def test_all_workers_go_back_to_their_stages_if_one_cannot_load_its_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subject, "Instance", ChangingInstance)
    machines, meter = FakeMachines(), Meter()
    reshaping = FakeReshaping(None, StepFailed("No memory is left."))

    def make(*_given: object, may_pause: bool) -> Any:
        del may_pause
        return reshaping

    monkeypatch.setattr(subject, "Reshaping", make)

    async def run() -> Replica:
        replica = make_replica(machines, meter)
        running = asyncio.create_task(replica.run(lambda _: None, lambda: False))
        await run_tasks_until(lambda: replica.service.error is None)
        await replica.split_again("Workers change.", may_pause=False)
        await run_tasks_until(lambda: running.done() or replica.service.info.epoch > 8)
        assert not running.done(), running.exception()
        await run_tasks_until(lambda: replica.service.error is None)
        running.cancel()
        return replica

    asyncio.run(run())
    # First the next plan was patched, then the present one, of which no rank is lost.
    assert [(each.epoch, each.lost) for each in machines.remains] == [(7, set()), (1, set())]
    assert not machines.remains[1].leaves_others
    assert [call for call in machines.calls if call.startswith("patch")] == ["patch 8 None", "patch 9 None"]
    assert (reshaping.calls, machines.loads) == (["load", "leave", "close"], 1)
    assert [*map(type, machines.failures)] == [NodeDrained], "no machine is blamed"
    assert not meter.losses


class SlowlyEndingInstance(ChangingInstance):
    """Instance that does not end yet when its workers change their stages."""

    def drain(self, nodes: frozenset[str], why: str) -> None:
        """Serve on."""


@pytest.mark.parametrize("instance", [ChangingInstance, SlowlyEndingInstance])
def test_new_workers_end_if_the_server_is_stopped_while_stages_change(
    monkeypatch: pytest.MonkeyPatch, instance: type[ChangingInstance]
) -> None:
    machines, reshaping, begun = FakeMachines(), FakeReshaping(None), asyncio.Event()
    monkeypatch.setattr(subject, "Instance", instance)

    def make(*_given: object, may_pause: bool) -> Any:
        del may_pause
        return reshaping

    async def stop(*_: object) -> None: ...

    monkeypatch.setattr(subject, "Reshaping", make)
    monkeypatch.setattr(subject, "stop_workers", stop)

    async def never(*_: object) -> Epoch:
        begun.set()
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(machines, "patch", never)

    async def run() -> None:
        replica = make_replica(machines, Meter())
        running = asyncio.create_task(replica.run(lambda _: None, lambda: False))
        await run_tasks_until(lambda: replica.service.error is None)
        await replica.split_again("Workers change.", may_pause=False)
        if instance is ChangingInstance:
            await begun.wait()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(run())
    assert reshaping.calls == ["load", "leave", "abandon"]
