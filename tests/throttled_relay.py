"""A TCP relay of limited bandwidth."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

_PAUSE_S = 0.02
"""Pause after a part of full size."""


@asynccontextmanager
async def throttled_relay(port: int, bytes_per_s: float) -> AsyncGenerator[int]:
    """Relay a port on loopback, with a limit on the bytes per second of each direction. Yield the relay's port."""
    part, relays = max(1, int(bytes_per_s * _PAUSE_S)), set[asyncio.Task[None]]()

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(target):
            while data := await source.read(part):
                target.write(data)
                await target.drain()
                await asyncio.sleep(len(data) / bytes_per_s)

    async def relay(source: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        with contextlib.ExitStack() as relayed:
            relayed.callback(back.transport.abort)
            answers, target = await asyncio.open_connection("127.0.0.1", port)
            relayed.callback(target.transport.abort)
            await asyncio.gather(pump(source, target), pump(answers, back))

    def connect(source: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(relay(source, back))
        relays.add(task)
        task.add_done_callback(relays.discard)

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        ended = [*relays]
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
