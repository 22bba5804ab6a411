"""Streams that begin before their answer can: a model that is loaded when it is asked for takes a while."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mlx_ring.api.connection import while_connected
from mlx_ring.api.error_bodies import is_anthropic
from mlx_ring.api.errors import error_body, log_failure
from mlx_ring.api.json_lines import event
from mlx_ring.api.streaming import EVENT_STREAM, KEEP_ALIVE

Endpoint = Callable[[Request], Awaitable[Response]]


def note_stream(request: Request, fields: object) -> None:
    """What was read of a request says whether its answer is a stream."""
    request.state.streams = bool(getattr(fields, "stream", None))


def begun_in_time(endpoint: Endpoint) -> Endpoint:
    """An endpoint whose streams begin after so much silence, with comments, whether or not their answer is there.

    What is refused sooner is refused with its own status; later it is the stream's last event.
    """

    async def in_time(request: Request) -> Response:
        quiet_s: float = request.app.state.keep_alive_s
        work = asyncio.ensure_future(endpoint(request))
        try:
            await asyncio.wait((work,), timeout=quiet_s)
        except asyncio.CancelledError:
            work.cancel()
            raise
        if work.done() or not getattr(request.state, "streams", False):
            return await work
        return _Begun(work, quiet_s)

    return in_time


class _Begun(Response):
    """Comments, and then the stream that is waited for."""

    media_type = EVENT_STREAM

    def __init__(self, work: asyncio.Future[Response], quiet_s: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._work = work
        self._quiet_s = quiet_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def send_rest(message: Message) -> None:
            if message["type"] != "http.response.start":
                await send(message)

        try:
            response = await while_connected(receive, self._awaited(send))
            await response(scope, receive, send_rest)
        except ClientDisconnect:
            raise
        except Exception as error:  # noqa: BLE001 - the status is out: the stream itself must say it
            log_failure(error, scope.get("request_id", "-"))
            await send({"type": "http.response.body", "body": _failure(error, scope)})
        finally:
            self._work.cancel()

    async def _awaited(self, send: Send) -> Response:
        while not self._work.done():
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            await asyncio.wait((self._work,), timeout=self._quiet_s)
        return self._work.result()


def _failure(error: Exception, scope: Scope) -> bytes:
    path = scope["path"]
    body = error_body(error, path, scope.get("request_id", "-"))
    return event(body, "error") if is_anthropic(path) else event(body)
