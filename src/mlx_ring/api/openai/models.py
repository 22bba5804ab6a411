"""`/v1/models`: the models, and their capabilities according to their templates and tokens."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.routing import Router

from mlx_ring.api.context import ApiContext
from mlx_ring.api.openai import schemas
from mlx_ring.api.openapi import documented_get
from mlx_ring.api.service import ModelService


def capabilities(context: ApiContext, model: ModelService) -> list[str]:
    """Return the model's capabilities under Ollama's names."""
    format_ = context.formats[model.tokenizer]
    can = {
        "completion": True,
        "tools": format_.calls is not None and format_.knows("tools"),
        "thinking": format_.thinking is not None,
        "embedding": not model.pooling.refusal,
    }
    return [name for name, is_so in can.items() if is_so]


def efforts(context: ApiContext, model: ModelService) -> list[str]:
    """Return the values of `reasoning_effort` that make a difference."""
    format_ = context.formats[model.tokenizer]
    if format_.knows("reasoning_effort"):
        return ["low", "medium", "high"]
    if format_.knows("enable_thinking") or format_.knows("thinking"):
        return ["none", "medium"]
    return []


def routes(context: ApiContext) -> Router:
    router = Router()

    async def list_models(_: Request) -> schemas.ModelList:
        ids = [model.model_id for model in context.catalog.models]
        return {
            "object": "list",
            "data": [describe(context, model) for model in context.catalog.models],
            "has_more": False,
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
        }

    async def retrieve_model(request: Request) -> schemas.Model:
        return describe(context, context.model(request.path_params["model"]))

    for prefix in ("/v1", ""):
        documented_get(router, f"{prefix}/models", list_models, schemas.MODELS)
        documented_get(router, f"{prefix}/models/{{model:path}}", retrieve_model, schemas.MODEL)
    return router


def describe(context: ApiContext, model: ModelService) -> schemas.Model:
    """Return the description of a model."""
    return {
        "id": model.model_id,
        "object": "model",
        "created": model.created,
        "owned_by": "mlx-ring",
        "type": "model",
        "display_name": model.model_id,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.context_length,
        "max_tokens": model.context_length,
        "max_model_len": model.context_length,
        "aliases": list(model.aliases),
        "state": model.state,
        "capabilities": capabilities(context, model),
        "reasoning_efforts": efforts(context, model),
    }
