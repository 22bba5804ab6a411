"""End a process whose test neither ends nor fails long after its time limit, and show where all its threads are.

The limit of pytest-timeout is an exception in the main thread. It does not end a wait outside Python, nor one for a
thread that has stopped. xdist counts the test as failed, and continues in another process.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator

import pytest

_FURTHER_S = 300.0
"""Seconds after the limit, in which a test that failed can end what it has started, or tests that run alone end."""
_errors = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_errors] = os.dup(2)  # pytest replaces it while a test runs


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_errors])


def limit_of(item: pytest.Item) -> float:
    """Return the seconds after which the process of a test ends; 0 if the test has no limit."""
    mark = item.get_closest_marker("timeout")
    usual = item.config.getoption("timeout")
    limit = float((mark.args[0] if mark else item.config.getini("timeout") if usual is None else usual) or 0)
    return limit and limit + _FURTHER_S


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if seconds := limit_of(item):
        faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[_errors])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
