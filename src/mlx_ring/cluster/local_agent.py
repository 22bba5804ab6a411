"""The agent of this machine, as the head holds it: a child process and a channel to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc

from mlx_ring.core.child import ChildProcess
from mlx_ring.core.config import Settings, inherited_environment
from mlx_ring.core.errors import WorkerLost
from mlx_ring.rpc.channels import open_aio_channel
from mlx_ring.rpc.failures import channel_error, failure_to_error
from mlx_ring.rpc.methods import START, STOP, WATCH
from mlx_ring.rpc.protos import agent_pb2

AGENT_MODULE = "mlx_ring.agent"
HEARTBEAT_S = 2.0
_STOP_WAIT_S = 8.0
"""Its workers have three seconds each, side by side, before they are killed."""

Report = Callable[[agent_pb2.StartProgress], None]


class LocalAgent:
    """Made by `start`; ended by `stop`, or by the end of this process."""

    def __init__(self, child: ChildProcess, channel: grpc.aio.Channel) -> None:
        self._child = child
        self._channel = channel

    @classmethod
    async def start(cls, settings: Settings, *, node: str, run_dir: Path, blas_threads: int) -> LocalAgent:
        """Start the process.

        Args:
            run_dir: private and empty; the agent listens on `agent.sock` in it, and removes it when it ends.
            blas_threads: of each worker.
        """
        child = await ChildProcess.start(
            AGENT_MODULE,
            [
                *("--run-dir", str(run_dir), "--node", node),
                *("--log-dir", str(settings.log_dir), "--log-level", settings.log_level),
                *("--blas", settings.blas, "--blas-threads", str(blas_threads)),
                *("--load-timeout", str(settings.model_load_timeout)),
            ],
            name="agent",
            rank=None,
            environment=inherited_environment({}),
        )
        return cls(child, open_aio_channel(f"unix:{run_dir / 'agent.sock'}"))

    @property
    def pid(self) -> int:
        return self._child.pid

    async def wait(self) -> str:
        """Its end, with the reason."""
        return await self._child.wait()

    async def load(self, request: agent_pb2.StartRequest, report: Report) -> dict[tuple[int, int], str]:
        """Start and load a plan's workers.

        Returns:
            Each worker's address, by stage and rank.

        Raises:
            RingError: what a worker could not do.
            WorkerLost: the agent itself is gone.
        """
        following = asyncio.ensure_future(self._follow_load(request, report))
        end = asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait((following, end), return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                raise WorkerLost(f"The agent (pid {self.pid}) {end.result()} before the model was loaded.")
            return following.result()
        finally:
            following.cancel()
            end.cancel()

    async def _follow_load(
        self, request: agent_pb2.StartRequest, report: Report
    ) -> dict[tuple[int, int], str]:
        addresses: dict[tuple[int, int], str] = {}
        try:
            async for progress in START.aio_unary_stream(self._channel)(request, wait_for_ready=True):
                if progress.progress.HasField("failure"):
                    raise failure_to_error(progress.progress.failure)
                addresses[progress.stage, progress.rank] = progress.address
                report(progress)
        except grpc.RpcError as error:
            raise channel_error(error, "the agent") from error
        return addresses

    async def watch(self, request: agent_pb2.WatchRequest) -> AsyncIterator[agent_pb2.AgentEvent]:
        """What the agent tells of its workers, until it is gone.

        Raises:
            WorkerLost: the agent is gone.
        """
        try:
            async for event in WATCH.aio_unary_stream(self._channel)(request, wait_for_ready=True):
                yield event
        except grpc.RpcError as error:
            raise channel_error(error, "the agent") from error
        raise WorkerLost("The agent ended its reports.")

    async def stop(self) -> None:
        """End every worker and the agent; returns once the agent, and so each of them, is verified dead."""
        if not self._child.exit_reason:
            with contextlib.suppress(grpc.RpcError):
                await STOP.aio_unary_unary(self._channel)(agent_pb2.StopRequest(), timeout=_STOP_WAIT_S)
        await self._channel.close()
        await self._child.stop(_STOP_WAIT_S)
