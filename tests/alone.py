"""Run tests marked `alone` while no other test runs, whatever the number of test processes.

Where ranks have processors to spare, they wait for each other in busy loops. When another process takes the processor
of one rank, the other rank keeps spinning, and a test of a second takes a minute. Where two ranks share the processors,
they wait in the kernel, and a test marked `alone(loops=True)` runs beside others.

A process holds the lock from one such test to the next, because taking it means waiting for every running test. For
the same reason `order.py` puts files of such tests together, at the end.
"""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest

from mlx_ring.host.process import usable_cores
from mlx_ring.worker.platform.ring_waits import can_wait_in_the_kernel, share_cores

_QUEUE, _MACHINE = Path(__file__), Path(__file__).with_name("conftest.py")
"""Files that every process can lock; nothing is written."""
_kept: list[ExitStack] = []
"""The lock on the machine, kept from one test that runs alone to the next."""


@contextmanager
def _locked(path: Path, kind: int) -> Generator[None]:
    with path.open() as file:
        fcntl.flock(file, kind)
        yield


def is_alone(item: pytest.Item) -> bool:
    """Return true for a test that runs while no other does."""
    mark = item.get_closest_marker("alone")
    return mark is not None and not (mark.kwargs.get("loops") and _two_ranks_wait_in_the_kernel())


@cache
def _two_ranks_wait_in_the_kernel() -> bool:
    """Return true if two ranks of MLX's ring on this machine keep no processor busy while they wait."""
    group = ("127.0.0.1:1", "127.0.0.1:2")
    return can_wait_in_the_kernel() and share_cores(group, 0, usable_cores())


def _take_lock(*, alone: bool) -> ExitStack:
    """Wait for the lock on the machine. A test that runs alone blocks the queue, so that no other starts before it."""
    lock = ExitStack()
    with _locked(_QUEUE, fcntl.LOCK_EX):
        lock.enter_context(_locked(_MACHINE, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
    return lock


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Take the lock before the test's timeout starts."""
    alone = is_alone(item)
    lock = _kept.pop() if _kept else _take_lock(alone=alone)
    try:
        return (yield)
    finally:
        if alone and nextitem is not None and is_alone(nextitem):
            _kept.append(lock)
        else:
            lock.close()
