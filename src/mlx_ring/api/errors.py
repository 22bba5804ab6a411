"""Errors over HTTP: the one place where the exception tree becomes status codes and bodies."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from mlx_ring.api import error_bodies
from mlx_ring.api.error_bodies import Trouble
from mlx_ring.api.json_lines import Json
from mlx_ring.core import errors
from mlx_ring.core.errors import RequestError, RingError

log = logging.getLogger(__name__)

INVALID = "invalid_request_error"
SERVER = "server_error"
_NOT_FOUND = 404
_METHOD_NOT_ALLOWED = 405
_TIMEOUT = 408
_SERVER_TROUBLE = 500
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
    return error_bodies.error_body(trouble_of(error), path, request_id)


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
    return error_bodies.error_body(trouble, path, request_id)


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
    return error_bodies.error_body(trouble, scope["path"], scope.get("request_id", "-"))
