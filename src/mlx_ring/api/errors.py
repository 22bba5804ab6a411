"""Errors over HTTP: the conversion of the exception tree to status codes and bodies.

The dialect of the request's path writes the body.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from mlx_ring.api.dialect import Dialects, ErrorInfo, ErrorNumbers, Json, dialect_of
from mlx_ring.core import errors
from mlx_ring.core.errors import RequestError, RingError

log = logging.getLogger(__name__)

INVALID = "invalid_request_error"
SERVER = "server_error"
_NOT_FOUND = 404
_METHOD_NOT_ALLOWED = 405
_TIMEOUT = 408
_SERVER_ERROR = 500
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
    errors.UnknownAnswer: _Reply(404, INVALID, "answer_not_found"),
    errors.AnswerCancelled: _Reply(409, INVALID, "answer_cancelled"),
    errors.Refused: _Reply(403, INVALID, "foreign_request"),
    errors.Unauthenticated: _Reply(401, INVALID, "invalid_api_key"),
    errors.BodyTooLarge: _Reply(413, INVALID, "body_too_large"),
    errors.BodyTooSlow: _Reply(408, "timeout_error", "body_timeout"),
    errors.Overloaded: _Reply(429, "rate_limit_error", "overloaded"),
    errors.DeadlineExceeded: _Reply(408, "timeout_error", "request_timeout"),
    errors.ModelNotFound: _Reply(404, INVALID, "model_not_found"),
    errors.ModelError: _Reply(400, INVALID, "model_unusable"),
    errors.PlanError: _Reply(503, SERVER, "no_room"),
    errors.ExceedsMemory: _Reply(503, SERVER, "exceeds_memory"),
    errors.Conflict: _Reply(409, INVALID, "conflict"),
    errors.NotReady: _Reply(503, SERVER, "not_ready"),
    errors.Draining: _Reply(503, SERVER, "draining"),
    errors.BodiesFull: _Reply(503, SERVER, "bodies_full"),
    errors.WorkerLost: _Reply(503, SERVER, "worker_lost"),
    errors.WorkerStuck: _Reply(503, SERVER, "worker_stuck"),
    errors.RepeatedLoss: _Reply(500, SERVER, "repeated_loss"),
    errors.StaleMessage: _Reply(503, SERVER, "stale_message"),
    errors.StepFailed: _Reply(500, SERVER, "step_failed"),
    RingError: _Reply(500, SERVER, "internal_error"),
}
_PASSING = (errors.NotReady, errors.Overloaded, errors.StaleMessage)
"""Errors after which a retry may succeed. For other 5xx errors and timeouts, a header asks clients not to retry."""
_LAST_WORDS = (errors.Draining, errors.BodyTooSlow, errors.BodiesFull)
"""Errors that end the connection."""


def error_info(error: Exception) -> ErrorInfo:
    """Return the description of an error for clients. Errors outside `RingError` show no detail."""
    reply = _reply_to(error)
    more: ErrorNumbers = {}
    if isinstance(error, errors.ContextExceeded):
        more = {"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.context_tokens}
    return ErrorInfo(
        reply.status,
        str(error) if isinstance(error, RingError) else "The server failed on this request; see its log.",
        reply.type,
        reply.code,
        error.param if isinstance(error, RequestError) else None,
        passes=isinstance(error, _PASSING),
        more=more,
    )


def error_body(error: Exception, scope: Scope) -> Json:
    """Return the error's body in the dialect of the request."""
    return _body(error_info(error), scope)


def stream_failure(error: Exception, scope: Scope) -> bytes:
    """Encode the error as the end of a stream whose status is already sent."""
    return dialect_of(scope).stream_failure(error_body(error, scope))


def error_response(error: Exception, scope: Scope) -> Response:
    """Return the whole HTTP answer to an error."""
    info = error_info(error)
    headers: dict[str, str] = {}
    if (info.status >= _SERVER_ERROR and not info.passes) or info.status == _TIMEOUT:
        headers["x-should-retry"] = "false"
    if isinstance(error, errors.Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, _LAST_WORDS):
        headers["connection"] = "close"
    seconds = _retry_after_s(error, info.status)
    if seconds is not None:
        headers["retry-after"] = str(max(1, math.ceil(seconds)))
    return JSONResponse(_body(info, scope), info.status, headers)


def _retry_after_s(error: Exception, status: int) -> float | None:
    if isinstance(error, errors.Overloaded | errors.NotReady):
        return error.retry_after_s
    return errors.NotReady.retry_after_s if status == _UNAVAILABLE else None


def transport_error(
    dialects: Dialects, status: int, message: str, request_id: str, scope: Scope | None = None
) -> Json:
    """Return the body for a request that is not valid HTTP or cannot be accepted, so that no route gets it.

    Its dialect is known if it has a `scope`.
    """
    info = ErrorInfo(status, message, *_TRANSPORT[status], passes=status == _UNAVAILABLE)
    dialect = dialects.of("") if scope is None else dialects.of(scope["path"], Headers(scope=scope))
    return dialect.error_body(info, request_id)


_TRANSPORT = {
    400: (INVALID, "bad_request"),
    408: ("timeout_error", "request_timeout"),
    431: (INVALID, "headers_too_large"),
    503: (SERVER, "too_many_connections"),
}


def log_failure(error: Exception, request_id: str) -> None:
    """Log a failure of the server. Errors of clients are not logged."""
    if not isinstance(error, RingError):
        log.error("Request %s failed", request_id, exc_info=error)
    elif _reply_to(error).status >= _SERVER_ERROR:
        log.warning("Request %s failed: %s", request_id, error)


def install_error_handlers(app: Starlette, dialects: Dialects) -> None:
    """Register the dialects. Answer every error and every unknown path in the dialect of the path."""
    app.state.dialects = dialects

    def on_ring_error(request: Request, error: Exception) -> Response:
        log_failure(error, request.scope.get("request_id", "-"))
        return error_response(error, request.scope)

    def on_http_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        return JSONResponse(
            _body(_http_error_info(request, error), request.scope), error.status_code, error.headers
        )

    app.add_exception_handler(RingError, on_ring_error)
    app.add_exception_handler(HTTPException, on_http_error)


def _http_error_info(request: Request, error: HTTPException) -> ErrorInfo:
    path, status = request.url.path, error.status_code
    if status == _NOT_FOUND:
        return ErrorInfo(
            status, f"There is no endpoint {path}; GET / lists the endpoints.", INVALID, "unknown_url"
        )
    if status == _METHOD_NOT_ALLOWED:
        message = f"{path} does not take {request.method}; GET / lists the endpoints and their methods."
        return ErrorInfo(status, message, INVALID, "method_not_allowed")
    return ErrorInfo(status, str(error.detail), INVALID)


def _reply_to(error: Exception) -> _Reply:
    for kind in type(error).__mro__:
        if kind in _REPLIES:
            return _REPLIES[kind]
    return _REPLIES[RingError]


def _body(info: ErrorInfo, scope: Scope) -> Json:
    return dialect_of(scope).error_body(info, scope.get("request_id", "-"))
