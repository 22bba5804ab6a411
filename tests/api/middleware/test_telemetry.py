"""Traces: only admitted requests have spans, with their route and their status."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.types import Message
from tests.api.twins import TwinCatalog, TwinService
from tests.default_settings import make_api_settings

from mlx_ring.api.app import build_app
from mlx_ring.core.logs import make_formatter
from mlx_ring.core.traces import Attributes


@dataclass
class RecordedSpan:
    """Span that keeps its attributes."""

    name: str
    attributes: dict[str, object]
    traceparent: str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    error: str | None = None

    def set_attributes(self, attributes: Attributes, *, name: str = "") -> None:
        self.name = name or self.name
        self.attributes |= attributes

    def end(self, at_ns: int | None = None, *, error: str = "") -> None:
        del at_ns
        self.error = error


@dataclass
class RecordingTracer:
    """Tracer that keeps every span."""

    spans: list[RecordedSpan] = field(default_factory=list[RecordedSpan])

    def start(self, name: str, attributes: Attributes, **_: object) -> RecordedSpan:
        self.spans.append(RecordedSpan(name, dict(attributes)))
        return self.spans[-1]

    def close(self) -> None:
        pass


def spans_of(method: str, path: str, key: str) -> list[RecordedSpan]:
    tracing = RecordingTracer()
    settings = make_api_settings(api_keys=("secret",))
    app = build_app(TwinCatalog(TwinService()), settings, tracing)

    async def call() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            await http.request(method, path, json={"prompt": "x"}, headers={"x-api-key": key})

    asyncio.run(call())
    return tracing.spans


def test_post_has_a_span_with_its_route_and_status() -> None:
    (span,) = spans_of("POST", "/v1/completions", "secret")
    assert (span.name, span.error) == ("POST /v1/completions", "")
    assert span.attributes["http.response.status_code"] == 200
    assert str(span.attributes["mlx_ring.request_id"]).startswith("req_")


def test_refused_requests_and_gets_have_no_span() -> None:
    assert not spans_of("POST", "/v1/completions", "guessed")
    assert not spans_of("GET", "/v1/models", "secret")


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_is_no_error_of_the_server(*, stream: bool) -> None:
    tracing = RecordingTracer()
    app = build_app(TwinCatalog(TwinService(automatic=False)), make_api_settings(), tracing)
    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    messages: list[Message] = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "headers": headers,
    }
    asyncio.run(app({**scope, "query_string": b"", "client": ("127.0.0.1", 1)}, receive, send))
    (span,) = tracing.spans
    status = sent[0]["status"] if sent else 499
    assert (span.attributes["http.response.status_code"], span.error) == (status, "")
    assert (status == 499) == (not stream)


@pytest.fixture
def json_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Record all lines as JSON."""
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(make_formatter("json", "mini", "head", None))
    caplog.set_level(logging.INFO, "mlx_ring.api")
    monkeypatch.setattr(logging.getLogger("mlx_ring.api"), "handlers", [handler])
    return handler.stream


def test_every_line_of_a_traced_request_has_its_trace_id_and_no_line_of_others(
    json_lines: io.StringIO,
) -> None:
    broken: Any = TwinService(names=("broken",))
    broken.tokenizer = None
    settings = make_api_settings(api_keys=("secret",))
    app = build_app(TwinCatalog(TwinService(), broken), settings, RecordingTracer())

    async def call() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            # All requests have one context, like pipelined ones.
            for model, key in (("twin", "secret"), ("broken", "secret"), ("twin", "guessed")):
                body = {"prompt": "x", "model": model}
                await http.post("/v1/completions", json=body, headers={"x-api-key": key})
            await http.get("/v1/models/twin", headers={"x-api-key": "secret"})

    asyncio.run(call())
    lines = [json.loads(line) for line in json_lines.getvalue().splitlines()]
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    assert [(line.get("status"), line.get("trace_id")) for line in lines] == [
        (200, trace_id),
        (None, trace_id),
        (500, trace_id),
        (401, None),
        (200, None),
    ]
