"""`mlx-ring serve` as `mlx.launch` starts it: the process of rank 0 serves, and those of the others are parents of its workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Generator

from mlx_ring.agent.lending import lend, lent_at
from mlx_ring.core.config import Settings
from mlx_ring.core.launched import Launch
from mlx_ring.core.logs import configure_logging
from mlx_ring.core.machine import node_name

_LOOK_S = 0.1


@contextlib.contextmanager
def serving_as_first(launch: Launch) -> Generator[None]:
    """While it lasts, the processes of the other ranks go on: each holds a connection, which ends with this process."""
    place = launch.meeting_place
    try:
        with socket.socket(socket.AF_UNIX) as held:
            held.bind(str(place / "head.sock"))
            held.listen(launch.size)
            yield
    finally:
        shutil.rmtree(place, ignore_errors=True)


def lend_to_first(settings: Settings, launch: Launch) -> None:
    """Be a parent for the worker of this rank, until the server ends or SIGTERM comes."""
    configure_logging(
        process=f"rank-{launch.rank}",
        node=node_name(),
        rank=launch.rank,
        level=settings.log_level,
        log_dir=settings.log_dir,
        to_stderr=settings.log_stderr == "on",
        log_format=settings.log_format,
    )
    # Ctrl-C in the terminal comes to all of them; the server ends its workers itself.
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
    """Its process, or who started all of them before it was there."""
    parent = os.getppid()
    while os.getppid() == parent:
        with contextlib.suppress(OSError):
            reader, _ = await asyncio.open_unix_connection(address)
            with contextlib.suppress(ConnectionError):
                await reader.read()
            return
        await asyncio.sleep(_LOOK_S)
