"""`/v1/models`."""

from __future__ import annotations

from fastapi import APIRouter

from mlx_ring.api.capabilities import capabilities, efforts
from mlx_ring.api.openai import answers as about
from mlx_ring.api.openapi import told
from mlx_ring.api.routes import ApiContext
from mlx_ring.api.service import ModelService


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()

    async def list_models() -> dict[str, object]:
        return {"object": "list", "data": [describe(context, model) for model in context.catalog.models]}

    async def retrieve_model(model: str) -> dict[str, object]:
        return describe(context, context.model(model))

    for prefix in ("/v1", ""):
        told(router, f"{prefix}/models", list_models, about.MODELS)
        told(router, f"{prefix}/models/{{model:path}}", retrieve_model, about.MODEL)
    return router


def describe(context: ApiContext, model: ModelService) -> dict[str, object]:
    """As OpenAI lists a model, with what else there is to know before asking it."""
    return {
        "id": model.model_id,
        "object": "model",
        "created": model.created,
        "owned_by": "mlx-ring",
        "max_model_len": model.context_length,
        "aliases": list(model.aliases),
        "state": model.state,
        "capabilities": capabilities(context, model),
        "reasoning_efforts": efforts(context, model),
    }
