"""Time in which a process owes an answer that it could have given.

Seconds in which other processes hold the processor do not count. Nor does a pause of the machine itself, for instance
a virtual one that is moved. Ending the process would not help then: it would be started again into the same problem.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_LONGEST_GAP_S = 2.0
"""Longest time that counts between two checks of a worker; after a longer one, this process was stopped itself."""
_LEAST_SHARE = 0.05
"""Share of a processor below which a process that is ready to compute counts as starved."""
_MOST_STARVED_S = 60.0
"""Limit of the starved time without an answer. With hardly any processor time, a stuck worker looks like a busy one."""
_RUNNABLE, _ON_DISK = "R", "D"
"""States of threads that run or could run, and of those that wait for a disk."""


class UnresponsiveTime:
    """Time since a worker last answered a status request."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looked_s = time.monotonic()
        self._cpu_s = _cpu_s(pid)
        self.seconds = 0.0
        """Seconds since its last answer, without the time in which it could not answer."""
        self.idle_s = 0.0
        """Last part of these seconds, in which it did not compute and did not wait for a disk."""
        self._starved_s = 0.0

    def answered(self) -> None:
        self._look()
        self.seconds = self.idle_s = self._starved_s = 0.0

    def unanswered(self) -> None:
        """Record a request that was not answered in time."""
        gap_s, computed_s = self._look()
        counted_s = min(gap_s, _LONGEST_GAP_S)
        is_still = computed_s < _LEAST_SHARE * gap_s
        is_starved = is_still and _has_thread(self._pid, _RUNNABLE)
        is_idle = is_still and not is_starved and not _has_thread(self._pid, _ON_DISK)
        self.idle_s = self.idle_s + counted_s if is_idle else 0.0
        if is_starved and self._starved_s < _MOST_STARVED_S:
            self._starved_s += counted_s
        else:
            self.seconds += counted_s

    def _look(self) -> tuple[float, float]:
        """Return the seconds since the last check, by the clock and of the processors."""
        now_s, cpu_s = time.monotonic(), _cpu_s(self._pid)
        gap_s, computed_s = now_s - self._looked_s, cpu_s - self._cpu_s
        self._looked_s, self._cpu_s = now_s, cpu_s
        return gap_s, computed_s


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of the process, ended threads included; 0 if the system does not report them."""
    user, system = _fields(Path(f"/proc/{pid}/stat"), 11, 12)
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _has_thread(pid: int, state: str) -> bool:
    """Return True if a thread of the process is in this state; False if the system does not report it."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return False
    return any(_fields(task / "stat", 0) == [state] for task in tasks)


def _fields(file: Path, *numbers: int) -> list[str]:
    """Return the fields of proc_pid_stat(5) from the state on; zeros if there is no such file."""
    try:
        fields = file.read_text().rpartition(")")[2].split()
    except OSError:
        return ["0"] * len(numbers)
    return [fields[number] for number in numbers]
