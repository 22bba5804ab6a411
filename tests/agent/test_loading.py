"""Loads of workers that wait for the other ranks of their group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from mlx_ring.agent import loading, server
from mlx_ring.agent.supervisor import Supervisor, Worker
from mlx_ring.core.errors import GroupStuck, WorkerLost
from mlx_ring.host.child import ChildProcess
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.methods import LOAD, RELINK
from mlx_ring.rpc.protos import agent_pb2, step_pb2, worker_pb2

GROUP = ["10.0.8.1:5000", "10.0.8.2:5000"]


class HungLoad:
    """Load that reports one phase, and then nothing."""

    def __init__(self, phase: str) -> None:
        self._reports = [worker_pb2.LoadProgress(phase=phase)]

    async def read(self) -> worker_pb2.LoadProgress:
        return self._reports.pop() if self._reports else await asyncio.get_running_loop().create_future()


def follow(worker: Worker, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load with short limits."""
    assignment = worker_pb2.StageAssignment(stages=2, tp_size=2, backend="ring", group=GROUP)
    monkeypatch.setattr(loading, "_GROUP_WAITS_S", {"group": 0.05, "warm-up": 0.05})

    def load(_request: worker_pb2.LoadRequest, *, wait_for_ready: bool) -> HungLoad:
        assert wait_for_ready
        return HungLoad(phase)

    def open_load(*_: object) -> Callable[..., HungLoad]:
        return load

    monkeypatch.setattr(type(LOAD), "aio_unary_stream", open_load)
    request = worker_pb2.LoadRequest(assignment=assignment)
    progress = asyncio.Queue[agent_pb2.StageProgress]()
    asyncio.run(loading._follow(worker, request, progress))  # pyright: ignore[reportPrivateUsage] - a load without a process


@pytest.fixture
def worker() -> Worker:
    child = cast("ChildProcess", SimpleNamespace(exit_reason="", pid=1))
    worker = Worker(worker_pb2.StageAssignment(rank=1), Path("w.sock"), child, cast("grpc.aio.Channel", None))
    worker.status = worker_pb2.WorkerStatus(phase="loading")
    return worker


def test_rank_that_waits_too_long_for_its_group_is_reported_with_the_addresses(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        GroupStuck, match=r"did not join .* ring group .* at 10\.0\.8\.1:5000, 10\.0\.8\.2:5000"
    ) as raised:
        follow(worker, "group", monkeypatch)
    report = loading.failed_load(raised.value)
    assert (report.stage, report.rank, report.progress.failure.kind) == (0, 1, "GroupStuck")
    waits = worker.state().status.waits
    assert (waits.kind, waits.backend) == ("collective", "ring")
    assert waits.peer == "the group at 10.0.8.1:5000, 10.0.8.2:5000, which it joins"


def test_rank_that_hangs_in_its_first_pass_waits_for_its_group(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(GroupStuck, match="for the other ranks of its ring group in its first pass"):
        follow(worker, "warm-up", monkeypatch)
    assert not worker.state().status.HasField("waits")


@pytest.mark.parametrize(
    ("waits", "ranks"),
    [("device", 1), ("load", 1), ("link", 1), ("collective", 1), ("", 1), ("collective", 2), ("link", 2)],
)
def test_only_a_worker_that_computes_or_loads_gets_more_time_to_end_its_step(
    worker: Worker, waits: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ranks of a stage compute and join collectives in one pass.
    worker.assignment.tp_size = ranks
    computed, stopped = asyncio.Event(), list[set[int]]()
    looks: list[str] = []

    async def refresh() -> None:
        looks.append(waits)
        worker.status = worker_pb2.WorkerStatus(waits=worker_pb2.Wait(kind=waits) if waits else None)
        if len(looks) == 3:
            computed.set()

    async def stop(_instance: str, pids: set[int]) -> None:
        stopped.append(pids)

    async def settle(_request: worker_pb2.RelinkRequest, **_: float) -> worker_pb2.RelinkReply:
        await computed.wait()
        return worker_pb2.RelinkReply()

    def open_relink(*_: object) -> Callable[..., object]:
        return settle

    monkeypatch.setattr(loading, "_SETTLE_WAIT_S", 0.0)
    monkeypatch.setattr(type(RELINK), "aio_unary_unary", open_relink)
    supervisor = cast("Supervisor", SimpleNamespace(workers=[worker], refresh=refresh, stop=stop))
    wanted = worker_pb2.StageAssignment(rank=1, epoch=2)
    request = agent_pb2.RelinkWorkersRequest(assignments=[wanted])
    answered = asyncio.run(loading.relink_workers(supervisor, request))
    computes = (waits, ranks) in {("device", 1), ("load", 1), ("collective", 2)}
    assert (len(answered), stopped) == ((1, []) if computes else (0, [{1}]))


class StubGroup:
    """Two ranks on one machine, of which the first answers late or never. Both compute a step together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workers = [loaded_worker(1, rank, rank + 1, ranks=2) for rank in (0, 1)]
        self.stopped: list[int] = []
        self.looks = 0
        self.is_silent = False
        self.answers_after = 0
        """Number of looks after which the first rank answers; 0: never."""
        self.failure = ""
        """Failure of the second rank."""
        self._answers = asyncio.Event()
        monkeypatch.setattr(loading, "_SETTLE_WAIT_S", 0.0)
        monkeypatch.setattr(loading, "_HALT_LOOK_S", 0.0)

        def open_relink(*_: object) -> Callable[..., object]:
            return self.settle

        monkeypatch.setattr(type(RELINK), "aio_unary_unary", open_relink)

    async def refresh(self) -> None:
        self.looks += 1
        for worker in self.workers:
            worker.status = worker_pb2.WorkerStatus(waits=worker_pb2.Wait(kind="collective"))
        if self.is_silent:
            self.workers[0].unresponsive.seconds += 1.0
        if self.looks == self.answers_after:
            self._answers.set()

    async def stop(self, _instance: str, pids: set[int]) -> None:
        self.stopped += sorted(pids)

    async def settle(self, request: worker_pb2.RelinkRequest, **_: float) -> worker_pb2.RelinkReply:
        if request.assignment.rank == 0:
            await self._answers.wait()
        elif self.failure:
            return worker_pb2.RelinkReply(failure=step_pb2.Failure(kind="WorkerStuck", message=self.failure))
        return worker_pb2.RelinkReply(begun_step=7 + request.assignment.rank)

    def relink(self, *, halt: bool) -> dict[int, int]:
        """Halt or prepare both; return the last step of each rank that answered."""
        wanted = [worker_pb2.StageAssignment(stage=1, rank=rank, tp_size=2, epoch=2) for rank in (0, 1)]
        request = agent_pb2.RelinkWorkersRequest(assignments=wanted, halt=halt)

        async def relink() -> dict[int, int]:
            async with asyncio.timeout(30.0):
                answers = await loading.relink_workers(cast("Supervisor", self), request)
                return {worker.rank: begun_step for worker, begun_step in answers}

        return asyncio.run(relink())


def test_a_rank_is_lost_though_it_computes_with_another_that_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = StubGroup(monkeypatch)
    assert group.relink(halt=False) == {1: 8}
    assert group.stopped == [1]


def test_a_rank_is_lost_at_once_if_another_one_cannot_execute_a_step_that_it_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = StubGroup(monkeypatch)
    group.failure = "The input of step 7 did not arrive."
    monkeypatch.setattr(loading, "_SETTLE_WAIT_S", 3600.0)
    assert group.relink(halt=False) == {}
    assert group.stopped == [1, 2]


def test_only_a_silent_rank_is_lost_before_it_is_halted(monkeypatch: pytest.MonkeyPatch) -> None:
    group = StubGroup(monkeypatch)
    group.is_silent = True
    assert group.relink(halt=True) == {1: 8}
    starved = StubGroup(monkeypatch)
    starved.answers_after = 50
    assert starved.relink(halt=True) == {0: 7, 1: 8}
    assert (group.stopped, starved.stopped) == ([], [])


def test_workers_that_stay_are_asked_while_others_end(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()
    ended = SimpleNamespace(exit_reason="ended by signal 9 (SIGKILL)", pid=2)
    lost = Worker(
        worker_pb2.StageAssignment(rank=0),
        Path("v.sock"),
        cast("ChildProcess", ended),
        cast("grpc.aio.Channel", None),
    )

    async def stop(_instance: str, pids: set[int]) -> None:
        assert pids == {2}
        await asked.wait()

    async def settle(_request: worker_pb2.RelinkRequest, **_: float) -> worker_pb2.RelinkReply:
        asked.set()
        return worker_pb2.RelinkReply()

    def open_relink(*_: object) -> Callable[..., object]:
        return settle

    monkeypatch.setattr(type(RELINK), "aio_unary_unary", open_relink)
    supervisor = cast("Supervisor", SimpleNamespace(workers=[lost, worker], stop=stop))
    request = agent_pb2.RelinkWorkersRequest(assignments=[worker_pb2.StageAssignment(rank=1, epoch=2)])

    async def relink() -> int:
        async with asyncio.timeout(10.0):
            return len(await loading.relink_workers(supervisor, request))

    assert asyncio.run(relink()) == 1


def test_linking_fails_if_a_worker_has_ended_since_it_was_prepared(worker: Worker) -> None:
    cast("SimpleNamespace", worker.child).exit_reason = "ended by signal 9 (SIGKILL)"
    supervisor = cast("Supervisor", SimpleNamespace(workers=[worker]))
    wanted = worker_pb2.StageAssignment(rank=1, epoch=2)
    request = agent_pb2.RelinkWorkersRequest(assignments=[wanted], commit=True)
    with pytest.raises(WorkerLost, match="The worker of stage 0, rank 1 has ended, so it cannot be linked"):
        asyncio.run(loading.relink_workers(supervisor, request))


def ended_to_start(
    workers: list[Worker], places: list[tuple[int, int]], free: int, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Start others in these places with some memory free; return the process IDs of the workers that are ended."""
    ended: list[int] = []

    async def stop(_instance: str, pids: list[int]) -> None:
        ended.extend(pids)

    async def start(*_: object) -> list[Worker]:
        return []

    monkeypatch.setattr(server, "usable_memory", lambda: SimpleNamespace(available_bytes=free))
    monkeypatch.setattr(server, "start_workers", start)
    supervisor = cast("Supervisor", SimpleNamespace(workers=workers, stop=stop, trusted=None))
    wanted = [worker_pb2.StageAssignment(stage=stage, rank=rank, epoch=2) for stage, rank in places]

    async def start_again() -> str:
        service = server.AgentService("here", supervisor, 1.0)
        request = agent_pb2.StartRequest(hello=make_hello(), assignments=wanted)
        return (await service.start(request, cast("Any", None))).failure.message

    assert asyncio.run(start_again()) == ""
    return sorted(ended)


def loaded_worker(stage: int, rank: int, pid: int, *, ranks: int = 1, silent_s: float = 0.0) -> Worker:
    """Return a worker with 100 bytes of weights."""
    child = cast("ChildProcess", SimpleNamespace(exit_reason="", pid=pid))
    assignment = worker_pb2.StageAssignment(stage=stage, rank=rank, tp_size=ranks)
    worker = Worker(assignment, Path("w.sock"), child, cast("grpc.aio.Channel", None))
    worker.status = worker_pb2.WorkerStatus(weight_bytes=100, memory_left_bytes=2000)
    worker.unresponsive.seconds = silent_s
    return worker


@pytest.mark.parametrize(("free", "ended"), [(100, [1]), (1000, [])])
def test_a_silent_worker_makes_room_for_another_one_if_memory_is_short(
    free: int, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering, silent = loaded_worker(0, 1, 1), loaded_worker(0, 1, 1, silent_s=3.0)
    assert ended_to_start([answering], [(0, 1)], free, monkeypatch) == [], "it answers"
    assert ended_to_start([silent], [(0, 1)], free, monkeypatch) == ended


@pytest.mark.parametrize(
    ("silent_s", "places", "free", "ended"),
    [
        # The silent rank is on another machine.
        ((0.0,), [(1, 0)], 100, [1]),
        ((0.0,), [(1, 0)], 1000, []),
        # Both are here: each needs the memory that it has.
        ((0.0, 3.0), [(1, 0), (1, 1)], 250, [1, 2]),
        ((0.0, 3.0), [(1, 0), (1, 1)], 350, []),
    ],
)
def test_ranks_whose_partner_is_silent_make_room_like_it(
    silent_s: tuple[float, ...],
    places: list[tuple[int, int]],
    free: int,
    ended: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = [
        loaded_worker(1, rank, rank + 1, ranks=2, silent_s=seconds) for rank, seconds in enumerate(silent_s)
    ]
    others = [loaded_worker(0, 0, 8), loaded_worker(2, 0, 9, ranks=2)]
    assert ended_to_start([*group, *others], places, free, monkeypatch) == ended, "other stages stay"


@pytest.mark.parametrize("gain", [worker_pb2.LoadRequest.NONE, worker_pb2.LoadRequest.BESIDE])
@pytest.mark.parametrize("weights", ["", "a manifest's digest"])
def test_a_worker_learns_that_its_agent_has_verified_the_weights(
    weights: str, gain: worker_pb2.LoadRequest.Gain
) -> None:
    asked = agent_pb2.LoadStagesRequest(hello=make_hello(), model_path="model", weights=weights, gain=gain)
    made = loading._load_request(asked, worker_pb2.StageAssignment(), [])  # pyright: ignore[reportPrivateUsage]
    assert (made.fetched, made.gain) == (bool(weights), gain)
