"""A thread for the disk, which may be slow, full or hang, beside an event loop that must not wait."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar, cast

_SLOWEST_S = 1.0
"""Longest time that a caller waits for the disk."""
T = TypeVar("T")


class DiskThread:
    """Thread that runs functions in their order. The process does not wait for it at its end."""

    def __init__(self) -> None:
        self._jobs = queue.SimpleQueue[Callable[[], None]]()
        self._since: float | None = None
        """Time at which the function that runs began; None while none runs."""
        self._overdue = False
        """True while a function takes too long. Others are refused then, so that they do not fill the memory."""
        threading.Thread(target=self._work, name="disk", daemon=True).start()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            self._since = time.monotonic()
            job()
            self._since = None

    def start(
        self,
        work: Callable[[], T],
        then: Callable[[T | None, Exception | None], None],
        *,
        limit_s: float | None = None,
    ) -> None:
        """Run a function that uses the disk after all earlier ones, and call `then` once with its result or error.

        The error is a `TimeoutError` if this function or an earlier one takes too long, and it may still run. If the
        disk is known to hang, it does not run.

        Args:
            work: the function.
            then: receives the result, or the error.
            limit_s: longest time that one function may take; None: a second.
        """
        if self._overdue:
            then(None, TimeoutError("the disk does not answer"))
            return
        loop = asyncio.get_running_loop()
        is_reported = False

        def report(result: T | None, error: Exception | None) -> None:
            nonlocal is_reported
            if not is_reported:
                is_reported = True
                then(result, error)

        def look() -> None:
            nonlocal timer
            since = self._since
            left_s = timeout_s if since is None else since + timeout_s - time.monotonic()
            if left_s > 0:
                timer = loop.call_later(left_s, look)
            elif not is_reported:
                self._overdue = True
                report(None, TimeoutError(f"the disk does not answer within {timeout_s:g} s"))

        timeout_s = _SLOWEST_S if limit_s is None else limit_s
        timer = loop.call_later(timeout_s, look)

        def finish(result: T | None, error: Exception | None) -> None:
            timer.cancel()
            self._overdue = False
            report(result, error)

        def job() -> None:
            result, problem = None, None
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - the caller gets it
                problem = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(finish, result, problem)

        self._jobs.put(job)

    async def run(self, work: Callable[[], T], *, limit_s: float | None = None) -> T:
        """Return the result of a function that uses the disk. Raises its error, or what `start` says."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(cast("T", result))

        self.start(work, settle, limit_s=limit_s)
        return await done
