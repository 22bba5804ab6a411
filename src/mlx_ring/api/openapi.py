"""`/openapi.json`: what every route takes and answers, told where the route is added.

Routes read their own bodies and write their own answers, so nothing of this is enforced by FastAPI; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal, cast

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from mlx_ring.api.dialect import Dialects
from mlx_ring.api.request_body import WITHOUT_EFFECT, Body
from mlx_ring.api.settings import ApiSettings
from mlx_ring.api.streaming import EVENT_STREAM, Endpoint, begun_in_time

Json = dict[str, Any]

_REF = "#/components/schemas/{model}"
_KEY = "about"
_JSON = "application/json"
_OF_ALL = (400, 403, 431, 500, 503)
_OF_POSTS = (404, 408, 413, 429)
_REASONS = {
    400: "The request is wrong; the error names the field where one is at fault.",
    401: "No API key, or one that the server does not know.",
    403: "A foreign Host or Origin, or what only this machine may ask.",
    404: "There is no such model here.",
    408: "The body did not come, or the answer took longer than the server allows.",
    409: "It would undo what is going on.",
    413: "The body is too large.",
    429: "Too many requests wait; `retry-after` says when to come again.",
    431: "The headers are too large.",
    500: "The server failed on this request.",
    503: "The model cannot answer now, or the server is ending; `retry-after` says when to come again.",
}
_REQUEST_ID: Json = {"x-request-id": {"description": "For the server's log.", "schema": {"type": "string"}}}
_RETRY: Json = {"retry-after": {"description": "Seconds.", "schema": {"type": "string"}}}
_EVENT: Json = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string", "contentMediaType": _JSON}},
    "required": ["data"],
}
"""Of a stream: its data are told apart, for the last ones of OpenAI's are no JSON."""
_MAY_RETRY = (429, 503)
_UNAUTHENTICATED, _UNAVAILABLE = 401, 503


class Told(BaseModel):
    """Base of what is answered. There may be more in it than is named; a field's docstring is its description."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class About:
    """What a route answers, and what else there is to know of it."""

    summary: str
    answer: type[BaseModel] | None = None
    """As JSON; None: of another kind."""
    streams: Mapping[str, type[BaseModel] | None] = field(default_factory=dict[str, type[BaseModel] | None])
    """By media type, what else it may be: a text, each of whose events or lines is one of these."""
    example: Json | None = None
    """A body that is answered with 200, whatever is served."""
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    """Parameters, none of which must be given, and what they mean."""
    more_statuses: Sequence[int] = ()
    open: bool = False
    """Whether it needs no key."""
    unwell: type[BaseModel] | None = None
    """The body of a 503, where that is no error's."""
    description: str = ""
    tag: str = "operations"


def documented(
    router: APIRouter,
    path: str,
    endpoint: Endpoint,
    schema: type[Body],
    about: About,
) -> None:
    """Add a POST route whose endpoint reads a body of that schema. Streams of events begin in time."""
    waited = begun_in_time(endpoint) if EVENT_STREAM in about.streams else endpoint
    _add(router, path, waited, "POST", about, schema)


def told(router: APIRouter, path: str, endpoint: Callable[..., Any], about: About) -> None:
    """Add a GET route. Whatever the endpoint returns but a response is written as JSON."""
    _add(router, path, endpoint, "GET", about, None)


def _add(
    router: APIRouter,
    path: str,
    endpoint: Callable[..., Any],
    method: Literal["GET", "POST"],
    about: About,
    schema: type[Body] | None,
) -> None:
    router.add_api_route(
        path,
        endpoint,
        methods=[method],
        response_model=None,
        openapi_extra={_KEY: (about, schema)},
    )


@dataclass(frozen=True, slots=True)
class _Operation:
    path: str
    method: str
    about: About
    schema: type[Body] | None
    parameters: Sequence[str]
    """In the path."""
    error: type[BaseModel]
    """Schema of the dialect's error bodies."""


def describe_api(
    app: FastAPI, routers: Sequence[APIRouter], settings: ApiSettings, dialects: Dialects
) -> None:
    """Have `/openapi.json` tell what was told of each of the routers' routes."""
    made: list[Json] = []

    def openapi() -> Json:
        if not made:
            made.append(_document(list(_operations(routers, dialects)), settings))
        return made[0]

    app.openapi = openapi


def _operations(routers: Sequence[APIRouter], dialects: Dialects) -> Iterable[_Operation]:
    """Of every route that is not hidden on purpose; one of which nothing was told is a mistake of ours."""
    for route in (route for router in routers for route in router.routes):
        if isinstance(route, APIRoute) and route.include_in_schema:
            about, schema = (route.openapi_extra or {})[_KEY]
            for method in sorted(route.methods or ()):
                yield _Operation(
                    route.path_format,
                    method.lower(),
                    about,
                    schema,
                    tuple(route.param_convertors),
                    dialects.of(route.path_format).error_schema,
                )


def _document(operations: Sequence[_Operation], settings: ApiSettings) -> Json:
    refs, definitions = _schemas(operations)
    paths: dict[str, Json] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, refs, settings)
    document: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "mlx-ring",
            "version": version("mlx-ring"),
            "description": "One language model across the machines you own, for clients of OpenAI's, Anthropic's and Ollama's APIs.",
        },
        "tags": [{"name": tag} for tag in dict.fromkeys(each.about.tag for each in operations)],
        "paths": paths,
        "components": {"schemas": definitions},
    }
    if settings.api_keys:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"bearer": []}, {"key": []}]
    return document


Refs = Mapping[type[BaseModel], Json]


def _schemas(operations: Iterable[_Operation]) -> tuple[Refs, Json]:
    """References to every model, and what they refer to; pydantic tells models of the same name apart."""
    taken = dict.fromkeys(each.schema for each in operations if each.schema is not None)
    given = dict.fromkeys(
        model
        for each in operations
        for model in (
            each.about.answer,
            each.about.unwell,
            *each.about.streams.values(),
            each.error,
        )
        if model is not None
    )
    pairs: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = []
    pairs.extend((model, "validation") for model in taken)
    pairs.extend((model, "serialization") for model in given if model not in taken)
    refs, whole = models_json_schema(pairs, ref_template=_REF)
    definitions: Json = whole["$defs"]
    found = {cast("type[BaseModel]", model): dict(ref) for (model, _), ref in refs.items()}
    for model in taken:
        _add_what_has_no_effect(definitions[found[model]["$ref"].rpartition("/")[2]])
    return found, definitions


def _add_what_has_no_effect(schema: Json) -> None:
    """Bodies are read without these."""
    note = "Taken, and of no effect on the answer."
    properties = schema.setdefault("properties", {})
    for name in sorted(WITHOUT_EFFECT):
        properties.setdefault(name, {"description": note})
    schema["patternProperties"] = {"^prompt_cache_": {"description": note}}


def _described(operation: _Operation, refs: Refs, settings: ApiSettings) -> Json:
    about = operation.about
    named = "".join(part.capitalize() for part in operation.path.replace("{", "/").split("/") if part)
    described: Json = {
        "operationId": f"{operation.method}{named.replace('}', '')}",
        "summary": about.summary,
        **({"description": about.description} if about.description else {}),
        "tags": [about.tag],
        "responses": _responses(operation, refs, settings),
    }
    parameters = [*map(_in_path, operation.parameters), *map(_in_query, about.query.items())]
    if parameters:
        described["parameters"] = parameters
    if operation.schema is not None:
        content: Json = {"schema": refs[operation.schema]}
        if about.example is not None:
            content["example"] = about.example
        described["requestBody"] = {"required": True, "content": {_JSON: content}}
    if about.open and settings.api_keys:
        described["security"] = []
    return described


def _in_path(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _in_query(parameter: tuple[str, str]) -> Json:
    name, meaning = parameter
    return {"name": name, "in": "query", "description": meaning, "schema": {"type": "string"}}


def _responses(operation: _Operation, refs: Refs, settings: ApiSettings) -> Json:
    about, model = operation.about, operation.error
    content: Json = {} if about.answer is None else {_JSON: {"schema": refs[about.answer]}}
    for media_type, each in about.streams.items():
        content[media_type] = {"schema": _EVENT if media_type == EVENT_STREAM else {"type": "string"}}
        if each is not None:
            content[media_type]["x-each"] = refs[each]
    responses: Json = {"200": {"description": about.summary, "headers": _REQUEST_ID, "content": content}}
    for status in sorted(_statuses(operation, settings)):
        responses[str(status)] = {
            "description": _REASONS[status],
            "headers": _REQUEST_ID | (_RETRY if status in _MAY_RETRY else {}),
            "content": {_JSON: {"schema": _or_error(status, about, refs, refs[model])}},
        }
    return responses


def _or_error(status: int, about: About, refs: Refs, error: Json) -> Json:
    if status == _UNAVAILABLE and about.unwell is not None:
        return {"anyOf": [refs[about.unwell], error]}
    return error


def _statuses(operation: _Operation, settings: ApiSettings) -> set[int]:
    statuses = {*_OF_ALL, *operation.about.more_statuses}
    if operation.schema is not None:
        statuses |= {*_OF_POSTS}
    if settings.api_keys and not operation.about.open:
        statuses.add(_UNAUTHENTICATED)
    return statuses
