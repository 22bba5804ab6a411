"""Which requests are under way, and whether the server takes new ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator

from mlx_ring.core.errors import Draining

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""These ask no model: they are answered to the end, and nobody waits for one that lasts, as a page's does."""


class Admission:
    """One for a whole server. Once it is closed, what has begun goes on, and nothing new begins."""

    def __init__(self) -> None:
        self._open = 0
        self._is_closed = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def is_draining(self) -> bool:
        return self._is_closed

    @property
    def open(self) -> int:
        """Requests that a model answers, or that change what is loaded."""
        return self._open

    @contextlib.contextmanager
    def admit(self, method: str) -> Generator[None]:
        """Meanwhile a request is under way.

        Raises:
            Draining: nothing new is taken.
        """
        if method in _READING:
            yield
            return
        if self._is_closed:
            raise Draining("The server is shutting down: it finishes what it has, and takes nothing new.")
        self._open += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._is_idle.set()

    def close(self) -> None:
        """From now on nothing new is taken."""
        self._is_closed = True

    async def drained(self) -> None:
        """Until nothing is under way."""
        await self._is_idle.wait()
