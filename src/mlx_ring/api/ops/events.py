"""`/cluster/events`: what `/cluster/status` and `/cache/stats` tell, and more, as it changes."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import Response

from mlx_ring.api.errors import error_body
from mlx_ring.api.live.feed import Feed, event
from mlx_ring.api.live.looks import Looks
from mlx_ring.api.openapi import told
from mlx_ring.api.ops import answers as about
from mlx_ring.api.routes import ApiContext
from mlx_ring.api.streaming import LiveAnswer
from mlx_ring.core.kept_lines import recent_lines


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()
    feed = Feed(Looks(context).take, recent_lines)

    async def cluster_events(request: Request) -> Response:
        def failure(error: Exception) -> bytes:
            return event("error", error_body(error, request.url.path))

        return LiveAnswer(feed.watching, _as_they_come, failure)

    told(router, "/cluster/events", cluster_events, about.CLUSTER_EVENTS)
    return router


def _as_they_come(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    return events
