"""OpenAI's API as a dialect. It is the default: its paths are all that no other dialect claims."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from mlx_ring.api.context import ApiContext
from mlx_ring.api.dialect import Dialect, ErrorInfo, Json, event
from mlx_ring.api.openai import chat, completions, embeddings, models, tokens
from mlx_ring.api.openai.responses import route as responses


class OpenAiErrorFields(BaseModel):
    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    message: str
    """One sentence: what happened, with which value, and what to do."""
    type: str
    param: str | None
    """Field at fault."""
    code: str | None
    n_prompt_tokens: int | None = None
    """Number of the prompt's tokens, where they exceed the context."""
    n_ctx: int | None = None
    """Size of that context in tokens."""


class OpenAiError(BaseModel):
    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    error: OpenAiErrorFields


def _error_body(info: ErrorInfo, _: str) -> Json:
    fields = {"message": info.message, "type": info.type, "param": info.param, "code": info.code}
    return {"error": fields | dict(info.more)}


OPENAI: Dialect[ApiContext] = Dialect(
    name="OpenAI",
    prefixes=(),
    routes=(
        chat.routes,
        completions.routes,
        responses.routes,
        embeddings.routes,
        tokens.routes,
        models.routes,
    ),
    error_body=_error_body,
    error_schema=OpenAiError,
    stream_failure=event,
)
