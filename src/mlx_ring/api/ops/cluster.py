"""`/cluster/status`: who runs which layers.

The `links` of `/cluster/status`: what is between the nodes, and what instances send over it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import mean

from fastapi import APIRouter

from mlx_ring.api.context import ApiContext, workers_of
from mlx_ring.api.openapi import documented_get
from mlx_ring.api.ops import answers as about
from mlx_ring.api.ops.status import ClusterStatus
from mlx_ring.api.service import InstanceInfo, LinkInfo, ModelService, ServedInstance
from mlx_ring.core.engine_stats import Policy, StepTiming
from mlx_ring.core.types import RankId
from mlx_ring.core.worker_status import LinkUse, WorkerInfo

Way = tuple[str, str]
_IDLE = "no stage of a model sends over it"


def told_links(
    links: Sequence[LinkInfo], instances: Iterable[InstanceInfo], unix_time_s: float
) -> list[dict[str, object]]:
    """Each way between two nodes; `unix_time_s` is now."""
    uses: dict[Way, list[LinkUse | None]] = {}
    for instance in instances:
        for way, use in _uses(instance):
            uses.setdefault(way, []).append(use)
    return [_told(link, uses, unix_time_s) for link in links]


def _uses(instance: InstanceInfo) -> Iterable[tuple[Way, LinkUse | None]]:
    """The nodes of stages that follow each other, and what the first of the two says of its sending."""
    firsts = [worker for worker in instance.workers if worker.rank == 0]
    for one, following in pairwise(firsts):
        if one.node != following.node:
            yield (one.node, following.node), one.sends


def _told(
    link: LinkInfo, uses: Mapping[Way, Sequence[LinkUse | None]], unix_time_s: float
) -> dict[str, object]:
    told: dict[str, object] = {"from": link.source, "to": link.target, "problem": link.problem or None}
    if not link.problem:
        told |= {
            "round_trip_us": round(1e6 * link.round_trip_s, 1),
            "bytes_per_s": round(link.bytes_per_s),
            "measured_at": round(link.unix_time_s),
            "measured_s_ago": round(max(0.0, unix_time_s - link.unix_time_s), 1),
        }
    senders = uses.get((link.source, link.target), ())
    known = [use for use in senders if use is not None]
    told |= {
        "carries_activations": bool(senders),
        "compresses": any(use.compresses for use in known),
        "why": _why(senders, known),
    }
    if known:
        for name in ("frames", "tensor_bytes", "sent_bytes"):
            told[name] = sum(getattr(use, name) for use in known)
    return told


def _why(senders: Sequence[LinkUse | None], known: Sequence[LinkUse]) -> str:
    """Why it compresses, or does not: what whoever sends most says."""
    if known:
        return max(known, key=lambda use: use.tensor_bytes).why
    return "nothing is known of what was sent yet" if senders else _IDLE


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()

    async def cluster_status() -> ClusterStatus:
        return told_cluster(context)

    documented_get(router, "/cluster/status", cluster_status, about.CLUSTER_STATUS)
    return router


def told_cluster(context: ApiContext) -> ClusterStatus:
    """How the cluster stands now."""
    model, parts = context.default, context.catalog.cluster()
    error, instances = model.error, model.instances
    first = _NOTHING if not instances else _instance(instances[0])
    return ClusterStatus.model_validate(
        {
            "nodes": parts.nodes,
            "instances": parts.instances,
            "status": "ready" if error is None else "unavailable",
            "reason": None if error is None else str(error),
            "model": model.model_id,
            **{name: first[name] for name in _OF_FIRST},
            "world_size": sum(len(instance.info.workers) for _, instance in context.instances()),
            "devices": [
                {"model": model.model_id, "instance": instance.info.name, **device}
                for model, instance in context.instances()
                for device in _devices(instance)
            ],
            "models": [_model(model) for model in context.catalog.models],
            "links": told_links(
                context.catalog.links, [instance.info for _, instance in context.instances()], time.time()
            ),
        }
    )


_OF_FIRST = ("instance", "epoch", "stages", "layers", "scheduling", "step_times")
"""What is told of the first model's first instance beside the whole."""
_NOTHING: dict[str, object] = {
    "instance": None,
    "epoch": 0,
    "stages": 0,
    "layers": 0,
    "scheduling": None,
    "step_times": [],
}


def _model(model: ModelService) -> dict[str, object]:
    error = model.error
    return {
        "model": model.model_id,
        "state": model.state,
        "reason": None if error is None else str(error),
        "instances": [_instance(instance) for instance in model.instances],
    }


def _instance(instance: ServedInstance) -> dict[str, object]:
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


def _devices(instance: ServedInstance) -> list[dict[str, object]]:
    return [_device(worker, instance.info) for worker in workers_of(instance)]


def _scheduling(policy: Policy, instance: InstanceInfo) -> dict[str, object]:
    return {**asdict(policy), "kv_bits": instance.kv_bits or None}


def _device(worker: WorkerInfo, instance: InstanceInfo) -> dict[str, object]:
    return {
        "node": worker.node,
        "pid": worker.pid,
        "stage": worker.stage,
        "rank": worker.rank,
        "role": _role(worker, instance),
        "layers": [worker.layers.start, worker.layers.end],
        "device": worker.device,
        "dtype": worker.dtype,
        "blas": worker.blas,
        "alive": worker.alive,
        "phase": worker.phase,
        **worker.memory,
        "device_limit_bytes": worker.memory_bytes or None,
        "device_left_bytes": worker.memory_left_bytes if worker.memory_bytes else None,
    }


_STEP_PARTS = ("compute_us", "link_wait_us", "link_send_us", "queue_us", "rows")


def _step_times(recent: Sequence[StepTiming]) -> list[dict[str, object]]:
    """By stage, how the last steps spent their time on average: decode steps and chunks of prompts apart."""
    told: list[dict[str, object]] = []
    for stage in sorted({timing.rank.stage for timing in recent}):
        stage_steps = [timing for timing in recent if timing.rank == RankId(stage, 0) and timing.rows]
        kinds = {
            "decode": [timing for timing in stage_steps if timing.is_decode],
            "prefill": [timing for timing in stage_steps if not timing.is_decode],
        }
        of_stage: dict[str, object] = {"stage": stage}
        for kind, steps in kinds.items():
            of_stage[f"{kind}_steps"] = len(steps)
            for part in _STEP_PARTS:
                of_stage[f"{kind}_{part}"] = mean(getattr(step, part) for step in steps) if steps else None
        told.append(of_stage)
    return told


def _role(worker: WorkerInfo, instance: InstanceInfo) -> str:
    first, last = worker.layers.start == 0, worker.layers.end == instance.layers
    if first and last:
        return "whole"
    return "first" if first else "last" if last else "middle"
