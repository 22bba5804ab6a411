"""What waits for the compute thread, in order.

`queue.SimpleQueue` would do, but up to Python 3.12 its `get` waits for ever where the time that it was given has passed
before it has begun to wait, as it does for a thread that a busy machine stops for some hundred microseconds.
`queue.Queue` cannot be filled by a signal handler while its thread takes from it.

How a worker ends that has no place in its group of ranks any more.

How long the threads that compute may go on before the machine turns to another.

MLX's CPU backend works through its queue in a thread of its own, which the compute thread fills. Where both share a
core, every operation wakes one of them and stops the other: hundreds of turns for one token. Linux'
batch policy says that waking such a thread is no reason to stop the one that computes.

It is not for ranks that MLX joins: their threads wait for other ranks in loops, and whoever has got what it waited for would wait
until the others' turns end. On one core each, two ranks decoded 1.3 times as fast as one with long turns, and 1.8 times with short ones.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from typing import Generic, NoReturn, TypeVar

Job = TypeVar("Job")


class JobQueue(Generic[Job]):
    """Any thread adds, and so does a signal handler; one thread takes."""

    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()
        self._bell = threading.Lock()
        """Free where something has come since the taker last waited."""

    def put(self, job: Job) -> None:
        """Add one. Never waits."""
        self._waiting.append(job)
        try:
            self._bell.release()
        except RuntimeError:
            """It is free already."""

    def get(self) -> Job:
        """Take the next, once there is one."""
        while not self._waiting:
            self._bell.acquire()
        return self._waiting.popleft()

    def get_within(self, seconds: float) -> Job | None:
        """Take the next, if there is one within so many seconds."""
        end = time.monotonic() + seconds
        while not self._waiting:
            if not self._bell.acquire(timeout=max(0.0, end - time.monotonic())):
                return None
        return self._waiting.popleft()


log = logging.getLogger(__name__)

_LAST_WORDS_S = 2.0
"""For the one whose fault it is to be found first, where ranks lose each other."""


def end_process(error: Exception) -> NoReturn:
    """End at once but for a pause: the other ranks may wait for this one in a collective, or have gone on without it."""
    log.error("this worker ends, for its group is of no use any more: %s", error)
    time.sleep(_LAST_WORDS_S)
    logging.shutdown()
    os._exit(1)


def prefer_throughput() -> None:
    """From now on, for the calling thread and those that it starts. Linux only; elsewhere nothing happens."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def prefer_latency() -> None:
    """As any thread does, so that it answers at once: the opposite of `prefer_throughput`."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
