"""`/models/load` and `/models/unload`: which models hold memory."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from mlx_ring.api.body import Body
from mlx_ring.api.connection import while_connected
from mlx_ring.api.openai.models import describe
from mlx_ring.api.openapi import documented
from mlx_ring.api.ops import answers as about
from mlx_ring.api.routes import ApiContext
from mlx_ring.api.settings import ApiSettings
from mlx_ring.core.errors import Refused

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
        check_manager(request, context.settings)
        fields = await context.read(request, LoadRequest)
        model = await while_connected(request.receive, context.catalog.load(fields.model))
        return JSONResponse(describe(context, model))

    async def unload(request: Request) -> Response:
        check_manager(request, context.settings)
        fields = await context.read(request, UnloadRequest)
        model = context.model(fields.model)
        await context.catalog.unload(model, force=fields.force)
        return JSONResponse(describe(context, model))

    documented(router, "/models/load", load, LoadRequest, about.LOAD)
    documented(router, "/models/unload", unload, UnloadRequest, about.UNLOAD)
    return router


def check_manager(request: Request, settings: ApiSettings) -> None:
    """Who asks from another machine must have shown a key: a model may be any folder, or fill the disk.

    Raises:
        Refused: there are no keys, and the client is not on this machine.
    """
    host = "" if request.client is None else request.client.host
    if not settings.api_keys and not _is_loopback(host):
        raise Refused(
            f"Models are loaded and unloaded from another machine ({host}) only with an API key: "
            "start the server with --api-key."
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
