"""Errors over HTTP: the one place where the exception tree becomes status codes and OpenAI's error body."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from mlx_ring.core import errors
from mlx_ring.core.errors import RequestError, RingError

log = logging.getLogger(__name__)

INVALID = "invalid_request_error"
SERVER = "server_error"
_NOT_FOUND = 404
_METHOD_NOT_ALLOWED = 405
_TIMEOUT = 408
_SERVER_TROUBLE = 500


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
    errors.WorkerLost: _Reply(503, SERVER, "worker_lost"),
    errors.WorkerStuck: _Reply(503, SERVER, "worker_stuck"),
    errors.StaleMessage: _Reply(503, SERVER, "stale_message"),
    errors.StepFailed: _Reply(500, SERVER, "step_failed"),
    RingError: _Reply(500, SERVER, "internal_error"),
}
_PASSING = (errors.NotReady, errors.Overloaded, errors.StaleMessage)
"""Worth another try; clients are told not to repeat what ends in any other 5xx, or took too long once."""
_RETRY_AFTER_S = {errors.Draining: 10, errors.NotReady: 5, errors.StaleMessage: 1}
"""What those take that do not say themselves."""
_LAST_WORDS = (errors.Draining, errors.BodyTooSlow)
"""The connection ends with them."""


def error_body(error: Exception) -> dict[str, dict[str, object]]:
    """OpenAI's error body. What is not of our tree shows nothing of its inside."""
    reply = _reply_to(error)
    if not isinstance(error, RingError):
        return _body("The server failed on this request; its log says why.", reply)
    body = _body(str(error), reply, error.param if isinstance(error, RequestError) else None)
    if isinstance(error, errors.ContextExceeded):
        body["error"] |= {"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.context_tokens}
    return body


def error_response(error: Exception) -> Response:
    """The whole HTTP answer to an error."""
    status = _reply_to(error).status
    headers: dict[str, str] = {}
    if (status >= _SERVER_TROUBLE and not isinstance(error, _PASSING)) or status == _TIMEOUT:
        headers["x-should-retry"] = "false"
    if isinstance(error, errors.Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, _PASSING):
        headers["retry-after"] = str(_retry_after_s(error))
    if isinstance(error, _LAST_WORDS):
        headers["connection"] = "close"
    return JSONResponse(error_body(error), status, headers)


def transport_error(status: int, message: str) -> dict[str, dict[str, object]]:
    """The body for what is no HTTP request, or none that can be taken: no route has seen it."""
    kind, code = _TRANSPORT[status]
    return _body(message, _Reply(status, kind, code))


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
    """Make every error that leaves a route, and every unknown path, OpenAI's body."""

    def on_ring_error(request: Request, error: Exception) -> Response:
        log_failure(error, request.scope.get("request_id", "-"))
        return error_response(error)

    def on_http_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        path = request.url.path
        if error.status_code == _NOT_FOUND:
            message = f"There is no {path} here; GET / lists the endpoints."
            body = _body(message, _Reply(_NOT_FOUND, INVALID, "unknown_url"))
        elif error.status_code == _METHOD_NOT_ALLOWED:
            message = f"{path} does not take {request.method}; GET / lists the endpoints and their methods."
            body = _body(message, _Reply(_METHOD_NOT_ALLOWED, INVALID, "method_not_allowed"))
        else:
            body = _body(str(error.detail), _Reply(error.status_code, INVALID))
        return JSONResponse(body, error.status_code, error.headers)

    def on_wrong_parameter(_: Request, error: Exception) -> Response:
        if not isinstance(error, RequestValidationError):
            raise error
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return error_response(RequestError(f"'{name}': {first['msg']}.", param=name))

    app.add_exception_handler(RingError, on_ring_error)
    app.add_exception_handler(RequestValidationError, on_wrong_parameter)
    app.add_exception_handler(HTTPException, on_http_error)


def _retry_after_s(error: RingError) -> int:
    if isinstance(error, errors.Overloaded):
        return max(1, round(error.retry_after_s))
    return next(_RETRY_AFTER_S[kind] for kind in type(error).__mro__ if kind in _RETRY_AFTER_S)


def _reply_to(error: Exception) -> _Reply:
    for kind in type(error).__mro__:
        if kind in _REPLIES:
            return _REPLIES[kind]
    return _REPLIES[RingError]


def _body(message: str, reply: _Reply, param: str | None = None) -> dict[str, dict[str, object]]:
    return {"error": {"message": message, "type": reply.type, "param": param, "code": reply.code}}
