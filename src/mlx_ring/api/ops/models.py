"""`/models/load` and `/models/unload`: which models hold memory."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from mlx_ring.api.body import Body
from mlx_ring.api.connection import while_connected
from mlx_ring.api.openai.models import describe
from mlx_ring.api.openapi import documented
from mlx_ring.api.routes import ApiContext

Name = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadRequest(Body):
    model: Name
    """As `mlx-ring serve` takes it: a built-in name, a folder of the head's machine, or a hub id."""


class UnloadRequest(Body):
    model: Name
    force: bool = False
    """Also while it answers requests, which end with an error."""


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()

    async def load(request: Request) -> Response:
        fields = await context.read(request, LoadRequest)
        model = await while_connected(request.receive, context.catalog.load(fields.model))
        return JSONResponse(describe(model))

    async def unload(request: Request) -> Response:
        fields = await context.read(request, UnloadRequest)
        model = context.model(fields.model)
        await context.catalog.unload(model, force=fields.force)
        return JSONResponse(describe(model))

    documented(router, "/models/load", load, LoadRequest)
    documented(router, "/models/unload", unload, UnloadRequest)
    return router
