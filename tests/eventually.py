"""Wait for an effect of another process or thread."""

from __future__ import annotations

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
