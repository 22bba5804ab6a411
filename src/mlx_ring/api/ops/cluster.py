"""`/cluster/status`: nodes, instances with their stages, devices, and the links between nodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import mean
from typing import Annotated, Literal, NotRequired

from pydantic import SkipValidation
from starlette.requests import Request
from starlette.routing import Router
from typing_extensions import TypedDict

from mlx_ring.api.context import ApiContext, workers_of
from mlx_ring.api.openapi import JsonObject, RouteDoc, documented_get
from mlx_ring.api.ops.models import client_host, is_loopback
from mlx_ring.api.ops.status import ClusterParts
from mlx_ring.api.service import LinkInfo, ModelService, ServedInstance, State
from mlx_ring.core.engine_stats import Policy, StepTiming
from mlx_ring.core.environment import program
from mlx_ring.core.types import RankId
from mlx_ring.core.worker_status import InstanceInfo, LinkUse, WaitUse, WorkerInfo, WorkerMemory
from mlx_ring.settings.config import shown_flags

Availability = Literal["ready", "unavailable"]
Mean = int | float | None
"""Mean of integers, which JSON shows as an integer where it is one."""


class SchedulingStatus(JsonObject):
    """Configuration of an instance's scheduler."""

    max_num_seqs: int
    """Largest number of sequences that run at the same time."""
    max_waiting: int
    """Largest number of queued requests; more are refused."""
    prefill_chunk: int
    """Largest number of one prompt's tokens in a step."""
    long_chunk: int
    """Largest number of tokens of a prompt alone, where a step of them is measured to take less than a second; 0: no more."""
    max_itl_ratio: float
    """Largest inter-token latency beside prefill, as a multiple of the latency without it."""
    steps_ahead: int
    """Decode steps of one micro-batch that are in flight at once."""
    prefix_cache: bool
    draft_tokens: int
    """Largest number of tokens that prompt lookup proposes in a step; 0: no speculative decoding."""
    step_deadline_s: float
    """Shortest time after which a rank without an answer counts as stuck; 0: never."""
    request_timeout_s: float | None
    """Longest time of a request, from its arrival; null: no limit."""
    kv_bits: int | None
    """Bits of a quantized key or value; null where they are kept as computed."""


class StageStepTimes(JsonObject):
    """Mean times of a stage's last steps, by kind of step. Null where there was none of that kind."""

    stage: int
    decode_steps: int
    decode_compute_us: Mean
    decode_link_wait_us: Mean
    decode_link_send_us: Mean
    decode_queue_us: Mean
    decode_rows: Mean
    prefill_steps: int
    prefill_compute_us: Mean
    prefill_link_wait_us: Mean
    prefill_link_send_us: Mean
    prefill_queue_us: Mean
    prefill_rows: Mean


class ServedInstanceStatus(JsonObject):
    """An instance of a model: its requests and its steps."""

    instance: str
    epoch: int
    status: Availability
    reason: str | None
    stages: int
    layers: int
    nodes: list[str]
    running: int
    waiting: int
    scheduling: SchedulingStatus | None
    """Null while the instance is unavailable."""
    step_times: list[StageStepTimes]


class ServedModelStatus(JsonObject):
    """A model and its instances."""

    model: str
    start_name: str
    """Name, or absolute path on the head's machine, with which `mlx-ring serve` finds the model."""
    state: State
    reason: str | None
    instances: list[ServedInstanceStatus]


class WaitStatus(JsonObject):
    """Cause for which a worker waits."""

    kind: str
    """`collective` of MLX, `link` over gRPC, `device`, or `load` of layers for the next plan."""
    backend: str | None
    """MLX's backend of a collective."""
    peer: str | None
    """Stages or ranks that it waits for."""
    seconds: float
    """Time since the start of the wait, at the worker's last report."""


class DeviceStatus(JsonObject, WorkerMemory):
    """One worker, as it measured itself last."""

    model: str
    instance: str
    node: str
    pid: int
    stage: int
    rank: int
    role: Literal["whole", "first", "middle", "last"]
    """Place of its layers in the model."""
    layers: list[int]
    """First layer, and the one after the last."""
    device: str
    dtype: str
    blas: str
    kernels: str | None
    """Instruction set of native kernels for quantized weights; null without them."""
    cpu_weights: str | None
    """Form of quantized weights on a CPU: quantized or float32. Null on a GPU, and for models without them."""
    alive: bool
    phase: str
    waits: WaitStatus | None
    """Null if no step was under way at the worker's last report."""
    device_limit_bytes: int | None
    """Memory of the device; null while it is unknown."""
    device_left_bytes: int | None
    """Memory of the device that all workers on it leave free."""


_LinkEnds = TypedDict("_LinkEnds", {"from": str, "to": str})


class LinkStatus(_LinkEnds, JsonObject):
    """One direction between two nodes. The measured fields are missing where `problem` says why nothing passes."""

    problem: str | None
    round_trip_us: NotRequired[float]
    bytes_per_s: NotRequired[int]
    measured_at: NotRequired[int]
    """Unix seconds."""
    measured_s_ago: NotRequired[float]
    carries_activations: bool
    """True if a stage on the first node sends to one on the second."""
    compresses: bool
    why: str
    """Reason why activations are compressed or not."""
    frames: NotRequired[int]
    """Number of tensors sent. This field and the next ones are missing before the first one."""
    tensor_bytes: NotRequired[int]
    sent_bytes: NotRequired[int]
    """Bytes of these tensors on the wire."""


class ClusterStatus(ClusterParts):
    """Answer of `/cluster/status`. Fields of a single instance are those of the first model's first one."""

    status: Availability
    reason: str | None
    model: str
    instance: str | None
    epoch: int
    stages: int
    layers: int
    world_size: int
    devices: Annotated[list[DeviceStatus], SkipValidation]
    """All workers."""
    scheduling: Annotated[SchedulingStatus | None, SkipValidation]
    step_times: Annotated[list[StageStepTimes], SkipValidation]
    models: Annotated[list[ServedModelStatus], SkipValidation]
    links: list[LinkStatus]
    """Both directions between every two nodes."""
    urls: list[str]
    """URLs by which other machines and phones reach this server; empty if it answers on its own machine alone."""
    program: str
    """Program that serves, as it was called: `mlx-ring`, or such as `.venv/bin/mlx-ring` from a checkout."""
    options: list[str]
    """Flags with which the server was started, for another start. Placeholders stand for keys and passwords, and for absolute
    paths where the client is on another machine. URLs have only their scheme, host and port."""
    join_refusal: str | None
    """Reason why no other machine can join; null if others can."""


def routes(context: ApiContext) -> Router:
    router = Router()

    async def status(request: Request) -> ClusterStatus:
        return cluster_status(context, shows_folders=is_loopback(client_host(request)))

    documented_get(
        router,
        "/cluster/status",
        status,
        RouteDoc(
            "Report nodes, instances and stages: memory and times, predicted and measured", ClusterStatus
        ),
    )
    return router


def cluster_status(context: ApiContext, *, shows_folders: bool = False) -> ClusterStatus:
    """Return the cluster's present state.

    Args:
        shows_folders: as for `start_options`.
    """
    model, parts = context.default, context.catalog.cluster()
    error, instances = model.error, model.instances
    first = _instance(instances[0]) if instances else None
    return ClusterStatus(
        nodes=parts.nodes,
        missing_machines=parts.missing_machines,
        absent_nodes=parts.absent_nodes,
        instances=parts.instances,
        hung_backends=parts.hung_backends,
        proposals=parts.proposals,
        no_proposals=parts.no_proposals,
        joules_per_token=parts.joules_per_token,
        status="ready" if error is None else "unavailable",
        reason=None if error is None else str(error),
        model=model.model_id,
        instance=None if first is None else first["instance"],
        epoch=0 if first is None else first["epoch"],
        stages=0 if first is None else first["stages"],
        layers=0 if first is None else first["layers"],
        world_size=sum(len(instance.info.workers) for _, instance in context.instances()),
        devices=[
            _device(worker, instance.info, model)
            for model, instance in context.instances()
            for worker in workers_of(instance)
        ],
        scheduling=None if first is None else first["scheduling"],
        step_times=[] if first is None else first["step_times"],
        models=[_model(model) for model in context.catalog.models],
        links=link_statuses(
            context.catalog.links, [instance.info for _, instance in context.instances()], time.time()
        ),
        urls=list(context.settings.urls()),
        program=program(shows_folders=False),
        options=start_options(shows_folders=shows_folders),
        join_refusal=context.settings.join_refusal or None,
    )


def start_options(*, shows_folders: bool) -> list[str]:
    """Return the flags with which this server was started. They do not change.

    Args:
        shows_folders: True for clients of this machine, which may read absolute paths.
    """
    return shown_flags(sys.argv[2:], shows_folders=shows_folders) if sys.argv[1:2] == ["serve"] else []


def _model(model: ModelService) -> ServedModelStatus:
    error = model.error
    return {
        "model": model.model_id,
        "start_name": model.start_name,
        "state": model.state,
        "reason": None if error is None else str(error),
        "instances": [_instance(instance) for instance in model.instances],
    }


def _instance(instance: ServedInstance) -> ServedInstanceStatus:
    info, error = instance.info, instance.error
    stats = None if error is not None else instance.engine.stats().scheduler
    return {
        "instance": info.name,
        "epoch": info.epoch,
        "status": "ready" if error is None else "unavailable",
        "reason": None if error is None else str(error),
        "stages": info.stages,
        "layers": info.layers,
        "nodes": sorted({worker.node for worker in info.workers}),
        "running": 0 if stats is None else stats.running,
        "waiting": 0 if stats is None else stats.waiting,
        "scheduling": None if error is not None else _scheduling(instance.engine.policy, info),
        "step_times": [] if stats is None else _step_times(stats.recent),
    }


def _scheduling(policy: Policy, instance: InstanceInfo) -> SchedulingStatus:
    return {
        "max_num_seqs": policy.max_num_seqs,
        "max_waiting": policy.max_queued_requests,
        "prefill_chunk": policy.prefill_chunk,
        "long_chunk": policy.long_chunk,
        "max_itl_ratio": policy.max_itl_ratio,
        "steps_ahead": policy.steps_ahead,
        "prefix_cache": policy.prefix_cache,
        "draft_tokens": policy.num_speculative_tokens,
        "step_deadline_s": policy.step_deadline_s,
        "request_timeout_s": policy.request_timeout_s,
        "kv_bits": instance.kv_bits or None,
    }


def _step_times(recent: Sequence[StepTiming]) -> list[StageStepTimes]:
    stages = sorted({timing.rank.stage for timing in recent})
    return [
        _stage_times(stage, [each for each in recent if each.rank == RankId(stage, 0) and each.rows])
        for stage in stages
    ]


def _stage_times(stage: int, steps: Sequence[StepTiming]) -> StageStepTimes:
    decode = [step for step in steps if step.is_decode]
    prefill = [step for step in steps if not step.is_decode]
    return {
        "stage": stage,
        "decode_steps": len(decode),
        "decode_compute_us": _mean([step.compute_us for step in decode]),
        "decode_link_wait_us": _mean([step.link_wait_us for step in decode]),
        "decode_link_send_us": _mean([step.link_send_us for step in decode]),
        "decode_queue_us": _mean([step.queue_us for step in decode]),
        "decode_rows": _mean([step.rows for step in decode]),
        "prefill_steps": len(prefill),
        "prefill_compute_us": _mean([step.compute_us for step in prefill]),
        "prefill_link_wait_us": _mean([step.link_wait_us for step in prefill]),
        "prefill_link_send_us": _mean([step.link_send_us for step in prefill]),
        "prefill_queue_us": _mean([step.queue_us for step in prefill]),
        "prefill_rows": _mean([step.rows for step in prefill]),
    }


def _mean(values: Sequence[int]) -> Mean:
    return mean(values) if values else None


def _device(worker: WorkerInfo, instance: InstanceInfo, model: ModelService) -> DeviceStatus:
    return {
        "model": model.model_id,
        "instance": instance.name,
        "node": worker.node,
        "pid": worker.pid,
        "stage": worker.stage,
        "rank": worker.rank,
        "role": _role(worker, instance),
        "layers": [worker.layers.start, worker.layers.end],
        "device": worker.device,
        "dtype": worker.dtype,
        "blas": worker.blas,
        "kernels": worker.kernels or None,
        "cpu_weights": worker.cpu_weights or None,
        "alive": worker.alive,
        "phase": worker.phase,
        "waits": _waits(worker.waits),
        **worker.memory,
        "device_limit_bytes": worker.memory_bytes or None,
        "device_left_bytes": worker.memory_left_bytes if worker.memory_bytes else None,
    }


def _waits(waits: WaitUse | None) -> WaitStatus | None:
    if waits is None:
        return None
    return {
        "kind": waits.kind,
        "backend": waits.backend or None,
        "peer": waits.peer or None,
        "seconds": round(waits.seconds, 1),
    }


def _role(worker: WorkerInfo, instance: InstanceInfo) -> Literal["whole", "first", "middle", "last"]:
    first, last = worker.layers.start == 0, worker.layers.end == instance.layers
    if first and last:
        return "whole"
    return "first" if first else "last" if last else "middle"


NodePair = tuple[str, str]
"""Sender and receiver."""
_IDLE = "no stage of a model uses it"


def link_statuses(
    links: Sequence[LinkInfo], instances: Iterable[InstanceInfo], unix_time_s: float
) -> list[LinkStatus]:
    """Return the state of every link; `unix_time_s` is the present time."""
    uses: dict[NodePair, list[LinkUse | None]] = {}
    for instance in instances:
        for pair, use in _uses(instance):
            uses.setdefault(pair, []).append(use)
    return [_link(link, uses, unix_time_s) for link in links]


def _uses(instance: InstanceInfo) -> Iterable[tuple[NodePair, LinkUse | None]]:
    """Return the nodes of consecutive stages, and the first stage's report of what it sends."""
    firsts = [worker for worker in instance.workers if worker.rank == 0]
    for one, following in pairwise(firsts):
        if one.node != following.node:
            yield (one.node, following.node), one.sends


def _link(
    link: LinkInfo, uses: Mapping[NodePair, Sequence[LinkUse | None]], unix_time_s: float
) -> LinkStatus:
    senders = uses.get((link.source, link.target), ())
    reports = [use for use in senders if use is not None]
    status: LinkStatus = {
        "from": link.source,
        "to": link.target,
        "problem": link.problem or None,
        "carries_activations": bool(senders),
        "compresses": any(use.compresses for use in reports),
        "why": _why(senders, reports),
    }
    if not link.problem:
        status["round_trip_us"] = round(1e6 * link.round_trip_s, 1)
        status["bytes_per_s"] = round(link.bytes_per_s)
        status["measured_at"] = round(link.unix_time_s)
        status["measured_s_ago"] = round(max(0.0, unix_time_s - link.unix_time_s), 1)
    if reports:
        status["frames"] = sum(use.frames for use in reports)
        status["tensor_bytes"] = sum(use.tensor_bytes for use in reports)
        status["sent_bytes"] = sum(use.sent_bytes for use in reports)
    return status


def _why(senders: Sequence[LinkUse | None], reports: Sequence[LinkUse]) -> str:
    """Return the reason of the sender with the most bytes."""
    if reports:
        return max(reports, key=lambda use: use.tensor_bytes).why
    return "nothing is known yet about the data sent" if senders else _IDLE
