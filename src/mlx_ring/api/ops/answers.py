"""What the server's own routes answer, as schemas for `/openapi.json`."""

from __future__ import annotations

from typing import Literal, NotRequired

from starlette.responses import Response

from mlx_ring.api.openai.schemas import Model, Performance, Usage
from mlx_ring.api.openapi import JsonObject, RouteDoc
from mlx_ring.api.ops.status import ClusterStatus
from mlx_ring.api.streaming import EVENT_STREAM

_TAG = "operations"


class Generated(JsonObject):
    id: str
    model: str
    text: str
    finish_reason: Literal["stop", "length"]
    usage: Usage
    performance: Performance


class ServiceInfo(JsonObject):
    service: Literal["mlx-ring"]
    version: str
    model: str
    models: list[str]
    status: Literal["ready", "unavailable"]
    endpoints: dict[str, str]


class ModelInfo(JsonObject):
    model: str
    aliases: list[str]
    context_length: int
    """Most tokens of prompt and answer together."""
    kept_context_length: int
    """What of that is there whatever else is loaded."""
    vocab_size: int
    device_count: int
    dtype: str | None
    embeddings: dict[str, object]
    """Whether texts become vectors, with `pooling`, `normalized`, `dimensions`, and the `reason` for either."""
    weight_bytes: int
    metadata: dict[str, object]


class PrefixCache(JsonObject):
    enabled: bool
    queries: NotRequired[int | None]
    hits: NotRequired[int | None]
    query_tokens: NotRequired[int | None]
    hit_tokens: NotRequired[int | None]
    entries: NotRequired[int | None]
    entry_tokens: NotRequired[int | None]
    evictions: NotRequired[int | None]


class CacheWorker(JsonObject):
    model: str
    instance: str
    stage: int
    rank: int
    kv_bytes: int
    """Held, as the worker said last."""
    limit_bytes: NotRequired[int | None]
    """That it may hold. This and what follows are missing where no limit is known."""
    used_bytes: NotRequired[int | None]
    """Given out by the head, in whole blocks: to running sequences, and to ended ones, which make way."""
    held_bytes: NotRequired[int | None]
    """As `kv_bytes`."""
    bytes_per_token: NotRequired[int | None]
    bytes_per_sequence: NotRequired[int | None]
    context_tokens: NotRequired[int | None]
    """Of a sequence as long as the context."""
    sequences_allowed: NotRequired[int | None]
    """Of that length, side by side."""


class CacheStatistics(JsonObject):
    kv_bytes: int
    sequences: int
    running: int
    waiting: int
    num_preemptions: int
    prefix_cache: PrefixCache
    speculation: dict[str, object] | None
    workers: list[CacheWorker]


class Health(JsonObject):
    """503 where no model can answer, with `reason`."""

    status: Literal["healthy", "loading", "draining", "unhealthy"]
    reason: str | None
    rank: int
    world_size: int
    model: str
    gpu_memory_gb: float
    pipeline: dict[str, object]
    distributed: bool
    instance: str | None
    models: list[dict[str, object]]
    context_length: int
    kv_bytes: int
    uptime_s: int
    version: str
    requests: dict[str, object] | None


class Alive(JsonObject):
    status: Literal["alive"]
    uptime_s: int


class Ready(JsonObject):
    status: Literal["ready"]
    model: str


GENERATE = RouteDoc(
    "A prompt in, its continuation out",
    Generated,
    example={"prompt": "Once upon a time", "max_tokens": 16},
    tag=_TAG,
)
LOAD = RouteDoc("Load a model, and serve it from now on", Model, more_statuses=(409,), tag=_TAG)
UNLOAD = RouteDoc(
    "Free what a model holds, until it is asked for again", Model, more_statuses=(409,), tag=_TAG
)
ROOT = RouteDoc("What this is; a page for browsers", ServiceInfo, {"text/html": None}, tag=_TAG)
MODEL_INFO = RouteDoc(
    "The model: metadata, context length, devices",
    ModelInfo,
    query={"model": "Which one; the first that is served otherwise."},
    more_statuses=(404,),
    tag=_TAG,
)
CLUSTER_STATUS = RouteDoc(
    "Nodes, instances, stages: memory and times, promised and measured", ClusterStatus, tag=_TAG
)
CLUSTER_EVENTS: RouteDoc[Response] = RouteDoc(
    "The same and more, as it changes",
    None,
    {EVENT_STREAM: None},
    description="One event a second at most: `state` holds everything, `change` is a JSON patch (RFC 6902) of it, `log` holds "
    "lines of the head's log. Browsers' EventSource sends no API key; `fetch` does.",
    more_statuses=(429,),
    tag=_TAG,
)
CACHE_STATS = RouteDoc("What the KV caches hold", CacheStatistics, tag=_TAG)
HEALTH = RouteDoc("Measured state", Health, unwell=Health, open=True, tag=_TAG)
LIVE = RouteDoc("The process runs", Alive, open=True, tag=_TAG)
READY = RouteDoc("The model can answer", Ready, open=True, tag=_TAG)
METRICS: RouteDoc[Response] = RouteDoc("Measurements for Prometheus", None, {"text/plain": None}, tag=_TAG)
