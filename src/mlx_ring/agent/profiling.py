"""Measures this machine in a process of its own, set up as its workers are. What befalls that process befalls nobody else."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from mlx_ring.agent.worker_environment import worker_environment
from mlx_ring.core.child import ChildProcess
from mlx_ring.core.errors import ProtocolError, WorkerLost, WorkerStuck
from mlx_ring.core.machine_profile import MachineProfile

log = logging.getLogger(__name__)

PROFILE_MODULE = "mlx_ring.worker.profile"


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """How the machine is measured: with the BLAS and the threads that workers will have."""

    blas: str = "auto"
    blas_threads: int = 1
    seconds: float = 2.5
    """That measuring takes, about; starting takes some more."""
    memory_share: float = 0.25
    """Of the memory that is left, what it may take."""
    timeout_s: float = 60.0


async def measure_machine(options: ProfileOptions, module: str = PROFILE_MODULE) -> MachineProfile:
    """Start a worker in profile mode and wait for what it finds.

    Raises:
        WorkerLost: it ended without a profile, and why.
        WorkerStuck: it took too long, and was ended.
        ProtocolError: what it left is no profile.
    """
    with tempfile.TemporaryDirectory(prefix="mlx-ring-profile-") as folder:
        output = Path(folder) / "profile.json"
        await _run_to_its_end(options, output, module)
        try:
            text = output.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProtocolError(f"Measuring this machine left no profile: {error}.") from error
    found = MachineProfile.from_json(text)
    # An agent is about as large as this process.
    return found.model_copy(update={"agent_bytes": psutil.Process().memory_info().rss})


async def _run_to_its_end(options: ProfileOptions, output: Path, module: str) -> None:
    child = await ChildProcess.start(
        module,
        [
            *("--output", str(output), "--seconds", str(options.seconds)),
            *("--memory-share", str(options.memory_share)),
            *("--blas", options.blas, "--blas-threads", str(options.blas_threads)),
        ],
        name="profile",
        rank=None,
        environment=worker_environment(options.blas_threads),
    )
    try:
        async with asyncio.timeout(options.timeout_s):
            end = await child.wait()
    except TimeoutError:
        raise WorkerStuck(
            f"Measuring this machine took longer than {options.timeout_s:g} s and was ended: "
            "end what else keeps the machine busy, and try again."
        ) from None
    finally:
        await child.stop()
    if end != "exit code 0":
        raise WorkerLost(f"Measuring this machine failed: it {end}")
