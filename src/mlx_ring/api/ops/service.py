"""`/` and `/model/info`: what this is, and what it serves. People get the page at `/`, programs JSON."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mlx_ring.api.openapi import told
from mlx_ring.api.ops import answers as about
from mlx_ring.api.page.routes import page_response
from mlx_ring.api.page.wanted import wants_page
from mlx_ring.api.routes import ApiContext, workers_of_model
from mlx_ring.api.service import ModelService

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


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()

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

    told(router, "/", root, about.ROOT)
    told(router, "/model/info", model_info, about.MODEL_INFO)
    return router


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
