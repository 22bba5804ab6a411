"""Ranks that an agent ends after it has lost its head."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_ring.agent.supervisor import Worker
from mlx_ring.agent.worker_processes import end_orphaned_workers
from mlx_ring.rpc.protos import worker_pb2

SPINS, SLEEPS = "while True: pass", "import time; time.sleep(600)"


@contextlib.contextmanager
def rank(program: str, instance: str, ranks: int = 2) -> Generator[Worker]:
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        assignment = worker_pb2.StageAssignment(instance=instance, stages=1, tp_size=ranks)
        child: Any = SimpleNamespace(pid=process.pid)
        try:
            yield Worker(assignment, Path("socket"), child, cast("Any", None))
        finally:
            process.kill()


class FakeSupervisor:
    """A supervisor that records the instances it ends."""

    def __init__(self, *workers: Worker) -> None:
        self.workers = workers
        self.ended: list[str] = []
        self.has_ended = asyncio.Event()

    async def stop(self, instance: str) -> int:
        self.ended.append(instance)
        self.workers = tuple(worker for worker in self.workers if worker.instance != instance)
        self.has_ended.set()
        return 1


@pytest.mark.parametrize(("silent_s", "expected"), [(60.0, ["waits"]), (0.0, [])])
def test_only_ranks_that_wait_for_others_are_ended_and_only_without_a_head(
    silent_s: float, expected: list[str]
) -> None:
    with rank(SPINS, "waits") as waits, rank(SLEEPS, "idle") as idle, rank(SPINS, "alone", 1) as alone:

        async def run() -> list[str]:
            supervisor = FakeSupervisor(waits, idle, alone)
            ending = asyncio.create_task(
                end_orphaned_workers(supervisor, lambda: time.monotonic() - silent_s, 30.0, 0.3)
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(30.0 if expected else 1.0):
                    await supervisor.has_ended.wait()
            ending.cancel()
            return supervisor.ended

        assert asyncio.run(run()) == expected
