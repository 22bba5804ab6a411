"""Losses of an instance before it serves, without machines."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.eventually import run_tasks_until

from mlx_ring.cluster.agent_link import AgentLink, Source
from mlx_ring.cluster.deployment import Site, WorkerPlace
from mlx_ring.cluster.layer_split import even_split
from mlx_ring.cluster.relinking import LoadedRanks
from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import NotReady, ProtocolError, RingError, StepFailed, WorkerLost, WorkerStuck
from mlx_ring.core.types import RankId
from mlx_ring.engine.executor import GrpcExecutor
from mlx_ring.engine.resumption import Silences
from mlx_ring.head import instance as subject
from mlx_ring.head.instance import Epoch, Instance
from mlx_ring.head.kv_memory import Reservation
from mlx_ring.head.placing import Placement
from mlx_ring.head.rank_placements import place_ranks
from mlx_ring.rpc.protos import agent_pb2, worker_pb2
from mlx_ring.settings.config import Settings

KEPT, NEW = RankId(0, 0), RankId(1, 0)


class FakeAgent:
    """Agent of a node, whose workers are never ready."""

    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.watches = 0
        """Number of calls that report its workers: the second one begins when all are loaded."""

    async def watch(self, _hello: object, *, waits: bool) -> AsyncIterator[agent_pb2.AgentEvent]:
        assert waits
        self.watches += 1
        await asyncio.get_running_loop().create_future()
        yield agent_pb2.AgentEvent()

    async def stop(self, instance: str, _timeout_s: float, _hello: object) -> None:
        self.stopped.append(instance)


class FakeExecutor:
    """Executor that counts its ends."""

    def __init__(self) -> None:
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1


class FakeShares:
    """Shares of KV memory that record what is reserved."""

    def __init__(self) -> None:
        self.expected: Mapping[str, Reservation] = {}

    def expect(self, _user: object, reservations: Mapping[str, Reservation]) -> None:
        self.expected = reservations

    def leave(self, _instance: str) -> None:
        pass

    def record_workers(self, _event: object) -> None:
        raise AssertionError


class FakeService:
    """Service that ignores what happens."""

    def ignore(self, *_: object) -> None:
        pass

    suspect = record_workers = lose = ignore
    recoveries = SimpleNamespace(status=None, silences=Silences())
    recovery_s = None

    def load_phase(self, _rank: RankId) -> str:
        return "weights"


class Run:
    """Run of an instance of two stages on nodes a and b; in a patched one, the first stage stays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_patched: bool, link: str = "grpc") -> None:
        self.agents = FakeAgent(), FakeAgent()
        sites = [
            Site(node, cast("AgentLink", agent), is_local=True, hosts={}, source=Source("model"))
            for node, agent in zip("ab", self.agents, strict=True)
        ]
        placement = Placement(
            even_split(2, 2), place_ranks(sites, [(1.0,)] * 2), None, group_settings={"link": link}
        )
        prepared = {KEPT: (agent_pb2.StartedWorker(pid=5), sites[0])}
        epoch = Epoch("tiny-1", 2, placement, "a", prepared=prepared if is_patched else None)
        limits = SimpleNamespace(context_length=64)
        served: Any = SimpleNamespace(
            folder=None, names=("tiny",), limits=limits, read_digest=self.read_digest
        )
        self.read_in: list[threading.Thread] = []
        """Threads that have read the model's digest."""
        self.assigned: list[str] = []
        """Digests in assignments."""
        self.shares, self.executor = FakeShares(), FakeExecutor()
        self.connecting = asyncio.Event()
        self.is_linking = False
        self.loading: asyncio.Future[list[WorkerPlace]] = asyncio.get_running_loop().create_future()
        self.linking: asyncio.Future[list[WorkerPlace]] = asyncio.get_running_loop().create_future()
        self.instance = Instance(
            Settings(),
            served,
            cast("Any", FakeService()),
            epoch,
            lambda _: None,
            cast("Any", self.shares),
            Meter(),
            None,
            None,
            lambda _: None,
            is_beside=False,
        )

        async def load(*_: object) -> list[WorkerPlace]:
            return await self.loading

        async def connect(*_: object, **__: object) -> FakeExecutor:
            self.connecting.set()
            return self.executor

        def assign(
            _settings: object, _served: object, digest: str, *_: object
        ) -> list[worker_pb2.StageAssignment]:
            self.assigned.append(digest)
            return [worker_pb2.StageAssignment(instance="tiny-1", epoch=2)]

        def memory(*_: object) -> int:
            return 1000

        monkeypatch.setattr(subject, "deploy", load)

        async def load_lost(*_: object) -> LoadedRanks:
            await self.loading
            return LoadedRanks(prepared | {NEW: (agent_pb2.StartedWorker(pid=6), sites[1])}, {})

        async def open_links(*_: object) -> list[WorkerPlace]:
            self.is_linking = True
            return await self.linking

        monkeypatch.setattr(subject, "load_lost", load_lost)
        monkeypatch.setattr(subject, "link", open_links)
        monkeypatch.setattr(GrpcExecutor, "connect", connect)
        monkeypatch.setattr(subject, "assign_all", assign)
        monkeypatch.setattr(subject, "memory_for_weights", memory)
        monkeypatch.setattr(subject, "_BETTER_REASON_S", 0.0)

    def read_digest(self) -> str:
        self.read_in.append(threading.current_thread())
        return f"digest {len(self.read_in)}"

    async def until_lost(self, lose: Callable[[], object]) -> RingError:
        """Load, and return the error with which the run ends after a loss."""
        running = asyncio.create_task(self.instance.run(lambda _: pytest.fail("it never served")))
        await run_tasks_until(lambda: self.shares.expected)
        lose()
        with pytest.raises(RingError) as raised:
            await running
        return raised.value


def run(monkeypatch: pytest.MonkeyPatch, *, is_patched: bool, lose: Callable[[Run], None]) -> tuple[Run, Any]:
    """Lose an instance; return its run, and the error."""

    async def act() -> tuple[Run, RingError]:
        run = Run(monkeypatch, is_patched=is_patched)
        return run, await run.until_lost(lambda: lose(run))

    return asyncio.run(act())


def test_an_instance_that_is_lost_before_its_first_report_has_failed_to_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose(run: Run) -> None:
        async def after_loading() -> None:
            await run_tasks_until(lambda: run.agents[0].watches == 2)
            run.instance.lose(WorkerLost("It died as soon as it was ready."))

        run.loading.set_result([])
        lost.append(asyncio.ensure_future(after_loading()))

    lost: list[asyncio.Future[None]] = []
    done, error = run(monkeypatch, is_patched=False, lose=lose)
    assert str(error) == "It died as soon as it was ready."
    assert done.executor.closed == 1
    assert (done.instance.remains, [agent.stopped for agent in done.agents]) == (None, [["tiny-1"]] * 2)


@pytest.mark.parametrize("error", [WorkerLost("It died."), WorkerStuck("It hangs.")])
def test_ranks_that_stayed_are_left_when_a_patch_is_lost_before_it_serves(
    monkeypatch: pytest.MonkeyPatch, error: RingError
) -> None:
    done, raised = run(monkeypatch, is_patched=True, lose=lambda run: run.loading.set_exception(error))
    assert raised is error
    assert done.instance.remains is not None
    assert done.instance.remains.lost == {NEW}
    assert [agent.stopped for agent in done.agents] == [[], []]


@pytest.mark.parametrize("is_linked", [False, True])
def test_ranks_that_were_loaded_are_left_when_another_one_is_lost_before_a_patch_serves(
    monkeypatch: pytest.MonkeyPatch, *, is_linked: bool
) -> None:
    lost = WorkerLost("It died.")

    def lose(run: Run) -> None:
        def lose_other() -> None:
            run.instance.watch.lost_ranks.add(KEPT)
            run.instance.lose(lost)

        run.loading.set_result([])
        if is_linked:
            run.linking.set_result([])
            monkeypatch.setattr(run.connecting, "set", lose_other)
        else:
            linking.append(asyncio.ensure_future(run_tasks_until(lambda: run.is_linking)))
            linking[0].add_done_callback(lambda _: lose_other())

    linking: list[asyncio.Future[None]] = []
    done, raised = run(monkeypatch, is_patched=True, lose=lose)
    assert raised is lost
    assert done.instance.remains is not None
    assert done.instance.remains.lost == {KEPT}
    assert done.instance.remains.pids[NEW] == 6
    assert [agent.stopped for agent in done.agents] == [[], []]


def test_nothing_is_left_when_a_patch_cannot_be_loaded_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ProtocolError("No such stage.")
    done, _ = run(monkeypatch, is_patched=True, lose=lambda run: run.loading.set_exception(refused))
    assert (done.instance.remains, [agent.stopped for agent in done.agents]) == (None, [["tiny-1"]] * 2)


def test_the_digest_of_a_model_is_read_once_an_epoch_in_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = WorkerLost("It died.")
    done, _ = run(monkeypatch, is_patched=False, lose=lambda run: run.loading.set_exception(lost))
    assert done.assigned == ["digest 1"]
    (thread,) = done.read_in
    assert thread is not threading.main_thread()


def test_an_epoch_that_was_prepared_keeps_the_digest_of_the_ranks_that_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def act() -> Run:
        run = Run(monkeypatch, is_patched=True)
        own: Any = run.instance
        own._epoch = replace(own._epoch, placement=replace(own._epoch.placement, model_digest="theirs"))
        await run.until_lost(lambda: run.loading.set_exception(WorkerLost("It died.")))
        return run

    done = asyncio.run(act())
    assert (done.assigned, done.read_in) == (["theirs"], [])
    assert done.instance.remains is not None
    assert done.instance.remains.placement.model_digest == "theirs"


def test_all_ranks_are_left_when_one_cannot_load_its_next_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    async def load_late(*_: object) -> None:
        """Fail, as `problem` says."""

    async def act() -> tuple[Run, RingError]:
        run = Run(monkeypatch, is_patched=True)
        reshaping = SimpleNamespace(late={KEPT: 5}, load_late=load_late, problem=StepFailed("No memory."))
        epoch = replace(run.instance._epoch, reshaping=cast("Any", reshaping))  # pyright: ignore[reportPrivateUsage]
        run.instance._epoch = epoch  # pyright: ignore[reportPrivateUsage]
        return run, await run.until_lost(lambda: None)

    done, error = asyncio.run(act())
    assert isinstance(error, NotReady)
    assert done.instance.is_dropped
    assert [agent.stopped for agent in done.agents] == [[], []]


@pytest.mark.parametrize("phase", [None, "loading"])
def test_garbage_is_collected_while_a_load_waits_unless_it_is_a_recovery(
    monkeypatch: pytest.MonkeyPatch, phase: str | None
) -> None:
    collected: list[None] = []
    loads: list[asyncio.Future[None]] = []
    monkeypatch.setattr(subject, "_LOAD_BEGINS_S", 0.0)
    monkeypatch.setattr(subject, "collect_left", lambda: collected.append(None))
    monkeypatch.setattr(FakeService.recoveries, "status", phase)

    def load(run: Run) -> None:
        async def finish() -> None:
            await run_tasks_until(lambda: collected or phase)
            run.loading.set_exception(WorkerLost("It died."))

        loads.append(asyncio.ensure_future(finish()))

    run(monkeypatch, is_patched=False, lose=load)
    assert bool(collected) == (phase is None)


@pytest.mark.parametrize(("is_patched", "nodes"), [(False, {"a", "b"}), (True, {"b"})])
def test_weights_are_reserved_only_for_ranks_that_are_loaded(
    monkeypatch: pytest.MonkeyPatch, nodes: set[str], *, is_patched: bool
) -> None:
    error = WorkerLost("It died.")
    done, _ = run(monkeypatch, is_patched=is_patched, lose=lambda run: run.loading.set_exception(error))
    assert done.shares.expected.keys() == nodes
    assert {reserved.weight_bytes for reserved in done.shares.expected.values()} == {500}


def test_a_connection_that_is_made_when_the_instance_is_lost_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose(run: Run) -> None:
        def on_connection() -> None:
            run.instance.lose(WorkerLost("It died."))

        monkeypatch.setattr(run.connecting, "set", on_connection)
        run.loading.set_result([])

    done, _ = run(monkeypatch, is_patched=False, lose=lose)
    assert done.executor.closed == 1


def test_ranks_that_would_be_left_are_stopped_if_nobody_patches_them_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cancel the run after a loss, while it still closes its connections."""

    async def act() -> Run:
        run, is_closing = Run(monkeypatch, is_patched=True), asyncio.Event()

        def lose() -> None:
            run.instance.watch.lost_ranks.add(KEPT)
            run.instance.lose(WorkerLost("It died."))

        async def close() -> None:
            is_closing.set()
            await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(run.connecting, "set", lose)
        monkeypatch.setattr(run.executor, "close", close)
        run.loading.set_result([])
        run.linking.set_result([])
        running = asyncio.create_task(run.instance.run(lambda _: pytest.fail("it never served")))
        await is_closing.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return run

    done = asyncio.run(act())
    assert [agent.stopped for agent in done.agents] == [["tiny-1"]] * 2


@pytest.mark.parametrize(("link", "lost"), [("grpc", {KEPT: 5}), ("ring", {KEPT: 5, NEW: math.inf})])
def test_a_lost_rank_is_lost_with_its_group_and_with_the_last_step_that_it_has_begun(
    monkeypatch: pytest.MonkeyPatch, link: str, lost: Mapping[RankId, float]
) -> None:
    async def act() -> Mapping[RankId, float]:
        instance = Run(monkeypatch, is_patched=False, link=link).instance
        instance.watch.lost_ranks.add(KEPT)
        instance.watch.begun_by_stuck = {KEPT: 5}
        return instance.lost_ranks

    assert asyncio.run(act()) == lost
