"""Cores and memory that this process may use, and memory that products with quantized weights take beside their results.

The machine's cores and memory count within the limits of control groups (containers, units).

Every reader takes the root of the file system, so that tests can pass another.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
_GROUPS = "sys/fs/cgroup"
TILE_BYTES = 64 << 20
"""Memory of the tiles of a product without native kernels, about: several are under way at once."""
_BLOCK, _STRIDE = 256, 272
"""Depth of the blocks in which `native/panel_product.h` keeps x, and numbers from row to row."""
_LEAST_ROWS, _MOST_ROWS, _MOST_BYTES = 96, 768, 32 << 20
"""Rows that it keeps at once: so many that they take this memory, within bounds."""
_FLOAT_BYTES = 4


def usable_cores(root: Path = ROOT) -> int:
    """Return the number of cores that may be kept busy, 1 at least."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _groups(root, "cpu"):
        quota, period = _numbers(folder / "cpu.max") or (
            _first(folder / "cpu.cfs_quota_us"),
            _first(folder / "cpu.cfs_period_us"),
        )
        if quota > 0 and period > 0:
            cores = min(cores, int(quota / period))
    return max(1, cores)


def free_memory(root: Path = ROOT) -> int:
    """Return the bytes of memory that are free; 0 if the system does not report it."""
    free = 0
    with contextlib.suppress(OSError), (root / "proc/meminfo").open(encoding="utf-8") as lines:
        free = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)
    for folder in _groups(root, "memory"):
        limit = _first(folder / "memory.max") or _first(folder / "memory.limit_in_bytes")
        used = _first(folder / "memory.current") or _first(folder / "memory.usage_in_bytes")
        if limit > 0:
            free = min(free, max(0, limit - max(0, used - _pages_of_files(folder))))
    return free


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the groups around this process, of version 2 and of a controller of version 1.

    In a container the path may be hidden: the mounted folder is then this process's group.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounted = root / _GROUPS / (controller if controllers else "")
        own = mounted / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(mounted))


def _pages_of_files(folder: Path) -> int:
    """Return the bytes of cached files in a group, which count as free."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (folder / "memory.stat").read_text("utf-8").splitlines()
    entries = dict(line.split(" ", 1) for line in lines if " " in line)
    prefix = "total_" if "total_inactive_file" in entries else ""
    return sum(int(entries.get(f"{prefix}{kind}_file", "0")) for kind in ("inactive", "active"))


def _numbers(file: Path) -> tuple[float, float] | None:
    """Return the two numbers of a file of version 2; None where there is no limit."""
    with contextlib.suppress(OSError, ValueError):
        first, second = file.read_text("utf-8").split()
        return float(first), float(second)
    return None


def _first(file: Path) -> int:
    """Return the number in a file; 0 where it is missing, or names no limit."""
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text("utf-8").strip())
    return 0


def scratch_bytes(inputs: int, rows: int) -> int:
    """Return the bytes that products of `rows` rows with up to `inputs` inputs keep, with native kernels or without."""
    row = _FLOAT_BYTES * _STRIDE * max(1, -(-inputs // _BLOCK))
    kept = max(_LEAST_ROWS, min(_MOST_ROWS, _MOST_BYTES // row))
    return max(TILE_BYTES, row * min(rows, kept))
