"""The bodies of errors as schemas: `error_bodies.py` writes them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from mlx_ring.api.error_bodies import is_anthropic, is_ollama


class _Error(BaseModel):
    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)


class OpenAiErrorFields(_Error):
    message: str
    """One sentence: what happened, with which value, and what to do."""
    type: str
    param: str | None
    """The field at fault."""
    code: str | None
    n_prompt_tokens: int | None = None
    """Where the context is exceeded; ..."""
    n_ctx: int | None = None
    """... it has so many."""


class OpenAiError(_Error):
    error: OpenAiErrorFields


class AnthropicErrorFields(_Error):
    type: str
    message: str


class AnthropicError(_Error):
    type: Literal["error"]
    error: AnthropicErrorFields
    request_id: str


class OllamaError(_Error):
    error: str


def error_schema(path: str) -> type[BaseModel]:
    """Of the errors that a request for this path may get."""
    if is_anthropic(path):
        return AnthropicError
    return OllamaError if is_ollama(path) else OpenAiError
