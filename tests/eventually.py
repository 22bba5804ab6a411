"""Wait for an effect of another process, thread or task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

PAUSE_S = 0.05
"""Pause between two calls. Without it, polling takes the processor from the awaited process."""
_T = TypeVar("_T")


def eventually(
    look: Callable[[], _T], holds: Callable[[_T], object] = bool, *, pause_s: float = PAUSE_S
) -> _T:
    """Call `look` until `holds` is true of its result, and return that. The test's timeout is the limit."""
    while not holds(seen := look()):
        time.sleep(pause_s)
    return seen


async def run_tasks_until(look: Callable[[], object]) -> None:
    """Run the other tasks of this event loop until `look` returns a true value. The test's timeout is the limit."""
    while True:
        if look():
            return
        await asyncio.sleep(0)


class LeapingLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock a test sets forward."""

    leapt_s = 0.0

    def time(self) -> float:
        return super().time() + self.leapt_s
