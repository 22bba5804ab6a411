"""A way between two processes that is as slow as is asked for: a relay of TCP, for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

_TURN_S = 0.02


@asynccontextmanager
async def slow_way(port: int, bytes_per_s: float) -> AsyncGenerator[int]:
    """The port of a relay on loopback to another; each direction passes on so many bytes a second, and no more."""
    part, pumps = max(1, int(bytes_per_s * _TURN_S)), set[asyncio.Task[None]]()

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(part):
                target.write(data)
                await target.drain()
                await asyncio.sleep(len(data) / bytes_per_s)
        with contextlib.suppress(OSError):
            target.close()

    async def connect(source: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        answers, target = await asyncio.open_connection("127.0.0.1", port)
        for task in (asyncio.create_task(pump(source, target)), asyncio.create_task(pump(answers, back))):
            pumps.add(task)
            task.add_done_callback(pumps.discard)

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
