"""The application: every route, behind the guard."""

from __future__ import annotations

from starlette.applications import Starlette

from mlx_ring.api import docs
from mlx_ring.api.anthropic.dialect import ANTHROPIC
from mlx_ring.api.context import ApiContext
from mlx_ring.api.dialect import Dialects
from mlx_ring.api.errors import install_error_handlers
from mlx_ring.api.journal import Journal
from mlx_ring.api.metrics import page as metrics
from mlx_ring.api.middleware.access_log import AccessLog
from mlx_ring.api.middleware.guard import Admission, BodyMemoryMiddleware, Guard, RequestBodyMemory
from mlx_ring.api.middleware.telemetry import HttpMeter, HttpMetricsMiddleware, TracingMiddleware
from mlx_ring.api.ollama.dialect import OLLAMA
from mlx_ring.api.openai.dialect import OPENAI
from mlx_ring.api.openapi import ApiRoute, describe_api
from mlx_ring.api.ops import cache, cluster, events, health, machines, models, what_if
from mlx_ring.api.page import routes as page
from mlx_ring.api.service import ModelCatalog
from mlx_ring.api.settings import ApiSettings
from mlx_ring.core.traces import Tracing

DIALECTS = Dialects(OPENAI, ANTHROPIC, OLLAMA)
"""Supported APIs; a path that no other API claims is OpenAI's."""
_OPERATIONS = (models, health, cluster, machines, what_if, cache, events, docs)


def build_app(
    catalog: ModelCatalog,
    settings: ApiSettings,
    tracing: Tracing | None = None,
    admission: Admission | None = None,
    journal: Journal | None = None,
) -> Starlette:
    """Build the HTTP side of the served models; once `admission` is closed, new requests are refused."""
    admission = admission or Admission()
    context = ApiContext(catalog, settings, admission, journal=journal)
    http = HttpMeter()
    routers = [
        *(routes(context) for dialect in DIALECTS for routes in dialect.routes),
        *(module.routes(context) for module in _OPERATIONS),
        *(metrics.routes(context, http), page.routes()),
    ]
    app = Starlette(routes=[route for router in routers for route in router.routes])
    app.router.redirect_slashes = False
    if journal is not None:
        journal.serve(
            app,
            {
                route.path: route.plain
                for route in app.routes
                if isinstance(route, ApiRoute) and route.method == "POST"
            },
        )
    app.state.keep_alive_s = settings.keep_alive_s
    app.state.rest_of_answer = context.rest
    describe_api(app, settings, DIALECTS)
    install_error_handlers(app, DIALECTS)
    app.add_middleware(
        BodyMemoryMiddleware, settings=settings, memory=RequestBodyMemory(settings.max_bodies_bytes)
    )
    if tracing is not None:
        app.add_middleware(TracingMiddleware, tracing=tracing)
    app.add_middleware(Guard, settings=settings, admission=admission)
    app.add_middleware(HttpMetricsMiddleware, meter=http)
    if settings.access_log:
        app.add_middleware(AccessLog)
    return app
