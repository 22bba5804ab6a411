"""Wait for what another process or thread brings about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PAUSE_S = 0.05
"""Pause between two looks. Without it, looking takes the processor from what is awaited."""
_T = TypeVar("_T")


def eventually(
    look: Callable[[], _T], holds: Callable[[_T], object] = bool, *, pause_s: float = PAUSE_S
) -> _T:
    """Look until `holds` is true of what is seen, and return that. The test's timeout is the limit."""
    while not holds(seen := look()):
        time.sleep(pause_s)
    return seen
