"""Which of several CUDA GPUs a worker of a group has, so that each has one of its own."""

from __future__ import annotations

from pathlib import Path

from mlx_ring.core.environment import library_variable
from mlx_ring.rpc.protos import worker_pb2

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")
"""Where Linux's driver lists them; there is CUDA nowhere else that MLX runs."""


def own_gpu(
    assignment: worker_pb2.StageAssignment, driver: Path = _DRIVER, visible: str | None = None
) -> dict[str, str]:
    """What leaves the worker one GPU; nothing where there are not as many as the instance has workers.

    Args:
        assignment: of a worker that MLX joins with others.
        driver: the folder of NVIDIA's driver.
        visible: those that this process may use, as CUDA reads them; the environment's otherwise.
    """
    named = library_variable(_VISIBLE) if visible is None else visible
    count = len(list(driver.iterdir())) if driver.is_dir() else 0
    gpus = [gpu.strip() for gpu in named.split(",")] if named else [str(number) for number in range(count)]
    workers = assignment.stages * assignment.tp_size
    if not count or len(gpus) < workers:
        return {}
    return {_VISIBLE: gpus[assignment.stage * assignment.tp_size + assignment.rank]}
