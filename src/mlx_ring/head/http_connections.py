"""Configuration of the HTTP server, and the TLS handshakes of its connections."""

from __future__ import annotations

import asyncio
import logging
import ssl
from functools import partial
from typing import Any, cast

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from mlx_ring.head.uvicorn_connection import (
    ClientConnection,
    ConnectionLimits,
    make_room,
    peer_of,
    with_checked_headers,
)

log = logging.getLogger(__name__)


class HttpConfig(Config):
    """Configuration of uvicorn with bounded connections and without its own log."""

    def __init__(
        self, app: ASGIApp, limits: ConnectionLimits, tls: ssl.SSLContext | None = None, *, end_s: int = 2
    ) -> None:
        """Configure a server.

        Args:
            app: the application.
            limits: limits of its connections.
            tls: context of HTTPS; None for HTTP. Its certificate was read, and checked, before.
            end_s: seconds that clients have to read the rest of their answers when the server ends.
        """
        super().__init__(
            cast("Any", with_checked_headers(app)),
            http=ClientConnection,
            ws="none",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=cast("int", limits.idle_s),
            timeout_graceful_shutdown=end_s,
        )
        self._limits = limits
        self._tls = tls

    def load(self) -> None:
        """Load the application, and make each connection start with its TLS handshake if there is TLS."""
        super().load()
        connect = partial(ClientConnection, limits=self._limits)
        if self._tls is not None:
            connect = partial(Handshake, self._tls, limits=self._limits)
        self.http_protocol_class = cast("Any", connect)


class Handshake(asyncio.Protocol):
    """A connection during its TLS handshake; a `ClientConnection` follows it.

    It counts as a connection. Without it asyncio runs handshakes unseen, and waits a minute for each.
    """

    has_answered = False

    def __init__(
        self,
        tls: ssl.SSLContext,
        config: Config,
        server_state: ServerState,
        *,
        limits: ConnectionLimits,
        **rest: Any,
    ) -> None:
        """Prepare the handshake and the connection that follows it.

        uvicorn passes `rest` to each connection.
        """
        self._tls = tls
        self._limits = limits
        self._connections = cast("set[object]", server_state.connections)
        self._next = ClientConnection(config, server_state, limits=limits, **rest)
        self._early = bytearray()
        self._is_lost = False
        self._shaking: asyncio.Task[None] | None = None
        self.peer = ""
        self.since_s = asyncio.get_running_loop().time()
        self.quiet_since_s: float | None = self.since_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - same as in uvicorn
        transport.pause_reading()
        self.transport, self.peer = transport, peer_of(transport)
        if not make_room(self, self._connections, self._limits) and self._is_crowded():
            transport.abort()
            return
        self._connections.add(self)
        self._shaking = asyncio.create_task(self._shake(), name="TLS handshake")

    def _is_crowded(self) -> bool:
        """Return True if another connection beyond the limit is being refused.

        Only one at a time gets an answer.
        """
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
            log.debug("The TLS handshake with %s failed: %s", self.peer, error)
            return
        finally:
            self._connections.discard(self)
        if encrypted is not None and not self._is_lost:
            self._continue_encrypted(encrypted)

    def _continue_encrypted(self, encrypted: asyncio.Transport) -> None:
        encrypted.set_protocol(self._next)
        self._next.connection_made(encrypted)
        if self._early:
            self._next.data_received(bytes(self._early))

    def data_received(self, data: bytes) -> None:
        """Keep what arrives in one packet with the end of the handshake."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._is_lost = True

    def shed(self) -> None:
        self.transport.abort()

    def shutdown(self) -> None:
        """Close because the server ends."""
        self.transport.abort()
