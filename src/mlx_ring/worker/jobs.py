"""What waits for the compute thread, in order.

`queue.SimpleQueue` would do, but up to Python 3.12 its `get` waits for ever where the time that it was given has passed
before it has begun to wait, as it does for a thread that a busy machine stops for some hundred microseconds.
`queue.Queue` cannot be filled by a signal handler while its thread takes from it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

Job = TypeVar("Job")


class Jobs(Generic[Job]):
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
