"""Tests marked `alone` have the machine for themselves, however many processes run this checkout's tests.

Ranks that wait for each other do so in loops. Where something else takes the processor of one, the other burns its own
meanwhile, and what takes a second takes a minute.
"""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

_DOOR, _ROOM = Path(__file__), Path(__file__).with_name("conftest.py")
"""Files that every process can lock; nothing is written."""


@contextmanager
def _locked(path: Path, kind: int) -> Generator[None]:
    with path.open() as file:
        fcntl.flock(file, kind)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Whoever wants to be alone holds the door until the others have left, so that nobody slips in before.

    The test's own time does not count yet.
    """
    alone = item.get_closest_marker("alone") is not None
    with ExitStack() as room:
        with _locked(_DOOR, fcntl.LOCK_EX):
            room.enter_context(_locked(_ROOM, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        return (yield)
