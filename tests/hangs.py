"""Let a test that hangs fail with all that it waits for, whatever it does with the exception of its time limit.

At the limit, pytest-timeout raises an exception in the main thread. Here it comes again each minute: the first may end
nothing, as where its handling waits for a thread that has stopped. It also shows the tasks of a running loop. A wait
outside Python gets no exception: after five minutes its process ends with the stacks of its threads. xdist counts the
test as failed, and continues in another process.
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

_AGAIN_S, _END_S = 60.0, 300.0
"""Seconds from one exception to the next, and from the limit to the end of the process."""
_errors = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_errors] = os.dup(2)  # pytest replaces it while a test runs


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_errors])


def limit_of(item: pytest.Item) -> float:
    """Return the seconds after which a test fails; 0 if it has no limit."""
    mark = item.get_closest_marker("timeout")
    usual = item.config.getoption("timeout")
    return float((mark.args[0] if mark else item.config.getini("timeout") if usual is None else usual) or 0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if limit := limit_of(item):
        faulthandler.dump_traceback_later(limit + _END_S, exit=True, file=item.config.stash[_errors])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(settings: Any) -> Generator[None, object, object]:
    """Repeat the signal of pytest-timeout's timer, and show tasks before its handler raises."""
    result = yield
    if settings.method == "signal":
        fail = cast("Callable[[int, FrameType | None], None]", signal.getsignal(signal.SIGALRM))

        def show_tasks_and_fail(number: int, frame: FrameType | None) -> None:
            __tracebackhide__ = True
            _show_tasks()
            fail(number, frame)

        signal.signal(signal.SIGALRM, show_tasks_and_fail)
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, _AGAIN_S)
    return result


def _show_tasks() -> None:
    """Write where the tasks of this thread's loop wait, if one runs."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return
    for task in tasks:
        task.print_stack(file=sys.stderr)
