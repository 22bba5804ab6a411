"""`/cluster/status` and `/cache/stats`: who runs which layers, and what their KV holds."""

from __future__ import annotations

from fastapi import APIRouter

from mlx_ring.api.routes import ApiContext
from mlx_ring.api.service import InstanceInfo, WorkerInfo


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
            "devices": [_device(worker, instance) for worker in workers],
        }

    async def cache_stats() -> dict[str, object]:
        """What exists: KV of running sequences. Nothing is kept between requests."""
        workers = context.workers()
        scheduler = None if service.error is not None else service.engine.stats().scheduler
        return {
            "kv_bytes": sum(worker.kv_bytes for worker in workers),
            "sequences": 0 if scheduler is None else scheduler.sequences_held,
            "prefix_cache": {"enabled": False},
            "workers": [
                {"stage": worker.stage, "rank": worker.rank, "kv_bytes": worker.kv_bytes}
                for worker in workers
            ],
        }

    router.add_api_route("/cluster/status", cluster_status, methods=["GET"])
    router.add_api_route("/cache/stats", cache_stats, methods=["GET"])
    return router


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


def _role(worker: WorkerInfo, instance: InstanceInfo) -> str:
    first, last = worker.layers.start == 0, worker.layers.end == instance.layers
    if first and last:
        return "whole"
    return "first" if first else "last" if last else "middle"
