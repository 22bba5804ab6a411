"""An HTTP answer that is written while it is made."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Generic, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_ring.api.connection import while_connected
from mlx_ring.api.errors import log_failure

EVENT_STREAM = "text/event-stream"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment between server-sent events: clients drop it, and nothing in between takes the stream for dead."""

WorkT = TypeVar("WorkT")


class LiveAnswer(Response, Generic[WorkT]):
    """What some work writes, as it comes. When the client leaves, the work is left."""

    def __init__(
        self,
        begin: Callable[[], AbstractAsyncContextManager[WorkT]],
        write: Callable[[WorkT], AsyncGenerator[bytes]],
        failure: Callable[[Exception], bytes],
        media_type: str = EVENT_STREAM,
    ) -> None:
        """What is raised while the work begins gets a status of its own; later the answer's last bytes say it.

        Args:
            begin: gives the work, which ends with its context.
            write: what the work writes.
            failure: how an error is written.
        """
        super().__init__(
            media_type=media_type, headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._begin = begin
        self._write = write
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send(scope, send))

    async def _send(self, scope: Scope, send: Send) -> None:
        async with self._begin() as work:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async with aclosing(self._write(work)) as pieces:
                    async for data in pieces:
                        await _send_data(send, data)
            except Exception as error:  # noqa: BLE001 - the status is out: the stream itself must say it
                log_failure(error, scope.get("request_id", "-"))
                await _send_data(send, self._failure(error))
            await send({"type": "http.response.body", "body": b""})


async def _send_data(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})
