"""Requests that ask nothing: they load a model, or unload it."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import JSONResponse, Response

from mlx_ring.api.connection import while_connected
from mlx_ring.api.ollama.lines import LineWriter
from mlx_ring.api.ollama.names import KeepAlive, goes_at_once
from mlx_ring.api.ops.models import check_manager
from mlx_ring.api.routes import ApiContext
from mlx_ring.api.service import ModelService


async def load_or_unload(
    context: ApiContext,
    request: Request,
    service: ModelService,
    keep_alive: KeepAlive | None,
    writer: LineWriter,
) -> Response:
    """One object, also where a stream was asked for: it is a stream of one line."""
    if goes_at_once(keep_alive):
        check_manager(request, context.settings)
        await context.catalog.unload(service, force=False)
        return JSONResponse(writer.loaded("unload"))
    await while_connected(request.receive, context.answering(service))
    return JSONResponse(writer.loaded("load"))
