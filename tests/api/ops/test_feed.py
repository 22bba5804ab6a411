"""One read a second for all watchers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from mlx_ring.api.ops.events import EventFeed
from mlx_ring.core.errors import Overloaded
from mlx_ring.core.logs import LogLine


class World:
    """State that counts how often it is read."""

    def __init__(self) -> None:
        self.looks = 0
        self.seen: asyncio.Queue[int] = asyncio.Queue()
        self.lines: list[LogLine] = []

    def look(self) -> dict[str, object]:
        self.looks += 1
        self.seen.put_nowait(self.looks)
        return {"looks": self.looks, "other": {"same": True}}

    def log(self, text: str) -> None:
        self.lines.append(LogLine(len(self.lines) + 1, 0.0, "INFO", "head", "a", text))

    def after(self, number: int) -> list[LogLine]:
        return self.lines[number:]

    def feed(self, *, every_s: float = 0.001, most: int = 8) -> EventFeed:
        return EventFeed(self.look, self.after, every_s=every_s, most=most)


async def next_event(events: AsyncGenerator[bytes]) -> tuple[str, Any]:
    """Return the next event's name and data."""
    name, data = (await anext(events)).decode().strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_a_watcher_gets_the_state_once_and_then_its_changes() -> None:
    async def watch() -> None:
        async with World().feed().subscribe() as events:
            assert await next_event(events) == ("state", {"looks": 1, "other": {"same": True}})
            for looks in (2, 3):
                change = [{"op": "replace", "path": "/looks", "value": looks}]
                assert await next_event(events) == ("change", change)

    asyncio.run(watch())


def test_a_watcher_that_missed_a_change_gets_the_state_again() -> None:
    async def watch() -> None:
        world = World()
        async with world.feed().subscribe() as events:
            await next_event(events)
            while await world.seen.get() < 4:
                pass
            name, state = await next_event(events)
            assert (name, state["looks"]) == ("state", world.looks)

    asyncio.run(watch())


def test_the_state_is_read_once_for_many_watchers_and_never_for_none() -> None:
    async def watch() -> None:
        world = World()
        feed = world.feed(every_s=3600)
        assert world.looks == 0
        async with feed.subscribe() as one, feed.subscribe() as other:
            assert await next_event(one) == await next_event(other)
            assert world.looks == 1
        tasks = asyncio.all_tasks()
        assert tasks == {asyncio.current_task()}
        async with feed.subscribe() as events:
            assert (await next_event(events))[1]["looks"] == 2

    asyncio.run(watch())


def test_a_watcher_that_comes_while_the_last_one_leaves_gets_the_state() -> None:
    async def watch() -> None:
        feed = World().feed(every_s=3600)
        leaving = feed.subscribe()
        await leaving.__aenter__()
        gone = asyncio.create_task(leaving.__aexit__(None, None, None))
        coming = feed.subscribe()
        await asyncio.sleep(0)
        assert not gone.done()
        events = await coming.__aenter__()
        await gone
        assert await next_event(events) == ("state", {"looks": 2, "other": {"same": True}})
        await coming.__aexit__(None, None, None)

    asyncio.run(watch())


def test_one_watcher_too_many_gets_a_retry_time_and_a_place_becomes_free() -> None:
    async def watch() -> None:
        feed = World().feed(most=1)
        async with feed.subscribe():
            with pytest.raises(Overloaded, match="1 watch already"):
                await feed.subscribe().__aenter__()
        async with feed.subscribe() as events:
            assert (await next_event(events))[0] == "state"

    asyncio.run(watch())


def test_each_log_line_is_sent_once() -> None:
    async def watch() -> None:
        world = World()
        world.log("first")
        async with world.feed().subscribe() as events:
            await next_event(events)
            name, lines = await next_event(events)
            assert (name, [line["text"] for line in lines]) == ("log", ["first"])
            world.log("second")
            while (event := await next_event(events))[0] != "log":
                pass
            assert [line["text"] for line in event[1]] == ["second"]

    asyncio.run(watch())


def test_a_read_that_fails_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(World):
        def look(self) -> dict[str, object]:
            state = super().look()
            if self.looks == 2:
                raise LookupError("just then")
            return state

    async def watch() -> None:
        async with Failing().feed().subscribe() as events:
            await next_event(events)
            assert await next_event(events) == ("change", [{"op": "replace", "path": "/looks", "value": 3}])

    asyncio.run(watch())
    assert "just then" in caplog.text
