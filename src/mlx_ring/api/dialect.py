"""Dialects: the supported APIs, each as one value, and the choice of a request's dialect.

A dialect sends values as JSON: whole, one per line, or as server-sent events.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field
from starlette.datastructures import Headers
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
    shared_prefixes: tuple[str, ...] = ()
    """Paths of the default dialect that this API has too."""
    client_header: str = ""
    """Header with which all clients of this API send its requests, also to the shared paths."""


class Dialects:
    """Dialects of one application. A path that no other dialect claims belongs to the first."""

    def __init__(self, default: Dialect[Any, Any], *others: Dialect[Any, Any]) -> None:
        self._default = default
        self._others = others

    def __iter__(self) -> Iterator[Dialect[Any, Any]]:
        return iter((self._default, *self._others))

    def of(self, path: str, headers: Container[str] = ()) -> Dialect[Any, Any]:
        """Return the dialect of a path. The names of the request's headers tell who reads the answer of a shared path."""
        for dialect in self._others:
            if _is_below(path, dialect.prefixes):
                return dialect
            if _is_below(path, dialect.shared_prefixes) and dialect.client_header in headers:
                return dialect
        return self._default


def _is_below(path: str, prefixes: tuple[str, ...]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes)


def dialect_of(scope: Scope) -> Dialect[Any, Any]:
    """Return the dialect of a request that an application with registered dialects serves."""
    dialects: Dialects = scope["app"].state.dialects
    return dialects.of(scope["path"], Headers(scope=scope))
