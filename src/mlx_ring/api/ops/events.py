"""`/cluster/events`: what `/cluster/status` and `/cache/stats` tell, and more, as it changes."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import Response

from mlx_ring.api.errors import error_body
from mlx_ring.api.live.feed import Feed, event
from mlx_ring.api.live.looks import Looks
from mlx_ring.api.routes import ApiContext
from mlx_ring.api.streaming import EVENT_STREAM, LiveAnswer
from mlx_ring.core.kept_lines import recent_lines

_DESCRIPTION = """Server-sent events, one a second at most: `state` holds everything, `change` is a JSON patch (RFC 6902) of it,
`log` holds lines of the head's log. Browsers' EventSource sends no API key; `fetch` does."""


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()
    feed = Feed(Looks(context).take, recent_lines)

    async def cluster_events(request: Request) -> Response:
        def failure(error: Exception) -> bytes:
            return event("error", error_body(error, request.scope))

        return LiveAnswer(feed.watching, _as_they_come, failure)

    router.add_api_route(
        "/cluster/events",
        cluster_events,
        methods=["GET"],
        response_class=Response,
        description=_DESCRIPTION,
        responses={
            200: {"content": {EVENT_STREAM: {"schema": {"type": "string"}}}},
            429: {"description": "Too many watch."},
        },
    )
    return router


def _as_they_come(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    return events
