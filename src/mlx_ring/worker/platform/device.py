"""What MLX computes on, and how much memory that has.

Freed memory that stays with the process, where the C library would give it back after every array.

On a CPU MLX takes an array's memory from `malloc` and frees it again. glibc returns what is free at the end of its heap
to the system above twice the largest array, and whoever takes it anew has each page cleared by the kernel: more than half of the time
that drawing 16 tokens of 152,000 takes.
"""

from __future__ import annotations

import ctypes
import sys

import mlx.core as mx

from mlx_ring.host.machine import machine_identity
from mlx_ring.host.process import usable_memory


def device_name() -> str:
    """What MLX computes on by default: "cpu" or "gpu"."""
    return mx.default_device().type.name


def device_memory() -> tuple[int, int]:
    """Bytes of memory that the device has, and that are left: what the system advises for a GPU, RAM for a CPU.

    A container's limit counts. What others hold of a GPU's memory does not: see `free_memory`.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        ram = usable_memory()
        return ram.total_bytes, ram.available_bytes
    told = mx.device_info()
    total = int(
        told.get("max_recommended_working_set_size") or told.get("memory_size") or told["total_memory"]
    )
    return total, max(0, total - mx.get_active_memory())


def free_memory() -> int:
    """Bytes that nobody holds, other processes counted: CUDA's driver knows, Metal shares the machine's."""
    _, left = device_memory()
    if mx.default_device() == mx.Device(mx.cpu):
        return left
    told = mx.device_info().get("free_memory")
    return min(left, usable_memory().available_bytes if told is None else int(told))


def device_description() -> tuple[str, str]:
    """The device's name, and what bounds its memory, in words."""
    if mx.default_device() == mx.Device(mx.cpu):
        return machine_identity().processor, usable_memory().limited_by
    told = mx.device_info()
    advised = "max_recommended_working_set_size" in told
    name = str(told.get("device_name") or machine_identity().processor)
    return name, "what Metal advises" if advised else "the device"


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
