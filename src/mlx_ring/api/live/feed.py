"""One look a second for all who watch, none while nobody does."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

from mlx_ring.api.live.patch import Json, json_patch
from mlx_ring.core.errors import Overloaded
from mlx_ring.core.kept_lines import LogLine

log = logging.getLogger(__name__)

MOST_WATCHERS = 32
_RETRY_AFTER_S = 10.0
_ENCODER = json.JSONEncoder(separators=(",", ":"))


class Feed:
    """Tells how things stand: the whole of it first, and then what has changed.

    Who cannot keep up is told the whole again, so nobody's events are kept for later.
    """

    def __init__(
        self,
        look: Callable[[], Json],
        lines: Callable[[int], Sequence[LogLine]],
        *,
        every_s: float = 1.0,
        most: int = MOST_WATCHERS,
    ) -> None:
        """What is told.

        Args:
            look: gives how things stand, as plain JSON.
            lines: gives the log's lines after the one with that number.
            every_s: between two looks.
            most: watchers at the same time.
        """
        self._look, self._lines = look, lines
        self._every_s, self._most = every_s, most
        self._watchers = 0
        self._looking: asyncio.Task[None] | None = None
        self._number = 0
        """Of the last look."""
        self._state: Json = {}
        self._change = b""
        self._news = asyncio.Event()

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[AsyncGenerator[bytes]]:
        """A watcher's place, and its events.

        Raises:
            Overloaded: there are too many watchers already.
        """
        if self._watchers >= self._most:
            raise Overloaded(
                f"{self._watchers} watch already, and the server tells no more at a time: close a page, or try again later.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._watchers += 1
        try:
            if self._looking is None:
                self._take()
                self._looking = asyncio.create_task(self._keep_looking(), name="live feed")
            events = self._events()
            try:
                yield events
            finally:
                await events.aclose()
        finally:
            self._watchers -= 1
            await self._rest()

    async def _rest(self) -> None:
        """Nobody watches: nothing is looked at any more."""
        task = self._looking
        if self._watchers or task is None:
            return
        # Before it is waited for: who comes meanwhile has a state of their own.
        self._looking, self._state = None, {}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                self._take()
            except Exception:
                log.exception("watchers are told nothing this time")

    def _take(self) -> None:
        state = self._look()
        self._change = event("change", json_patch(self._state, state))
        self._state = state
        self._number += 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _events(self) -> AsyncGenerator[bytes]:
        told = line = 0
        while True:
            if told != self._number:
                is_next = told and told == self._number - 1
                told = self._number
                yield self._change if is_next else event("state", self._state)
            lines = self._lines(line)
            if lines:
                line = lines[-1].number
                yield event("log", [each.as_json() for each in lines])
            if told == self._number:
                await self._news.wait()


def event(name: str, value: object) -> bytes:
    """One server-sent event."""
    return f"event: {name}\ndata: {_ENCODER.encode(value)}\n\n".encode()
