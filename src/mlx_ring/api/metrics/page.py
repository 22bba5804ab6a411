"""`/metrics`: everything that is measured, for Prometheus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from importlib.metadata import version

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from starlette.responses import PlainTextResponse, Response

from mlx_ring.api.metrics.families import gauge
from mlx_ring.api.metrics.http import HttpMeter
from mlx_ring.api.metrics.machines import (
    LinkCounts,
    instance_families,
    link_families,
    node_families,
    worker_families,
    workers_now,
)
from mlx_ring.api.metrics.requests import replicas_of, request_families, step_families
from mlx_ring.api.routes import ApiContext
from mlx_ring.api.service import ModelCatalog


class Numbers:
    """Everything, as a collector of Prometheus' client."""

    def __init__(self, catalog: ModelCatalog, http: HttpMeter) -> None:
        self._catalog = catalog
        self._http = http
        self._links = LinkCounts()

    def collect(self) -> Iterator[Metric]:
        models = list(self._catalog.models)
        replicas = [replica for model in models for replica in replicas_of(model)]
        workers = workers_now(replicas)
        yield gauge("build_info", "1, with the version.", ("version",), [((version("mlx-ring"),), 1.0)])
        yield gauge("uptime_seconds", "Since the head started.", (), [((), time.time() - models[0].created)])
        yield from request_families(replicas, models)
        yield from step_families(replicas)
        yield from instance_families(replicas, models)
        yield from worker_families(replicas, workers, self._links)
        yield from node_families(self._catalog.cluster().nodes, workers)
        yield from link_families(self._catalog.links)
        yield from self._http.families()


class _Collected:
    """What was read in the event loop, to be written in a thread of its own."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def routes(context: ApiContext, http: HttpMeter) -> APIRouter:
    router = APIRouter()
    numbers = Numbers(context.catalog, http)
    process = CollectorRegistry()
    ProcessCollector(registry=process)

    async def metrics(request: Request) -> Response:
        """Numbers for Prometheus, in its text format or in OpenMetrics'."""
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        registry = CollectorRegistry()
        registry.register(_Collected([*numbers.collect(), *process.collect()]))
        return Response(await asyncio.to_thread(encode, registry), headers={"content-type": media_type})

    router.add_api_route("/metrics", metrics, methods=["GET"], response_class=PlainTextResponse)
    return router
