"""Requests over HTTP: how many, how long, how they ended, and each one's trace. Middleware round the whole application."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import Metric
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_ring.api.metrics.families import counter, gauge, histogram
from mlx_ring.core.request_context import TRACEPARENT
from mlx_ring.core.traces import Span, Tracing
from mlx_ring.engine.meters import Distribution

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_LEFT = 499
"""The client went before there was a status; nginx's number for it."""
_SERVER_TROUBLE = 500

Key = tuple[str, str, str]
"""Method, route and status."""


class HttpMeter:
    """What was asked over HTTP since the head started."""

    def __init__(self) -> None:
        self.in_progress = 0
        self._requests: Counter[Key] = Counter()
        self._seconds: defaultdict[Key, Distribution] = defaultdict(lambda: Distribution(BOUNDS_S))

    def note(self, key: Key, seconds: float) -> None:
        self._requests[key] += 1
        self._seconds[key].see(seconds)

    def families(self) -> Iterator[Metric]:
        labels = ("method", "route", "status")
        yield counter("http_requests", "Requests over HTTP.", labels, self._requests.items())
        yield histogram(
            "http_request_duration_seconds",
            "From a request's arrival to the last byte of its answer.",
            labels,
            self._seconds.items(),
        )
        yield gauge(
            "http_requests_in_progress", "Requests that are being answered.", (), [((), self.in_progress)]
        )


class Observed:
    """Tells a meter, and opens a span for what may be computed for: a POST."""

    def __init__(
        self,
        app: ASGIApp,
        meter: HttpMeter,
        tracing: Tracing | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._app = app
        self._meter = meter
        self._tracing = tracing
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = _LEFT, self._clock()

        async def send_observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        span = self._open(scope)
        token = TRACEPARENT.set("" if span is None else span.traceparent)
        self._meter.in_progress += 1
        try:
            await self._app(scope, receive, send_observed)
        except Exception:
            status = _SERVER_TROUBLE if status == _LEFT else status
            raise
        finally:
            TRACEPARENT.reset(token)
            self._meter.in_progress -= 1
            method, route = _method(scope), route_of(scope)
            self._meter.note((method, route, str(status)), self._clock() - began)
            if span is not None:
                _close(span, scope, method, route, status)

    def _open(self, scope: Scope) -> Span | None:
        if self._tracing is None or scope["method"] != "POST":
            return None
        headers = Headers(scope=scope)
        return self._tracing.start(
            f"POST {scope['path']}",
            {"http.request.method": "POST", "url.path": scope["path"], "url.scheme": scope["scheme"]},
            parent=headers.get("traceparent", ""),
            state=headers.get("tracestate", ""),
            kind="server",
        )


def _close(span: Span, scope: Scope, method: str, route: str, status: int) -> None:
    span.tell(
        {
            "http.route": route,
            "http.response.status_code": status,
            "mlx_ring.request_id": scope.get("request_id", ""),
        },
        name=f"{method} {route}",
    )
    span.end(error=str(status) if status >= _SERVER_TROUBLE else "")


def route_of(scope: Scope) -> str:
    """As it was declared, so that there are only so many; `none` for what no route took."""
    return getattr(scope.get("route"), "path", "") or "none"


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in _METHODS else "other"
