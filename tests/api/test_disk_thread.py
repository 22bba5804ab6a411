"""Thread for the disk: pauses of the event loop, and disks that hang."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from mlx_ring.api.disk_thread import DiskThread


def test_pause_of_the_event_loop_does_not_look_like_a_hanging_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_ring.api.disk_thread._SLOWEST_S", 0.02)

    def stand_still() -> None:
        time.sleep(0.1)

    async def run() -> list[int]:
        disk, done = DiskThread(), threading.Event()

        def work() -> int:
            done.set()
            return 1

        asked = asyncio.ensure_future(disk.run(work))
        await asyncio.sleep(0)
        # The loop stands still for longer than the disk may take, and the function runs meanwhile.
        done.wait()
        stand_still()
        return [await asked, await disk.run(lambda: 2, limit_s=60)]

    assert asyncio.run(run()) == [1, 2]


def test_disk_that_hung_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_ring.api.disk_thread._SLOWEST_S", 0.02)
    goes_on = threading.Event()

    async def run() -> int:
        disk = DiskThread()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await disk.run(goes_on.wait)
        goes_on.set()
        while True:
            with contextlib.suppress(TimeoutError):
                return await disk.run(lambda: 3)
            await asyncio.sleep(0)

    assert asyncio.run(run()) == 3
