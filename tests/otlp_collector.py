"""A collector of traces: a real HTTP server on the loopback that reads OTLP's protobuf."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


@dataclass(frozen=True)
class ReceivedSpan:
    """A span, as it arrived."""

    trace: str
    id: str
    parent: str
    name: str
    started_ns: int
    ended_ns: int
    is_error: bool
    attributes: Mapping[str, object]
    resource: Mapping[str, object]


@dataclass
class Collector:
    url: str
    spans: list[ReceivedSpan] = field(default_factory=list[ReceivedSpan])
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, *names: str, within_s: float = 60.0) -> list[ReceivedSpan]:
        """Wait for a span of each of these names, and return all spans."""
        with self.changed:
            assert self.changed.wait_for(
                lambda: set(names) <= {span.name for span in self.spans}, within_s
            ), f"{names} did not all arrive; {[span.name for span in self.spans]} did"
            return list(self.spans)

    def take(self, request: ExportTraceServiceRequest) -> None:
        with self.changed:
            for of_resource in request.resource_spans:
                resource = _plain(of_resource.resource.attributes)
                for of_scope in of_resource.scope_spans:
                    self.spans += [
                        ReceivedSpan(
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.name,
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            span.status.code == span.status.STATUS_CODE_ERROR,
                            _plain(span.attributes),
                            resource,
                        )
                        for span in of_scope.spans
                    ]
            self.changed.notify_all()


def _plain(attributes: Iterable[KeyValue]) -> dict[str, object]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in attributes
    }


@contextmanager
def running_collector() -> Generator[Collector]:
    """Run a collector on a free port."""
    collector = Collector("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            assert self.headers["content-type"] == "application/x-protobuf"
            request = ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())
            collector.take(request)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
