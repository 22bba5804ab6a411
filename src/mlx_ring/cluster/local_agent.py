"""The agent of this machine, as the head holds it: a child process and a channel to it."""

from __future__ import annotations

from pathlib import Path

from mlx_ring.cluster.agent_link import AgentLink
from mlx_ring.core.child import ChildProcess
from mlx_ring.core.config import Settings
from mlx_ring.core.environment import inherited_environment
from mlx_ring.core.launched import read_launch
from mlx_ring.rpc.channels import open_aio_channel

AGENT_MODULE = "mlx_ring.agent"
_STOP_WAIT_S = 8.0
"""Its workers have three seconds each, side by side, before they are killed."""


class LocalAgent:
    """Made by `start`; ended by `stop`, or by the end of this process."""

    def __init__(self, child: ChildProcess, link: AgentLink) -> None:
        self._child = child
        self.link = link

    @classmethod
    async def start(
        cls,
        settings: Settings,
        *,
        node: str,
        run_dir: Path,
        blas_threads: int,
    ) -> LocalAgent:
        """Start the process.

        Args:
            run_dir: private and empty; the agent listens on `agent.sock` in it, and removes it when it ends.
            blas_threads: of each worker.
        """
        launch = read_launch()
        child = await ChildProcess.start(
            AGENT_MODULE,
            [
                *("--run-dir", str(run_dir), "--node", node),
                *("--log-dir", str(settings.log_dir), "--log-level", settings.log_level),
                *("--log-format", settings.log_format),
                *("--blas", settings.blas, "--blas-threads", str(blas_threads)),
                *("--load-timeout", str(settings.model_load_timeout)),
                *(["--lent", str(launch.meeting_place)] if launch is not None else []),
            ],
            name="agent",
            rank=None,
            environment=inherited_environment({}),
        )
        return cls(child, AgentLink(open_aio_channel(f"unix:{run_dir / 'agent.sock'}"), "the agent"))

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit_reason(self) -> str:
        """Why it ended; empty while it runs."""
        return self._child.exit_reason

    async def stop(self) -> None:
        """End every worker and the agent; returns once the agent, and so each of them, is verified dead."""
        if not self._child.exit_reason:
            await self.link.stop("", _STOP_WAIT_S)
        await self.link.close()
        await self._child.stop(_STOP_WAIT_S)
