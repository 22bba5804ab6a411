"""`/cluster/status` and `/cache/stats`: who runs which layers, and what their KV holds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean

from fastapi import APIRouter

from mlx_ring.api.ops.links import told_links
from mlx_ring.api.routes import ApiContext
from mlx_ring.api.service import InstanceInfo, WorkerInfo
from mlx_ring.engine.executor import RankId
from mlx_ring.engine.policy import Policy
from mlx_ring.engine.stats import CacheStats, EngineStats, SchedulerStats, StepTiming


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()
    service = context.service

    async def cluster_status() -> dict[str, object]:
        instance, error, workers = service.instance(), service.error, context.workers()
        return {
            "status": "ready" if error is None else "unavailable",
            "reason": None if error is None else str(error),
            "model": service.model_id,
            "instance": instance.name,
            "epoch": instance.epoch,
            "nodes": sorted({worker.node for worker in workers}),
            "stages": instance.stages,
            "layers": instance.layers,
            "world_size": len(workers),
            "links": told_links(instance.links, [instance], time.time()),
            "devices": [_device(worker, instance) for worker in workers],
            "scheduling": None if error is not None else _scheduling(service.engine.policy, instance),
            "step_times": [] if error is not None else _step_times(service.engine.stats().scheduler.recent),
        }

    async def cache_stats() -> dict[str, object]:
        workers = context.workers()
        stats = None if service.error is not None else service.engine.stats()
        return {
            "kv_bytes": sum(worker.kv_bytes for worker in workers),
            "sequences": 0 if stats is None else stats.scheduler.sequences_held,
            "running": 0 if stats is None else stats.scheduler.running,
            "waiting": 0 if stats is None else stats.scheduler.waiting,
            "num_preemptions": 0 if stats is None else stats.scheduler.num_preemptions,
            "prefix_cache": {"enabled": False} if stats is None else _prefix_cache(stats.cache),
            "speculation": None if stats is None else _speculation(stats.scheduler),
            "workers": [_worker_cache(worker, stats, service.context_length) for worker in workers],
        }

    router.add_api_route("/cluster/status", cluster_status, methods=["GET"])
    router.add_api_route("/cache/stats", cache_stats, methods=["GET"])
    return router


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
        "weight_bytes": worker.weight_bytes,
        "device_memory_bytes": worker.device_memory_bytes,
        "peak_memory_bytes": worker.peak_memory_bytes,
        "rss_bytes": worker.rss_bytes,
        "kv_bytes": worker.kv_bytes,
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


def _prefix_cache(cache: CacheStats) -> dict[str, object]:
    return {
        "enabled": cache.enabled,
        "queries": cache.queries,
        "hits": cache.hits,
        "query_tokens": cache.query_tokens,
        "hit_tokens": cache.hit_tokens,
        "entries": cache.entries,
        "entry_tokens": cache.entry_tokens,
        "evictions": cache.evictions,
    }


def _speculation(scheduler: SchedulerStats) -> dict[str, object]:
    proposed, accepted = scheduler.draft_tokens, scheduler.accepted_tokens
    return {
        "draft_tokens": proposed,
        "accepted_tokens": accepted,
        "acceptance": accepted / proposed if proposed else None,
    }


def _worker_cache(worker: WorkerInfo, stats: EngineStats | None, context: int) -> dict[str, object]:
    """What the worker says it holds, and what the head has given out of its memory."""
    told: dict[str, object] = {"stage": worker.stage, "rank": worker.rank, "kv_bytes": worker.kv_bytes}
    use = None if stats is None else stats.cache.ranks.get(RankId(worker.stage, worker.rank))
    if use is not None:
        told |= {
            "limit_bytes": use.limit_bytes,
            "used_bytes": use.used_bytes,
            "held_bytes": use.held_bytes,
            "bytes_per_token": use.bytes_per_token,
            "bytes_per_sequence": use.bytes_per_sequence,
            "context_tokens": context,
            "sequences_allowed": use.sequences_allowed(context),
        }
    return told


def _role(worker: WorkerInfo, instance: InstanceInfo) -> str:
    first, last = worker.layers.start == 0, worker.layers.end == instance.layers
    if first and last:
        return "whole"
    return "first" if first else "last" if last else "middle"
