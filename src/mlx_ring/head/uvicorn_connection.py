"""One client's HTTP connection: the only place that subclasses uvicorn's protocol.

uvicorn waits without limit for a client that stalls. It may stall while it sends the head of a request, while it
should read an answer, or after it vanished. uvicorn has no setting or hook for these cases, so its `H11Protocol` is subclassed.
Therefore `pyproject.toml` admits only the minor version of uvicorn that is tested, and
`tests/head/test_uvicorn_connection.py` checks everything of uvicorn that the subclass relies on:

- its methods `connection_made`, `connection_lost`, `data_received`, `handle_events`, `on_response_complete`,
  `pause_writing`, `shutdown` and `send_400_response` are called as uvicorn 0.54 calls them;
- its attributes `access_log`, `app`, `client`, `conn`, `connections`, `cycle`, `logger`, `loop` and `transport`;
- the cycle's attributes `disconnected`, `message_event`, `response_complete`, `response_started` and `scope`.

When there are too many connections, one closes. Idle connections close first. If all are busy, the address with the
most connections loses one, but only to an address that has fewer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import h11
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from mlx_ring.api.app import DIALECTS
from mlx_ring.api.errors import transport_error
from mlx_ring.core.traces import client_at, new_request_id


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of what clients may do. Times are in seconds."""

    connections: int = 1024
    idle_s: float = 75.0
    """Longest time between two requests."""
    stall_s: float = 60.0
    """Longest time to send the head of a request, or to read nothing of what was written."""
    handshake_s: float = 10.0
    """Longest time of a TLS handshake."""


class Connected(Protocol):
    """A connection, or one whose TLS handshake is not complete."""

    peer: str
    """Client that the connection belongs to."""
    since_s: float
    """Time at which it was opened."""
    quiet_since_s: float | None
    """Time since which it has no request; None while it has one."""

    @property
    def has_answered(self) -> bool:
        """True once a part of an answer is sent, which closing would cut."""
        ...


class Closable(Connected, Protocol):
    """A connection that can be closed to make room."""

    transport: asyncio.Transport

    def shed(self) -> None:
        """Close to make room for another connection."""
        ...


_AnyConnected = TypeVar("_AnyConnected", bound=Connected)


def choose_connection_to_shed(newcomer: Connected, others: Iterable[_AnyConnected]) -> _AnyConnected | None:
    """Choose the connection that closes for a newcomer; None if the newcomer itself must be refused."""
    others = tuple(others)
    counts = Counter(each.peer for each in (newcomer, *others))
    quiet = {each: each.quiet_since_s for each in others if each.quiet_since_s is not None}
    if quiet:
        return min(quiet, key=lambda each: (-counts[each.peer], quiet[each]))
    most = max(counts.values())
    greedy = [each for each in others if counts[each.peer] == most > counts[newcomer.peer]]
    return min(greedy, key=lambda each: (each.has_answered, -each.since_s), default=None)


def make_room(newcomer: Closable, connections: Iterable[object], limits: ConnectionLimits) -> bool:
    """Close another connection if there are too many; return False if the newcomer must be refused."""
    opened = (each for each in cast("Iterable[Closable]", connections) if each is not newcomer)
    others = [each for each in opened if not each.transport.is_closing()]
    if len(others) < limits.connections:
        return True
    chosen = choose_connection_to_shed(newcomer, others)
    if chosen is not None:
        chosen.shed()
    return chosen is not None


def peer_of(transport: asyncio.BaseTransport) -> str:
    """Return the client that a connection belongs to; empty if the connection has no address."""
    address = cast("object", transport.get_extra_info("peername"))
    return client_at(str(cast("tuple[object, ...]", address)[0])) if isinstance(address, tuple) else ""


log = logging.getLogger(__name__)

_HEADERS_TOO_LARGE = 431
_MOST_HEADER_BYTES = 16 << 10
"""Limit of the header bytes, the same that h11 applies to headers that arrive in parts."""
_LONG_HEADERS = "The request's headers are too large; the limit is 16 KiB."
_TWO_LENGTHS = "The request has Content-Length and Transfer-Encoding: send only one of them."
_BAD_REQUEST, _LATE, _TOO_MANY = 400, 408, 503
_FULL = "The server has reached its limit of connections; try again in a moment."
_RETRY_AFTER_S = 5
_UNSENT_BYTES = 128 << 10
"""Bytes of an answer that the kernel accepts before the client has room for them."""
_PROBES = 3
_QUOTED = re.compile(r"bytearray\(b(?P<quote>['\"])(?P<sent>.*)(?P=quote)\)", re.DOTALL)
"""Pattern of what the client sent, as h11 repeats it."""
_uvicorn_log = logging.getLogger("uvicorn.error.connection")
_uvicorn_log.setLevel(logging.ERROR)
"""Log of uvicorn without its warning about each malformed request."""


class ClientConnection(H11Protocol):
    """A connection, which carries one request after another."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self.access_log = False
        self.logger = _uvicorn_log
        self.peer = ""
        self.since_s = self.loop.time()
        self.quiet_since_s: float | None = None
        """Time since which no request is in progress, by the loop's clock; None while one is."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # ---- events of uvicorn and of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - same as in uvicorn
        super().connection_made(transport)
        _detect_silence(transport.get_extra_info("socket"), self._limits.stall_s)
        self.peer = peer_of(transport)
        self.quiet_since_s = self.loop.time()
        self._expect_head()
        if not make_room(self, self.connections, self._limits):
            self.app = cast("Any", _refusing_app(_TOO_MANY, _FULL))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_quiet():
            self._expect_head()

    def handle_events(self) -> None:
        super().handle_events()
        self._note_activity()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_activity()
        if self._has_begun():
            self._expect_head()
        self._expect_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def shutdown(self) -> None:
        """End because the server ends; a stream of events, which has no end of its own, closes at once."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if (
            cycle is not None
            and cycle.response_started
            and not cycle.response_complete
            and cycle.scope["method"] == "GET"
        ):
            cycle.disconnected = True
            cycle.message_event.set()
            self.transport.close()
        super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; uvicorn calls it while it handles h11's error."""
        error = sys.exception()
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else _BAD_REQUEST
        log.debug("%s sent a malformed HTTP request: %s", self.client, error)
        if hint == _HEADERS_TOO_LARGE:
            self._refuse(_HEADERS_TOO_LARGE, _LONG_HEADERS)
            return
        problem = _QUOTED.sub(_quoted, str(error or msg)).rstrip(".")
        self._refuse(_BAD_REQUEST, f"The HTTP request cannot be read: {problem}.")

    # ---- load shedding

    def _note_activity(self) -> None:
        """Note the start or the end of a request."""
        if not self._is_quiet():
            self.quiet_since_s = None
            self._cancel_head_timer()
        elif self.quiet_since_s is None:
            self.quiet_since_s = self.loop.time()

    def _is_quiet(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is None or cycle.response_complete

    @property
    def has_answered(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and cycle.response_started

    def shed(self) -> None:
        """Close to make room: a request without an answer gets status 503, an answer that has begun is cut."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is None or self._is_quiet():
            # With TLS even a polite end waits for the other side, up to half a minute.
            unread = self.transport.get_write_buffer_size()
            (self.transport.close if unread else self.transport.abort)()
            return
        log.info(
            "Closing a connection of %s, which has the most, to make room for another client", self.client
        )
        cycle.disconnected = True
        cycle.message_event.set()
        if cycle.response_started:
            self.transport.abort()
        else:
            self._refuse(_TOO_MANY, _FULL)

    # ---- the head of a request

    def _expect_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._limits.stall_s, self._time_out_head)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _time_out_head(self) -> None:
        self._head_timer = None
        if self.transport.is_closing() or not self._is_quiet():
            return
        if self._has_begun():
            message = f"The head of the request was not complete within {self._limits.stall_s:g} seconds."
            self._refuse(_LATE, message)
        else:
            self.transport.close()

    def _has_begun(self) -> bool:
        """Return True if a part of a request's head has arrived."""
        return self.conn.our_state is h11.IDLE and bool(self.conn.trailing_data[0])

    # ---- the client reads

    def _expect_reading(self) -> None:
        """Expect the client to read some of what is written in each period, until nothing is left."""
        left = self.transport.get_write_buffer_size()
        if self._write_timer is None and left:
            self._write_timer = self.loop.call_later(self._limits.stall_s, self._check_reading, left)

    def _check_reading(self, left_before: int) -> None:
        self._write_timer = None
        left = self.transport.get_write_buffer_size()
        if left and left >= left_before:
            log.info("%s does not read its answer: closing its connection", self.client)
            self.transport.abort()
        else:
            self._expect_reading()

    def _stop_timers(self) -> None:
        self._cancel_head_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # ---- refusals that no route sees

    def _refuse(self, status: int, message: str) -> None:
        """Answer if that is still possible, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            request_id = new_request_id()
            body = json.dumps(transport_error(DIALECTS, status, message, request_id)).encode()
            headers = [
                (b"x-request-id", request_id.encode()),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                CLOSE_HEADER,
            ]
            if status == _TOO_MANY:
                headers.append((b"retry-after", str(_RETRY_AFTER_S).encode()))
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _refusing_app(status: int, message: str) -> ASGIApp:
    """Return an application that refuses every request."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        request_id = new_request_id()
        headers = {"x-request-id": request_id, "connection": "close"}
        if status == _TOO_MANY:
            headers["retry-after"] = str(_RETRY_AFTER_S)
        body = transport_error(DIALECTS, status, message, request_id, scope)
        await JSONResponse(body, status, headers)(scope, receive, send)

    return refuse


def with_checked_headers(app: ASGIApp) -> ASGIApp:
    """Refuse requests that h11 takes: with long headers, which it limits only in parts, or with two lengths of a body.

    A proxy may believe the other length, and take the rest of the body for the next request (RFC 9112, section 6.1).
    """
    too_long = _refusing_app(_HEADERS_TOO_LARGE, _LONG_HEADERS)
    two_lengths = _refusing_app(_BAD_REQUEST, _TWO_LENGTHS)

    async def check(scope: Scope, receive: Receive, send: Send) -> None:
        headers = cast("list[tuple[bytes, bytes]]", scope.get("headers", []))
        if sum(len(name) + len(value) for name, value in headers) > _MOST_HEADER_BYTES:
            await too_long(scope, receive, send)
        elif {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
            await two_lengths(scope, receive, send)
        else:
            await app(scope, receive, send)

    return check


def _quoted(found: re.Match[str]) -> str:
    return f"'{found['sent']}'"


def _detect_silence(peer: socket.socket | None, stall_s: float) -> None:
    """Make the kernel report a vanished client, and keep it from buffering an answer that is not read."""
    if peer is None or peer.family not in (socket.AF_INET, socket.AF_INET6):
        return
    for level, option, value in _socket_options(stall_s):
        with contextlib.suppress(OSError):
            peer.setsockopt(level, option, value)


def _socket_options(stall_s: float) -> Iterator[tuple[int, int, int]]:
    """Yield the options that this system has, because names differ between Linux and macOS."""
    whole_s = max(1, round(stall_s))
    yield socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
    wanted = {
        "TCP_KEEPIDLE": whole_s,
        "TCP_KEEPALIVE": whole_s,
        "TCP_KEEPINTVL": max(1, whole_s // _PROBES),
        "TCP_KEEPCNT": _PROBES,
        "TCP_USER_TIMEOUT": round(1000 * stall_s),
        "TCP_NOTSENT_LOWAT": _UNSENT_BYTES,
    }
    for name, value in wanted.items():
        option = getattr(socket, name, None)
        if option is not None:
            yield socket.IPPROTO_TCP, option, value
