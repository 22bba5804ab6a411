"""`/health` and its kin: what is measured, and 503 when the model cannot answer.

`/` and `/model/info`: what this is, and what it serves. People get the page at `/`, programs JSON.
"""

from __future__ import annotations

import time
from collections import Counter
from importlib.metadata import version

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mlx_ring.api.context import ApiContext, workers_of_model
from mlx_ring.api.errors import error_response
from mlx_ring.api.openapi import documented_get
from mlx_ring.api.ops import answers as about
from mlx_ring.api.page.routes import page_response, wants_page
from mlx_ring.api.service import ModelService
from mlx_ring.core.errors import Draining, NotReady, RingError
from mlx_ring.core.worker_status import WorkerInfo

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

    documented_get(router, "/health", health, about.HEALTH)
    documented_get(router, "/health/live", live, about.LIVE)
    documented_get(router, "/health/ready", ready, about.READY)
    _add_service(router, context)
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


_ENDPOINTS = {
    "POST /v1/chat/completions": "a chat answer, whole or streamed",
    "POST /v1/completions": "a continuation, whole or streamed",
    "POST /v1/responses": "a chat answer in items, whole or streamed; nothing is kept",
    "POST /v1/messages": "a chat answer as Anthropic has it, whole or streamed",
    "POST /v1/messages/count_tokens": "how long its prompt would be",
    "POST /v1/embeddings": "a vector of each text",
    "POST /tokenize": "text or messages as tokens",
    "POST /detokenize": "tokens as text",
    "GET /v1/models": "the models that are served",
    "GET /v1/models/{model}": "one of them",
    "POST /api/chat": "Ollama's chat",
    "POST /api/generate": "Ollama's answer to one prompt",
    "POST /api/embed": "Ollama's embeddings",
    "POST /api/embeddings": "Ollama's embedding of one prompt",
    "GET /api/tags": "the models, as Ollama lists them",
    "GET /api/ps": "those that are loaded",
    "POST /api/show": "one of them",
    "POST /api/pull": "whether a model is served: nothing is fetched",
    "GET /api/version": "the version of Ollama's API",
    "POST /generate": "a prompt in, its continuation out",
    "POST /models/load": "load a model, and serve it from now on",
    "POST /models/unload": "free what a model holds, until it is asked for again",
    "GET /model/info": "the model: metadata, context length, devices",
    "GET /cluster/status": "nodes, instances, stages: memory and times, promised and measured",
    "GET /cluster/events": "the same and more, as it changes: server-sent events",
    "GET /cache/stats": "what the KV caches hold",
    "GET /metrics": "numbers for Prometheus",
    "GET /health": "measured state; 503 when the model cannot answer",
    "GET /health/live": "the process runs",
    "GET /health/ready": "the model can answer; 503 with the reason when not",
    "GET /docs": "all of this for people",
    "GET /openapi.json": "all of this for machines",
}


def _add_service(router: APIRouter, context: ApiContext) -> None:
    async def root(request: Request) -> Response:
        """The page for whoever wants HTML."""
        if wants_page(request.headers.get("accept")):
            return page_response(request, wants_key=bool(context.settings.api_keys))
        service = context.default
        told = {
            "service": "mlx-ring",
            "version": version("mlx-ring"),
            "model": service.model_id,
            "models": [model.model_id for model in context.catalog.models],
            "status": "ready" if service.error is None else "unavailable",
            "endpoints": _ENDPOINTS,
        }
        return JSONResponse(told, headers={"vary": "accept"})

    async def model_info(model: str | None = None) -> dict[str, object]:
        service = context.default if model is None else context.model(model)
        workers = workers_of_model(service)
        return {
            "model": service.model_id,
            "aliases": list(service.aliases),
            "context_length": service.context_length,
            "kept_context_length": service.kept_context_length,
            "vocab_size": service.vocab_size,
            "device_count": len(workers),
            "dtype": workers[0].dtype if workers else None,
            "embeddings": _embeddings(service),
            "weight_bytes": sum(worker.weight_bytes for worker in workers),
            "metadata": dict(service.metadata),
        }

    documented_get(router, "/", root, about.ROOT)
    documented_get(router, "/model/info", model_info, about.MODEL_INFO)


def _embeddings(service: ModelService) -> dict[str, object]:
    """How texts become vectors, or why they cannot."""
    pooling = service.pooling
    if pooling.refusal:
        return {"available": False, "reason": pooling.refusal}
    return {
        "available": True,
        "pooling": pooling.kind,
        "reason": pooling.why,
        "normalized": pooling.normalize,
        "dimensions": service.hidden_size,
    }
