"""Spans of traces, as the code that makes them knows them. `otlp_traces.py` exports them, `trace_export.py` opens it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

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

    def tell(self, attributes: Attributes, *, name: str = "") -> None:
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
