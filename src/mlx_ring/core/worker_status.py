"""Status of a worker, as one value from the worker's report to the API, the page and the metrics.

A worker reports it as the proto `WorkerStatus`. Each field here that has the name of a proto field is read from it.
So is each of `WorkerMemory`, which `/cluster/status` and the metrics show as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, get_type_hints

from typing_extensions import TypedDict

from mlx_ring.core.types import LayerRange

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic_core import CoreSchema


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


@dataclass(frozen=True, slots=True)
class WaitUse:
    """Cause for which a worker waits."""

    kind: str
    """Kind: `collective`, `link`, `device` or `load`."""
    backend: str
    """MLX's backend of a collective; empty for other kinds."""
    peer: str
    """Stages or ranks that it waits for; empty if none."""
    seconds: float
    """Time since the start of the wait."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of a number, whose help text is also the number's description in `/openapi.json`."""

    name: str
    help: str

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, object]:
        """Return the number's JSON schema."""
        return {**handler(schema), "description": self.help}


class WorkerMemory(TypedDict):
    """Bytes that a worker holds."""

    weight_bytes: Annotated[int, Metric("worker_weight_bytes", "Weights that a worker holds.")]
    device_memory_bytes: Annotated[
        int, Metric("worker_device_bytes", "Memory that MLX holds on a worker, including weights and KV.")
    ]
    peak_memory_bytes: Annotated[int, Metric("worker_peak_bytes", "The most that MLX has held on a worker.")]
    rss_bytes: Annotated[
        int,
        Metric("worker_resident_bytes", "Memory of a worker's process: resident, or on a Mac its footprint."),
    ]
    kv_bytes: Annotated[int, Metric("worker_kv_bytes", "Keys and values that a worker holds.")]


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
    memory: WorkerMemory
    memory_bytes: int = 0
    """Memory of the device; 0 if unknown."""
    memory_left_bytes: int = 0
    """Free memory of the device, for all workers on it."""
    blas: str = ""
    """Description of what computes products on a CPU."""
    kernels: str = ""
    """Instruction set of the native kernels that compute quantized weights; empty without them."""
    cpu_weights: str = ""
    """Form of quantized weights on a CPU: `quantized` or `float32`; empty on a GPU, and for other models."""
    sends: LinkUse | None = None
    """Traffic to the next stage; None if there is none, or nothing is known."""
    group: GroupUse | None = None
    """Connection with other ranks through MLX; None if there is none."""
    waits: WaitUse | None = None
    """Present wait; None if no step is under way."""

    @property
    def memory_by_name(self) -> Mapping[str, int]:
        return {name: size for name, size in self.memory.items() if isinstance(size, int)}


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """Plan in force, and its workers in order of stage and rank."""

    name: str
    epoch: int
    layers: int
    """Number of the model's layers."""
    workers: tuple[WorkerInfo, ...]
    kv_bits: int = 0
    """Bits of a quantized key or value; 0: kept as computed."""

    @property
    def stages(self) -> int:
        return len({worker.stage for worker in self.workers})


def _metric(hint: object) -> Metric:
    """Return the metric in a field's annotation."""
    [metric] = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Metric)]
    return metric


MEMORY: Mapping[str, Metric] = {
    name: _metric(hint) for name, hint in get_type_hints(WorkerMemory, include_extras=True).items()
}
"""Names of the numbers of bytes that a worker reports, each with its metric."""
REPORTED = frozenset(each.name for each in fields(WorkerInfo)) - {
    *("stage", "rank", "layers", "node", "pid", "alive"),
    *("memory", "sends", "group", "waits"),
}
"""Names of the fields that are copied from the worker's report as they are, beside those in `MEMORY`."""
