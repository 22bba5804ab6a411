"""The agent of a single machine, which is replaced if it hangs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.eventually import run_tasks_until

from mlx_ring.agent.profiling import ProfileOptions
from mlx_ring.core.errors import Conflict, NotReady, RingError, WorkerLost, WorkerStuck
from mlx_ring.head import single_node as subject
from mlx_ring.head.move_order import MoveOrder
from mlx_ring.head.moves import Moves
from mlx_ring.head.single_node import SingleNode, measure_alone, profile_command
from mlx_ring.host.machine import node_name
from mlx_ring.host.machine_profile import MachineProfile
from mlx_ring.settings.config import Settings


class FakeAgent:
    """An agent that answers or hangs."""

    exit_reason = ""

    def __init__(self, *, with_spare: bool = False) -> None:
        self.hangs = False
        self.is_stopped = False
        self.with_spare = with_spare
        self.link = SimpleNamespace(on_suspect=bool, on_answer=bool)

    async def answers(self) -> bool:
        return not self.hangs

    async def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[FakeAgent]:
    """Return the agents that are started."""
    agents: list[FakeAgent] = []

    class Starts:
        @classmethod
        async def start(cls, *_: object, with_spare: bool = False, **_options: object) -> FakeAgent:
            agents.append(FakeAgent(with_spare=with_spare))
            return agents[-1]

    monkeypatch.setattr(subject, "LocalAgent", Starts)
    return agents


@pytest.mark.parametrize(("fails", "hangs", "agents"), [(1, 1, 2), (1, 0, 1), (0, 1, 1)])
def test_only_an_agent_that_hangs_after_a_failure_is_replaced(
    tmp_path: Path, started: list[FakeAgent], fails: int, hangs: int, agents: int
) -> None:
    async def run() -> None:
        machines: Any = SingleNode(Settings(), tmp_path, 1)
        agent = await machines._alive()
        agent.hangs = bool(hangs)
        if fails:
            machines.record_failure(WorkerStuck("The agent has sent nothing."), 0.0)
        assert await machines._alive() is started[-1]

    asyncio.run(run())
    assert [agent.is_stopped for agent in started] == [True] * (agents - 1) + [False]


def test_another_agent_starts_while_the_present_one_is_suspect_and_replaces_it_if_it_is_lost(
    tmp_path: Path, started: list[FakeAgent]
) -> None:
    async def run() -> None:
        machines: Any = SingleNode(Settings(), tmp_path, 1)
        first: Any = await machines._alive()
        first.link.on_suspect()
        first.link.on_suspect()
        await run_tasks_until(lambda: len(started) == 2)
        first.link.on_answer()
        await run_tasks_until(lambda: started[1].is_stopped)
        assert await machines._alive() is first
        first.link.on_suspect()
        await run_tasks_until(lambda: len(started) == 3)
        first.hangs = True
        machines.record_failure(WorkerStuck("The agent has sent nothing."), 0.0)
        assert await machines._alive() is started[2]
        assert first.is_stopped
        started[2].link.on_suspect()
        await run_tasks_until(lambda: len(started) == 4)
        await machines.stop()

    asyncio.run(run())
    assert [agent.with_spare for agent in started] == [False, True, True, True]
    assert all(agent.is_stopped for agent in started)


def test_an_agent_that_cannot_be_started_is_started_at_the_next_attempt(
    tmp_path: Path, started: list[FakeAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = cast("Any", subject).LocalAgent.start
    failures = [OSError(24, "Too many open files")] * 3

    async def fail_at_first(*_: object, **options: Any) -> FakeAgent:
        if failures:
            raise failures.pop()
        return await starts(**options)

    monkeypatch.setattr(cast("Any", subject).LocalAgent, "start", fail_at_first)

    async def run() -> None:
        machines: Any = SingleNode(Settings(), tmp_path, 1)
        for attempt in range(3):
            if attempt:  # as while the present one is silent
                machines._begin_replacement()
            if attempt == 2:
                machines._drop_replacement()
                (dropping,) = machines._dropping
                await dropping
            else:
                with pytest.raises(NotReady, match=r"cannot be started: Too many open files\."):
                    await machines._alive()
        assert await machines._alive() is started[-1]
        await machines.stop()

    asyncio.run(run())
    assert len(started) == 1


def test_a_single_machine_is_not_drained_also_before_it_was_measured(tmp_path: Path) -> None:
    machines = SingleNode(Settings(), tmp_path, 1)
    assert not machines.cluster_view().membership.members
    moves = Moves(lambda: machines, list, cast("Any", None), MoveOrder(), cast("Any", None))
    with pytest.raises(Conflict, match=f"{node_name()} is the only machine of this server"):
        asyncio.run(moves.drain(node_name(), force=False))


def test_only_a_built_in_model_is_loaded_while_native_kernels_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urgencies: list[bool] = []
    ends: list[str] = []

    async def run() -> None:
        compiled = asyncio.Event()

        async def build_kernels(_blas: str, *, is_urgent: bool) -> None:
            urgencies.append(is_urgent)
            try:
                await compiled.wait()
            except asyncio.CancelledError:
                ends.append("cancelled")
                raise
            ends.append("compiled")

        monkeypatch.setattr(subject, "build_kernels", build_kernels)
        machines: Any = SingleNode(Settings(), tmp_path, 1)
        await machines._prepare_kernels(is_urgent=False)
        await run_tasks_until(lambda: urgencies)
        waiting = asyncio.create_task(machines._prepare_kernels(is_urgent=True))
        await run_tasks_until(lambda: len(urgencies) == 2)
        assert (urgencies, ends, waiting.done()) == ([False, True], ["cancelled"], False)
        compiled.set()
        await waiting
        compiled.clear()
        other: Any = SingleNode(Settings(), tmp_path, 1)
        await other._prepare_kernels(is_urgent=False)
        await run_tasks_until(lambda: len(urgencies) == 3)
        await other.stop()

    asyncio.run(run())
    assert ends == ["cancelled", "compiled", "cancelled"]


def test_machine_is_measured_until_its_profile_is_steady_with_the_threads_of_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    noisy, steady = (cast("MachineProfile", SimpleNamespace(is_steady=each)) for each in (False, True))
    failure = WorkerLost("Measuring this machine failed: it was killed")
    ends: list[MachineProfile | RingError] = [failure, noisy, steady]
    threads: list[int] = []

    async def recall_or_measure(_: object, options: ProfileOptions, *, accepts_noise: bool) -> MachineProfile:
        assert not accepts_noise
        threads.append(options.blas_threads)
        if isinstance(end := ends.pop(0), RingError):
            raise end
        return end

    async def build_kernels(blas: str, *, is_urgent: bool) -> None:
        assert (blas, is_urgent) == ("auto", True)

    monkeypatch.setattr(subject, "recall_or_measure", recall_or_measure)
    monkeypatch.setattr(subject, "build_kernels", build_kernels)
    monkeypatch.setattr("mlx_ring.host.machine.usable_cores", lambda: 8)

    async def run() -> None:
        machines: Any = SingleNode(Settings(), tmp_path, 2)
        await measure_alone(machines, bool)
        assert machines._profile is None
        await measure_alone(machines, bool)
        assert machines._profile is noisy
        await asyncio.gather(measure_alone(machines, bool), measure_alone(machines, bool))
        assert machines._profile is steady
        await machines.stop()

    asyncio.run(run())
    assert threads == [3, 3, 3]
    assert "This machine is not measured: Measuring this machine failed: it was killed" in caplog.text


def test_a_machine_is_not_measured_while_it_computes_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy = cast("MachineProfile", SimpleNamespace(is_steady=False))
    kept: list[MachineProfile | None] = [None, noisy]
    measured: list[None] = []

    async def recall_or_measure(*_: object, **__: object) -> MachineProfile:
        measured.append(None)
        return noisy

    async def build_kernels(_blas: str, *, is_urgent: bool) -> None:
        assert is_urgent

    monkeypatch.setattr(subject, "recall_or_measure", recall_or_measure)
    monkeypatch.setattr(subject, "build_kernels", build_kernels)
    monkeypatch.setattr(subject, "recall", lambda *_: kept.pop(0))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]

    async def run() -> None:
        machines: Any = SingleNode(Settings(), tmp_path, 1)
        with pytest.raises(NotReady, match="while it computes answers: ask again once they end"):
            await measure_alone(machines, lambda: True)
        # A profile of an earlier start serves meanwhile.
        await measure_alone(machines, lambda: True)
        assert machines._profile is noisy
        assert not measured
        began = iter([False, True])
        await measure_alone(machines, lambda: next(began))
        assert not measured, "a request came while kernels were compiled"
        await measure_alone(machines, lambda: False)
        assert len(measured) == 1
        await machines.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "models", "command"),
    [
        (Settings(), 1, "mlx-ring profile --blas-threads 7"),
        (Settings(stages=2), 1, "mlx-ring profile --blas-threads 3"),
        (Settings(stages=2, replicas=2), 1, "mlx-ring profile --blas-threads 1"),
        (Settings(), 3, "mlx-ring profile --blas-threads 2"),
        (Settings(stages=2, nodes=2), 1, "mlx-ring profile --blas-threads 7"),
        (Settings(stages=2, blas_threads=5), 1, "mlx-ring profile --blas-threads 5"),
        (
            Settings(tp=2, blas="openblas", state_dir=Path("/my state")),
            1,
            "mlx-ring profile --blas-threads 3 --blas openblas --state-dir FOLDER",
        ),
    ],
)
def test_the_command_to_measure_a_machine_has_the_threads_of_its_workers(
    settings: Settings, models: int, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_ring.host.machine.usable_cores", lambda: 8)
    assert profile_command(settings, models) == command
