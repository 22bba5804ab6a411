"""The served model as the API sees it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_ring.api.service import (
    InstanceInfo,
    LinkInfo,
    LinkUse,
    SamplingDefaults,
    ServingEngine,
    WorkerInfo,
)
from mlx_ring.cluster.found_links import FoundLink
from mlx_ring.core.errors import NotReady, RingError
from mlx_ring.core.types import LayerRange
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.served_model import ServedModel, describe_model
from mlx_ring.rpc.protos import agent_pb2, worker_pb2

log = logging.getLogger(__name__)

FIRST_EPOCH = 1
_LOADING = "The model is being loaded; ask again in a moment."


class HeadService:
    """The served model as the API sees it: an engine, or the reason why there is none."""

    def __init__(self, served: ServedModel, *, kv_bits: int = 0) -> None:
        self._served = served
        self._kv_bits = kv_bits
        self._ranges: Sequence[LayerRange] = ()
        self._instance, self._epoch = "", FIRST_EPOCH
        self._engine: Engine | None = None
        self._lost: RingError | None = None
        self._workers: dict[str, tuple[WorkerInfo, ...]] = {}
        """By node."""
        self._metadata = describe_model(served.folder)
        self.links: Callable[[], Sequence[FoundLink]] = tuple
        """What is known of the links between nodes."""
        self.created = int(time.time())
        self.default_sampling = _sampling_defaults(served.folder.generation_config)

    @property
    def model_id(self) -> str:
        return self._served.names[0]

    @property
    def aliases(self) -> Sequence[str]:
        return self._served.names[1:]

    @property
    def tokenizer(self) -> Any:
        return self._served.tokenizer

    @property
    def context_length(self) -> int:
        limits = self._served.limits
        return limits.context_length if self._engine is None else self._engine.context_length

    @property
    def vocab_size(self) -> int:
        return self._served.limits.vocab_size

    @property
    def metadata(self) -> Mapping[str, object]:
        return self._metadata

    @property
    def engine(self) -> ServingEngine:
        if self._engine is None:
            raise NotReady(_LOADING)
        return self._engine

    @property
    def error(self) -> RingError | None:
        if self._lost is not None:
            return self._lost
        return NotReady(_LOADING) if self._engine is None else self._engine.error

    def instance(self) -> InstanceInfo:
        layers = self._served.folder.num_layers
        workers = sorted(
            (worker for of_node in self._workers.values() for worker in of_node),
            key=lambda worker: (worker.stage, worker.rank),
        )
        links = tuple(map(_link_info, self.links()))
        return InstanceInfo(self._instance, self._epoch, layers, tuple(workers), self._kv_bits, links)

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


def _link_info(found: FoundLink) -> LinkInfo:
    return LinkInfo(
        source=found.source,
        target=found.target,
        round_trip_s=found.round_trip_s,
        bytes_per_s=found.bytes_per_s,
        unix_time_s=found.unix_time_s,
        problem=found.problem,
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
        sends=_sends(status),
    )


def _sends(status: worker_pb2.WorkerStatus) -> LinkUse | None:
    if not status.HasField("sends"):
        return None
    sends = status.sends
    return LinkUse(sends.compresses, sends.why, sends.frames, sends.tensor_bytes, sends.sent_bytes)


def _sampling_defaults(config: Mapping[str, Any]) -> SamplingDefaults:
    """What the model's makers advise, where their file gives numbers."""
    fallback = SamplingDefaults()

    def number(name: str, otherwise: float) -> float:
        value: object = config.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return otherwise
        return float(value) if value >= 0 else otherwise

    return SamplingDefaults(
        temperature=0.0 if config.get("do_sample") is False else number("temperature", fallback.temperature),
        top_p=number("top_p", fallback.top_p),
        top_k=int(number("top_k", fallback.top_k)),
        min_p=number("min_p", fallback.min_p),
        repetition_penalty=number("repetition_penalty", fallback.repetition_penalty),
    )
