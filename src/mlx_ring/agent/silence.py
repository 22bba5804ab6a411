"""How long a worker has owed an answer, of the time in which it could have given one.

A processor that others hold for seconds keeps a worker from answering, and so does a machine that was itself stopped (a virtual
one that is moved, say). Neither is a reason to end the worker: it would be loaded again into the same trouble.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_LONGEST_GAP_S = 2.0
"""Between two looks at a worker; where more has passed, whoever looks was stopped himself."""
_LEAST_SHARE = 0.05
"""Of a processor: who is ready to compute and gets less of it is starved."""
_MOST_STARVED_S = 60.0
"""Without an answer. In a container that grants next to nothing, who waits for ever and who is busy for ever look alike."""
_RUNNABLE = "R"


class Silence:
    """What one worker owes. Told of each question's outcome."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looked_s = time.monotonic()
        self._cpu_s = _cpu_s(pid)
        self.seconds = 0.0
        """Since it last answered, without the time in which it could not."""
        self._starved_s = 0.0

    def answered(self) -> None:
        self._look()
        self.seconds = self._starved_s = 0.0

    def unanswered(self) -> None:
        """A question's time ran out."""
        gap_s, computed_s = self._look()
        counted_s = min(gap_s, _LONGEST_GAP_S)
        is_starved = computed_s < _LEAST_SHARE * gap_s and _is_runnable(self._pid)
        if is_starved and self._starved_s < _MOST_STARVED_S:
            self._starved_s += counted_s
        else:
            self.seconds += counted_s

    def _look(self) -> tuple[float, float]:
        """Seconds since the last look, on the clock and of the processors."""
        now_s, cpu_s = time.monotonic(), _cpu_s(self._pid)
        gap_s, computed_s = now_s - self._looked_s, cpu_s - self._cpu_s
        self._looked_s, self._cpu_s = now_s, cpu_s
        return gap_s, computed_s


def _cpu_s(pid: int) -> float:
    """What the process has computed, in seconds, threads that have ended included; 0 where the system does not say it this way."""
    user, system = _fields(Path(f"/proc/{pid}/stat"), 11, 12)
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _is_runnable(pid: int) -> bool:
    """Whether a thread of the process has a processor or waits for one; False where the system does not say it."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return False
    return any(_fields(task / "stat", 0) == [_RUNNABLE] for task in tasks)


def _fields(file: Path, *numbers: int) -> list[str]:
    """Of proc_pid_stat(5), counted from the state on; zeros where there is no such file."""
    try:
        fields = file.read_text().rpartition(")")[2].split()
    except OSError:
        return ["0"] * len(numbers)
    return [fields[number] for number in numbers]
