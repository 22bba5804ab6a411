"""Dialects: the supported APIs, each as one value, and the choice of a request's dialect.

A dialect sends values as JSON: whole, one per line, or as server-sent events.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from starlette.routing import Router
from starlette.types import Scope
from typing_extensions import TypedDict, TypeForm

Json = dict[str, object]

_ENCODER = json.JSONEncoder(separators=(",", ":"))


def json_bytes(value: Mapping[str, object]) -> bytes:
    """Encode a value in ASCII, because some clients read U+2028 and similar characters as the end of a line."""
    return _ENCODER.encode(value).encode()


def event(value: Mapping[str, object], name: str | None = None) -> bytes:
    """Encode a server-sent event, with a name if the dialect names events."""
    named = b"" if name is None else b"event: %s\n" % name.encode()
    return named + b"data: %s\n\n" % json_bytes(value)


def named_event(value: Mapping[str, object]) -> bytes:
    """Encode a server-sent event with its type as its name."""
    return event(value, str(value["type"]))


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
        return schema


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


class ErrorNumbers(TypedDict, total=False):
    """Token counts of a prompt that exceeds the context."""

    n_prompt_tokens: Annotated[int, Field(description="Number of the prompt's tokens.")]
    n_ctx: Annotated[int, Field(description="Size of the context in tokens.")]


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """Description of an error, which every dialect writes in its own form."""

    status: int
    message: str
    type: str
    """OpenAI's name for the kind of error."""
    code: str | None = None
    param: str | None = None
    """Field at fault."""
    passes: bool = False
    """True if the same request may succeed later."""
    more: ErrorNumbers = field(default_factory=ErrorNumbers)
    """Numbers of the message, for programs."""


ContextT = TypeVar("ContextT")
ErrorT = TypeVar("ErrorT", bound=Mapping[str, object])


@dataclass(frozen=True, slots=True)
class Dialect(Generic[ContextT, ErrorT]):
    """One supported API: its paths, its routes and the form of its errors."""

    name: str
    prefixes: tuple[str, ...]
    """Paths of the dialect. All paths below them belong to it too."""
    routes: tuple[Callable[[ContextT], Router], ...]
    """Functions that make its routers, in the order in which paths are matched."""
    error_body: Callable[[ErrorInfo, str], ErrorT]
    """Function that writes an error. Its second argument is the request's id."""
    error_schema: TypeForm[ErrorT]
    """Type of an error body."""
    stream_failure: Callable[[ErrorT], bytes]
    """Encoder of an error body that ends a stream."""
    request_id_header: str | None = None
    """Second header with the request's id, beside `x-request-id`."""


class Dialects:
    """Dialects of one application. A path that no other dialect claims belongs to the first."""

    def __init__(self, default: Dialect[Any, Any], *others: Dialect[Any, Any]) -> None:
        self._default = default
        self._others = others

    def __iter__(self) -> Iterator[Dialect[Any, Any]]:
        return iter((self._default, *self._others))

    def of(self, path: str) -> Dialect[Any, Any]:
        """Return the dialect of a path."""
        for dialect in self._others:
            if any(path == prefix or path.startswith(f"{prefix}/") for prefix in dialect.prefixes):
                return dialect
        return self._default


def dialect_of(scope: Scope) -> Dialect[Any, Any]:
    """Return the dialect of a request that an application with registered dialects serves."""
    dialects: Dialects = scope["app"].state.dialects
    return dialects.of(scope["path"])
