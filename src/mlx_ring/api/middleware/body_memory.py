"""What the bodies of all requests may hold of memory, and each client of that. Middleware behind the guard, which says who asks.

A body counts as it comes, until its request is answered. A client may have no more of it than is left: one alone gets half, and
however many share the rest, there is room for who comes next.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_ring.api.settings import ApiSettings
from mlx_ring.core.errors import BodiesFull
from mlx_ring.core.traces import CLIENT

_DRAIN = 4
"""What is refused is read on, and dropped, to so many times the longest body: who is still sending would not see the answer."""


@dataclass(slots=True)
class BodyRoom:
    """Bytes that are held, by client."""

    most_bytes: int
    _held: Counter[str] = field(default_factory=Counter[str])

    @property
    def held_bytes(self) -> int:
        return self._held.total()

    def take(self, client: str, size: int) -> bool:
        """Whether a client may hold so many bytes more; if so it does."""
        left = self.most_bytes - self.held_bytes - size
        if self._held[client] + size > left:
            return False
        self._held[client] += size
        return True

    def give_back(self, client: str, size: int) -> None:
        self._held[client] -= size
        if not self._held[client]:
            del self._held[client]


class Bodies:
    """Counts what comes, and refuses what there is no room for."""

    def __init__(self, app: ASGIApp, settings: ApiSettings, room: BodyRoom) -> None:
        self._app = app
        self._longest = settings.max_body_bytes
        self._room = room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(self._room, CLIENT.get(), self._longest, receive)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.let_go()


@dataclass(slots=True)
class _Body:
    room: BodyRoom
    client: str
    longest: int
    """Bytes that are kept of it; what is more is dropped by whoever reads it."""
    source: Receive
    held: int = 0

    async def receive(self) -> Message:
        message = await self.source()
        size = min(len(message.get("body", b"")), self.longest - self.held)
        if size and not self.room.take(self.client, size):
            self.let_go()
            await self._drop(message)
            raise BodiesFull(
                f"The bodies of requests hold as much as they may, {self.room.most_bytes >> 20} MiB in all, or this client "
                f"has its share of that; come again in {BodiesFull.retry_after_s:g} s."
            )
        self.held += size
        return message

    def let_go(self) -> None:
        if self.held:
            self.room.give_back(self.client, self.held)
        self.held = 0

    async def _drop(self, message: Message) -> None:
        left = self.longest * _DRAIN
        while message.get("more_body", False) and left > 0:
            message = await self.source()
            left -= len(message.get("body", b""))
