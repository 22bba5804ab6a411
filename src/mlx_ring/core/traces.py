"""Context of the request that the code works for, and interfaces of trace spans.

The handler that accepts a request sets the context variables; tasks that it starts inherit them. Log lines and spans
read them. `otlp_traces.py` exports spans, and `trace_export.py` opens the exporter.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, Protocol

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""As clients read it in `x-request-id`; empty outside of requests."""
TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")
"""W3C's, of the span that is open for the request; empty where it is not traced."""


CLIENT: ContextVar[str] = ContextVar("client", default="")
"""Who asks, as shares go: by an API key, or by an address. Never told; empty outside of requests."""


def new_request_id() -> str:
    """Of a request that brings none of its own."""
    return f"req_{secrets.token_hex(12)}"


Attributes = Mapping[str, str | int | float | bool | tuple[str, ...]]
SpanKind = Literal["server", "internal"]


@dataclass(frozen=True, slots=True)
class TracePlace:
    """A worker, on whose node a span was made."""

    node: str
    stage: int
    rank: int


class Span(Protocol):
    """A span that is open. Times are Unix time, nanoseconds; None is now."""

    @property
    def traceparent(self) -> str:
        """W3C's, for what is done within it."""
        ...

    def set_attributes(self, attributes: Attributes, *, name: str = "") -> None:
        """Add to what it tells; a name replaces its own."""
        ...

    def end(self, at_ns: int | None = None, *, error: str = "") -> None:
        """It is over; `error` says with which kind of error."""
        ...


class Tracing(Protocol):
    """Where spans go."""

    def start(
        self,
        name: str,
        attributes: Attributes,
        *,
        parent: str = "",
        state: str = "",
        kind: SpanKind = "internal",
        at_ns: int | None = None,
        place: TracePlace | None = None,
    ) -> Span | None:
        """Open a span; None where its trace is not recorded.

        Args:
            name: what is done.
            attributes: what is known of it.
            parent: a `traceparent`, a client's perhaps; a trace of its own begins where that is empty or nonsense.
            state: the `tracestate` that came with it.
            kind: whether it is what a client asked for.
            at_ns: when it began.
            place: where, if not in the head.
        """
        ...

    def close(self) -> None:
        """Send what is left, within seconds."""
        ...
