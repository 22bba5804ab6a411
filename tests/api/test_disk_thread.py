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


@pytest.mark.parametrize("fails", [False, True])
def test_quick_function_is_reported_before_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    monkeypatch.setattr("mlx_ring.api.disk_thread._AT_ONCE_S", 60.0)

    def work() -> int:
        if fails:
            raise OSError(28, "No space left on device")
        return 1

    async def run() -> list[tuple[int | None, str]]:
        reports: list[tuple[int | None, str]] = []
        DiskThread().start(work, lambda result, error: reports.append((result, str(error))))
        return reports

    assert asyncio.run(run()) == [(None, "[Errno 28] No space left on device") if fails else (1, "None")]


def test_loop_goes_on_while_a_function_is_slow_and_gets_its_result_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlx_ring.api.disk_thread._AT_ONCE_S", 0.0)
    goes_on = threading.Event()

    async def run() -> list[str]:
        disk, reports = DiskThread(), list[str]()
        for name in ("first", "second"):
            disk.start(goes_on.wait, lambda _result, _error, name=name: reports.append(name), limit_s=60)
        assert reports == []
        goes_on.set()
        assert await disk.run(lambda: 3, limit_s=60) == 3
        return reports

    assert asyncio.run(run()) == ["first", "second"]
