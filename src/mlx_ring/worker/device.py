"""What MLX computes on, and how much memory that has."""

from __future__ import annotations

import mlx.core as mx

from mlx_ring.core.machine_identity import machine_identity
from mlx_ring.core.process_limits import usable_memory


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
