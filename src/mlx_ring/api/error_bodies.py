"""One error in three dialects: whose it is, the path of the request says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mlx_ring.api.json_lines import Json

_SERVER_TROUBLE = 500


@dataclass(frozen=True, slots=True)
class Trouble:
    """What went wrong, as every dialect tells it."""

    status: int
    message: str
    type: str
    """OpenAI's word for its kind."""
    code: str | None = None
    param: str | None = None
    """The field at fault."""
    passes: bool = False
    """Whether asking again may well help."""
    more: Mapping[str, object] = field(default_factory=dict[str, object])
    """Numbers that a client could want to have apart."""


def error_body(trouble: Trouble, path: str, request_id: str) -> Json:
    """The body of an answer to a request for that path, and of an event in mid-stream."""
    return _dialect(path)(trouble, request_id)


def is_anthropic(path: str) -> bool:
    """Whether a path is one of Anthropic's."""
    return _dialect(path) is _anthropic


def is_ollama(path: str) -> bool:
    """Whether a path is one of Ollama's."""
    return _dialect(path) is _ollama


def _openai(trouble: Trouble, _: str) -> Json:
    shown = {"message": trouble.message, "type": trouble.type, "param": trouble.param, "code": trouble.code}
    return {"error": shown | dict(trouble.more)}


def _anthropic(trouble: Trouble, request_id: str) -> Json:
    details = _DETAILS.get(trouble.param or "", {})
    shown = {"type": _anthropic_type(trouble), "message": trouble.message, **details, **trouble.more}
    return {"type": "error", "error": shown, "request_id": request_id}


def _ollama(trouble: Trouble, _: str) -> Json:
    return {"error": trouble.message}


_DETAILS: Mapping[str, Json] = {"thread": {"details": {"error_code": "thread_unsupported_request"}}}
"""By the field that was refused: with these the SDK asks again without it."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def _anthropic_type(trouble: Trouble) -> str:
    if trouble.status >= _SERVER_TROUBLE:
        return "overloaded_error" if trouble.passes else "api_error"
    return _ANTHROPIC_TYPES.get(trouble.status, "invalid_request_error")


_DIALECTS: Mapping[str, Callable[[Trouble, str], Json]] = {"/v1/messages": _anthropic, "/api": _ollama}
"""By the beginning of the path; everything else is OpenAI's."""


def _dialect(path: str) -> Callable[[Trouble, str], Json]:
    for prefix, dialect in _DIALECTS.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return dialect
    return _openai
