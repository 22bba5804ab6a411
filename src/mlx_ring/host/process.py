"""Usable memory and cores of this process, including limits of containers; its freed memory, signals, stacks and output.

Linux describes the machine in `/proc`, and the container in the folders of its control group, version 2
(`memory.max`, `cpu.max`) or 1 (`memory.limit_in_bytes`, `cpu.cfs_quota_us`). A group's limit holds for all groups in
it, so
the smallest on the path to the root counts. In a container the path to its own group may be hidden: the mounted
folder is then that group. Every reader takes the root of the file system, so that tests can pass another.

On a Mac the footprint of a process counts, as jetsam and Activity Monitor count it: memory of its GPU is not resident.

A process that gets `SIGNAL` writes the stacks of its threads to stderr. Those of a worker or an agent come into its
parent's log. Native code shows as the call that led into it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import math
import os
import re
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

import psutil

ROOT = Path("/")
_GROUPS = Path("sys/fs/cgroup")
_HYBRID = "unified"
"""Mount point of version 2 beside version 1."""
_NO_LIMIT = 1 << 60
"""Number above any memory, which version 1 writes for no limit."""

METAL_SHARE = 8 / 9
"""Share of the memory that Metal recommends, or that a Mac grants its GPU, which counts as the GPU's memory.

With the default `--memory-utilization` of 0.9, a fifth of the recommendation stays free. Other servers ran out of memory
at the first token with less (Mesh-LLM/mesh-llm#1011).
"""


@dataclass(frozen=True, slots=True)
class UsableMemory:
    """Memory of the CPU, in bytes."""

    total_bytes: int
    """Memory that this process and those beside it may use in all."""
    available_bytes: int
    """Free memory of it."""
    limited_by: str
    """Source of the limit as text: the machine, or a file of a control group."""


@dataclass(frozen=True, slots=True)
class _MemoryLimit:
    """Limit of one control group."""

    nbytes: int
    left_bytes: int
    file: Path


def usable_memory(root: Path = ROOT) -> UsableMemory:
    """Return the memory of the machine, or of the tightest control group around this process."""
    ram = psutil.virtual_memory()
    return limited_memory(ram.total, ram.available, root)


def limited_memory(total: int, available: int, root: Path) -> UsableMemory:
    """Return the memory of a machine that control groups leave.

    Args:
        total: bytes of the machine.
        available: bytes that it has left.
        root: of the file system.
    """
    limits = [limit for limit in _memory_limits(root) if limit.nbytes < total]
    tightest = min(limits, key=lambda limit: limit.nbytes, default=None)
    left = min([available, *(limit.left_bytes for limit in limits)])
    if tightest is None:
        return UsableMemory(total, left, "the machine")
    file = Path("/") / tightest.file.relative_to(root)
    return UsableMemory(tightest.nbytes, left, f"the control group ({file})")


def usable_cores(root: Path = ROOT) -> int:
    """Return the number of cores that threads may keep busy: physical ones, those of our affinity, and a container's share; 1 at least."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return limited_cores(min(physical, own), root)


def limited_cores(cores: int, root: Path) -> int:
    """Return how many of these cores control groups leave; whole ones of a share like 2.5."""
    quota = cpu_quota(root)
    return cores if quota is None else max(1, min(cores, math.floor(quota.cores)))


@dataclass(frozen=True, slots=True)
class CpuQuota:
    """CPU time that a control group grants."""

    cores: float
    """Cores' worth of time."""
    period_s: float
    """Period in which it is granted."""


def cpu_quota(root: Path = ROOT) -> CpuQuota | None:
    """Return the least grant of all control groups; None without a limit."""
    return min(_cpu_quotas(root), default=None, key=lambda quota: quota.cores)


def own_memory() -> int:
    """Return the bytes that this process holds: resident ones, and on a Mac its footprint."""
    footprint = mac_footprint(ctypes.CDLL(None).proc_pid_rusage) if sys.platform == "darwin" else 0
    return footprint or psutil.Process().memory_info().rss


class _ResourceUse(ctypes.Structure):
    """`struct rusage_info_v0` of macOS (`sys/resource.h`)."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("user_time", ctypes.c_uint64),
        ("system_time", ctypes.c_uint64),
        ("pkg_idle_wkups", ctypes.c_uint64),
        ("interrupt_wkups", ctypes.c_uint64),
        ("pageins", ctypes.c_uint64),
        ("wired_size", ctypes.c_uint64),
        ("resident_size", ctypes.c_uint64),
        ("phys_footprint", ctypes.c_uint64),
        ("proc_start_abstime", ctypes.c_uint64),
        ("proc_exit_abstime", ctypes.c_uint64),
    )


def mac_footprint(proc_pid_rusage: Callable[..., int]) -> int:
    """Return the footprint of this process in bytes; 0 if the system does not tell.

    Args:
        proc_pid_rusage: function of macOS: `int proc_pid_rusage(int pid, int flavor, rusage_info_t *buffer)`.
    """
    use = _ResourceUse()
    failed = proc_pid_rusage(os.getpid(), 0, ctypes.byref(use))
    return 0 if failed else int(use.phys_footprint)


# ---- control groups


def _memory_limits(root: Path) -> Iterator[_MemoryLimit]:
    for folder in control_groups(root, ""):
        for name in ("memory.max", "memory.high"):
            if (limit := _number(folder / name)) is not None:
                yield _limit(folder, folder / name, limit, "memory.current", "")
    for folder in control_groups(root, "memory"):
        file = folder / "memory.limit_in_bytes"
        if (limit := _number(file)) is not None and limit < _NO_LIMIT:
            yield _limit(folder, file, limit, "memory.usage_in_bytes", "total_")


def _limit(folder: Path, file: Path, limit: int, usage: str, prefix: str) -> _MemoryLimit:
    """Return a folder's limit. Cached pages of files count as free, as in the machine's own figures."""
    pages = sum(_entry(folder / "memory.stat", f"{prefix}{kind}_file") for kind in ("inactive", "active"))
    used = (_number(folder / usage) or 0) - pages
    return _MemoryLimit(limit, max(0, limit - max(0, used)), file)


def _cpu_quotas(root: Path) -> Iterator[CpuQuota]:
    for folder in control_groups(root, ""):
        granted = _words(folder / "cpu.max")
        if len(granted) == 2 and granted[0].isdigit() and granted[1].isdigit():  # noqa: PLR2004 - two fields: quota and period
            yield _quota(int(granted[0]), int(granted[1]))
    for folder in control_groups(root, "cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            yield _quota(quota, period)


def _quota(granted_us: int, period_us: int) -> CpuQuota:
    return CpuQuota(granted_us / max(1, period_us), max(1, period_us) / 1e6)


def control_groups(root: Path, controller: str) -> list[Path]:
    """Return the folders of this process's group and of those around it; of version 2 if no controller is named."""
    mount, path = _mount(root, controller), own_control_group(root, controller)
    if mount is None or path is None:
        return []
    parts = [part for part in path.split("/") if part not in ("", "..")]
    ends = (parts[start:] for start in range(len(parts) + 1))
    own = next((end for end in ends if mount.joinpath(*end).is_dir()), list[str]())
    return [mount.joinpath(*own[:length]) for length in range(len(own), -1, -1)]


def _mount(root: Path, controller: str) -> Path | None:
    groups = root / _GROUPS
    places = [groups / controller, groups / "cpu,cpuacct"] if controller else [groups, groups / _HYBRID]
    if controller and controller != "cpu":
        places = places[:1]
    needed = "" if controller else "cgroup.controllers"
    return next((place for place in places if (place / needed).exists()), None)


def own_control_group(root: Path, controller: str) -> str | None:
    """Return the path in `/proc/self/cgroup`: lines of `number:controllers:path`, of version 2 without controllers."""
    for line in _lines(root / "proc" / "self" / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return path
    return None


def _number(file: Path) -> int | None:
    """Return the number in a file; None if there is no such file or number: `max` stands for no limit."""
    words = _words(file)
    return int(words[0]) if len(words) == 1 and words[0].lstrip("-").isdigit() else None


def _entry(file: Path, name: str) -> int:
    found = (line.split() for line in _lines(file))
    return next((int(pair[1]) for pair in found if len(pair) > 1 and pair[0] == name), 0)


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []


def release_freed_memory() -> None:
    """Return freed memory to the system: after large temporary data, it is most of what a small process holds.

    Only glibc keeps so much, and only glibc offers to return it.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


SIGNAL = signal.SIGUSR1


def dump_stacks_on_signal() -> None:
    """Write all stacks when the signal comes, even while a thread holds the interpreter."""
    faulthandler.register(SIGNAL, all_threads=True, chain=False)


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to end. The end of a terminal does not where it is ignored (`nohup`)."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (
        (signal.SIGINT, signal.SIGTERM) if ignores_hangup else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    )


_CAP_SYS_NICE = 23
"""Bit of the capability in `/proc/PID/status`; see capabilities(7)."""


def may_raise_priority() -> bool:
    """Report whether this process may raise the priority of others, which root may not in most containers."""
    try:
        found = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return found is not None and bool(int(found[1], 16) >> _CAP_SYS_NICE & 1)


# ---- output that nobody may read

_MOST_KEPT_BYTES = 1 << 20
_END_WAIT_S = 1.0
"""Longest wait at the end for a slow reader."""
_FULL_PAUSE_S = 0.05
"""Time until the next try to write where another program wrote first."""


class _Waiting:
    """Bytes that wait for the reader of one file, in the order in which they came, and the thread that writes them.

    There may be 1 MiB of them. Then the oldest are dropped, and a line says so.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Held for all that is written, unless the thread writes it."""
        self._kept: deque[tuple[UnblockedOutput, bytes]] = deque()
        self._kept_bytes = self._dropped_lines = 0
        self._is_writing = False
        """True while the thread writes bytes that are no longer among the kept ones."""
        self._thread: threading.Thread | None = None

    def is_over(self) -> bool:
        """Report whether all bytes are written."""
        return not self._kept and not self._is_writing

    def keep(self, output: UnblockedOutput, data: bytes) -> None:
        """Let the thread write bytes to an output."""
        self._kept.append((output, data))
        self._kept_bytes += len(data)
        while self._kept_bytes > _MOST_KEPT_BYTES and len(self._kept) > 1:
            _, dropped = self._kept.popleft()
            self._kept_bytes -= len(dropped)
            self._dropped_lines += dropped.count(b"\n")
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_kept, name="unread output", daemon=True)
            self._thread.start()
        self.changed.notify_all()

    def _write_kept(self) -> None:
        while True:
            with self.changed:
                self._is_writing = False
                self.changed.notify_all()
                self.changed.wait_for(lambda: self._kept)
                output, data = self._kept.popleft()
                self._kept_bytes -= len(data)
                self._is_writing = True
            try:
                output.write_patiently(data)
                self._report_dropped(output)
            except OSError as error:
                with self.changed:
                    output.error = error
                    self._kept = deque(each for each in self._kept if each[0] is not output)
                    self._kept_bytes = sum(len(each) for _, each in self._kept)
                    self._dropped_lines = 0

    def _report_dropped(self, output: UnblockedOutput) -> None:
        with self.changed:
            dropped, self._dropped_lines = self._dropped_lines, 0
        if dropped:
            output.write_patiently(f"({dropped} lines are missing here: nobody read them)\n".encode())


class UnblockedOutput(io.RawIOBase):
    """Output to a descriptor that never waits for a reader, as writes to a full pipe or a stopped terminal do.

    Bytes that cannot be written at once are kept, and written by a thread, whose error the next write raises.
    """

    def __init__(self, stream: TextIO, others: Iterable[UnblockedOutput] = ()) -> None:
        """Write to the descriptor of `stream`, which stays open; in one order with those of `others` to the same file."""
        self._stream = stream
        self._descriptor = stream.fileno()
        # `select` may find room for a byte in a terminal, where a write then waits for more.
        self._never_at_once = os.isatty(self._descriptor)
        self.error: OSError | None = None
        """Error that the next write raises."""
        same = (each for each in others if os.path.sameopenfile(each.fileno(), self._descriptor))
        self._waiting = next((each._waiting for each in same), None) or _Waiting()  # noqa: SLF001 - of its own class

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any, /) -> int:
        """Write or keep all of the bytes, and return their number. Raises `OSError` if they cannot be written any more."""
        given = bytes(data)
        with self._waiting.changed:
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            is_next = self._waiting.is_over() and not self._never_at_once
            rest = self._write_at_once(given) if is_next else given
            if rest:
                self._waiting.keep(self, rest)
        return len(given)

    def _write_at_once(self, data: bytes) -> bytes:
        """Write what needs no wait, and return the rest."""
        with contextlib.suppress(BlockingIOError):
            while data and select.select([], [self._descriptor], [], 0.0)[1]:
                data = self._write_some(data)
        return data

    def write_patiently(self, data: bytes) -> None:
        """Write bytes, however long it takes until they are read."""
        while data:
            select.select([], [self._descriptor], [])  # a pipe may be one that lets nobody wait
            try:
                data = self._write_some(data)
            except BlockingIOError:  # another program has filled it just now
                time.sleep(_FULL_PAUSE_S)

    def _write_some(self, data: bytes) -> bytes:
        """Write as many bytes as a pipe with any room has room for, and return the others."""
        return data[os.write(self._descriptor, data[: select.PIPE_BUF]) :]

    def finish(self) -> bool:
        """Wait a second at most until all bytes are written; return true if they are."""
        with self._waiting.changed:
            return self._waiting.changed.wait_for(self._waiting.is_over, _END_WAIT_S)


@contextlib.contextmanager
def unblocked_output() -> Generator[None]:
    """Let nothing that is printed or logged meanwhile wait for a reader of stdout or stderr."""
    given = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    outputs: dict[str, UnblockedOutput] = {}
    for name, stream in given.items():
        with contextlib.suppress(AttributeError, OSError, ValueError):  # a test's, or closed
            stream.flush()
            outputs[name] = UnblockedOutput(stream, outputs.values())
            text = io.TextIOWrapper(outputs[name], stream.encoding, stream.errors, line_buffering=True)  # pyright: ignore[reportArgumentType] - it takes every write whole, as a buffered one does
            setattr(sys, name, text)
    try:
        yield
    finally:
        for name, output in outputs.items():
            # Later text would wait behind these bytes.
            if output.finish():
                setattr(sys, name, given[name])


def exit_now(code: int) -> NoReturn:
    """End this process without a wait for its threads, but with what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
            if isinstance(output := getattr(stream, "buffer", None), UnblockedOutput):
                output.finish()
    os._exit(code)
