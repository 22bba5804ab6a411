"""`/health` and its parts, `/`, and `/model/info`: the server's measured state and the models it serves.

At `/` browsers get the page, and programs get JSON.
"""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from typing import Literal, NotRequired

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router

from mlx_ring.api.context import ApiContext, workers_of_model
from mlx_ring.api.errors import error_response
from mlx_ring.api.openapi import JsonObject, RouteDoc, documented_get, list_endpoints
from mlx_ring.api.page.routes import page_response, wants_page
from mlx_ring.api.service import ModelService, State
from mlx_ring.api.streaming import JsonAnswer
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
    """Purpose of each route, by method and path."""


class EmbeddingInfo(JsonObject):
    """Method by which the model computes embeddings, or the reason why it cannot."""

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


def routes(context: ApiContext) -> Router:
    router = Router()

    async def health(_: Request) -> JsonAnswer[Health]:
        error = _serving_error(context)
        return JsonAnswer(_health(context, error), status=200 if error is None else _UNAVAILABLE)

    async def live(_: Request) -> Alive:
        """Answer as long as the process runs."""
        return {"status": "alive", "uptime_s": int(context.uptime_s)}

    async def ready(request: Request) -> Ready | Response:
        error = _serving_error(context)
        if error is None:
            return {"status": "ready", "model": context.default.model_id}
        response = error_response(error, request.scope)
        response.status_code = _UNAVAILABLE
        return response

    documented_get(
        router,
        "/health",
        health,
        RouteDoc("Report the measured state; 503 when no model can answer", Health, unwell=Health, open=True),
    )
    documented_get(
        router, "/health/live", live, RouteDoc("Answer as long as the process runs", Alive, open=True)
    )
    documented_get(
        router,
        "/health/ready",
        ready,
        RouteDoc("Answer 200 when the model can answer, else 503 with the reason", Ready, open=True),
    )
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
        "gpu_memory_gb": _gigabytes(sum(worker.memory["device_memory_bytes"] for worker in workers)),
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
        "kv_bytes": sum(worker.memory["kv_bytes"] for worker in workers),
        "uptime_s": int(context.uptime_s),
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
        "memory_gb": _gigabytes(worker.memory["device_memory_bytes"]),
        "kv_bytes": worker.memory["kv_bytes"],
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


def _add_service(router: Router, context: ApiContext) -> None:
    async def root(request: Request) -> JsonAnswer[ServiceInfo] | Response:
        """Answer browsers, which prefer HTML, with the page."""
        if wants_page(request.headers.get("accept")):
            return page_response(request, wants_key=bool(context.settings.api_keys))
        service = context.default
        described: ServiceInfo = {
            "service": "mlx-ring",
            "version": version("mlx-ring"),
            "model": service.model_id,
            "models": [model.model_id for model in context.catalog.models],
            "status": "ready" if service.error is None else "unavailable",
            "endpoints": list_endpoints(request.app),
        }
        return JsonAnswer(described, headers={"vary": "accept"})

    async def model_info(request: Request) -> ModelInfo:
        model = request.query_params.get("model")
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
            "weight_bytes": sum(worker.memory["weight_bytes"] for worker in workers),
            "metadata": dict(service.metadata),
        }

    documented_get(
        router,
        "/",
        root,
        RouteDoc("Describe the server; in browsers, show the page", ServiceInfo, {"text/html": None}),
    )
    documented_get(
        router,
        "/model/info",
        model_info,
        RouteDoc(
            "Describe a model: metadata, context length, devices",
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
