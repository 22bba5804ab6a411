"""Ollama's API as a dialect."""

from __future__ import annotations

from mlx_ring.api.context import ApiContext
from mlx_ring.api.dialect import Dialect, ErrorInfo
from mlx_ring.api.ollama import embed, models, routes
from mlx_ring.api.ollama.writer import json_line
from mlx_ring.api.openapi import JsonObject


class OllamaError(JsonObject):
    error: str
    """One sentence: what happened, with which value, and what to do."""


def _error_body(info: ErrorInfo, _: str) -> OllamaError:
    return {"error": info.message}


OLLAMA: Dialect[ApiContext, OllamaError] = Dialect(
    name="Ollama",
    prefixes=("/api",),
    routes=(routes.routes, embed.routes, models.routes),
    error_body=_error_body,
    error_schema=OllamaError,
    stream_failure=json_line,
)
