"""Export of traces over OTLP/HTTP by OpenTelemetry's SDK, from the extra `otel`.

A separate thread sends them in batches.

The SDK reads sampling, headers and the service's name from the environment (`OTEL_TRACES_SAMPLER`,
`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_SERVICE_NAME`). By default a client that says whether it records its trace decides,
and every other request is recorded.
"""

from __future__ import annotations

import threading
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mlx_ring.core.traces import Attributes, Span, SpanKind, TracePlace

_PATH = "/v1/traces"
_SCOPE = "mlx_ring"
_LAST_BATCH_S = 3.0
_KINDS = {"server": trace.SpanKind.SERVER, "internal": trace.SpanKind.INTERNAL}
_CONTEXT = TraceContextTextMapPropagator()


class _OpenSpan:
    """Open span that implements `Span`."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def set_attributes(self, attributes: Attributes, *, name: str = "") -> None:
        self._span.set_attributes(dict(attributes))
        if name:
            self._span.update_name(name)

    def end(self, at_ns: int | None = None, *, error: str = "") -> None:
        if error:
            self._span.set_status(Status(StatusCode.ERROR))
            self._span.set_attribute("error.type", error)
        self._span.end(at_ns)


class OtlpTraces:
    """Exporter that implements `Tracing`."""

    def __init__(self, endpoint: str, node: str, version: str) -> None:
        path = urlsplit(endpoint).path
        self._exporter = OTLPSpanExporter(endpoint if path.strip("/") else endpoint.rstrip("/") + _PATH)
        self._processor = BatchSpanProcessor(self._exporter)
        self._version = version
        self._head = self._tracer({"host.name": node})
        self._tracers: dict[TracePlace, trace.Tracer] = {}

    def _tracer(self, where: Attributes) -> trace.Tracer:
        """Return the tracer of a place. Each place is a separate resource, so that a node's spans carry its name."""
        named = Resource.create({"service.version": self._version, **where})
        if str(named.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            named = named.merge(Resource({SERVICE_NAME: "mlx-ring"}))
        provider = TracerProvider(resource=named, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        return provider.get_tracer(_SCOPE, self._version)

    def _tracer_at(self, place: TracePlace | None) -> trace.Tracer:
        if place is None:
            return self._head
        if place not in self._tracers:
            self._tracers[place] = self._tracer(
                {"host.name": place.node, "service.instance.id": f"{place.node}/{place.stage}/{place.rank}"}
            )
        return self._tracers[place]

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
        """Open a span; return None if its trace is not recorded."""
        span = self._tracer_at(place).start_span(
            name,
            # A context that another library made current does not count.
            _CONTEXT.extract({"traceparent": parent, "tracestate": state}, context=Context()),
            _KINDS[kind],
            dict(attributes),
            start_time=at_ns,
        )
        return _OpenSpan(span) if span.is_recording() else None

    def close(self) -> None:
        """Send the remaining spans, but do not wait long for a collector that does not answer."""
        closing = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(_LAST_BATCH_S)
        if closing.is_alive():
            self._exporter.shutdown()
