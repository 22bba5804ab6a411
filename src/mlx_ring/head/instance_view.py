"""Instance of a model as the API sees it."""

from __future__ import annotations

import logging

from pydantic import TypeAdapter

from mlx_ring.api.context import workers_of
from mlx_ring.api.service import InstanceInfo
from mlx_ring.core.errors import NotReady, RingError
from mlx_ring.core.types import LayerRange
from mlx_ring.core.worker_status import MEMORY, REPORTED, GroupUse, LinkUse, WorkerInfo, WorkerMemory
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.step_times import StepTimes
from mlx_ring.head.placing import Placement
from mlx_ring.head.status import InstanceView, LoadingProgress
from mlx_ring.rpc.protos import agent_pb2, worker_pb2

log = logging.getLogger(__name__)

FIRST_EPOCH = 1
LOADING = "The model is being loaded; ask again in a moment."


class InstanceService:
    """Engine and its workers, or the reason why there is none."""

    def __init__(self, layers: int, kv_bits: int) -> None:
        """Start without an engine; `layers` is the model's number of layers."""
        self._layers = layers
        self._kv_bits = kv_bits
        self._placement: Placement | None = None
        self._loading = LoadingProgress()
        self._is_loading = False
        self._instance, self._epoch = "", FIRST_EPOCH
        self._engine: Engine | None = None
        self._lost: RingError | None = None
        self._suspicion = ""
        self._workers: dict[str, tuple[WorkerInfo, ...]] = {}
        """Workers of each node."""

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise NotReady(LOADING)
        return self._engine

    @property
    def error(self) -> RingError | None:
        """Reason why it cannot answer now; None if it can."""
        if self._lost is not None:
            return self._lost
        return NotReady(LOADING) if self._engine is None else self._engine.error

    @property
    def info(self) -> InstanceInfo:
        """Plan of the instance, and its workers as reported last."""
        workers = sorted(
            (worker for of_node in self._workers.values() for worker in of_node),
            key=lambda worker: (worker.stage, worker.rank),
        )
        return InstanceInfo(self._instance, self._epoch, self._layers, tuple(workers), self._kv_bits)

    def view(self, model: str) -> InstanceView | None:
        """Return the state of the instance; None before it was planned."""
        placement, error = self._placement, self.error
        if placement is None:
            return None
        return InstanceView(
            name=self._instance,
            model=model,
            epoch=self._epoch,
            state="ready" if error is None else "loading" if self._is_loading else "unavailable",
            reason=(self._suspicion or None) if error is None else str(error),
            layers=self._layers,
            ranges=placement.ranges,
            nodes=[[placed.site.node for placed in stage] for stage in placement.ranks],
            plan=placement.plan,
            forecast=placement.forecast,
            workers=workers_of(self),
            loading=self._loading,
            times=StepTimes() if self._engine is None else self._engine.step_times(),
        )

    def begin(self, instance: str, epoch: int, placement: Placement) -> None:
        """Start to load another instance with this placement."""
        self._instance, self._epoch, self._placement = instance, epoch, placement
        self._workers, self._loading, self._is_loading = {}, LoadingProgress(), True
        self._engine, self._suspicion = None, ""

    def serve(self, engine: Engine) -> None:
        """Answer requests from now on."""
        self._engine, self._lost, self._is_loading = engine, None, False

    def lose(self, error: RingError) -> None:
        """End the engine with the reason, and refuse new requests until `serve`.

        A later reason replaces an earlier one.
        """
        # Unloading a model or ending the server is not an error.
        log.log(logging.INFO if isinstance(error, NotReady) else logging.ERROR, "%s", error)
        self._lost, self._is_loading = error, False
        if self._engine is not None:
            self._engine.lose(error)

    def suspect(self, reason: str) -> None:
        """Show that the instance is suspect; without a reason, that it is not."""
        self._suspicion = f"Suspect, without new steps: {reason}." if reason else ""

    def record_loading(self, progress: agent_pb2.StageProgress) -> None:
        """Record the loading progress of a worker."""
        self._loading.record(progress)

    def record_workers(self, event: agent_pb2.AgentEvent) -> None:
        """Record an agent's report of its workers."""
        if self._placement is None:
            return
        ranges = self._placement.ranges
        self._workers[event.hello.node] = tuple(
            _worker_info(state, ranges[state.stage], event.hello.node)
            for state in event.workers
            if state.instance == self._instance
        )


_MEMORY = TypeAdapter(WorkerMemory)


def _worker_info(state: agent_pb2.WorkerState, layers: LayerRange, node: str) -> WorkerInfo:
    status = state.status
    return WorkerInfo(
        stage=state.stage,
        rank=state.rank,
        layers=layers,
        node=node,
        pid=state.pid,
        alive=state.alive,
        memory=_MEMORY.validate_python({name: getattr(status, name) for name in MEMORY}),
        **{name: getattr(status, name) for name in REPORTED},
        sends=_sends(status),
        group=GroupUse(status.group.backend, status.group.why) if status.HasField("group") else None,
    )


def _sends(status: worker_pb2.WorkerStatus) -> LinkUse | None:
    if not status.HasField("sends"):
        return None
    sends = status.sends
    return LinkUse(sends.compresses, sends.why, sends.frames, sends.tensor_bytes, sends.sent_bytes)
