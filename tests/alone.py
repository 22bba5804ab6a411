"""Tests marked `alone` have the machine for themselves, however many processes run this checkout's tests.

Ranks that wait for each other do so in loops. Where something else takes the processor of one, the other burns its own
meanwhile, and what takes a second takes a minute.

A process keeps the machine from one such test to the next: each time that it is handed over, one waits for the end of what
another is at. That is why `order.py` puts files of such tests first.
"""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

_DOOR, _ROOM = Path(__file__), Path(__file__).with_name("conftest.py")
"""Files that every process can lock; nothing is written."""
_kept: list[ExitStack] = []
"""The room, from one test that is alone to the next."""


@contextmanager
def _locked(path: Path, kind: int) -> Generator[None]:
    with path.open() as file:
        fcntl.flock(file, kind)
        yield


def is_alone(item: pytest.Item) -> bool:
    """Return true for a test that runs while no other does."""
    return item.get_closest_marker("alone") is not None


def _enter(*, alone: bool) -> ExitStack:
    """Whoever wants to be alone holds the door until the others have left, so that nobody slips in before."""
    room = ExitStack()
    with _locked(_DOOR, fcntl.LOCK_EX):
        room.enter_context(_locked(_ROOM, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
    return room


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """The test's own time does not count yet while it waits."""
    alone = is_alone(item)
    room = _kept.pop() if _kept else _enter(alone=alone)
    try:
        return (yield)
    finally:
        if alone and nextitem is not None and is_alone(nextitem):
            _kept.append(room)
        else:
            room.close()
