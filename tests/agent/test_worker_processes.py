"""Processes of workers: GPUs, and the spare one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from tests.eventually import run_tasks_until
from tests.machines import free_pair_of_ports

from mlx_ring.agent import worker_processes as subject
from mlx_ring.agent.worker_processes import Inherited, SpareWorker, end_worker, listening_arguments, own_gpu
from mlx_ring.core.environment import inherited_environment
from mlx_ring.host.child import ChildProcess
from mlx_ring.host.machine import NodePorts, ProcessPorts
from mlx_ring.host.process import UsableMemory
from mlx_ring.rpc.protos.worker_pb2 import StageAssignment
from mlx_ring.settings.process_settings import SpareMode


@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [
        (4, "", ["0", "1", "2", "3"]),
        (8, "7,6,5,4,3", ["7", "6", "5", "4"]),
        (8, "1,2", [None] * 4),
        (2, "", [None] * 4),
        (0, "", [None] * 4),
    ],
)
def test_workers_have_a_gpu_each_if_there_are_enough(
    gpus: int, visible: str, expected: list[str | None], tmp_path: Path
) -> None:
    for number in range(gpus):
        (tmp_path / f"0000:{number:02x}:00.0").mkdir()
    places = [
        StageAssignment(stage=stage, stages=2, rank=rank, tp_size=2) for stage in (0, 1) for rank in (0, 1)
    ]
    assert [own_gpu(place, tmp_path, visible).get("CUDA_VISIBLE_DEVICES") for place in places] == expected


WAITS = """
import json, os, sys
from mlx_ring.host.child import READY_LINE, read_lifeline

print(READY_LINE, flush=True)
given = json.loads(read_lifeline(int(sys.argv[-1])) or "[]")
print(*given, flush=True)
while given and os.read(int(sys.argv[-1]), 1):
    pass
"""
"""Spare that prints the arguments that it gets."""


class Node:
    """Node with a spare, and the lines that it has written."""

    def __init__(self, folder: Path, mode: SpareMode) -> None:
        (folder / "spare_under_test.py").write_text(WAITS)
        self.like = Inherited(inherited_environment({"PYTHONPATH": str(folder)}), is_joined=False)
        self.lines: list[str] = []
        self.started: list[ChildProcess] = []
        self.idle = asyncio.Event()
        self.spare = SpareWorker(mode, self._start, self._wait_until_idle)

    async def _wait_until_idle(self) -> None:
        await self.idle.wait()

    async def _start(self, like: Inherited, on_line: Callable[[str], str]) -> ChildProcess:
        def word(line: str) -> str:
            if text := on_line(line):
                self.lines.append(text)
            return text

        child = await ChildProcess.start(
            "spare_under_test", [], name="spare", rank=None, environment=like.environment, word=word
        )
        self.started.append(child)
        return child

    async def take(self, *, is_joined: bool = False) -> ChildProcess | None:
        like = Inherited(self.like.environment, is_joined)
        return await self.spare.take(like, ["--stage", "1"], name="worker-1-0", rank=0)

    async def make_spare(self) -> int:
        """Take none, as the first load does, and wait for a spare; return its process ID."""
        assert await self.take() is None
        self.idle.set()
        self.spare.prepare()
        await run_tasks_until(lambda: self.spare.is_ready)
        assert self.spare.pid is not None
        return self.spare.pid


@asynccontextmanager
async def node_with_spare(folder: Path, mode: SpareMode = "on") -> AsyncGenerator[Node]:
    node = Node(folder, mode)
    try:
        async with asyncio.timeout(60):
            yield node
    finally:
        await node.spare.stop()
        for child in node.started:
            await child.stop(0.0, asks_where=False)


def test_a_spare_becomes_the_next_worker_and_gets_its_arguments(tmp_path: Path) -> None:
    async def run() -> None:
        async with node_with_spare(tmp_path) as node:
            pid = await node.make_spare()
            worker = await node.take()
            assert worker is not None
            assert (worker.pid, worker.name, node.spare.pid) == (pid, "worker-1-0", None)
            await run_tasks_until(lambda: node.lines == ["--stage 1"])
            assert await node.take() is None, "one spare is one worker"

    asyncio.run(run())


def test_no_load_waits_for_a_spare_that_is_made_when_the_node_is_idle(tmp_path: Path) -> None:
    async def run() -> None:
        async with node_with_spare(tmp_path) as node:
            assert await node.take() is None
            node.spare.prepare()
            assert await node.take() is None
            assert not node.started
            node.idle.set()
            await run_tasks_until(lambda: node.spare.is_ready)

    asyncio.run(run())


@pytest.mark.parametrize(("mode", "kept"), [("auto", False), ("on", True)])
def test_a_gpu_whose_memory_a_spare_would_hold_has_one_only_on_request(
    mode: SpareMode, *, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "has_cuda_build", lambda: True)

    async def run() -> None:
        async with node_with_spare(tmp_path, mode) as node:
            assert await node.take() is None
            node.spare.prepare()
            node.idle.set()
            await run_tasks_until(lambda: node.spare.is_settled)
            assert node.spare.is_ready == kept

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_process_for_a_worker_that_is_about_to_come_is_made_at_once_whatever_the_setting(
    mode: SpareMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_MOST_SHARE", 0.0)

    async def run() -> None:
        async with node_with_spare(tmp_path, mode) as node:
            node.spare.make_at_once(node.like)
            await run_tasks_until(lambda: node.spare.is_ready)
            (child,) = node.started
            worker = await node.take()
            assert worker is child

    asyncio.run(run())


def test_a_spare_stays_when_a_load_that_does_not_take_it_follows_the_last_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_EMPTY_S", 0.01)

    async def run() -> None:
        async with node_with_spare(tmp_path) as node:
            pid = await node.make_spare()
            node.spare.end_soon()
            node.spare.prepare()
            await run_tasks_until(lambda: node.spare.is_settled)
            assert node.spare.pid == pid

    asyncio.run(run())


def test_a_spare_that_has_ended_takes_no_memory() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert subject._memory_of(process.pid) == 0  # pyright: ignore[reportPrivateUsage] - it may end at any moment


@pytest.mark.parametrize("fault", ["joined", "killed", "stopped"])
def test_a_spare_that_cannot_serve_is_ended_and_not_taken(fault: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with node_with_spare(tmp_path) as node:
            pid = await node.make_spare()
            if fault == "killed":
                os.kill(pid, signal.SIGKILL)
                await node.started[0].wait()
            elif fault == "stopped":
                os.kill(pid, signal.SIGSTOP)
                await run_tasks_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
            assert await node.take(is_joined=fault == "joined") is None
            assert node.started[0].exit_reason
            assert node.spare.pid is None
            # A later load makes one for workers like the last one.
            node.spare.prepare()
            await run_tasks_until(lambda: node.spare.is_ready)
            assert len(node.started) == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("mode", "gigabytes", "expected"), [("auto", 64, 1), ("auto", 2, 0), ("on", 2, 1), ("off", 64, 0)]
)
def test_a_spare_takes_at_most_a_hundredth_of_the_memory(
    mode: SpareMode, gigabytes: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = gigabytes << 30
    monkeypatch.setattr(subject, "usable_memory", lambda: UsableMemory(total, total, "the machine"))

    async def run() -> int:
        async with node_with_spare(tmp_path, mode) as node:
            await node.take()
            node.idle.set()
            node.spare.prepare()
            await run_tasks_until(lambda: node.spare.is_settled)
            return len(node.started)

    assert asyncio.run(run()) == expected


def test_a_spare_that_is_larger_than_expected_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "SPARE_BYTES", 1)
    memory = UsableMemory(64 << 20, 64 << 20, "the machine")
    monkeypatch.setattr(subject, "usable_memory", lambda: memory)

    async def run() -> None:
        async with node_with_spare(tmp_path, "auto") as node:
            assert await node.take() is None
            node.idle.set()
            node.spare.prepare()
            await run_tasks_until(lambda: node.spare.is_settled)
            (child,) = node.started
            assert child.exit_reason
            node.spare.prepare()
            await run_tasks_until(lambda: node.spare.is_settled)
            assert len(node.started) == 1, "no other is made"

    asyncio.run(run())


def test_the_spare_ends_with_its_node_and_some_time_after_the_last_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_EMPTY_S", 0.01)

    async def run() -> None:
        async with node_with_spare(tmp_path) as node:
            await node.make_spare()
            node.spare.end_soon()
            assert await node.started[0].wait()
            await node.make_spare()
            await node.spare.stop()
            assert node.started[1].exit_reason

    asyncio.run(run())


class Ending:
    """Process that records how it was asked to end."""

    name = "worker-0-1"

    def __init__(self) -> None:
        self.asked: list[tuple[float, bool, str]] = []

    async def stop(self, grace_s: float, *, asks_where: bool, before_kill: str) -> str:
        self.asked.append((grace_s, asks_where, before_kill))
        return "killed"


RDMA_RANK = StageAssignment(stages=1, tp_size=2, backend="jaccl")


@pytest.mark.parametrize(
    ("assignment", "grace_s", "asks"),
    [
        (StageAssignment(stages=2, tp_size=1), 0.5, True),
        (StageAssignment(stages=1, tp_size=2, backend="ring"), 0.5, False),
    ],
)
def test_ranks_without_rdma_end_as_soon_as_before(
    assignment: StageAssignment, grace_s: float, *, asks: bool
) -> None:
    child = Ending()
    asyncio.run(end_worker(child, assignment, grace_s, 10**9))
    assert child.asked == [(grace_s, asks, "")]


def test_a_rank_with_rdma_gets_time_and_is_warned_of_before_it_is_killed() -> None:
    child = Ending()
    asyncio.run(end_worker(child, RDMA_RANK, 0.5, 0))
    ((grace_s, asks, sentence),) = child.asked
    assert grace_s >= 10
    assert not asks
    assert "until the machine restarts" in sentence


@pytest.mark.parametrize(
    ("after", "warned"), [([60 * 10**9] * 100, True), ([60 * 10**9, 41 * 10**9], False), ([None] * 9, False)]
)
def test_wired_memory_that_does_not_return_is_reported(
    after: list[int | None],
    *,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(subject, "_RETURNS_WITHIN_S", 0.02)
    monkeypatch.setattr(subject, "_LOOK_S", 0.01)
    looks = iter([None if after[0] is None else 60 * 10**9, *after])
    asyncio.run(end_worker(Ending(), RDMA_RANK, 0.5, 20 * 10**9, lambda: next(looks)))
    assert ("20.0 GB that worker-0-1 had wired have not returned" in caplog.text) is warned


def test_a_worker_listens_on_the_node_s_ports_where_other_machines_connect() -> None:
    first = free_pair_of_ports()
    alone = StageAssignment(stages=2, tp_size=1)

    def ports() -> ProcessPorts:
        return ProcessPorts(NodePorts((first, first + 1)))

    assert listening_arguments(alone, None, "127.0.0.1", ports()) == []
    reach = ["--credentials", "/c", "--listen"]
    assert listening_arguments(alone, Path("/c"), "127.0.0.1", ports()) == [*reach, f"127.0.0.1:{first}"]
    here = StageAssignment(stages=1, tp_size=2, backend="ring")
    group = ["--in-group", "ring", "--group-listen"]
    assert listening_arguments(here, None, "127.0.0.1", ports()) == [*group, "127.0.0.1:0"]
    # Any other loopback address stands for an interface of this machine.
    far = StageAssignment(stages=1, tp_size=2, backend="ring", group_host="127.0.0.2")
    assert listening_arguments(far, Path("/c"), "127.0.0.1", ports()) == [
        *(*reach, f"127.0.0.1:{first}"),
        *(*group, f"127.0.0.2:{first + 1}"),
    ]
