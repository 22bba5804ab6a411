"""`/v1/models`."""

from __future__ import annotations

from fastapi import APIRouter

from mlx_ring.api.openai.sampling import check_model
from mlx_ring.api.routes import ApiContext


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()

    def describe() -> dict[str, object]:
        service = context.service
        return {
            "id": service.model_id,
            "object": "model",
            "created": service.created,
            "owned_by": "mlx-ring",
            "max_model_len": service.context_length,
            "aliases": list(service.aliases),
        }

    async def list_models() -> dict[str, object]:
        return {"object": "list", "data": [describe()]}

    async def retrieve_model(model: str) -> dict[str, object]:
        check_model(model, context.service)
        return describe()

    for prefix in ("/v1", ""):
        router.add_api_route(f"{prefix}/models", list_models, methods=["GET"])
        router.add_api_route(f"{prefix}/models/{{model:path}}", retrieve_model, methods=["GET"])
    return router
