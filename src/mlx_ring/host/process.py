"""Usable memory and cores of this process, including limits of containers; its freed memory, its signals, its stacks.

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
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

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
