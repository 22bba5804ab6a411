"""A thread for the disk, which may be slow, full or hang, beside an event loop that must not wait."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar, cast

_SLOWEST_S = 1.0
"""Longest time that a caller waits for the disk."""
_AT_ONCE_S = 0.001
"""Longest time that the event loop itself waits. A write takes a part of it. To wake the loop again costs several times as
much processor time as the write."""
T = TypeVar("T")


class _End(Generic[T]):
    """End of a function, for which its caller may wait a moment."""

    def __init__(self, *, is_awaited: bool) -> None:
        self._is_awaited = is_awaited
        self._mutex, self._has_ended = threading.Lock(), threading.Lock()
        self._has_ended.acquire()
        self._outcome: tuple[T | None, Exception | None] | None = None

    def report(self, result: T | None, error: Exception | None) -> bool:
        """Record the result or the error; return True if the caller takes it."""
        with self._mutex:
            self._outcome = (result, error)
            self._has_ended.release()
            return self._is_awaited

    def wait(self, limit_s: float) -> tuple[T | None, Exception | None] | None:
        """Return the result or the error if it comes within the limit, and take no later one."""
        if not self._is_awaited:
            return None
        self._has_ended.acquire(timeout=limit_s)
        with self._mutex:
            self._is_awaited = False
            return self._outcome


class _Watch(Generic[T]):
    """One report of a result or an error, and the timer that reports a hanging disk."""

    def __init__(self, then: Callable[[T | None, Exception | None], None]) -> None:
        self._then = then
        self.timer: asyncio.TimerHandle | None = None
        self.is_reported = False

    def report(self, result: T | None, error: Exception | None) -> None:
        """Report the first result or error."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.is_reported:
            self.is_reported = True
            self._then(result, error)


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

        If no other one runs and it is quick, `then` is called before this returns.

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
        timeout_s = _SLOWEST_S if limit_s is None else limit_s
        end = _End[T](is_awaited=self._since is None and self._jobs.empty())
        watch = _Watch(then)

        def look() -> None:
            since = self._since
            left_s = timeout_s if since is None else since + timeout_s - time.monotonic()
            if left_s > 0:
                watch.timer = loop.call_later(left_s, look)
            elif not watch.is_reported:
                self._overdue = True
                watch.report(None, TimeoutError(f"the disk does not answer within {timeout_s:g} s"))

        def finish(result: T | None, error: Exception | None) -> None:
            self._overdue = False
            watch.report(result, error)

        def job() -> None:
            result, problem = None, None
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - the caller gets it
                problem = error
            if not end.report(result, problem):
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(finish, result, problem)

        self._jobs.put(job)
        ended = end.wait(_AT_ONCE_S)
        if ended is not None:
            then(*ended)
        else:
            watch.timer = loop.call_later(timeout_s, look)

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
