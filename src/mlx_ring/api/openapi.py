"""Routes that read their own bodies, and still say in `/openapi.json` what they take."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_ring.api.body import Body

_DEFINITION = "#/$defs/"
_REASONS = {
    400: "The request is wrong; `error.param` names the field.",
    403: "A foreign Host or Origin.",
    404: "The model is not served here.",
    408: "The request took longer than the server allows.",
    413: "The body is too large.",
    429: "Too many requests wait.",
    500: "The server failed on this request.",
    503: "The model cannot answer now.",
}


def documented(
    router: APIRouter,
    path: str,
    endpoint: Callable[[Request], Awaitable[Response]],
    schema: type[Body],
) -> None:
    """Add a POST route whose endpoint reads a body of that schema."""
    whole = schema.model_json_schema()
    body = _inline(whole, whole.get("$defs", {}))
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": reason} for status, reason in _REASONS.items()
    }
    router.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        responses=responses,
        response_model=None,
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}},
    )


def _inline(schema: object, definitions: dict[str, object]) -> object:
    """The schema with its definitions put in place: inside an OpenAPI document it has no root of its own."""
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in cast("list[object]", schema)]
    if not isinstance(schema, dict):
        return schema
    fields = cast("dict[str, object]", schema)
    reference = fields.get("$ref")
    if isinstance(reference, str):
        return _inline(definitions[reference.removeprefix(_DEFINITION)], definitions)
    left_out = ("$defs", "discriminator")
    return {name: _inline(value, definitions) for name, value in fields.items() if name not in left_out}
