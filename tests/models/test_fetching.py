"""Fetches while a head serves: who keeps one in progress, and who ends it."""

from __future__ import annotations

import asyncio

import pytest

from mlx_ring.core.errors import Conflict
from mlx_ring.models import fetching
from mlx_ring.models.fetching import Fetches
from mlx_ring.models.model_folder import PullProgress

NAME = "someone/tiny"


class Hub:
    """Fetch that begins, and ends once it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.released = asyncio.Event(), asyncio.Event()
        self.has_ended = self.is_listed = False
        monkeypatch.setattr(fetching, "fetch_beside", self.fetch)

    async def fetch(self, *_: object, **__: object) -> None:
        self.begun.set()
        try:
            await self.released.wait()
        finally:
            self.has_ended = True

    async def list(self) -> None:
        self.is_listed = True


def ignore(_: PullProgress) -> None:
    """Watch without interest."""


async def left_by_its_watcher(hub: Hub, fetches: Fetches, *, lasts: bool) -> None:
    """Begin a fetch, and cancel the only request that waits for it."""
    watching = asyncio.create_task(
        fetches.fetch(NAME, must_fit=False, report=ignore, lasts=lasts, then=hub.list)
    )
    await hub.begun.wait()
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


def test_a_lasting_fetch_continues_unwatched_and_its_model_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act() -> None:
        hub, fetches = Hub(monkeypatch), Fetches()
        await left_by_its_watcher(hub, fetches, lasts=True)
        assert fetches.is_running(NAME)
        joined = asyncio.create_task(fetches.fetch(NAME, must_fit=False, report=ignore, lasts=False))
        hub.released.set()
        await joined
        assert hub.is_listed
        assert not fetches.is_running(NAME)

    asyncio.run(act())


def test_another_fetch_ends_with_the_last_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act() -> None:
        hub, fetches = Hub(monkeypatch), Fetches()
        await left_by_its_watcher(hub, fetches, lasts=False)
        await asyncio.gather(*fetches.stop(), return_exceptions=True)
        assert (hub.has_ended, hub.is_listed) == (True, False)

    asyncio.run(act())


def test_a_cancelled_fetch_ends_for_all_that_wait_and_cannot_be_cancelled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def act() -> None:
        hub, fetches = Hub(monkeypatch), Fetches()
        waiting = [asyncio.create_task(fetches.fetch(NAME, must_fit=False)) for _ in range(2)]
        await hub.begun.wait()
        fetches.cancel(NAME)
        for each in waiting:
            with pytest.raises(Conflict, match=f"The download of {NAME} was cancelled"):
                await each
        assert hub.has_ended
        with pytest.raises(Conflict, match="is in progress"):
            fetches.cancel(NAME)

    asyncio.run(act())
