"""`/health` and its parts, `/`, and `/model/info`: the server's measured state and the models it serves.

At `/` browsers get the page, and programs get JSON.
"""

from __future__ import annotations

import time
from collections import Counter
from importlib.metadata import version
from typing import Literal, NotRequired

from fastapi import APIRouter, Request, Response

from mlx_ring.api.context import ApiContext, workers_of_model
from mlx_ring.api.errors import error_response
from mlx_ring.api.openapi import JsonObject, RouteDoc, documented_get
from mlx_ring.api.page.routes import page_response, wants_page
from mlx_ring.api.service import ModelService, State
from mlx_ring.core.errors import Draining, NotReady, RingError
from mlx_ring.core.worker_status import WorkerInfo

_UNAVAILABLE = 503
_GIGABYTE = 1e9

HealthStatus = Literal["healthy", "loading", "draining", "unhealthy"]


class WorkerHealth(JsonObject):
    """One rank of one stage."""

    stage: int
    rank: int
    layers: list[int]
    """First layer, and the one after the last."""
    alive: bool
    phase: str
    device: str
    memory_gb: float
    """Memory that MLX holds; 1 GB is 10^9 bytes."""
    kv_bytes: int


class PipelineHealth(JsonObject):
    """Pipeline of the first model's first instance."""

    stages: int
    layers: int
    epoch: int
    workers: list[WorkerHealth]


class ModelHealth(JsonObject):
    """State of one model."""

    id: str
    state: State
    reason: str | None
    """Cause why the model cannot answer; null where it can."""


class RequestCounts(JsonObject):
    """Requests of the first model."""

    running: int
    waiting: int
    finished: dict[str, int]
    """Ended requests, by the reason why they ended."""


class Health(JsonObject):
    """State of the server. The status is 503 when no model can answer; `reason` then says why."""

    status: HealthStatus
    reason: str | None
    rank: int
    world_size: int
    model: str
    gpu_memory_gb: float
    pipeline: PipelineHealth
    distributed: bool
    instance: str | None
    models: list[ModelHealth]
    context_length: int
    kv_bytes: int
    uptime_s: int
    version: str
    requests: RequestCounts | None


class Alive(JsonObject):
    status: Literal["alive"]
    uptime_s: int


class Ready(JsonObject):
    status: Literal["ready"]
    model: str


class ServiceInfo(JsonObject):
    """Description of the server for programs."""

    service: Literal["mlx-ring"]
    version: str
    model: str
    """Model of requests that name none."""
    models: list[str]
    status: Literal["ready", "unavailable"]
    endpoints: dict[str, str]


class EmbeddingInfo(JsonObject):
    """How the model computes embeddings, or why it cannot."""

    available: bool
    pooling: NotRequired[str]
    """Method that makes one vector of all hidden states. This field and the next ones are missing without embeddings."""
    reason: str
    """Reason for the pooling, or for the lack of embeddings."""
    normalized: NotRequired[bool]
    dimensions: NotRequired[int]


class ModelInfo(JsonObject):
    """Description of a model."""

    model: str
    aliases: list[str]
    context_length: int
    """Largest number of tokens of prompt and answer together."""
    kept_context_length: int
    """Part of the context that stays available whichever other models are loaded."""
    vocab_size: int
    device_count: int
    dtype: str | None
    embeddings: EmbeddingInfo
    weight_bytes: int
    metadata: dict[str, object]


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()

    async def health(response: Response) -> Health:
        error = _serving_error(context)
        response.status_code = 200 if error is None else _UNAVAILABLE
        return _health(context, error)

    async def live() -> Alive:
        """Answer as long as the process runs."""
        return {"status": "alive", "uptime_s": _uptime_s(context.default.created)}

    async def ready(request: Request) -> Ready | Response:
        error = _serving_error(context)
        if error is None:
            return {"status": "ready", "model": context.default.model_id}
        response = error_response(error, request.scope)
        response.status_code = _UNAVAILABLE
        return response

    documented_get(router, "/health", health, RouteDoc("Measured state", Health, unwell=Health, open=True))
    documented_get(router, "/health/live", live, RouteDoc("The process runs", Alive, open=True))
    documented_get(router, "/health/ready", ready, RouteDoc("The model can answer", Ready, open=True))
    _add_service(router, context)
    return router


def _serving_error(context: ApiContext) -> RingError | None:
    """Return the first model's error if no model can answer."""
    if context.admission.is_draining:
        return Draining(f"The server is draining: {context.admission.open} requests are in progress.")
    errors = [model.error for model in context.catalog.models]
    return None if None in errors else errors[0]


def _health(context: ApiContext, error: RingError | None) -> Health:
    service = context.default
    first = next((instance.info for instance in service.instances), None)
    workers = workers_of_model(service)
    return {
        "status": _status(error),
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


def _status(error: RingError | None) -> HealthStatus:
    if error is None:
        return "healthy"
    if isinstance(error, Draining):
        return "draining"
    return "loading" if isinstance(error, NotReady) else "unhealthy"


def _model(model: ModelService) -> ModelHealth:
    error = model.error
    return {"id": model.model_id, "state": model.state, "reason": None if error is None else str(error)}


def _worker(worker: WorkerInfo) -> WorkerHealth:
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


def _requests(model: ModelService) -> RequestCounts:
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
    "POST /v1/chat/completions": "answer a chat, whole or streamed",
    "POST /v1/completions": "continue a prompt, whole or streamed",
    "POST /v1/responses": "answer a chat in items, whole or streamed; nothing is stored",
    "POST /v1/messages": "answer a chat in Anthropic's format, whole or streamed",
    "POST /v1/messages/count_tokens": "count the tokens of its prompt",
    "POST /v1/embeddings": "compute an embedding of each text",
    "POST /tokenize": "split text or messages into tokens",
    "POST /detokenize": "join tokens to text",
    "GET /v1/models": "list the served models",
    "GET /v1/models/{model}": "describe one of them",
    "POST /api/chat": "answer a chat in Ollama's format",
    "POST /api/generate": "answer one prompt in Ollama's format",
    "POST /api/embed": "compute embeddings in Ollama's format",
    "POST /api/embeddings": "compute the embedding of one prompt in Ollama's format",
    "GET /api/tags": "list the models in Ollama's format",
    "GET /api/ps": "list the loaded models in Ollama's format",
    "POST /api/show": "describe a model in Ollama's format",
    "POST /api/pull": "check that a model is served; nothing is downloaded",
    "GET /api/version": "return the version of Ollama's API",
    "POST /generate": "continue a prompt",
    "POST /models/load": "load a model and serve it from now on",
    "POST /models/unload": "free a model's memory until the next request for it",
    "GET /model/info": "describe a model: metadata, context length, devices",
    "GET /cluster/status": "report nodes, instances and stages: memory and times, predicted and measured",
    "GET /cluster/events": "report the same and more on each change, as server-sent events",
    "GET /cache/stats": "report the contents of the KV caches",
    "GET /metrics": "export metrics for Prometheus",
    "GET /health": "report the measured state; 503 when no model can answer",
    "GET /health/live": "answer as long as the process runs",
    "GET /health/ready": "answer 200 when the model can answer, else 503 with the reason",
    "GET /docs": "show this API's documentation as a page",
    "GET /openapi.json": "describe this API in OpenAPI's format",
}


def _add_service(router: APIRouter, context: ApiContext) -> None:
    async def root(request: Request, response: Response) -> ServiceInfo | Response:
        """Answer browsers, which prefer HTML, with the page."""
        if wants_page(request.headers.get("accept")):
            return page_response(request, wants_key=bool(context.settings.api_keys))
        response.headers["vary"] = "accept"
        service = context.default
        return {
            "service": "mlx-ring",
            "version": version("mlx-ring"),
            "model": service.model_id,
            "models": [model.model_id for model in context.catalog.models],
            "status": "ready" if service.error is None else "unavailable",
            "endpoints": _ENDPOINTS,
        }

    async def model_info(model: str | None = None) -> ModelInfo:
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

    documented_get(
        router,
        "/",
        root,
        RouteDoc("Description of the server; in browsers, the page", ServiceInfo, {"text/html": None}),
    )
    documented_get(
        router,
        "/model/info",
        model_info,
        RouteDoc(
            "Description of a model: metadata, context length, devices",
            ModelInfo,
            query={"model": "Name of the model. Default: the first served model."},
            more_statuses=(404,),
        ),
    )


def _embeddings(service: ModelService) -> EmbeddingInfo:
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
