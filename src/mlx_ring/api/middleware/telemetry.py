"""Telemetry of each HTTP request: metrics of number, duration and status, and spans of POST requests."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_ring.core.engine_stats import Distribution
from mlx_ring.core.traces import TRACEPARENT, Span, Tracing

_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_LEFT = 499
"""Status of a request whose client left before the answer's status, as in nginx."""
_SERVER_ERROR = 500

Key = tuple[str, str, str]
"""Method, route and status."""


class HttpMeter:
    """Meter of HTTP requests since the head started."""

    def __init__(self) -> None:
        self.in_progress = 0
        self.requests: Counter[Key] = Counter()
        self.seconds: defaultdict[Key, Distribution] = defaultdict(lambda: Distribution(_BOUNDS_S))

    def record(self, key: Key, seconds: float) -> None:
        self.requests[key] += 1
        self.seconds[key].record(seconds)


@dataclass(slots=True)
class _Answer:
    """The answer to one request, whose status is observed while an application sends it."""

    status: int = _LEFT

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer. If it raises before it sends a status, the status is 500.

        A client that left is no error of the application.
        """

        async def send_observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            await send(message)

        try:
            await app(scope, receive, send_observed)
        except ClientDisconnect:
            raise
        except Exception:
            self.status = _SERVER_ERROR if self.status == _LEFT else self.status
            raise


class HttpMetricsMiddleware:
    """ASGI middleware that records each request."""

    def __init__(self, app: ASGIApp, meter: HttpMeter) -> None:
        self._app = app
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer, began = _Answer(), time.perf_counter()
        self._meter.in_progress += 1
        try:
            await answer.run(self._app, scope, receive, send)
        finally:
            self._meter.in_progress -= 1
            key = (_method(scope), _route(scope), str(answer.status))
            self._meter.record(key, time.perf_counter() - began)


def _route(scope: Scope) -> str:
    """Return the route's declared path, which limits the number of series; `none` without a route."""
    return getattr(scope.get("route"), "path", "") or "none"


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in _METHODS else "other"


class TracingMiddleware:
    """ASGI middleware that opens a span around each POST request.

    The guard runs before, so refused requests have none.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        span = self._open(scope)
        if span is None:
            await self._app(scope, receive, send)
            return
        answer = _Answer()
        # The guard and the access log write their lines afterwards, with the id of the trace.
        TRACEPARENT.set(span.traceparent)
        try:
            await answer.run(self._app, scope, receive, send)
        finally:
            _close(span, scope, answer.status)

    def _open(self, scope: Scope) -> Span | None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        headers = Headers(scope=scope)
        return self._tracing.start(
            f"POST {scope['path']}",
            {"http.request.method": "POST", "url.path": scope["path"], "url.scheme": scope["scheme"]},
            parent=headers.get("traceparent", ""),
            state=headers.get("tracestate", ""),
            kind="server",
        )


def _close(span: Span, scope: Scope, status: int) -> None:
    route = _route(scope)
    span.set_attributes(
        {
            "http.route": route,
            "http.response.status_code": status,
            "mlx_ring.request_id": scope.get("request_id", ""),
        },
        name=f"POST {route}",
    )
    span.end(error=str(status) if status >= _SERVER_ERROR else "")
