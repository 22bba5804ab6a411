"""Control of workers by their agent: refused certificates, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import psutil
import pytest
from tests.default_settings import agent_settings
from tests.eventually import eventually, run_tasks_until
from tests.machines import free_pair_of_ports

from mlx_ring.agent import supervisor as subject
from mlx_ring.agent.supervisor import Supervisor, Worker, WorkerOptions
from mlx_ring.core.environment import inherited_environment
from mlx_ring.core.errors import AddressInUse
from mlx_ring.host.child import ChildProcess
from mlx_ring.host.machine import NodePorts
from mlx_ring.rpc.channels import make_aio_server, open_aio_channel
from mlx_ring.rpc.methods import STATUS, WORKER_SERVICE, service_handler
from mlx_ring.rpc.protos import worker_pb2


def test_workers_receive_refused_certificates_at_once(tmp_path: Path) -> None:
    async def run() -> list[str]:
        received: asyncio.Queue[list[str]] = asyncio.Queue()

        async def status(
            request: worker_pb2.StatusRequest, _context: grpc.aio.ServicerContext[object, object]
        ) -> worker_pb2.WorkerStatus:
            received.put_nowait(list(request.revoked))
            return worker_pb2.WorkerStatus(phase="ready")

        socket = tmp_path / "w.sock"
        server = make_aio_server()
        server.add_generic_rpc_handlers((service_handler(WORKER_SERVICE, ((STATUS, status),)),))
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        supervisor = Supervisor(WorkerOptions("here", tmp_path, agent_settings(tmp_path, blas="off")))
        living = cast("ChildProcess", SimpleNamespace(exit_reason="", pid=os.getpid()))
        async with open_aio_channel(f"unix:{socket}") as channel:
            supervisor._workers.append(Worker(worker_pb2.StageAssignment(), socket, living, channel))  # pyright: ignore[reportPrivateUsage] - no process is needed for this
            supervisor.revoke(("7f",))
            async with asyncio.timeout(60):
                serials = await received.get()
        await server.stop(None)
        return serials

    assert asyncio.run(run()) == ["7f"]


PROGRAMS = {"hangs": "exec sleep 600", "computes": "while :; do :; done"}

IGNORES_SIGTERM = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("ends_all", [False, True])
def test_a_cancelled_stop_still_ends_a_worker_that_ignores_sigterm(tmp_path: Path, *, ends_all: bool) -> None:
    """Cancel it, as a head does that is disconnected during its call. A stop of all waits for that end, too."""

    async def run() -> str:
        (tmp_path / "stubborn_worker.py").write_text(IGNORES_SIGTERM)
        supervisor = Supervisor(WorkerOptions("here", tmp_path, agent_settings(tmp_path, blas="off")))
        up = asyncio.Event()

        def on_line(line: str) -> str:
            up.set()
            return line

        environment = inherited_environment({"PYTHONPATH": str(tmp_path)})
        child = await ChildProcess.start(
            "stubborn_worker", [], name="stubborn", rank=1, environment=environment, word=on_line
        )
        try:
            async with asyncio.timeout(60), open_aio_channel(f"unix:{tmp_path / 'w.sock'}") as channel:
                await up.wait()
                rank = worker_pb2.StageAssignment(instance="tiny", rank=1, tp_size=2)
                supervisor._workers.append(Worker(rank, tmp_path / "w.sock", child, channel))  # pyright: ignore[reportPrivateUsage] - a worker of its own kind
                stopping = asyncio.create_task(supervisor.stop("tiny"))
                await run_tasks_until(lambda: not supervisor.workers)
                stopping.cancel()
                if ends_all:
                    await supervisor.stop()
                    return child.exit_reason
                return await child.wait()
        finally:
            await child.stop(0.0)

    assert asyncio.run(run()) == "ended by signal 9 (SIGKILL)"


@contextlib.asynccontextmanager
async def supervised(
    tmp_path: Path, pid: int, answers: asyncio.Event
) -> AsyncGenerator[tuple[Supervisor, Worker]]:
    """Supervise a worker that answers once the event is set. Its process is another one."""

    async def status(
        _request: worker_pb2.StatusRequest, _context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.WorkerStatus:
        await answers.wait()
        return worker_pb2.WorkerStatus(phase="ready")

    socket, server = tmp_path / "w.sock", make_aio_server()
    server.add_generic_rpc_handlers((service_handler(WORKER_SERVICE, ((STATUS, status),)),))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    supervisor = Supervisor(WorkerOptions("here", tmp_path, agent_settings(tmp_path, blas="off")))
    living = cast("ChildProcess", SimpleNamespace(exit_reason="", pid=pid))
    async with open_aio_channel(f"unix:{socket}") as channel:
        worker = Worker(worker_pb2.StageAssignment(), socket, living, channel)
        supervisor._workers.append(worker)  # pyright: ignore[reportPrivateUsage] - no process is needed for this
        yield supervisor, worker
    await server.stop(None)


def test_two_workers_never_get_the_same_port_and_an_ended_one_gives_its_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = free_pair_of_ports()
    ports, ends = NodePorts((first, first + 1)), [asyncio.Event() for _ in range(3)]
    options = WorkerOptions("here", tmp_path, agent_settings(tmp_path), tmp_path, "127.0.0.1", ports)
    given: list[str] = []

    async def start_process(_assignment: object, arguments: list[str]) -> Any:
        given.append(arguments[arguments.index("--listen") + 1])
        ended = ends[len(given) - 1]

        async def wait() -> str:
            await ended.wait()
            return "exit code 1"

        return SimpleNamespace(wait=wait, name="worker", pid=1, exit_reason="")

    async def run() -> None:
        supervisor: Any = Supervisor(options)
        monkeypatch.setattr(supervisor, "_start_process", start_process)
        alone = worker_pb2.StageAssignment(stages=1, tp_size=1)
        await supervisor.start([alone, alone])
        assert given == [f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"]
        with pytest.raises(AddressInUse, match="all of these ports are taken"):
            await supervisor.start([alone])
        ended = [*supervisor._tasks]
        ends[1].set()
        await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        await supervisor.start([alone])
        for end in ends:
            end.set()
        await asyncio.gather(*supervisor._tasks)
        assert given[2:] == [f"127.0.0.1:{first + 1}"]

    asyncio.run(run())


def test_a_late_answer_of_a_worker_counts_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_STATUS_WAIT_S", 0.01)

    async def run(pid: int) -> None:
        answers = asyncio.Event()
        async with supervised(tmp_path, pid, answers) as (supervisor, worker):
            with supervisor.changes() as changed:
                await supervisor.refresh()
                assert worker.unresponsive.seconds > 0
                assert not changed.is_set()
                answers.set()
                await changed.wait()
                assert worker.unresponsive.seconds == 0

    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            eventually(psutil.Process(process.pid).status, lambda status: status == psutil.STATUS_SLEEPING)
            asyncio.run(run(process.pid))
        finally:
            process.kill()


def test_a_worker_that_hangs_while_loading_is_found_but_not_one_that_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_STATUS_WAIT_S", 0.01)
    monkeypatch.setattr(subject, "_HANG_LOOK_S", 0.1)

    async def error_of(pid: int, folder: Path) -> str:
        async with supervised(folder, pid, asyncio.Event()) as (supervisor, worker):
            hung = asyncio.ensure_future(supervisor.until_hung(worker, 0.3))
            await run_tasks_until(lambda: hung.done() or worker.unresponsive.seconds > 1.0)
            hung.cancel()
            return str(hung.result()) if hung.done() and not hung.cancelled() else ""

    errors: dict[str, str] = {}
    for name, program in PROGRAMS.items():
        (tmp_path / name).mkdir()
        with subprocess.Popen(["sh", "-c", program]) as process:
            try:
                errors[name] = asyncio.run(error_of(process.pid, tmp_path / name))
            finally:
                process.kill()
    assert errors["hangs"].endswith("neither answered nor computed for 0.3 s; it hangs.")
    assert errors["computes"] == ""
