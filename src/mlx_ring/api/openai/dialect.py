"""OpenAI's API as a dialect. It is the default: it has all paths that no other dialect claims."""

from __future__ import annotations

from mlx_ring.api.context import ApiContext
from mlx_ring.api.dialect import Dialect, ErrorInfo, ErrorNumbers, event
from mlx_ring.api.openai import chat, completions, embeddings, models
from mlx_ring.api.openai.responses import route as responses
from mlx_ring.api.openapi import JsonObject


class OpenAiErrorFields(JsonObject, ErrorNumbers):
    message: str
    """One sentence: what happened, with which value, and what to do."""
    type: str
    param: str | None
    """Field at fault."""
    code: str | None


class OpenAiError(JsonObject):
    error: OpenAiErrorFields


def _error_body(info: ErrorInfo, _: str) -> OpenAiError:
    return {
        "error": {
            "message": info.message,
            "type": info.type,
            "param": info.param,
            "code": info.code,
            **info.more,
        }
    }


OPENAI: Dialect[ApiContext, OpenAiError] = Dialect(
    name="OpenAI",
    prefixes=(),
    routes=(
        chat.routes,
        completions.routes,
        responses.routes,
        responses.kept_routes,
        embeddings.routes,
        models.tokenizer_routes,
        models.routes,
    ),
    error_body=_error_body,
    error_schema=OpenAiError,
    stream_failure=event,
)
