"""Memory limit for request bodies, in total and by client. The guard, which identifies the client, runs before it.

A body counts from its arrival until its request is answered. A client may hold no more than it leaves free. A single client
gets half, so there is always room for the next one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_ring.api.settings import ApiSettings
from mlx_ring.core.errors import BodiesFull
from mlx_ring.core.traces import CLIENT

_DRAIN = 4
"""Limit for a refused body, which is read and dropped, as a multiple of the longest body.

A client that is still sending would not see the answer.
"""


@dataclass(slots=True)
class RequestBodyMemory:
    """Accounting of the bytes that request bodies hold, by client."""

    most_bytes: int
    _held: Counter[str] = field(default_factory=Counter[str])

    @property
    def held_bytes(self) -> int:
        return self._held.total()

    def reserve(self, client: str, size: int) -> bool:
        """Reserve bytes for a client. Return False if it would hold more than it leaves free."""
        left = self.most_bytes - self.held_bytes - size
        if self._held[client] + size > left:
            return False
        self._held[client] += size
        return True

    def release(self, client: str, size: int) -> None:
        self._held[client] -= size
        if not self._held[client]:
            del self._held[client]


class BodyMemoryMiddleware:
    """ASGI middleware that refuses bodies beyond the memory limit."""

    def __init__(self, app: ASGIApp, settings: ApiSettings, memory: RequestBodyMemory) -> None:
        self._app = app
        self._longest = settings.max_body_bytes
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(self._memory, CLIENT.get(), self._longest, receive)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.release_all()


@dataclass(slots=True)
class _Body:
    memory: RequestBodyMemory
    client: str
    longest: int
    """Limit of a body. The reader drops what exceeds it."""
    source: Receive
    held: int = 0

    async def receive(self) -> Message:
        message = await self.source()
        size = min(len(message.get("body", b"")), self.longest - self.held)
        if size and not self.memory.reserve(self.client, size):
            self.release_all()
            await self._drop(message)
            raise BodiesFull(
                f"The memory for request bodies is full, {self.memory.most_bytes >> 20} MiB in all, or this client "
                f"uses its whole share; try again in {BodiesFull.retry_after_s:g} s."
            )
        self.held += size
        return message

    def release_all(self) -> None:
        if self.held:
            self.memory.release(self.client, self.held)
        self.held = 0

    async def _drop(self, message: Message) -> None:
        left = self.longest * _DRAIN
        while message.get("more_body", False) and left > 0:
            message = await self.source()
            left -= len(message.get("body", b""))
