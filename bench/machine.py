"""Cores, threads and memory bandwidth of this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

ONE_THREAD = [
    f"{name}=1"
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
]
"""Arguments of `env` that give each process one BLAS thread."""
_ARRAY_BYTES = 512 << 20


def cores() -> list[int]:
    """Return the cores for pinning, or none if the system cannot pin. The first core is last: it handles most interrupts."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0), reverse=True)


def pin(pid: int, core: int) -> None:
    """Pin every thread of a process to one core; later threads inherit it."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def read_bandwidth(core: int | None) -> float:
    """Return the bytes per second that one thread reads from memory: the best of several passes over 512 MiB."""
    before = os.sched_getaffinity(0) if core is not None else None
    if core is not None:
        os.sched_setaffinity(0, {core})
    array = np.ones(_ARRAY_BYTES // 4, dtype=np.float32)
    best = min(_seconds_to_read(array) for _ in range(5))
    if before is not None:
        os.sched_setaffinity(0, before)
    return _ARRAY_BYTES / best


def _seconds_to_read(array: np.ndarray[tuple[int], np.dtype[np.float32]]) -> float:
    started = time.perf_counter()
    array.max()
    return time.perf_counter() - started
