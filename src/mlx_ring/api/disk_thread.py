"""A thread for the disk, which may be slow, full or hang, beside an event loop that must not wait."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar, cast

_SLOWEST_S = 1.0
"""Longest time that a caller waits for the disk."""
T = TypeVar("T")


class DiskThread:
    """Thread that runs functions in their order. The process does not wait for it at its end."""

    def __init__(self) -> None:
        self._jobs = queue.SimpleQueue[Callable[[], None]]()
        self._overdue = False
        """True while a job takes too long."""
        threading.Thread(target=self._work, name="disk", daemon=True).start()

    def _work(self) -> None:
        while True:
            self._jobs.get()()

    def start(self, work: Callable[[], T], then: Callable[[T | None, Exception | None], None]) -> None:
        """Run a function that uses the disk after all earlier ones, and call `then` with its result or error.

        The error is a `TimeoutError` if the disk takes too long, now or with an earlier function. The function runs
        nevertheless.
        """
        loop = asyncio.get_running_loop()
        if self._overdue:
            self._jobs.put(lambda: _ignore_failure(work))
            then(None, TimeoutError("the disk does not answer"))
            return

        def overdue() -> None:
            self._overdue = True
            then(None, TimeoutError(f"the disk does not answer within {_SLOWEST_S:g} s"))

        timer = loop.call_later(_SLOWEST_S, overdue)

        def finish(result: T | None, error: Exception | None) -> None:
            self._overdue = False
            if not (timer.cancelled() or timer.when() <= loop.time()):
                timer.cancel()
                then(result, error)

        def job() -> None:
            result, problem = None, None
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - the caller gets it
                problem = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(finish, result, problem)

        self._jobs.put(job)

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of a function that uses the disk. Raises its error, or what `start` says."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(cast("T", result))

        self.start(work, settle)
        return await done


def _ignore_failure(work: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):
        work()
