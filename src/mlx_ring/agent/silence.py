"""How long a worker has owed an answer, of the time in which it could have given one.

A processor that others hold for seconds keeps a worker from answering, and so does a machine that was itself stopped (a virtual
one that is moved, say). Neither is a reason to end the worker: it would be loaded again into the same trouble.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LONGEST_GAP_S = 2.0
"""Between two looks at a worker; where more has passed, whoever looks was stopped himself."""
_LEAST_SHARE = 0.05
"""Of a processor: who is ready to compute and gets less of it is starved."""
_RUNNABLE = "R"


class Silence:
    """What one worker owes. Told of each question's outcome."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looked_s = time.monotonic()
        self._cpu_s = _cpu_s(pid)
        self.seconds = 0.0
        """Since it last answered, without the time in which it could not."""

    def answered(self) -> None:
        self._look()
        self.seconds = 0.0

    def unanswered(self) -> None:
        """A question's time ran out."""
        gap_s, computed_s = self._look()
        if not (computed_s < _LEAST_SHARE * gap_s and _is_runnable(self._pid)):
            self.seconds += min(gap_s, _LONGEST_GAP_S)

    def _look(self) -> tuple[float, float]:
        """Seconds since the last look, on the clock and of the processors."""
        now_s, cpu_s = time.monotonic(), _cpu_s(self._pid)
        gap_s, computed_s = now_s - self._looked_s, cpu_s - self._cpu_s
        self._looked_s, self._cpu_s = now_s, cpu_s
        return gap_s, computed_s


def _cpu_s(pid: int) -> float:
    """What the process has computed, in seconds; 0 where the system does not say it this way (Linux does)."""
    ticks = sum(int(user) + int(system) for _, user, system in _threads(pid))
    return ticks / os.sysconf("SC_CLK_TCK")


def _is_runnable(pid: int) -> bool:
    """Whether a thread of the process has a processor or waits for one; False where the system does not say it."""
    return any(state == _RUNNABLE for state, _, _ in _threads(pid))


def _threads(pid: int) -> Iterator[tuple[str, str, str]]:
    """State, and ticks of user and system time, of each thread: proc_pid_stat(5), fields 3, 14 and 15."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                yield fields[0], fields[11], fields[12]
