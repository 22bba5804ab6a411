"""`/cluster/events`: what `/cluster/status` and `/cache/stats` tell, and more, as it changes."""

from __future__ import annotations

from contextlib import aclosing

from fastapi import APIRouter
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_ring.api.connection import while_connected
from mlx_ring.api.live.feed import Feed
from mlx_ring.api.live.looks import Looks
from mlx_ring.api.routes import ApiContext
from mlx_ring.core.logs import recent_lines

_DESCRIPTION = """Server-sent events, one a second at most: `state` holds everything, `change` is a JSON patch (RFC 6902) of it,
`log` holds lines of the head's log. Browsers' EventSource sends no API key; `fetch` does."""


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()
    feed = Feed(Looks(context).take, recent_lines)

    async def cluster_events() -> Response:
        return EventStream(feed)

    router.add_api_route(
        "/cluster/events",
        cluster_events,
        methods=["GET"],
        response_class=EventStream,
        description=_DESCRIPTION,
        responses={
            200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
            429: {"description": "Too many watch."},
        },
    )
    return router


class EventStream(Response):
    """A watcher's events, until it goes."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One watcher too many gets its status before the first byte."""
        del scope
        await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with self._feed.watching() as events, aclosing(events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
