"""Freed memory that stays with the process, where the C library would give it back after every array.

On a CPU MLX takes an array's memory from `malloc` and frees it again. glibc returns what is free at the end of its heap
to the system above twice the largest array, and whoever takes it anew has each page cleared by the kernel: more than half of the time
that drawing 16 tokens of 152,000 takes.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""mallopt(3)."""
_KEPT_BYTES = 128 << 20
"""At the heap's end: arrays of a step, and not KV or weights, which are larger."""
_LARGEST_BYTES = 32 << 20
"""Arrays from this size on get memory of their own; glibc's own upper bound."""


def keep_freed_memory() -> bool:
    """For arrays that come from here on. Whether the C library can be told: glibc can."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
