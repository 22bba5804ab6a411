"""One instance of a model as the API sees it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mlx_ring.api.service import InstanceInfo, WorkerInfo
from mlx_ring.core.errors import NotReady, RingError
from mlx_ring.core.types import LayerRange
from mlx_ring.engine.engine import Engine
from mlx_ring.rpc.protos import agent_pb2

log = logging.getLogger(__name__)

FIRST_EPOCH = 1
LOADING = "The model is being loaded; ask again in a moment."


class InstanceService:
    """An engine and the workers behind it, or the reason why there is none."""

    def __init__(self, layers: int, kv_bits: int) -> None:
        """`layers` are the whole model's."""
        self._layers = layers
        self._kv_bits = kv_bits
        self._ranges: Sequence[LayerRange] = ()
        self._instance, self._epoch = "", FIRST_EPOCH
        self._engine: Engine | None = None
        self._lost: RingError | None = None
        self._workers: dict[str, tuple[WorkerInfo, ...]] = {}
        """By node."""

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise NotReady(LOADING)
        return self._engine

    @property
    def error(self) -> RingError | None:
        """Why it cannot answer now; None when it can."""
        if self._lost is not None:
            return self._lost
        return NotReady(LOADING) if self._engine is None else self._engine.error

    @property
    def info(self) -> InstanceInfo:
        """Its plan, and its workers as they were last heard of."""
        workers = sorted(
            (worker for of_node in self._workers.values() for worker in of_node),
            key=lambda worker: (worker.stage, worker.rank),
        )
        return InstanceInfo(self._instance, self._epoch, self._layers, tuple(workers), self._kv_bits)

    def begin(self, instance: str, epoch: int, ranges: Sequence[LayerRange]) -> None:
        """Another instance is being loaded, with these layers in its stages."""
        self._instance, self._epoch, self._ranges = instance, epoch, ranges
        self._workers = {}
        self._engine = None

    def serve(self, engine: Engine) -> None:
        """From now on requests are answered."""
        self._engine, self._lost = engine, None

    def lose(self, error: RingError) -> None:
        """End what is being answered, and say why nothing more is until `serve`. A later reason is a better one."""
        log.error("%s", error)
        self._lost = error
        if self._engine is not None:
            self._engine.fail(error)

    def hear(self, event: agent_pb2.AgentEvent) -> None:
        """Take in what an agent tells of its workers."""
        ours = [state for state in event.workers if state.instance == self._instance]
        self._workers[event.hello.node] = tuple(
            _worker_info(state, self._ranges[state.stage], event.hello.node) for state in ours
        )


def _worker_info(state: agent_pb2.WorkerState, layers: LayerRange, node: str) -> WorkerInfo:
    status = state.status
    return WorkerInfo(
        stage=state.stage,
        rank=state.rank,
        layers=layers,
        node=node,
        pid=state.pid,
        device=status.device,
        dtype=status.dtype,
        alive=state.alive,
        phase=status.phase,
        weight_bytes=status.weight_bytes,
        device_memory_bytes=status.device_memory_bytes,
        peak_memory_bytes=status.peak_memory_bytes,
        rss_bytes=status.rss_bytes,
        kv_bytes=status.kv_bytes,
        blas=status.blas,
    )
