"""Errors over HTTP: the one place where the exception tree becomes status codes and bodies.

One error in three dialects: whose it is, the path of the request says.

The bodies of errors as schemas: `error_bodies.py` writes them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from mlx_ring.api.sse import Json
from mlx_ring.core import errors
from mlx_ring.core.errors import RequestError, RingError

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


def format_error(trouble: Trouble, path: str, request_id: str) -> Json:
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


log = logging.getLogger(__name__)

INVALID = "invalid_request_error"
SERVER = "server_error"
_NOT_FOUND = 404
_METHOD_NOT_ALLOWED = 405
_TIMEOUT = 408

_UNAVAILABLE = 503


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    type: str
    code: str | None = None


_REPLIES: Mapping[type[RingError], _Reply] = {
    RequestError: _Reply(400, INVALID),
    errors.ContextExceeded: _Reply(400, INVALID, "context_length_exceeded"),
    errors.UnknownModel: _Reply(404, INVALID, "model_not_found"),
    errors.Refused: _Reply(403, INVALID, "foreign_request"),
    errors.Unauthenticated: _Reply(401, INVALID, "invalid_api_key"),
    errors.BodyTooLarge: _Reply(413, INVALID, "body_too_large"),
    errors.BodyTooSlow: _Reply(408, "timeout_error", "body_timeout"),
    errors.Overloaded: _Reply(429, "rate_limit_error", "overloaded"),
    errors.DeadlineExceeded: _Reply(408, "timeout_error", "request_timeout"),
    errors.ModelNotFound: _Reply(404, INVALID, "model_not_found"),
    errors.ModelError: _Reply(400, INVALID, "model_unusable"),
    errors.PlanError: _Reply(503, SERVER, "no_room"),
    errors.Conflict: _Reply(409, INVALID, "conflict"),
    errors.NotReady: _Reply(503, SERVER, "not_ready"),
    errors.Draining: _Reply(503, SERVER, "draining"),
    errors.BodiesFull: _Reply(503, SERVER, "bodies_full"),
    errors.WorkerLost: _Reply(503, SERVER, "worker_lost"),
    errors.WorkerStuck: _Reply(503, SERVER, "worker_stuck"),
    errors.StaleMessage: _Reply(503, SERVER, "stale_message"),
    errors.StepFailed: _Reply(500, SERVER, "step_failed"),
    RingError: _Reply(500, SERVER, "internal_error"),
}
_PASSING = (errors.NotReady, errors.Overloaded, errors.StaleMessage)
"""Worth another try; clients are told not to repeat what ends in any other 5xx, or took too long once."""
_LAST_WORDS = (errors.Draining, errors.BodyTooSlow, errors.BodiesFull)
"""The connection ends with them."""


def trouble_of(error: Exception) -> Trouble:
    """What a client is told of an error. What is not of our tree shows nothing of its inside."""
    reply = _reply_to(error)
    more: dict[str, object] = {}
    if isinstance(error, errors.ContextExceeded):
        more = {"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.context_tokens}
    return Trouble(
        reply.status,
        str(error)
        if isinstance(error, RingError)
        else "The server failed on this request; its log says why.",
        reply.type,
        reply.code,
        error.param if isinstance(error, RequestError) else None,
        passes=isinstance(error, _PASSING),
        more=more,
    )


def error_body(error: Exception, path: str = "", request_id: str = "-") -> Json:
    """The error body that clients of this path know; of no path in particular: OpenAI's."""
    return format_error(trouble_of(error), path, request_id)


def error_response(error: Exception, scope: Scope) -> Response:
    """The whole HTTP answer to an error."""
    trouble = trouble_of(error)
    headers: dict[str, str] = {}
    if (trouble.status >= _SERVER_TROUBLE and not trouble.passes) or trouble.status == _TIMEOUT:
        headers["x-should-retry"] = "false"
    if isinstance(error, errors.Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, _LAST_WORDS):
        headers["connection"] = "close"
    seconds = _retry_after_s(error, trouble.status)
    if seconds is not None:
        headers["retry-after"] = str(max(1, math.ceil(seconds)))
    return JSONResponse(_body(trouble, scope), trouble.status, headers)


def _retry_after_s(error: Exception, status: int) -> float | None:
    if isinstance(error, errors.Overloaded | errors.NotReady):
        return error.retry_after_s
    return errors.NotReady.retry_after_s if status == _UNAVAILABLE else None


def transport_error(status: int, message: str, request_id: str, path: str = "") -> Json:
    """The body for what is no HTTP request, or none that can be taken: no route has seen it."""
    trouble = Trouble(status, message, *_TRANSPORT[status], passes=status == _UNAVAILABLE)
    return format_error(trouble, path, request_id)


_TRANSPORT = {
    400: (INVALID, "bad_request"),
    408: ("timeout_error", "request_timeout"),
    431: (INVALID, "headers_too_large"),
    503: (SERVER, "too_many_connections"),
}


def log_failure(error: Exception, request_id: str) -> None:
    """Note the service's own trouble; a client's mistake is its own business."""
    if not isinstance(error, RingError):
        log.error("request %s failed", request_id, exc_info=error)
    elif _reply_to(error).status >= _SERVER_TROUBLE:
        log.warning("request %s failed: %s", request_id, error)


def install_error_handlers(app: FastAPI) -> None:
    """Give every error that leaves a route, and every unknown path, the body of its dialect."""

    def on_ring_error(request: Request, error: Exception) -> Response:
        log_failure(error, request.scope.get("request_id", "-"))
        return error_response(error, request.scope)

    def on_http_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        return JSONResponse(
            _body(_http_trouble(request, error), request.scope), error.status_code, error.headers
        )

    def on_wrong_parameter(request: Request, error: Exception) -> Response:
        """FastAPI's own answer would be a 422, which no client knows."""
        if not isinstance(error, RequestValidationError):
            raise error
        return error_response(_wrong_parameter(error), request.scope)

    app.add_exception_handler(RingError, on_ring_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_wrong_parameter)


def _http_trouble(request: Request, error: HTTPException) -> Trouble:
    path, status = request.url.path, error.status_code
    if status == _NOT_FOUND:
        return Trouble(status, f"There is no {path} here; GET / lists the endpoints.", INVALID, "unknown_url")
    if status == _METHOD_NOT_ALLOWED:
        message = f"{path} does not take {request.method}; GET / lists the endpoints and their methods."
        return Trouble(status, message, INVALID, "method_not_allowed")
    return Trouble(status, str(error.detail), INVALID)


def _wrong_parameter(error: RequestValidationError) -> RequestError:
    detail = error.errors()[0]
    name = str(detail["loc"][-1])
    return RequestError(f"'{name}' is wrong: {detail['msg']}.", param=name)


def _reply_to(error: Exception) -> _Reply:
    for kind in type(error).__mro__:
        if kind in _REPLIES:
            return _REPLIES[kind]
    return _REPLIES[RingError]


def _body(trouble: Trouble, scope: Scope) -> Json:
    return format_error(trouble, scope["path"], scope.get("request_id", "-"))


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
