"""Spans of POST requests. The guard runs before, so refused requests have none."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_ring.api.middleware.access_log import LEFT, SERVER_ERROR, route_of
from mlx_ring.core.traces import TRACEPARENT, Span, Tracing


class TracingMiddleware:
    """ASGI middleware that opens a span around each POST request."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        span = self._open(scope)
        if span is None:
            await self._app(scope, receive, send)
            return
        status = LEFT

        async def send_recorded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        token = TRACEPARENT.set(span.traceparent)
        try:
            await self._app(scope, receive, send_recorded)
        except Exception:
            status = SERVER_ERROR if status == LEFT else status
            raise
        finally:
            TRACEPARENT.reset(token)
            _close(span, scope, status)

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
    route = route_of(scope)
    span.set_attributes(
        {
            "http.route": route,
            "http.response.status_code": status,
            "mlx_ring.request_id": scope.get("request_id", ""),
        },
        name=f"POST {route}",
    )
    span.end(error=str(status) if status >= SERVER_ERROR else "")
