"""`mlx-ring serve` under `mlx.launch`: rank 0 serves; the other processes start and keep its workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Generator

from mlx_ring.agent.lending import lend, lent_at
from mlx_ring.core.logs import configure_logging
from mlx_ring.host.machine import node_name
from mlx_ring.settings.config import Settings
from mlx_ring.settings.launched import Launch

_LOOK_S = 0.1


@contextlib.contextmanager
def serving_as_first(launch: Launch) -> Generator[None]:
    """Keep the processes of the other ranks running: each holds a connection that ends with this process."""
    place = launch.meeting_place
    try:
        with socket.socket(socket.AF_UNIX) as held:
            held.bind(str(place / "head.sock"))
            held.listen(launch.size)
            yield
    finally:
        shutil.rmtree(place, ignore_errors=True)


def lend_to_first(settings: Settings, launch: Launch) -> None:
    """Be the parent of this rank's worker until the server ends or SIGTERM arrives."""
    configure_logging(
        process=f"rank-{launch.rank}",
        node=node_name(),
        rank=launch.rank,
        level=settings.log_level,
        log_dir=settings.log_dir,
        to_stderr=settings.log_stderr == "on",
        log_format=settings.log_format,
    )
    # Ctrl-C in the terminal reaches all processes, and the server ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_lend(launch))


async def _lend(launch: Launch) -> None:
    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
    place = launch.meeting_place
    lending = asyncio.create_task(lend(lent_at(place, launch.rank), end), name="lending")
    watching = asyncio.create_task(_until_the_server_ends(str(place / "head.sock")), name="head")
    await asyncio.wait((lending, watching), return_when=asyncio.FIRST_COMPLETED)
    end.set()
    watching.cancel()
    await lending


async def _until_the_server_ends(address: str) -> None:
    """Wait for the end of the server, or of the launcher before the server listens."""
    parent = os.getppid()
    while os.getppid() == parent:
        with contextlib.suppress(OSError):
            reader, _ = await asyncio.open_unix_connection(address)
            with contextlib.suppress(ConnectionError):
                await reader.read()
            return
        await asyncio.sleep(_LOOK_S)
