"""What a model can be asked for, as its template and its tokens have it."""

from __future__ import annotations

from mlx_ring.api.routes import ApiContext
from mlx_ring.api.service import ModelService


def capabilities(context: ApiContext, model: ModelService) -> list[str]:
    """By the names that Ollama has for them."""
    format_ = context.formats[model.tokenizer]
    can = {
        "completion": True,
        "tools": format_.calls is not None and format_.knows("tools"),
        "thinking": format_.thinking is not None,
        "embedding": not model.pooling.refusal,
    }
    return [name for name, is_so in can.items() if is_so]


def efforts(context: ApiContext, model: ModelService) -> list[str]:
    """Values of `reasoning_effort` that make a difference."""
    format_ = context.formats[model.tokenizer]
    if format_.knows("reasoning_effort"):
        return ["low", "medium", "high"]
    if format_.knows("enable_thinking") or format_.knows("thinking"):
        return ["none", "medium"]
    return []
