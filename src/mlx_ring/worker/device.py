"""What MLX computes on, and how much memory that has."""

from __future__ import annotations

import mlx.core as mx
import psutil


def device_name() -> str:
    """What MLX computes on by default: "cpu" or "gpu"."""
    return mx.default_device().type.name


def device_memory() -> tuple[int, int]:
    """Bytes of memory that the device has, and that are left: what the system advises for a GPU, RAM for a CPU."""
    if mx.default_device() == mx.Device(mx.cpu):
        ram = psutil.virtual_memory()
        return ram.total, ram.available
    told = mx.device_info()
    total = int(
        told.get("max_recommended_working_set_size") or told.get("memory_size") or told["total_memory"]
    )
    return total, max(0, total - mx.get_active_memory())
