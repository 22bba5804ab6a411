"""One API that clients speak, as one value, and which of them a request belongs to.

Its values leave as JSON: whole, a line each, or as server-sent events.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar

from fastapi import APIRouter
from pydantic import Field
from starlette.types import Scope
from typing_extensions import TypedDict, TypeForm

Json = dict[str, object]

_ENCODER = json.JSONEncoder(separators=(",", ":"))


def json_bytes(value: Mapping[str, object]) -> bytes:
    """Encode a value in ASCII: some clients take U+2028 and its like for the end of a line."""
    return _ENCODER.encode(value).encode()


def event(value: Mapping[str, object], name: str | None = None) -> bytes:
    """Encode a server-sent event, with a name where the dialect has names."""
    named = b"" if name is None else b"event: %s\n" % name.encode()
    return named + b"data: %s\n\n" % json_bytes(value)


def named_event(value: Mapping[str, object]) -> bytes:
    """Encode a server-sent event with its type as its name."""
    return event(value, str(value["type"]))


class ErrorNumbers(TypedDict, total=False):
    """Numbers of a prompt that exceeds the context."""

    n_prompt_tokens: Annotated[int, Field(description="Number of the prompt's tokens.")]
    n_ctx: Annotated[int, Field(description="Size of the context in tokens.")]


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """Description of an error, which every dialect writes in its own form."""

    status: int
    message: str
    type: str
    """Kind of the error, as OpenAI names it."""
    code: str | None = None
    param: str | None = None
    """Field at fault."""
    passes: bool = False
    """True where the same request may well succeed later."""
    more: ErrorNumbers = field(default_factory=ErrorNumbers)
    """Numbers that a client could want apart from the message."""


ContextT = TypeVar("ContextT")
ErrorT = TypeVar("ErrorT", bound=Mapping[str, object])


@dataclass(frozen=True, slots=True)
class Dialect(Generic[ContextT, ErrorT]):
    """One API that clients speak: its paths, its routes, and how it reports errors."""

    name: str
    prefixes: tuple[str, ...]
    """Paths that belong to the dialect, with everything below them."""
    routes: tuple[Callable[[ContextT], APIRouter], ...]
    """Makers of its routers, in the order in which paths are matched."""
    error_body: Callable[[ErrorInfo, str], ErrorT]
    """Writer of an error; takes the request's id too."""
    error_schema: TypeForm[ErrorT]
    """Type of what `error_body` writes."""
    stream_failure: Callable[[ErrorT], bytes]
    """Encoder of an error body that ends a stream."""
    request_id_header: str | None = None
    """Second header with the request's id, beside `x-request-id`."""


class Dialects:
    """The dialects of one application. A path that no other dialect claims belongs to the first."""

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
