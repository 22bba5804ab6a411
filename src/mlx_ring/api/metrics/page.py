"""`/metrics`: all measurements, for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from itertools import chain

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router

from mlx_ring.api.context import ApiContext
from mlx_ring.api.metrics.machines import (
    LinkCounts,
    backend_families,
    energy_families,
    instance_families,
    link_families,
    node_families,
    worker_families,
    workers_now,
)
from mlx_ring.api.metrics.requests import (
    gauge,
    http_families,
    journal_families,
    replicas_of,
    request_families,
    step_families,
)
from mlx_ring.api.middleware.telemetry import HttpMeter
from mlx_ring.api.openapi import RouteDoc, documented_get

_END = b"# EOF\n"
"""Last line in the OpenMetrics format."""

_DOC: RouteDoc[Response] = RouteDoc("Export metrics for Prometheus", None, {"text/plain": None})


class MetricsCollector:
    """Collector of all metrics, as Prometheus' client defines it."""

    def __init__(self, context: ApiContext, http: HttpMeter) -> None:
        self._context, self._http = context, http
        self._links = LinkCounts()
        self._version = version("mlx-ring")

    def collect(self) -> Iterator[Metric]:
        catalog = self._context.catalog
        models = list(catalog.models)
        replicas = [replica for model in models for replica in replicas_of(model)]
        workers = workers_now(replicas)
        yield gauge(
            "build_info", "Constant 1, labelled with the version.", ("version",), [((self._version,), 1.0)]
        )
        yield gauge("uptime_seconds", "Time since the head started.", (), [((), self._context.uptime_s)])
        yield gauge("head_tasks", "Running coroutines of the head.", (), [((), len(asyncio.all_tasks()))])
        yield from request_families(replicas, models)
        yield from step_families(replicas)
        yield from instance_families(replicas, models)
        yield from worker_families(replicas, workers, self._links)
        cluster = catalog.cluster()
        yield from node_families(cluster.nodes, workers)
        yield from energy_families(cluster)
        yield from backend_families(cluster.hung_backends)
        yield from link_families(catalog.links)
        yield from journal_families(self._context.journal)
        yield from http_families(self._http)


class _Family:
    """Collector of a single family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


async def encode_families(families: Iterable[Metric], encode: Callable[[Collector], bytes]) -> bytes:
    """Encode families one by one, and let the event loop run other tasks in between."""
    parts: list[bytes] = []
    for family in families:
        parts.append(encode(_Family(family)).removesuffix(_END))
        await asyncio.sleep(0)
    is_open_metrics = encode(CollectorRegistry()) == _END
    return b"".join([*parts, _END if is_open_metrics else b""])


def routes(context: ApiContext, http: HttpMeter) -> Router:
    router = Router()
    collector = MetricsCollector(context, http)
    process = CollectorRegistry()
    ProcessCollector(registry=process)

    async def metrics(request: Request) -> Response:
        """Return the metrics in Prometheus' text format or in OpenMetrics."""
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        page = await encode_families(chain(collector.collect(), process.collect()), encode)
        return Response(page, headers={"content-type": media_type})

    documented_get(router, "/metrics", metrics, _DOC)
    return router
