"""The head's HTTP server inside the head's event loop, which alone decides when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Generator

import uvicorn

from mlx_ring.api.admission import Admission
from mlx_ring.api.app import build_app
from mlx_ring.api.service import ModelCatalog
from mlx_ring.api.settings import ApiSettings
from mlx_ring.core.config import Settings, api_keys, bodies_mb
from mlx_ring.core.traces import Tracing
from mlx_ring.node.connections import ConnectionLimits, HttpConfig


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the head ends it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def end_http(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    server.should_exit = True
    await asyncio.wait((serving,))


def http_config(
    catalog: ModelCatalog,
    settings: Settings,
    admission: Admission,
    tls: ssl.SSLContext | None,
    tracing: Tracing | None,
) -> HttpConfig:
    """What is served, and to whom."""
    app = build_app(
        catalog,
        ApiSettings(
            host=settings.host,
            allowed_hosts=settings.allowed_hosts,
            allowed_origins=settings.allowed_origins,
            api_keys=api_keys(settings),
            default_max_tokens=settings.default_max_tokens,
            max_body_bytes=settings.max_request_mb << 20,
            max_bodies_bytes=bodies_mb(settings) << 20,
            client_timeout_s=settings.client_timeout_s,
            access_log=settings.access_log == "on",
        ),
        tracing,
        admission,
    )
    limits = ConnectionLimits(
        settings.max_connections, settings.http_timeout_keep_alive, settings.client_timeout_s
    )
    return HttpConfig(app, limits, tls)
