"""How long the threads that compute may go on before the machine turns to another.

MLX's CPU backend works through its queue in a thread of its own, which the compute thread fills. Where both share a
core, every operation wakes one of them and stops the other: hundreds of turns for one token. Linux'
batch policy says that waking such a thread is no reason to stop the one that computes.

It is not for ranks that MLX joins: their threads wait for other ranks in loops, and whoever has got what it waited for would wait
until the others' turns end. On one core each, two ranks decoded 1.3 times as fast as one with long turns, and 1.8 times with short ones.
"""

from __future__ import annotations

import contextlib
import os
import sys


def take_long_turns() -> None:
    """From now on, for the calling thread and those that it starts. Linux only; elsewhere nothing happens."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def take_short_turns() -> None:
    """As any thread does, so that it answers at once: the opposite of `take_long_turns`."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
