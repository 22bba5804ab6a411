"""How an agent ends its workers, and what it tells them without being asked."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc

from mlx_ring.agent.supervisor import Supervisor, Worker, WorkerOptions
from mlx_ring.core.environment import inherited_environment
from mlx_ring.host.child import ChildProcess
from mlx_ring.rpc.channels import make_aio_server, open_aio_channel
from mlx_ring.rpc.methods import STATUS, WORKER_SERVICE, service_handler
from mlx_ring.rpc.protos import worker_pb2


def test_workers_hear_at_once_which_certificates_are_refused(tmp_path: Path) -> None:
    async def run() -> list[str]:
        heard: asyncio.Queue[list[str]] = asyncio.Queue()

        async def status(
            request: worker_pb2.StatusRequest, _context: grpc.aio.ServicerContext[object, object]
        ) -> worker_pb2.WorkerStatus:
            heard.put_nowait(list(request.revoked))
            return worker_pb2.WorkerStatus(phase="ready")

        socket = tmp_path / "w.sock"
        server = make_aio_server()
        server.add_generic_rpc_handlers((service_handler(WORKER_SERVICE, ((STATUS, status),)),))
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        supervisor = Supervisor(WorkerOptions("here", tmp_path, tmp_path, "info", "off", 1))
        living = cast("ChildProcess", SimpleNamespace(exit_reason="", pid=os.getpid()))
        async with open_aio_channel(f"unix:{socket}") as channel:
            supervisor._workers.append(Worker(worker_pb2.StageAssignment(), socket, living, channel))  # pyright: ignore[reportPrivateUsage] - no process is needed for this
            supervisor.revoke(("7f",))
            async with asyncio.timeout(60):
                told = await heard.get()
        await server.stop(None)
        return told

    assert asyncio.run(run()) == ["7f"]


DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
while True:
    signal.pause()
"""


def test_a_stop_whose_caller_is_cancelled_still_ends_a_worker_that_ignores_sigterm(tmp_path: Path) -> None:
    """A head that is cut off in the middle cancels its call."""

    async def run() -> str:
        (tmp_path / "deaf_worker.py").write_text(DEAF)
        supervisor = Supervisor(WorkerOptions("here", tmp_path, tmp_path, "info", "off", 1))
        up = asyncio.Event()

        def hear(line: str) -> str:
            up.set()
            return line

        environment = inherited_environment({"PYTHONPATH": str(tmp_path)})
        child = await ChildProcess.start(
            "deaf_worker", [], name="deaf", rank=1, environment=environment, word=hear
        )
        try:
            async with asyncio.timeout(60), open_aio_channel(f"unix:{tmp_path / 'w.sock'}") as channel:
                await up.wait()
                rank = worker_pb2.StageAssignment(instance="tiny", rank=1, tp_size=2)
                supervisor._workers.append(Worker(rank, tmp_path / "w.sock", child, channel))  # pyright: ignore[reportPrivateUsage] - a worker of its own kind
                stopping = asyncio.create_task(supervisor.stop("tiny"))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert not supervisor.workers
                stopping.cancel()
                return await child.wait()
        finally:
            await child.stop(0.0)

    assert asyncio.run(run()) == "ended by signal 9 (SIGKILL)"
