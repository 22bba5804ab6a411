"""Metrics of HTTP requests: number, duration and status."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_ring.api.metrics.requests import counter, gauge, histogram
from mlx_ring.core.engine_stats import Distribution

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
LEFT = 499
"""Status of a request whose client left before the answer's status, as in nginx."""
SERVER_TROUBLE = 500

Key = tuple[str, str, str]
"""Method, route and status."""


class HttpMeter:
    """Meter of HTTP requests since the head started."""

    def __init__(self) -> None:
        self.in_progress = 0
        self._requests: Counter[Key] = Counter()
        self._seconds: defaultdict[Key, Distribution] = defaultdict(lambda: Distribution(BOUNDS_S))

    def record(self, key: Key, seconds: float) -> None:
        self._requests[key] += 1
        self._seconds[key].record(seconds)

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


class HttpMetricsMiddleware:
    """ASGI middleware that records each request."""

    def __init__(
        self,
        app: ASGIApp,
        meter: HttpMeter,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._app = app
        self._meter = meter
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = LEFT, self._clock()

        async def send_observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._meter.in_progress += 1
        try:
            await self._app(scope, receive, send_observed)
        except Exception:
            status = SERVER_TROUBLE if status == LEFT else status
            raise
        finally:
            self._meter.in_progress -= 1
            self._meter.record((_method(scope), route_of(scope), str(status)), self._clock() - began)


def route_of(scope: Scope) -> str:
    """Return the route's declared path, which limits the number of series; `none` without a route."""
    return getattr(scope.get("route"), "path", "") or "none"


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in _METHODS else "other"
