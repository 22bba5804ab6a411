"""Status of a worker, as one value from the worker's report to the API, the page and the metrics.

A worker reports it as the proto `WorkerStatus`. Each field here that has the name of a proto field is read from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from mlx_ring.core.types import LayerRange


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Traffic from a stage to the next one."""

    compresses: bool
    why: str
    frames: int
    tensor_bytes: int
    sent_bytes: int
    """Bytes of tensors as they were sent."""


@dataclass(frozen=True, slots=True)
class GroupUse:
    """Connection of a worker with the other ranks of its stage."""

    backend: str
    """MLX's name of the backend."""
    why: str
    """Reason for the choice of the backend."""


def _memory(metric: str, about: str) -> int:
    """Declare a number of bytes that is also a metric."""
    return field(metadata={"metric": metric, "about": about})


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One rank of one stage, as it was reported last. Sizes are in bytes."""

    stage: int
    rank: int
    layers: LayerRange
    node: str
    pid: int
    device: str
    dtype: str
    alive: bool
    phase: str
    """Phase that the worker reports: `loading`, `ready` or `failed`."""
    weight_bytes: int = _memory("worker_weight_bytes", "Weights that a worker holds.")
    device_memory_bytes: int = _memory(
        "worker_device_bytes", "Memory that MLX holds on a worker, including weights and KV."
    )
    """Memory that MLX holds now."""
    peak_memory_bytes: int = _memory("worker_peak_bytes", "The most that MLX has held on a worker.")
    rss_bytes: int = _memory("worker_resident_bytes", "Resident memory of a worker's process.")
    kv_bytes: int = _memory("worker_kv_bytes", "Keys and values that a worker holds.")
    memory_bytes: int = 0
    """Memory of the device; 0 if unknown."""
    memory_left_bytes: int = 0
    """Free memory of the device, for all workers on it."""
    blas: str = ""
    sends: LinkUse | None = None
    """Traffic to the next stage; None if there is none, or nothing is known."""
    group: GroupUse | None = None
    """Connection with other ranks through MLX; None if there is none."""

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes that the worker holds, by name."""
        return {name: getattr(self, name) for name in MEMORY}


MEMORY: Mapping[str, tuple[str, str]] = {
    each.name: (each.metadata["metric"], each.metadata["about"])
    for each in fields(WorkerInfo)
    if "metric" in each.metadata
}
"""Names of the numbers of bytes that a worker reports, each with its metric and the metric's help text."""
REPORTED = frozenset(each.name for each in fields(WorkerInfo)) - {
    *("stage", "rank", "layers", "node", "pid", "alive"),
    *("sends", "group"),
}
"""Names of the fields that are copied from the worker's report as they are."""
