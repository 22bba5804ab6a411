"""Connections to HTTP clients: bounded in number, and none waits for its client for ever.

uvicorn reads requests with h11 and stops writing to a client that does not read, but waits as long as it takes. A client
may stall while it sends a request's head, or while it should read its answer; it may also be gone without a word. Each of
these ends its connection, and with it the request.

Who makes room where there are as many connections as may be. Pure.

One that has no request goes first. Where all are busy, the address that has most gives one up, to one that has fewer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import h11
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from mlx_ring.api.errors import transport_error
from mlx_ring.core.request_context import new_request_id
from mlx_ring.host.addresses import whose


class Connected(Protocol):
    """A connection, or one that is still agreeing on its encryption."""

    peer: str
    """Whose it is."""
    since_s: float
    """When it was opened."""
    quiet_since_s: float | None
    """Since when it has no request; None while it has one."""

    @property
    def has_answered(self) -> bool:
        """Whether a part of an answer is out, which would be cut."""
        ...


Each = TypeVar("Each", bound=Connected)


def who_makes_room(newcomer: Connected, others: Iterable[Each]) -> Each | None:
    """The one that ends for a newcomer; None where it is the newcomer that must go."""
    others = tuple(others)
    counts = Counter(each.peer for each in (newcomer, *others))
    quiet = {each: each.quiet_since_s for each in others if each.quiet_since_s is not None}
    if quiet:
        return min(quiet, key=lambda each: (-counts[each.peer], quiet[each]))
    most = max(counts.values())
    greedy = [each for each in others if counts[each.peer] == most > counts[newcomer.peer]]
    return min(greedy, key=lambda each: (each.has_answered, -each.since_s), default=None)


log = logging.getLogger(__name__)

_UNSENT_BYTES = 128 << 10
"""Of an answer, that the kernel takes before the client has made room for it."""
_PROBES = 3
_BAD_REQUEST, _LATE, _HEADERS_TOO_LARGE, _TOO_MANY = 400, 408, 431, 503
_RETRY_AFTER_S = 5
_FULL = "The server has as many connections as it takes; come again in a moment."
_MOST_HEADER_BYTES = 16 << 10
"""h11's own bound of a head that does not come whole."""
_LONG_HEADERS = "The request's headers are too large; the most are 16 KiB."
_QUOTED = re.compile(r"bytearray\(b(?P<quote>['\"])(?P<sent>.*)(?P=quote)\)", re.DOTALL)
"""What was sent, as h11 repeats it."""
_quiet = logging.getLogger("uvicorn.error.connection")
_quiet.setLevel(logging.ERROR)
"""What strangers send is no trouble of ours: uvicorn would warn of each."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What clients may do. Seconds."""

    connections: int = 1024
    idle_s: float = 75.0
    """Between two requests."""
    stall_s: float = 60.0
    """Without a whole head of a request, or without reading what was written."""
    handshake_s: float = 10.0
    """Until a connection is encrypted."""


class HttpConfig(uvicorn.Config):
    """uvicorn's, for a server whose connections keep to limits and whose log is ours."""

    def __init__(
        self, app: ASGIApp, limits: ConnectionLimits, tls: ssl.SSLContext | None = None, *, end_s: int = 2
    ) -> None:
        """`end_s` is how long clients may take to read what is left for them when the server ends."""
        self.limits = limits
        super().__init__(
            cast("Any", _with_bounded_headers(app)),
            http=ClientConnection,
            ws="none",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=cast("int", limits.idle_s),
            timeout_graceful_shutdown=end_s,
        )
        self._tls = tls

    def load(self) -> None:
        """With TLS a connection begins with its handshake, which counts as a connection does.

        The certificate was read long before, when it could still be told what is wrong with it.
        """
        super().load()
        if self._tls is not None:
            self.http_protocol_class = cast("Any", partial(Handshake, self._tls))


class Opened(Connected, Protocol):
    """What counts as a connection."""

    transport: asyncio.Transport

    def make_way(self) -> None:
        """End for another one."""
        ...


class Handshake(asyncio.Protocol):
    """A connection that is still to be encrypted; it becomes a `ClientConnection`.

    Left to itself asyncio tells nobody of those, and waits a minute for each.
    """

    has_answered = False

    def __init__(
        self, tls: ssl.SSLContext, config: HttpConfig, server_state: ServerState, **rest: Any
    ) -> None:
        """`rest` is what else uvicorn gives to each connection."""
        self._tls = tls
        self._limits = config.limits
        self._connections = cast("set[object]", server_state.connections)
        self._next = ClientConnection(config, server_state, **rest)
        self._early = bytearray()
        self._is_lost = False
        self._shaking: asyncio.Task[None] | None = None
        self.peer = ""
        self.since_s = asyncio.get_running_loop().time()
        self.quiet_since_s: float | None = self.since_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as uvicorn's own
        transport.pause_reading()
        self.transport, self.peer = transport, peer_of(transport)
        if not make_room(self, self._connections, self._limits) and self._is_crowded():
            transport.abort()
            return
        self._connections.add(self)
        self._shaking = asyncio.create_task(self._shake(), name="TLS handshake")

    def _is_crowded(self) -> bool:
        """Whether somebody else is just being told that there is no room; nobody waits to tell a second one."""
        return len(self._connections) > self._limits.connections

    async def _shake(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            encrypted = await loop.start_tls(
                self.transport,
                self,
                self._tls,
                server_side=True,
                ssl_handshake_timeout=self._limits.handshake_s,
            )
        except OSError as error:
            log.debug("%s did not agree on TLS: %s", self.peer, error)
            return
        finally:
            self._connections.discard(self)
        if encrypted is not None and not self._is_lost:
            self._hand_on(encrypted)

    def _hand_on(self, encrypted: asyncio.Transport) -> None:
        encrypted.set_protocol(self._next)
        self._next.connection_made(encrypted)
        if self._early:
            self._next.data_received(bytes(self._early))

    def data_received(self, data: bytes) -> None:
        """What comes in one packet with the end of the handshake."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._is_lost = True

    def make_way(self) -> None:
        self.transport.abort()

    def shutdown(self) -> None:
        """The server ends."""
        self.transport.abort()


class ClientConnection(H11Protocol):
    """One connection, which takes one request after the other."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = config.limits if isinstance(config, HttpConfig) else ConnectionLimits()
        self.access_log = False
        self.logger = _quiet
        self.peer = ""
        self.since_s = self.loop.time()
        self.quiet_since_s: float | None = None
        """Since when no request is under way, by the loop's clock; None while one is."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # ---- what uvicorn and the transport tell

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as uvicorn's own
        super().connection_made(transport)
        _notice_silence(transport.get_extra_info("socket"), self._limits.stall_s)
        self.peer = peer_of(transport)
        self.quiet_since_s = self.loop.time()
        self._expect_head()
        if not make_room(self, self.connections, self._limits):
            self.app = cast("Any", _refusing(_TOO_MANY, _FULL))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_quiet():
            self._expect_head()

    def handle_events(self) -> None:
        super().handle_events()
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()
        if self._has_begun():
            self._expect_head()
        self._expect_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def shutdown(self) -> None:
        """The server ends: what asks no model and still goes on would never end by itself, as what a page follows."""
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
        """Called while the error is being handled."""
        error = sys.exception()
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else _BAD_REQUEST
        log.debug("%s sent what is no HTTP request: %s", self.client, error)
        status = _HEADERS_TOO_LARGE if hint == _HEADERS_TOO_LARGE else _BAD_REQUEST
        said = {
            _HEADERS_TOO_LARGE: _LONG_HEADERS,
            _BAD_REQUEST: f"This is no HTTP request that can be read: {_QUOTED.sub(_quoted, str(error or msg)).rstrip('.')}.",
        }
        self._refuse(status, said[status])

    # ---- how many there are

    def _look(self) -> None:
        """Whether a request is under way now."""
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

    def make_way(self) -> None:
        """End for another one. A request that has no answer yet is told so; an answer that has begun is cut."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is None or self._is_quiet():
            # With TLS even a polite end waits for the other side, half a minute if need be.
            unread = self.transport.get_write_buffer_size()
            (self.transport.close if unread else self.transport.abort)()
            return
        log.info("%s, which has most connections, makes room for another client", self.client)
        cycle.disconnected = True
        cycle.message_event.set()
        if cycle.response_started:
            self.transport.abort()
        else:
            self._refuse(_TOO_MANY, _FULL)

    # ---- the head of a request

    def _expect_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._limits.stall_s, self._head_is_late)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing() or not self._is_quiet():
            return
        if self._has_begun():
            self._refuse(
                _LATE, f"The request's head did not come whole within {self._limits.stall_s:g} seconds."
            )
        else:
            self.transport.close()

    # ---- the client reads

    def _expect_reading(self) -> None:
        """From now on the client must read some of what is written, again and again, until all is."""
        left = self.transport.get_write_buffer_size()
        if self._write_timer is None and left:
            self._write_timer = self.loop.call_later(self._limits.stall_s, self._has_read, left)

    def _has_read(self, left_before: int) -> None:
        self._write_timer = None
        left = self.transport.get_write_buffer_size()
        if left and left >= left_before:
            log.info("%s reads nothing of its answer: its connection ends", self.client)
            self.transport.abort()
        else:
            self._expect_reading()

    def _has_begun(self) -> bool:
        """Whether a part of a request's head is here."""
        return self.conn.our_state is h11.IDLE and bool(self.conn.trailing_data[0])

    def _stop_timers(self) -> None:
        self._cancel_head_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # ---- refusals that no route sees

    def _refuse(self, status: int, message: str) -> None:
        """Answer, where that is still possible, and end the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            request_id = new_request_id()
            body = json.dumps(transport_error(status, message, request_id)).encode()
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


def peer_of(transport: asyncio.BaseTransport) -> str:
    """Whose a connection is; of one that has no address: nobody's in particular."""
    address = cast("object", transport.get_extra_info("peername"))
    return whose(str(cast("tuple[object, ...]", address)[0])) if isinstance(address, tuple) else ""


def make_room(newcomer: Opened, connections: Iterable[object], limits: ConnectionLimits) -> bool:
    """Whether there is room for one more of the connections, as there is where another has just made way."""
    opened = (each for each in cast("Iterable[Opened]", connections) if each is not newcomer)
    others = [each for each in opened if not each.transport.is_closing()]
    if len(others) < limits.connections:
        return True
    chosen = who_makes_room(newcomer, others)
    if chosen is not None:
        chosen.make_way()
    return chosen is not None


def _refusing(status: int, message: str) -> ASGIApp:
    """An application for what no route is to see."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        request_id = new_request_id()
        headers = {"x-request-id": request_id, "connection": "close"}
        if status == _TOO_MANY:
            headers["retry-after"] = str(_RETRY_AFTER_S)
        body = transport_error(status, message, request_id, scope["path"])
        await JSONResponse(body, status, headers)(scope, receive, send)

    return refuse


def _with_bounded_headers(app: ASGIApp) -> ASGIApp:
    """h11 bounds a head that comes in pieces alone."""
    refuse = _refusing(_HEADERS_TOO_LARGE, _LONG_HEADERS)

    async def bound(scope: Scope, receive: Receive, send: Send) -> None:
        headers = cast("Iterable[tuple[bytes, bytes]]", scope.get("headers", ()))
        is_long = sum(len(name) + len(value) for name, value in headers) > _MOST_HEADER_BYTES
        await (refuse if is_long else app)(scope, receive, send)

    return bound


def _quoted(found: re.Match[str]) -> str:
    return f"'{found['sent']}'"


def _notice_silence(peer: socket.socket | None, stall_s: float) -> None:
    """Have the kernel tell when the other machine is gone, and not take an answer that nobody reads."""
    if peer is None or peer.family not in (socket.AF_INET, socket.AF_INET6):
        return
    for level, option, value in _options(stall_s):
        with contextlib.suppress(OSError):
            peer.setsockopt(level, option, value)


def _options(stall_s: float) -> Iterator[tuple[int, int, int]]:
    """Those that this system has: names differ between Linux and macOS."""
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
