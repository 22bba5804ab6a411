"""Context of the request that the code works for, and interfaces of trace spans.

The handler that accepts a request sets the context variables; tasks that it starts inherit them. Log lines and spans
read them. `otlp_traces.py` exports spans, which only the extra `otel` makes possible.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import secrets
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, Protocol

from mlx_ring.core.errors import ConfigError

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request, as clients read it in `x-request-id`; empty outside of requests."""
TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")
"""W3C `traceparent` of the span that is open for the request; empty if it is not traced."""


CLIENT: ContextVar[str] = ContextVar("client", default="")
"""Client for fair sharing: by its API key, or its address. Never logged; empty outside of requests."""
REQUEST_TASK: ContextVar[asyncio.Task[Any] | None] = ContextVar("request_task", default=None)
"""Task that lasts as long as the request. Others may prepare and send its answer; None outside of requests."""
FOR_OWNER = "journal "
"""Beginning of the client's name where an answer is computed for the owner of a key whose client has left."""


def owner_of(client: str) -> str:
    """Return the digest of a client's API key, 16 bytes in hexadecimal; empty for a client without one."""
    if client.startswith(FOR_OWNER):
        return client.removeprefix(FOR_OWNER)
    return hashlib.sha256(client.encode()).hexdigest()[:32] if client.startswith("key ") else ""


def new_request_id() -> str:
    """Return an id for a request that brings none."""
    return f"req_{secrets.token_hex(12)}"


Attributes = Mapping[str, str | int | float | bool | tuple[str, ...]]
SpanKind = Literal["server", "internal"]


def client_at(host: str) -> str:
    """Return the client at a connection's address: one machine may use a whole /64 of IPv6."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


@dataclass(frozen=True, slots=True)
class TracePlace:
    """Worker on whose node a span was made."""

    node: str
    stage: int
    rank: int


class Span(Protocol):
    """Open span. Times are Unix time, nanoseconds; None is now."""

    @property
    def traceparent(self) -> str:
        """W3C `traceparent` for spans within it."""
        ...

    def set_attributes(self, attributes: Attributes, *, name: str = "") -> None:
        """Add attributes; a name replaces the span's own."""
        ...

    def end(self, at_ns: int | None = None, *, error: str = "") -> None:
        """End the span; `error` names the kind of error."""
        ...


class Tracing(Protocol):
    """Destination of spans."""

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
        """Open a span; return None if its trace is not recorded.

        Args:
            name: name of the operation.
            attributes: initial attributes.
            parent: a `traceparent`, perhaps a client's; an empty or invalid one starts a new trace.
            state: the `tracestate` that came with it.
            kind: "server" for a client's request.
            at_ns: time of its beginning.
            place: place of the operation, if not in the head.
        """
        ...

    def close(self) -> None:
        """Send the remaining spans within seconds."""
        ...


# ---- export

_EXPORTER = "mlx_ring.core.otlp_traces"


def check_exporter(endpoint: str | None) -> None:
    """Check that traces can be exported, if an endpoint is set.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if endpoint is None:
        return
    try:
        import_module(_EXPORTER)
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint is {endpoint}, and OpenTelemetry is not installed ({error}): "
            "install it with pip install 'mlx-ring[otel]', or leave the flag out."
        ) from error


def open_tracing(endpoint: str | None, node: str, version: str) -> Tracing | None:
    """Start the export of traces to an endpoint; return None without one.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if endpoint is None:
        return None
    check_exporter(endpoint)
    # OpenTelemetry may be missing, so it is loaded by name.
    exporter: Callable[[str, str, str], Tracing] = import_module(_EXPORTER).OtlpTraces
    return exporter(endpoint, node, version)
