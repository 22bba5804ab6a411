"""Control groups, which limit the memory and the CPU time of processes.

They are of version 2 or 1, as this machine has them, below the group that the tests run in. A watcher removes them with
the processes left in them, also when the tests are killed. It waits for the end of a pipe whose other end the tests hold.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shlex
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.processes import run_at_end

_MOUNT = Path("/sys/fs/cgroup")
_PERIOD_US = 10_000
_REMOVE = """
trap '' INT TERM HUP
read -r _ || true
for folder in "$@"; do
  until rmdir "$folder" 2>/dev/null || ! test -d "$folder"; do
    for pid in $(cat "$folder/cgroup.procs"); do kill -KILL "$pid" 2>/dev/null; done
    sleep 0.05
  done
done
true
"""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A group: a folder for each controller, or one for all."""

    folders: tuple[Path, ...]

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs `arguments` in this group."""
        enter = "".join(f"echo $$ > {shlex.quote(str(folder))}/cgroup.procs && " for folder in self.folders)
        return ["sh", "-c", f'{enter}exec "$@"', "sh", *arguments]

    def add(self, pid: int) -> None:
        """Move a process into this group."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def set_cores(self, cores: float, period_us: int = _PERIOD_US) -> None:
        """Change the limit on cores."""
        quota = str(round(cores * period_us))
        for folder in self.folders:
            if (folder / "cpu.max").exists():
                (folder / "cpu.max").write_text(f"{quota} {period_us}")
            elif (folder / "cpu.cfs_quota_us").exists():
                (folder / "cpu.cfs_quota_us").write_text(quota)


def skip_without_groups() -> None:
    """Skip the test, with the reason, where this process may not make control groups."""
    if reason := _obstacle():
        pytest.skip(reason)


@contextlib.contextmanager
def limited(memory_bytes: int, cores: float, period_us: int = _PERIOD_US) -> Generator[ControlGroup]:
    """Make a group with limits on memory and on cores, whose time is granted anew in each period."""
    name = f"ring{os.getpid():x}{secrets.token_hex(2)}"
    limits = _limits(memory_bytes, cores, period_us)
    folders = tuple(folder / name for folder in limits)
    with run_at_end(_REMOVE, *map(str, folders)):
        for folder, entries in zip(folders, limits.values(), strict=True):
            folder.mkdir()
            for entry, value in entries.items():
                (folder / entry).write_text(value)
        yield ControlGroup(folders)


def mount_command() -> str:
    """Return the shell command that shows the groups to a host of `tests.namespaces`, which has a `/sys` of its own."""
    if _is_version_2():
        return f"mount -t cgroup2 none {_MOUNT}"
    own = [_own_folder(controller).relative_to(_MOUNT).parts[0] for controller in ("memory", "cpu")]
    mounts = [f"mkdir {_MOUNT}/{name} && mount -t cgroup -o {name} none {_MOUNT}/{name}" for name in own]
    return " && ".join([f"mount -t tmpfs none {_MOUNT}", *mounts])


def _limits(memory_bytes: int, cores: float, period_us: int) -> Mapping[Path, Mapping[str, str]]:
    """Return the contents of the group's files, by the folder that the group is made in."""
    quota = str(round(cores * period_us))
    if _is_version_2():
        parent = _own_folder("")
        (parent / "cgroup.subtree_control").write_text("+memory +cpu")
        return {parent: {"memory.max": str(memory_bytes), "cpu.max": f"{quota} {period_us}"}}
    return {
        _own_folder("memory"): {"memory.limit_in_bytes": str(memory_bytes)},
        _own_folder("cpu"): {"cpu.cfs_period_us": str(period_us), "cpu.cfs_quota_us": quota},
    }


def _is_version_2() -> bool:
    return (_MOUNT / "cgroup.controllers").exists()


def _own_folder(controller: str) -> Path:
    """Return the folder of this process's group. In version 2 it has no controller."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return _MOUNT / controllers / path.lstrip("/")
    raise FileNotFoundError(f"no control group has the controller {controller or 'of version 2'}")


@functools.cache
def _obstacle() -> str:
    """Return the reason why no group can be made on this machine; empty if one can."""
    try:
        with limited(1 << 30, 1.0):
            return ""
    except OSError as error:
        return f"control groups cannot be made here: {error}"
