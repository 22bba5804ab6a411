"""Streamed answers, and work that ends when its client disconnects.

A stream may begin before its answer, because loading a model takes a while.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Literal, Never, Protocol, TypeVar

import typing_extensions
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from mlx_ring.api.dialect import event
from mlx_ring.api.errors import log_failure, stream_failure
from mlx_ring.core.errors import Suspended
from mlx_ring.core.generation import GenerateRequest, RequestStream, Source

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Cancel and await it if the client disconnects.

    The request's body must have been read: the next message of `receive` is the disconnect.

    Raises:
        ClientDisconnect: the client disconnected first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for unfinished in (task, watcher):
            unfinished.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


EVENT_STREAM = "text/event-stream"
KEEP_ALIVE = b": keep-alive\n\n"
"""Comment between server-sent events. Clients ignore it, and proxies keep the connection because of it."""
RESUMING = b": resuming\n\n"
"""Comment while an answer waits for another instance of the model."""


class QuietReason(Enum):
    """Reason why a stream has no events for a while."""

    QUIET = "quiet"
    PAUSED = "paused"


class Submit(Protocol):
    """Function that submits requests to an engine."""

    def __call__(self, *requests: GenerateRequest) -> list[RequestStream]: ...


class Playback(Protocol):
    """One writing of an answer that the journal keeps: the first, or a repetition for a client that comes back.

    All of them make the same events, because they read the same deltas and draw the same random numbers in order.
    """

    is_first: bool
    streams: bool
    """True if a repetition writes events, whatever the request says."""
    model: str
    """Digest of the model that answers now; empty if it is unknown."""

    @property
    def created(self) -> int:
        """Unix seconds at which the request came."""
        ...

    @property
    def ended(self) -> int | None:
        """Unix seconds at which the answer ended; None if it has not."""
        ...

    @property
    def unfinished(self) -> Literal["queued", "in_progress"] | None:
        """State of the answer, for a client that does not wait for its end; None: write the answer."""
        ...

    def prompt(self, index: int) -> tuple[int, ...] | None:
        """Return the prompt of a sequence in a repetition; a template may write another one by now."""
        ...

    def draw(self, bits: int) -> int:
        """Return so many random bits."""
        ...

    def numbered(self, event: bytes) -> bytes:
        """Return a server-sent event with its id; nothing for one that the client has."""
        ...

    async def open(self, submit: Submit, requests: Sequence[GenerateRequest]) -> Source:
        """Return the deltas of the answer. Submit what is not yet answered, unless it is in progress."""
        ...


PLAYBACK: ContextVar[Playback | None] = ContextVar("playback", default=None)
"""Writing of an answer in the current context; None if the journal does not keep it."""


def draw_bits(bits: int) -> int:
    """Return random bits of an answer, such as its seed."""
    playback = PLAYBACK.get()
    return secrets.randbits(bits) if playback is None else playback.draw(bits)


def new_id(prefix: str, nbytes: int = 12) -> str:
    """Return a new id of an answer, or of a part of it, with so many random bytes."""
    return f"{prefix}{draw_bits(8 * nbytes):0{2 * nbytes}x}"


def recorded_prompt(index: int) -> tuple[int, ...] | None:
    """Return the prompt of a sequence of the current request, if its answer is written again; otherwise None."""
    playback = PLAYBACK.get()
    return None if playback is None else playback.prompt(index)


def time_created() -> int:
    """Return the Unix seconds at which the current request came."""
    playback = PLAYBACK.get()
    return int(time.time()) if playback is None else playback.created


def time_ended() -> int:
    """Return the Unix seconds at which the current answer ended."""
    playback = PLAYBACK.get()
    return (None if playback is None else playback.ended) or int(time.time())


WorkT = TypeVar("WorkT")
EventT = typing_extensions.TypeVar("EventT", bound=Mapping[str, object], default=Never)
"""Type of a stream's events; Never for an answer that is not streamed."""


class StreamedAnswer(Response):
    """Answer whose bytes are sent as soon as its work makes them. The work ends if the client disconnects."""

    def __init__(
        self,
        begin: Callable[[], AbstractAsyncContextManager[AsyncGenerator[bytes]]],
        media_type: str = EVENT_STREAM,
        failure: Callable[[Exception], bytes] | None = None,
        end: bytes = b"",
    ) -> None:
        """Create an answer. Errors before its work starts get a status; later ones end the stream.

        Args:
            begin: starts the work and returns its pieces. The work ends with the context.
            media_type: content type of the answer.
            failure: encoder of an error; None: the dialect's own.
            end: last bytes of a stream without an error.
        """
        super().__init__(
            media_type=media_type, headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._begin = begin
        self._failure = failure
        self._end = end
        self._playback = PLAYBACK.get()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send(scope, send))

    async def _send(self, scope: Scope, send: Send) -> None:
        PLAYBACK.set(self._playback)
        async with self._begin() as pieces:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for data in pieces:
                    await _send_data(send, data)
                last = self._end
            except Suspended:
                # Without an end, the client knows that there is more.
                raise ClientDisconnect from None
            except Exception as error:  # noqa: BLE001 - the status is out: the stream itself must say it
                log_failure(error, scope.get("request_id", "-"))
                failure = self._failure
                last = stream_failure(error, scope) if failure is None else failure(error)
            await send({"type": "http.response.body", "body": last})


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """Form of a dialect's streams."""

    media_type: str
    encode: Callable[[Mapping[str, object]], bytes]
    """Encoder of one event or line."""
    keep_alive: bytes = b""
    """Bytes without content that keep the connection open; empty if `resuming` makes them, or the dialect has none."""
    resuming: Callable[[], bytes] = bytes
    """Maker of bytes without content for an answer that waits for another instance of the model."""
    end: bytes = b""
    """Last bytes of a stream without an error."""

    def quiet(self) -> bytes:
        """Return bytes without content that keep a connection open."""
        return self.keep_alive or self.resuming()

    def encode_some(self, events: Iterable[Mapping[str, object]]) -> bytes:
        """Encode events in one piece, without those that the client has."""
        playback, encoded = PLAYBACK.get(), map(self.encode, events)
        return b"".join(encoded if playback is None else map(playback.numbered, encoded))

    async def encode_all(
        self, batches: AsyncGenerator[Iterable[Mapping[str, object]] | QuietReason]
    ) -> AsyncGenerator[bytes]:
        """Encode batches of events, each in one piece."""
        async with aclosing(batches):
            async for batch in batches:
                match batch:
                    case QuietReason.QUIET:
                        yield _beside_ids(self.quiet())
                    case QuietReason.PAUSED:
                        yield _beside_ids(self.resuming())
                    case events:
                        yield self.encode_some(events)


_EVENTS = StreamFormat(EVENT_STREAM, event, KEEP_ALIVE, lambda: RESUMING)


def _beside_ids(comment: bytes) -> bytes:
    """Return a comment without its empty line if the events have ids: OpenAI's SDK for Python would see an empty event."""
    is_comment = comment.startswith(b":") and PLAYBACK.get() is not None
    return comment.removesuffix(b"\n") if is_comment else comment


class JsonStream(StreamedAnswer, Generic[EventT]):
    """Stream of JSON values of one type, which the route's documentation names."""

    def __init__(
        self,
        begin: Callable[[], AbstractAsyncContextManager[WorkT]],
        batches: Callable[[WorkT], AsyncGenerator[Iterable[EventT] | QuietReason]],
        form: StreamFormat,
        failure: Callable[[Exception], bytes] | None = None,
    ) -> None:
        """Create a stream of the work's batches of events."""

        @asynccontextmanager
        async def pieces() -> AsyncGenerator[AsyncGenerator[bytes]]:
            async with begin() as work, aclosing(form.encode_all(batches(work))) as encoded:
                yield encoded

        super().__init__(pieces, form.media_type, failure, form.end)


async def _send_data(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})


AnswerT = TypeVar("AnswerT")


class JsonAnswer(JSONResponse, Generic[AnswerT]):
    """JSON answer of a type. Its first list may be encoded before the rest, for example because it is long."""

    def __init__(
        self,
        answer: AnswerT,
        *,
        first_list: bytes = b"",
        media_type: str | None = None,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Create an answer. `first_list` fills its first list if that is empty."""
        self._first_list = first_list
        super().__init__(answer, status, headers, media_type)

    def render(self, content: object) -> bytes:
        return fill_list(super().render(content), self._first_list)


def fill_list(value: bytes, items: bytes) -> bytes:
    """Insert items into the first list of a JSON value, an empty one."""
    return value.replace(b"[]", b"[%s]" % items, 1)


Endpoint = Callable[[Request], Awaitable[Response]]


def json_endpoint(endpoint: Callable[[Request], Awaitable[object]]) -> Endpoint:
    """Return an endpoint that writes another one's result as JSON, unless it is a response."""

    async def respond(request: Request) -> Response:
        answer = await endpoint(request)
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    return respond


class _Beginning:
    """A request whose answer has not begun."""

    def __init__(self, *, has_events: bool) -> None:
        self.has_events = has_events
        """True if its route has event streams."""
        self.was_read = asyncio.Event()
        """Event of its body's end, from which a disconnect can be noticed. Not set for work that lasts without a client."""
        self.stream: StreamFormat | None = None
        """Form of the stream that it wants; None: no stream, or not known yet."""


_BEGINNING = "mlx_ring.beginning"
"""Key of a request's scope: its `_Beginning`, unless nobody waits for it."""


def note_read(request: Request, fields: object) -> None:
    """Record that the request's body was read, whether it wants an event stream, and whether it lasts without its client."""
    beginning: _Beginning | None = request.scope.get(_BEGINNING)
    if beginning is not None:
        if beginning.has_events and getattr(fields, "stream", None):
            beginning.stream = _EVENTS
        if not getattr(fields, "lasts", False):
            beginning.was_read.set()


def note_stream(request: Request, form: StreamFormat = _EVENTS) -> None:
    """Record the form of the stream that the request wants."""
    beginning: _Beginning | None = request.scope.get(_BEGINNING)
    if beginning is not None:
        beginning.stream = form


def start_in_time(endpoint: Endpoint, *, has_events: bool) -> Endpoint:
    """Return an endpoint that ends if its client leaves, and whose streams send something after some silence.

    Both also hold before the answer starts. An earlier error keeps its own status; a later one ends the stream. If it
    has event streams, a POST request with the id of the last event that its client has gets the events after it.
    """

    async def in_time(request: Request) -> Response:
        quiet_s: float = request.app.state.keep_alive_s
        rests = has_events and request.method == "POST" and "last-event-id" in request.headers
        beginning = request.scope[_BEGINNING] = _Beginning(has_events=has_events)
        work = asyncio.ensure_future((request.app.state.rest_of_answer if rests else endpoint)(request))
        watcher = asyncio.ensure_future(_wait_until_left(request.receive, beginning))
        unfinished: list[asyncio.Future[Any]] = [work, watcher]
        try:
            # It is not known whether the request wants a stream until its body was read.
            while not work.done():
                done, _ = await asyncio.wait(
                    (work, watcher), timeout=quiet_s, return_when=asyncio.FIRST_COMPLETED
                )
                if watcher.done() and not work.done():
                    raise ClientDisconnect
                if not done and beginning.stream is not None:
                    unfinished.remove(work)
                    return _StartedStream(work, beginning.stream, quiet_s)
            return work.result()
        finally:
            for each in unfinished:
                each.cancel()
            try:
                await asyncio.gather(*unfinished, return_exceptions=True)
            except asyncio.CancelledError:
                work.cancel()
                raise

    return in_time


async def _wait_until_left(receive: Receive, beginning: _Beginning) -> None:
    await beginning.was_read.wait()
    await _wait_for_disconnect(receive)


class _StartedStream(Response):
    """Stream that sends bytes without content until the real one is ready."""

    def __init__(self, work: asyncio.Future[Response], form: StreamFormat, quiet_s: float) -> None:
        super().__init__(
            media_type=form.media_type, headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._work = work
        self._form = form
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
            await send({"type": "http.response.body", "body": stream_failure(error, scope)})
        finally:
            self._work.cancel()

    async def _awaited(self, send: Send) -> Response:
        while not self._work.done():
            await send({"type": "http.response.body", "body": self._form.quiet(), "more_body": True})
            await asyncio.wait((self._work,), timeout=self._quiet_s)
        return self._work.result()
