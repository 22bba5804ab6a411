"""`/health` and its kin: what is measured, and 503 when the model cannot answer."""

from __future__ import annotations

import time
from collections import Counter
from importlib.metadata import version

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mlx_ring.api.errors import error_response
from mlx_ring.api.openapi import told
from mlx_ring.api.ops import answers as about
from mlx_ring.api.routes import ApiContext, workers_of_model
from mlx_ring.api.service import ModelService, WorkerInfo
from mlx_ring.core.errors import Draining, NotReady, RingError

_UNAVAILABLE = 503
_GIGABYTE = 1e9


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()

    async def health() -> Response:
        error = _trouble(context)
        return JSONResponse(_health(context, error), 200 if error is None else _UNAVAILABLE)

    async def live() -> dict[str, object]:
        """The process answers; more is not said."""
        return {"status": "alive", "uptime_s": _uptime_s(context.default.created)}

    async def ready(request: Request) -> Response:
        error = _trouble(context)
        if error is None:
            return JSONResponse({"status": "ready", "model": context.default.model_id})
        response = error_response(error, request.scope)
        response.status_code = _UNAVAILABLE
        return response

    told(router, "/health", health, about.HEALTH)
    told(router, "/health/live", live, about.LIVE)
    told(router, "/health/ready", ready, about.READY)
    return router


def _trouble(context: ApiContext) -> RingError | None:
    """Why no model can answer: that of the first; None where some model can."""
    if context.admission.is_draining:
        return Draining(f"The server is draining: {context.admission.open} requests are under way.")
    errors = [model.error for model in context.catalog.models]
    return None if None in errors else errors[0]


def _health(context: ApiContext, error: RingError | None) -> dict[str, object]:
    service = context.default
    first = next((instance.info for instance in service.instances), None)
    workers = workers_of_model(service)
    return {
        "status": _word(error),
        "reason": None if error is None else str(error),
        "rank": 0,
        "world_size": len(workers),
        "model": service.model_id,
        "gpu_memory_gb": _gigabytes(sum(worker.device_memory_bytes for worker in workers)),
        "pipeline": {
            "stages": 0 if first is None else first.stages,
            "layers": 0 if first is None else first.layers,
            "epoch": 0 if first is None else first.epoch,
            "workers": [_worker(worker) for worker in workers],
        },
        "distributed": len(workers) > 1,
        "instance": None if first is None else first.name,
        "models": [_model(model) for model in context.catalog.models],
        "context_length": service.context_length,
        "kv_bytes": sum(worker.kv_bytes for worker in workers),
        "uptime_s": _uptime_s(service.created),
        "version": version("mlx-ring"),
        "requests": _requests(service) if service.error is None else None,
    }


def _word(error: RingError | None) -> str:
    if error is None:
        return "healthy"
    if isinstance(error, Draining):
        return "draining"
    return "loading" if isinstance(error, NotReady) else "unhealthy"


def _model(model: ModelService) -> dict[str, object]:
    error = model.error
    return {"id": model.model_id, "state": model.state, "reason": None if error is None else str(error)}


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


def _requests(model: ModelService) -> dict[str, object]:
    stats = [instance.engine.stats() for instance in model.instances if instance.error is None]
    finished = Counter[str]()
    for each in stats:
        finished.update(each.finished)
    return {
        "running": sum(each.scheduler.running for each in stats),
        "waiting": sum(each.scheduler.waiting for each in stats),
        "finished": dict(finished),
    }


def _gigabytes(count: int) -> float:
    return round(count / _GIGABYTE, 3)


def _uptime_s(created: int) -> int:
    return max(0, int(time.time()) - created)
