"""End a process whose test neither ends nor fails, and show where its tasks and threads wait.

At a test's limit, pytest-timeout raises an exception in the main thread. That does not end a wait outside Python, nor a
cleanup that waits for a thread or a task. So five minutes later the process ends with the stacks of its threads; xdist
counts the test as failed, and continues in another process. As many minutes are for ending what a failed test has
started. A test's wait for others, where it runs alone, does not count.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, cast

import pytest
import pytest_timeout

_END_S = 300.0
"""Seconds from the limit to the end of the process."""
_errors = pytest.StashKey[int]()
_is_debugged = False


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_errors] = os.dup(2)  # pytest replaces it while a test runs


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_errors])


def pytest_enter_pdb() -> None:
    global _is_debugged  # noqa: PLW0603 - a debugger is there until the process ends
    _is_debugged = True


def limit_of(item: pytest.Item) -> float:
    """Return the seconds after which pytest-timeout lets a test fail; 0 if it has no limit."""
    settings: Any = getattr(pytest_timeout, "_get_item_settings")(item)  # noqa: B009 - it is private
    return settings.timeout or 0.0


def _end_after(seconds: float, item: pytest.Item) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[_errors])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if limit := limit_of(item):
        _end_after(limit + _END_S, item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Limit what follows a failure, too: pytest has dropped the end of the process, and pytest-timeout the limit."""
    if limit_of(item) and not _is_debugged and not item.config.getoption("usepdb"):
        _end_after(limit_of(item) + _END_S, item)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(settings: Any) -> Generator[None, object, object]:
    """Show tasks before pytest-timeout's handler raises."""
    result = yield
    if settings.method == "signal":
        fail = cast("Callable[[int, FrameType | None], None]", signal.getsignal(signal.SIGALRM))

        def show_tasks_and_fail(number: int, frame: FrameType | None) -> None:
            __tracebackhide__ = True
            _show_tasks()
            fail(number, frame)

        signal.signal(signal.SIGALRM, show_tasks_and_fail)
    return result


def _show_tasks() -> None:
    """Write where the tasks of this thread's loop wait, if one runs."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return
    for task in tasks:
        task.print_stack(file=sys.stderr)
