"""Child process: started with a lifeline, its output logged, its end reported with the reason, and always ended.

`UnresponsiveTime` tells one that hangs from one that cannot compute.

A child ends when its parent does, whatever ended the parent.

The parent keeps the writing end of a pipe, to which it writes one line at most; the child inherits the
reading end. The kernel closes the writing end with the parent, even by SIGKILL, and
the child reads its end of file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mlx_ring.core.logs import is_tagged, pass_on
from mlx_ring.host.process import SIGNAL

log = logging.getLogger(__name__)

SPARE_FLAG, READY_LINE = "--spare", "spare: ready"
"""First argument of a child that waits for the others on its lifeline, and the line that it prints then."""
GRACE_S = 3.0
"""Time from SIGTERM to SIGKILL."""
_LAST_WORDS_S = 0.3
_LINE_LIMIT = 1 << 20


def advice_for(end: str, machine: str) -> str:
    """Return a sentence on what to do if a child's end has this reason; empty if the reason says it."""
    if f"({signal.SIGKILL.name})" not in end:
        return ""
    return f" Memory may have run out: lower --memory-utilization of {machine}, or end other programs there."


class ChildProcess:
    """One child. It leads a session of its own, so that a Ctrl-C in the terminal only reaches the parent."""

    def __init__(
        self,
        name: str,
        rank: int | None,
        process: asyncio.subprocess.Process,
        lifeline: int,
        word: Callable[[str], str],
    ) -> None:
        self.name = name
        self._tag = _tag_of(name, rank)
        self._process = process
        self._lifeline = lifeline
        self._word = word
        self._last_lines: deque[str] = deque(maxlen=20)
        self._output = asyncio.create_task(self._relay_output(), name=f"output of {name}")
        self._end = asyncio.create_task(self._wait(), name=f"end of {name}")

    @classmethod
    async def start(
        cls,
        module: str,
        arguments: Sequence[str],
        *,
        name: str,
        rank: int | None,
        environment: Mapping[str, str],
        word: Callable[[str], str] = str,
    ) -> ChildProcess:
        """Run `python -m module arguments --lifeline-fd N`.

        Args:
            name: the process's name in log lines.
            rank: of a worker; None for a process without one.
            environment: all of its variables.
            word: returns the text to log for an output line that is no log line; empty to log nothing.
        """
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", module, *arguments, "--lifeline-fd", str(reading)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(reading,),
                start_new_session=True,
                env=dict(environment),
                limit=_LINE_LIMIT,
            )
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        return cls(name, rank, process, writing, word)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_reason(self) -> str:
        """Reason why it ended; empty while it runs."""
        return self._end.result() if self._end.done() else ""

    def send_line(self, line: str) -> bool:
        """Write a line to the lifeline, for a child that reads one. Return False if it has ended."""
        try:
            os.write(self._lifeline, f"{line}\n".encode())
        except OSError:
            return False
        return True

    def rename(self, name: str, rank: int | None) -> None:
        """Change the name in log lines, and the rank."""
        self.name = name
        self._tag |= _tag_of(name, rank)

    async def wait(self) -> str:
        """Wait for its end and return the reason. Several callers may wait."""
        return await asyncio.shield(self._end)

    async def stop(self, grace_s: float = GRACE_S, *, asks_where: bool = True, before_kill: str = "") -> str:
        """End it with SIGTERM, then SIGKILL; return the reason once the kernel has confirmed its end.

        With `asks_where`, a child that ignores SIGTERM first writes its stacks. `before_kill` is a sentence that is
        logged before SIGKILL.
        """
        if not self._end.done():
            self._signal(signal.SIGTERM)
            if await self._ends_within(grace_s):
                return self._end.result()
            log.warning(
                "%s (pid %d) did not end within %g s of SIGTERM: killing it.%s",
                *(self.name, self.pid, grace_s, before_kill and f" {before_kill}"),
            )
            if asks_where:
                self._signal(SIGNAL)
                await self._ends_within(_LAST_WORDS_S)
            self._signal(signal.SIGKILL)
        return await self.wait()

    async def _ends_within(self, seconds: float) -> bool:
        """Wait without `asyncio.timeout`: in a task that was cancelled before, Python 3.11.2's ends as another cancellation."""
        await asyncio.wait((self._end,), timeout=seconds)
        return self._end.done()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _wait(self) -> str:
        code = await self._process.wait()
        os.close(self._lifeline)
        # A grandchild may hold the pipe open; the process's own last lines are there at once.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._output
        return self._reason(code)

    def _reason(self, code: int) -> str:
        if code < 0:
            return f"ended by signal {-code} ({signal.Signals(-code).name})"
        last = next((line for line in reversed(self._last_lines) if line.strip()), "")
        return f"exit code {code}: {last}" if code and last else f"exit code {code}"

    async def _relay_output(self) -> None:
        stream = self._process.stdout
        if stream is None:
            return
        while line := await _read_line(stream):
            text = line.decode("utf-8", errors="replace").rstrip("\n")
            if is_tagged(text):
                # The child's own file has it already.
                pass_on(text)
            elif text := self._word(text):
                log.warning("%s", text, extra=self._tag)
            if text:
                self._last_lines.append(text)


def _tag_of(name: str, rank: int | None) -> dict[str, str]:
    return {"child_process": name, "child_rank": "-" if rank is None else str(rank)}


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """Read a line, or as much of an overlong one as fits the buffer; empty at the end."""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)


def read_lifeline(descriptor: int) -> str:
    """Return the line that the parent writes to the inherited pipe; empty if the parent has ended."""
    text = b""
    while not text.endswith(b"\n"):
        if not (part := os.read(descriptor, 1 << 16)):
            return ""
        text += part
    return text.decode().rstrip("\n")


def watch_lifeline(descriptor: int, end: Callable[[], None]) -> None:
    """Call `end` from a separate thread once the inherited pipe closes."""

    def wait() -> None:
        while os.read(descriptor, 1):
            pass
        end()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


# ---- unresponsive children

_LONGEST_GAP_S = 2.0
"""Longest time that counts between two checks of a worker; after a longer one, this process was stopped itself."""
_LEAST_SHARE = 0.05
"""Share of a processor below which a process that is ready to compute counts as starved."""
_MOST_STARVED_S = 60.0
"""Limit of the starved time without an answer. With hardly any processor time, a stuck worker looks like a busy one."""
_RUNNABLE, _ON_DISK = "R", "D"
"""States of threads that run or could run, and of those that wait for a disk."""


class UnresponsiveTime:
    """Time since a worker last answered a status request, in which it owes an answer that it could have given.

    Seconds in which other processes hold the processor do not count. Nor does a pause of the machine itself, for instance
    a virtual one that is moved. Ending the process would not help then: it would be started again into the same problem.
    """

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
