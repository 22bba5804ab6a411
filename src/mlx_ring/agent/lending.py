"""Workers as children of processes that another program started, such as `mlx.launch`, and that lend themselves to the agent.

Over a Unix socket the agent names a module and its arguments. The lender runs it as its child, with its own environment,
and reports its process id and its end. When either end of the connection ends, so does the worker. Each line is one JSON
object.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from mlx_ring.core.environment import worker_environment
from mlx_ring.core.errors import WorkerLost
from mlx_ring.host.child import GRACE_S, ChildProcess

log = logging.getLogger(__name__)

_LINE_LIMIT = 1 << 20
_FOUND_WITHIN_S, _LOOK_S = 60.0, 0.1
"""Whoever lends was started at the same time as this, and has as much to import."""


def lent_at(folder: Path, rank: int) -> Path:
    """Return the address on which the process of a rank listens."""
    return folder / f"{rank}.sock"


async def lend(socket: Path, end: asyncio.Event) -> None:
    """Run what an agent asks for, until the event is set; nothing of it is left."""
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            running.add(task)
            task.add_done_callback(running.discard)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await _run_one(reader, writer)
        writer.close()

    # asyncio leaves the file behind, and would refuse one that is there.
    socket.unlink(missing_ok=True)  # noqa: ASYNC240 - a moment, before anything runs
    server = await asyncio.start_unix_server(serve, socket, limit=_LINE_LIMIT)
    await end.wait()
    server.close()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _run_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one worker, from the request to its end."""
    wanted = await _next(reader)
    if wanted is None:
        return
    child = await ChildProcess.start(
        wanted["module"],
        wanted["arguments"],
        name=wanted["name"],
        rank=wanted["rank"],
        environment=worker_environment(wanted["blas_threads"]),
    )
    log.info("Lent to the agent: %s, pid %d", child.name, child.pid)
    orders: asyncio.Task[None] | None = None
    try:
        await _send(writer, pid=child.pid)
        orders = asyncio.create_task(_obey(reader, child))
        await _send(writer, ended=await child.wait())
    finally:
        if orders is not None:
            orders.cancel()
        await child.stop()


async def _obey(reader: asyncio.StreamReader, child: ChildProcess) -> None:
    """End the child on request, or when the connection is lost."""
    order = await _next(reader)
    if order is None:
        await child.stop()
    else:
        await child.stop(
            order["stop"], asks_where=order["asks_where"], before_kill=order.get("before_kill", "")
        )


class LentChild:
    """A worker that another process has started for the agent; as `ChildProcess` for who supervises it."""

    def __init__(
        self, name: str, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.name = name
        self.pid = pid
        self._writer = writer
        self._end = asyncio.create_task(self._receive_end(reader), name=f"end of {name}")

    @classmethod
    async def start(
        cls, socket: Path, module: str, arguments: Sequence[str], *, name: str, rank: int, blas_threads: int
    ) -> LentChild:
        """Have the process that listens there start it.

        Raises:
            WorkerLost: no process does, or it ends.
        """
        reader, writer = await _connect(socket, rank)
        await _send(
            writer,
            module=module,
            arguments=list(arguments),
            name=name,
            rank=rank,
            blas_threads=blas_threads,
        )
        started = await _next(reader)
        if started is None:
            raise WorkerLost(f"The process of rank {rank} that mlx.launch started ended: see what it wrote.")
        return cls(name, started["pid"], reader, writer)

    @property
    def exit_reason(self) -> str:
        """Reason of its end; empty while it runs."""
        return self._end.result() if self._end.done() else ""

    async def wait(self) -> str:
        """Wait for its end and return the reason. Any number of callers may wait."""
        return await asyncio.shield(self._end)

    async def stop(self, grace_s: float = GRACE_S, *, asks_where: bool = True, before_kill: str = "") -> str:
        """End it, and return the reason. See `ChildProcess.stop`."""
        if not self._end.done():
            with contextlib.suppress(ConnectionError):
                await _send(self._writer, stop=grace_s, asks_where=asks_where, before_kill=before_kill)
        return await self.wait()

    async def _receive_end(self, reader: asyncio.StreamReader) -> str:
        message = await _next(reader)
        self._writer.close()
        return (
            "ended with the process that mlx.launch started for it" if message is None else message["ended"]
        )


async def _connect(socket: Path, rank: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    until = loop.time() + _FOUND_WITHIN_S
    while True:
        try:
            return await asyncio.open_unix_connection(socket, limit=_LINE_LIMIT)
        except OSError:
            if loop.time() > until:
                raise WorkerLost(
                    f"The process of rank {rank} that mlx.launch started did not answer within {_FOUND_WITHIN_S:g} s: "
                    "see what it wrote."
                ) from None
            await asyncio.sleep(_LOOK_S)


async def _send(writer: asyncio.StreamWriter, **message: object) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def _next(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message; None at the end."""
    try:
        line = await reader.readline()
    except ConnectionError:
        return None
    return cast("dict[str, Any]", json.loads(line)) if line.endswith(b"\n") else None
