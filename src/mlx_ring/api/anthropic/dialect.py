"""Anthropic's API as a dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NotRequired

from mlx_ring.api.anthropic.routes import MESSAGES_PATH, routes
from mlx_ring.api.context import ApiContext
from mlx_ring.api.dialect import Dialect, ErrorInfo, ErrorNumbers, event
from mlx_ring.api.openapi import JsonObject

_SERVER_ERROR = 500
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class ErrorDetails(JsonObject):
    error_code: str


_DETAILS: Mapping[str, ErrorDetails] = {"thread": {"error_code": "thread_unsupported_request"}}
"""Details of an error by refused field. They make the SDK repeat the request without the field."""


class AnthropicErrorFields(JsonObject, ErrorNumbers):
    type: str
    message: str
    details: NotRequired[ErrorDetails]


class AnthropicError(JsonObject):
    type: Literal["error"]
    error: AnthropicErrorFields
    request_id: str


def _error_body(info: ErrorInfo, request_id: str) -> AnthropicError:
    fields: AnthropicErrorFields = {"type": _error_type(info), "message": info.message}
    details = _DETAILS.get(info.param or "")
    if details is not None:
        fields["details"] = details
    return {"type": "error", "error": {**fields, **info.more}, "request_id": request_id}


def _error_type(info: ErrorInfo) -> str:
    if info.status >= _SERVER_ERROR:
        return "overloaded_error" if info.passes else "api_error"
    return _ERROR_TYPES.get(info.status, "invalid_request_error")


def _stream_failure(body: AnthropicError) -> bytes:
    return event(body, "error")


ANTHROPIC: Dialect[ApiContext, AnthropicError] = Dialect(
    name="Anthropic",
    prefixes=(MESSAGES_PATH,),
    routes=(routes,),
    error_body=_error_body,
    error_schema=AnthropicError,
    stream_failure=_stream_failure,
    request_id_header="request-id",
)
