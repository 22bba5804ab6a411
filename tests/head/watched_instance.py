"""A watch over an instance with one rank on one node, whose reports and clock are the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.eventually import run_tasks_until

from mlx_ring.cluster.agent_link import AgentLink, Source
from mlx_ring.cluster.deployment import Site
from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import RingError
from mlx_ring.core.types import RankId
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.in_flight import Unanswered
from mlx_ring.engine.resumption import Silences
from mlx_ring.head import instance_watch as subject
from mlx_ring.head.instance_view import SuspectWait
from mlx_ring.rpc.channels import Silence
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2


class FakeEngine:
    """An engine that records its pauses; one rank may answer."""

    def __init__(self) -> None:
        self.is_paused = False
        self.error: RingError | None = None
        self.answered_at: dict[RankId, float] = {}
        self.loading: list[bool] = []
        """For each heartbeat, True if it says that the rank loads layers between steps."""

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def record_started(self, _rank: RankId, _step: int, *, is_loading: bool) -> None:
        self.loading.append(is_loading)

    def oldest_unanswered(self) -> Unanswered:
        return Unanswered(RankId(0, 0), 5, 31.0, 30.0)


class FakeAgent:
    """An agent whose reports the test sends. Its calls break when the test says so."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[agent_pb2.AgentEvent | RingError] = asyncio.Queue()
        self.waits: list[bool] = []
        self.is_silent = False
        self.suspicions: list[bool] = []
        """True for each silence, False for its end."""

    def on_suspect(self) -> None:
        self.suspicions.append(True)

    def on_answer(self) -> None:
        self.suspicions.append(False)

    async def close(self) -> None:
        pass

    async def watch(self, _hello: object, *, waits: bool) -> AsyncIterator[agent_pb2.AgentEvent]:
        self.waits.append(waits)
        while True:
            report = await self.reports.get()
            if isinstance(report, RingError):
                raise report
            yield report


class FakeChild:
    """A process that records the time in which it may end, and whether it must say where it is."""

    exit_reason = ""

    def __init__(self) -> None:
        self.graces: list[tuple[float, bool]] = []

    async def stop(self, grace_s: float, *, asks_where: bool) -> None:
        self.graces.append((grace_s, asks_where))


class Watching:
    """A watch over an instance with one rank on one node, by a clock of its own."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        stays: int | None = None,
        is_cluster: bool = True,
        history: Sequence[float | None] = (),
        recovery_s: float | None = None,
    ) -> None:
        self.now_s = 100.0
        self.meter, silences = Meter(), Silences()
        for silent_s in history:
            silences.record(silent_s)
        wait = SuspectWait("tiny-1", self.meter, silences, lambda: recovery_s, lambda: self.now_s)
        monkeypatch.setattr(subject, "Silence", partial(Silence, lambda: self.now_s))
        monkeypatch.setattr(subject, "_JUDGE_S", 1e9)
        self.agent, self.engine = FakeAgent(), FakeEngine()
        self.losses: list[RingError] = []
        self.suspicions: list[str] = []
        site = Site("n2", cast("AgentLink", self.agent), is_local=False, hosts={}, source=Source("model"))
        placement: Any = SimpleNamespace(nodes=[site], ranks=[[SimpleNamespace(site=site)]])
        self.watch = subject.InstanceWatch(
            "tiny-1",
            placement,
            self.losses.append,
            self.suspicions.append,
            (),
            is_cluster=is_cluster,
            first_epoch=2,
            staying={} if stays is None else {RankId(0, 0): stays},
            wait=wait,
        )
        self.watch._engine = cast("Engine", self.engine)  # pyright: ignore[reportPrivateUsage] - deadlines need a whole one

    async def report(
        self,
        silent_s: float = 0.0,
        *,
        phase: str = "ready",
        alive: bool = True,
        epoch: int = 2,
        pid: int = 1,
        last_step: int = 0,
        waits: worker_pb2.Wait | None = None,
    ) -> None:
        """Let the agent report its worker."""
        worker = agent_pb2.WorkerState(
            instance="tiny-1",
            alive=alive,
            exit_reason="" if alive else "ended by signal 9 (SIGKILL)",
            status=worker_pb2.WorkerStatus(phase=phase, last_step=last_step, waits=waits),
            silent_s=silent_s,
            pid=pid,
            assignment=worker_pb2.StageAssignment(epoch=epoch),
        )
        event = agent_pb2.AgentEvent(hello=hello_pb2.Hello(node="n2"), workers=[worker])
        self.agent.reports.put_nowait(event)
        await run_tasks_until(self.agent.reports.empty)
        await asyncio.sleep(0)

    def pass_time(self, seconds: float) -> None:
        """Let time pass, with regular looks."""
        for _ in range(round(seconds / 0.25)):
            self.now_s += 0.25
            self.watch.judge()


def watch_and(
    act: Callable[[Watching], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, **figures: Any
) -> None:
    """Run a watch whose agent has reported, and act."""

    async def run() -> None:
        watching = Watching(monkeypatch, **figures)
        async with watching.watch.watching(hello_pb2.Hello()):
            await watching.watch.begin()
            await watching.report()
            await act(watching)

    asyncio.run(run())
