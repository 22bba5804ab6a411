"""`/health` and its kin: what is measured, and 503 when the model cannot answer."""

from __future__ import annotations

import time
from importlib.metadata import version

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from mlx_ring.api.errors import error_response
from mlx_ring.api.routes import ApiContext
from mlx_ring.api.service import WorkerInfo
from mlx_ring.core.errors import NotReady

_UNAVAILABLE = 503
_GIGABYTE = 1e9


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()
    service = context.service

    async def health() -> Response:
        error = service.error
        body = _health(context, None if error is None else str(error))
        return JSONResponse(body, 200 if error is None else _UNAVAILABLE)

    async def live() -> dict[str, object]:
        """The process answers; more is not said."""
        return {"status": "alive", "uptime_s": _uptime_s(service.created)}

    async def ready() -> Response:
        error = service.error
        if error is None:
            return JSONResponse({"status": "ready", "model": service.model_id})
        response = error_response(error)
        response.status_code = _UNAVAILABLE
        return response

    router.add_api_route("/health", health, methods=["GET"])
    router.add_api_route("/health/live", live, methods=["GET"])
    router.add_api_route("/health/ready", ready, methods=["GET"])
    return router


def _health(context: ApiContext, reason: str | None) -> dict[str, object]:
    service = context.service
    instance = service.instance()
    workers = context.workers()
    loading = isinstance(service.error, NotReady)
    body: dict[str, object] = {
        "status": "healthy" if reason is None else "loading" if loading else "unhealthy",
        "reason": reason,
        "rank": 0,
        "world_size": len(workers),
        "model": service.model_id,
        "gpu_memory_gb": _gigabytes(sum(worker.device_memory_bytes for worker in workers)),
        "pipeline": {
            "stages": instance.stages,
            "layers": instance.layers,
            "epoch": instance.epoch,
            "workers": [_worker(worker) for worker in workers],
        },
        "distributed": len(workers) > 1,
        "instance": instance.name,
        "context_length": service.context_length,
        "kv_bytes": sum(worker.kv_bytes for worker in workers),
        "uptime_s": _uptime_s(service.created),
        "version": version("mlx-ring"),
    }
    return body | {"requests": _requests(context) if reason is None else None}


def _worker(worker: WorkerInfo) -> dict[str, object]:
    return {
        "stage": worker.stage,
        "rank": worker.rank,
        "layers": [worker.layers.start, worker.layers.end],
        "alive": worker.alive,
        "phase": worker.phase,
        "device": worker.device,
        "memory_gb": _gigabytes(worker.device_memory_bytes),
        "kv_bytes": worker.kv_bytes,
    }


def _requests(context: ApiContext) -> dict[str, object]:
    stats = context.service.engine.stats()
    return {
        "running": stats.scheduler.running,
        "waiting": stats.scheduler.waiting,
        "finished": dict(stats.finished),
    }


def _gigabytes(count: int) -> float:
    return round(count / _GIGABYTE, 3)


def _uptime_s(created: int) -> int:
    return max(0, int(time.time()) - created)
