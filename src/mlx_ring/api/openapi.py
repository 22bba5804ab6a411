"""`/openapi.json`: the requests and answers of each route, documented where the route is added.

A route's answer is described by the type that its endpoint returns, and its stream by the type of the stream's events.
So the type checker holds the document to the code.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import textwrap
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from typing import Any, Generic, Literal

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, TypeAdapter, with_config
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, to_jsonable_python
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, Router
from typing_extensions import TypedDict, TypeForm

from mlx_ring.api.dialect import Dialects
from mlx_ring.api.settings import ApiSettings
from mlx_ring.api.streaming import (
    EVENT_STREAM,
    AnswerT,
    Endpoint,
    EventT,
    JsonAnswer,
    JsonStream,
    json_endpoint,
    start_in_time,
)

DocumentPart = dict[str, Any]

_REF = "#/components/schemas/{model}"
_JSON = "application/json"
_ANY_STATUSES = (400, 403, 431, 500, 503)
_POST_STATUSES = (404, 408, 413, 429)
_REASONS = {
    400: "The request is invalid. The error names the field at fault, if there is one.",
    401: "The API key is missing or unknown.",
    403: "The Host or Origin is not allowed, or only this machine may send the request.",
    404: "The server has no such model.",
    408: "The body did not arrive in time, or the answer took longer than the server allows.",
    409: "The request conflicts with an operation in progress.",
    413: "The body is too large.",
    429: "Too many requests are queued. Retry after the seconds in `retry-after`.",
    431: "The headers are too large.",
    500: "The server failed on this request.",
    503: "The model cannot answer now, or the server is shutting down. Retry after the seconds in `retry-after`.",
}
_REQUEST_ID: DocumentPart = {
    "x-request-id": {"description": "Id of the request in the server's log.", "schema": {"type": "string"}}
}
_RETRY: DocumentPart = {
    "retry-after": {"description": "Seconds to wait before the next try.", "schema": {"type": "string"}}
}
_EVENT: DocumentPart = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string", "contentMediaType": _JSON}},
    "required": ["data"],
}
"""Schema of a server-sent event. Its data has a schema of its own, because OpenAI's last event is not JSON."""
_MAY_RETRY = (429, 503)
_UNAUTHENTICATED, _UNAVAILABLE = 401, 503
_SUCCESS = "The request succeeded."
WITHOUT_EFFECT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"})
"""Fields that clients send and that do not affect the answer. `prompt_cache_...` are further ones."""


def has_no_effect(name: str) -> bool:
    return name in WITHOUT_EFFECT or name.startswith("prompt_cache_")


class DescribedModel(BaseModel):
    """Base of models whose fields are described by their docstrings.

    A class is built when it is first used, and its docstrings are read when `/openapi.json` is. Pydantic's
    `use_attribute_docstrings` reads the sources of all models on import, which takes a seventh of a head's start.
    """

    model_config = ConfigDict(defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /
    ) -> JsonSchemaValue:
        """Return the model's JSON schema, in which each field has its docstring as description."""
        schema = handler(core_schema)
        properties: dict[str, Any] = handler.resolve_ref_schema(schema).get("properties", {})
        bases = [each for each in reversed(cls.__mro__) if issubclass(each, DescribedModel)]
        docstrings = dict(found for base in bases for found in _docstrings_of_fields(base))
        for name, declared in cls.model_fields.items():
            if name in docstrings and declared.description is None:
                properties[declared.alias or name]["description"] = docstrings[name]
        if cls.model_config.get("extra") == "forbid":
            # A request's null means the same as a missing field.
            handler.resolve_ref_schema(schema)["additionalProperties"] = {"type": "null"}
        return schema


def needs(field: str, *, of: str) -> dict[str, Any]:
    """Return the schema's condition for a field that requires another field to be true."""
    said, true = (
        {"properties": {field: {"type": "null"}}},
        {"properties": {of: {"const": True}}, "required": [of]},
    )
    return {field: {"anyOf": [said, true]}}


@cache
def _docstrings_of_fields(model: type) -> Sequence[tuple[str, str]]:
    """Return the names and docstrings of the fields that a class declares itself; none where its source is missing."""
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(model)))
    except OSError:
        return ()
    statements = [part for each in source.body if isinstance(each, ast.ClassDef) for part in each.body]
    found: list[tuple[str, str]] = []
    for statement, after in pairwise(statements):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match after:
                case ast.Expr(value=ast.Constant(value=str() as docstring)):
                    found.append((statement.target.id, inspect.cleandoc(docstring)))
                case _:
                    pass
    return found


@with_config(ConfigDict(use_attribute_docstrings=True))
class JsonObject(TypedDict):
    """Base of every JSON object in an answer. A field's docstring becomes its description."""


@dataclass(frozen=True, slots=True)
class RouteDoc(Generic[AnswerT, EventT]):
    """Documentation of a route."""

    summary: str
    """Purpose of the route, in the imperative; `/` lists it."""
    answer: TypeForm[AnswerT] | None = None
    """Type of the JSON answer; None where the answer is never JSON."""
    streams: Mapping[str, TypeForm[EventT] | None] = field(default_factory=dict[str, Any])
    """Other media types of the answer, each with the type of one event or line."""
    example: DocumentPart | None = None
    """Example of a body that the server answers with 200 for any model."""
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    """Optional query parameters and their descriptions."""
    more_statuses: Sequence[int] = ()
    open: bool = False
    """True if the route needs no API key."""
    unwell: type | None = None
    """Type of a 503's body, where it is not an error."""
    description: str = ""
    tag: str = "operations"
    events: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Types of the data of an event stream's events, by the event's name."""


class ApiRoute(Route):
    """Route of one method, with its documentation unless it is hidden."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        method: str = "GET",
        doc: RouteDoc[Any, Any] | None = None,
        schema: type[DescribedModel] | None = None,
    ) -> None:
        """Create a route. `schema` is the type of its body."""
        super().__init__(path, endpoint, methods=[method])
        self.methods = {method}  # without the HEAD of Starlette, because the guard answers it
        self.method = method
        self.doc = doc
        self.schema = schema
        self.plain: Endpoint = endpoint
        """Endpoint without what `start_in_time` adds."""


def documented_post(
    router: Router,
    path: str,
    endpoint: Callable[[Request], Awaitable[AnswerT | JsonAnswer[AnswerT] | JsonStream[EventT]]],
    schema: type[DescribedModel],
    doc: RouteDoc[AnswerT, EventT],
) -> None:
    """Add a POST route that reads a body of this schema. Its work ends if its client leaves; see `start_in_time`."""
    respond = json_endpoint(endpoint)
    in_time = start_in_time(respond, has_events=EVENT_STREAM in doc.streams)
    route = ApiRoute(path, in_time, "POST", doc, schema)
    route.plain = respond
    router.routes.append(route)


def documented_get(
    router: Router,
    path: str,
    endpoint: Callable[[Request], Awaitable[AnswerT | JsonAnswer[AnswerT] | Response]],
    doc: RouteDoc[AnswerT, EventT],
) -> None:
    """Add a GET route. A returned value that is not a response is written as JSON."""

    async def respond(request: Request) -> Response:
        answer = await endpoint(request)
        return answer if isinstance(answer, Response) else JSONResponse(to_jsonable_python(answer))

    router.routes.append(ApiRoute(path, respond, doc=doc))


@dataclass(frozen=True, slots=True)
class _Operation:
    path: str
    method: str
    doc: RouteDoc[Any, Any]
    schema: type[DescribedModel] | None
    parameters: Sequence[str]
    """Parameters in the path."""
    error: TypeForm[Any]
    """Type of the dialect's error bodies."""


def describe_api(app: Starlette, settings: ApiSettings, dialects: Dialects) -> None:
    """Add `/openapi.json`, which describes every documented route of the application, and make `/` list it."""
    made: list[bytes] = []
    making = asyncio.Lock()
    operations = list(_operations(app.routes, dialects))
    app.state.endpoints = _summaries(operations)

    async def openapi(_: Request) -> Response:
        async with making:
            if not made:
                # It takes seconds of CPU time, while other requests' tokens are sent.
                made.append(await asyncio.to_thread(_encoded_document, operations, settings, dialects))
        return Response(made[0], media_type=_JSON)

    app.routes.append(ApiRoute("/openapi.json", openapi))


def _encoded_document(operations: Sequence[_Operation], settings: ApiSettings, dialects: Dialects) -> bytes:
    return bytes(JSONResponse(_document(operations, settings, dialects)).body)


def list_endpoints(app: Starlette) -> dict[str, str]:
    """Return the summary of each route by its method and path."""
    return app.state.endpoints | {"GET /openapi.json": "Describe this API in OpenAPI's format"}


def _summaries(operations: Iterable[_Operation]) -> dict[str, str]:
    """Return the summary of each operation by its method and path. An operation that repeats another is left out."""
    summaries, documented = dict[str, str](), list[RouteDoc[Any]]()
    for operation in operations:
        if not any(doc is operation.doc for doc in documented):
            documented.append(operation.doc)
            summaries[f"{operation.method.upper()} {operation.path}"] = operation.doc.summary
    return summaries


def _operations(routes: Iterable[BaseRoute], dialects: Dialects) -> Iterator[_Operation]:
    """Yield the operations of all routes that are not hidden."""
    for route in routes:
        if isinstance(route, ApiRoute) and route.doc is not None:
            yield _Operation(
                route.path_format,
                route.method.lower(),
                route.doc,
                route.schema,
                tuple(route.param_convertors),
                dialects.of(route.path_format).error_schema,
            )


def _listed(names: Sequence[str]) -> str:
    """Return names as a phrase: "A, B and C"."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _document(operations: Sequence[_Operation], settings: ApiSettings, dialects: Dialects) -> DocumentPart:
    refs, definitions = _schemas(operations)
    paths: dict[str, DocumentPart] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, refs, settings)
    document: DocumentPart = {
        "openapi": "3.1.0",
        "info": {
            "title": "mlx-ring",
            "version": version("mlx-ring"),
            "description": f"Language models across the machines you own, compatible with the {_listed([each.name for each in dialects])} APIs.",
        },
        "tags": [{"name": tag} for tag in dict.fromkeys(each.doc.tag for each in operations)],
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


Refs = Mapping[object, DocumentPart]


def _schemas(operations: Iterable[_Operation]) -> tuple[Refs, DocumentPart]:
    """Return a reference to every type's schema, and the schemas. Pydantic renames types of the same name."""
    bodies = dict.fromkeys(each.schema for each in operations if each.schema is not None)
    answers = dict.fromkeys(
        each
        for operation in operations
        for each in (
            operation.doc.answer,
            operation.doc.unwell,
            *operation.doc.streams.values(),
            *operation.doc.events.values(),
            operation.error,
        )
        if each is not None and each not in bodies
    )
    adapters: list[tuple[object, Literal["validation", "serialization"], TypeAdapter[Any]]] = []
    adapters.extend((each, "validation", TypeAdapter(each)) for each in bodies)
    adapters.extend((each, "serialization", TypeAdapter(each)) for each in answers)
    schemas, whole = TypeAdapter.json_schemas(adapters, ref_template=_REF)
    definitions: DocumentPart = whole["$defs"]
    refs = {kind: dict(ref) for (kind, _), ref in schemas.items()}
    for body in bodies:
        _add_fields_without_effect(definitions[refs[body]["$ref"].rpartition("/")[2]])
    return refs, definitions


def _add_fields_without_effect(schema: DocumentPart) -> None:
    """Add the fields that the server accepts and drops before it validates a body."""
    note = "Accepted, without effect on the answer."
    properties = schema.setdefault("properties", {})
    for name in sorted(WITHOUT_EFFECT):
        properties.setdefault(name, {"description": note})
    schema["patternProperties"] = {"^prompt_cache_": {"description": note}}


def _described(operation: _Operation, refs: Refs, settings: ApiSettings) -> DocumentPart:
    doc = operation.doc
    named = "".join(part.capitalize() for part in operation.path.replace("{", "/").split("/") if part)
    described: DocumentPart = {
        "operationId": f"{operation.method}{named.replace('}', '')}",
        "summary": doc.summary,
        **({"description": doc.description} if doc.description else {}),
        "tags": [doc.tag],
        "responses": _responses(operation, refs, settings),
    }
    parameters = [*map(_in_path, operation.parameters), *map(_in_query, doc.query.items())]
    if parameters:
        described["parameters"] = parameters
    if operation.schema is not None:
        content: DocumentPart = {"schema": refs[operation.schema]}
        if doc.example is not None:
            content["example"] = doc.example
        described["requestBody"] = {"required": True, "content": {_JSON: content}}
    if doc.open and settings.api_keys:
        described["security"] = []
    return described


def _in_path(name: str) -> DocumentPart:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _in_query(parameter: tuple[str, str]) -> DocumentPart:
    name, meaning = parameter
    return {"name": name, "in": "query", "description": meaning, "schema": {"type": "string"}}


def _responses(operation: _Operation, refs: Refs, settings: ApiSettings) -> DocumentPart:
    doc, model = operation.doc, operation.error
    content: DocumentPart = {} if doc.answer is None else {_JSON: {"schema": refs[doc.answer]}}
    for media_type, each in doc.streams.items():
        content[media_type] = {"schema": _EVENT if media_type == EVENT_STREAM else {"type": "string"}}
        if each is not None:
            content[media_type]["x-each"] = refs[each]
        if doc.events and media_type == EVENT_STREAM:
            content[media_type]["x-events"] = {name: refs[kind] for name, kind in doc.events.items()}
    responses: DocumentPart = {"200": {"description": _SUCCESS, "headers": _REQUEST_ID, "content": content}}
    for status in sorted(_statuses(operation, settings)):
        responses[str(status)] = {
            "description": _REASONS[status],
            "headers": _REQUEST_ID | (_RETRY if status in _MAY_RETRY else {}),
            "content": {_JSON: {"schema": _or_error(status, doc, refs, refs[model])}},
        }
    return responses


def _or_error(status: int, doc: RouteDoc[Any, Any], refs: Refs, error: DocumentPart) -> DocumentPart:
    if status == _UNAVAILABLE and doc.unwell is not None:
        return {"anyOf": [refs[doc.unwell], error]}
    return error


def _statuses(operation: _Operation, settings: ApiSettings) -> set[int]:
    statuses = {*_ANY_STATUSES, *operation.doc.more_statuses}
    if operation.schema is not None:
        statuses |= {*_POST_STATUSES}
    if settings.api_keys and not operation.doc.open:
        statuses.add(_UNAUTHENTICATED)
    return statuses
