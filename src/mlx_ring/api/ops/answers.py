"""What the server's own routes answer, as schemas for `/openapi.json`."""

from __future__ import annotations

from typing import Literal

from mlx_ring.api.openai.answers import Model, Performance, Usage
from mlx_ring.api.openapi import About, Told
from mlx_ring.api.ops.status import ClusterStatus
from mlx_ring.api.streaming import EVENT_STREAM

_TAG = "operations"


class Generated(Told):
    id: str
    model: str
    text: str
    finish_reason: Literal["stop", "length"]
    usage: Usage
    performance: Performance


class ServiceInfo(Told):
    service: Literal["mlx-ring"]
    version: str
    model: str
    models: list[str]
    status: Literal["ready", "unavailable"]
    endpoints: dict[str, str]


class ModelInfo(Told):
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


class PrefixCache(Told):
    enabled: bool
    queries: int | None = None
    hits: int | None = None
    query_tokens: int | None = None
    hit_tokens: int | None = None
    entries: int | None = None
    entry_tokens: int | None = None
    evictions: int | None = None


class CacheWorker(Told):
    model: str
    instance: str
    stage: int
    rank: int
    kv_bytes: int
    """Held, as the worker said last."""
    limit_bytes: int | None = None
    """That it may hold. This and what follows are missing where no limit is known."""
    used_bytes: int | None = None
    """Given out by the head, in whole blocks: to running sequences, and to ended ones, which make way."""
    held_bytes: int | None = None
    """As `kv_bytes`."""
    bytes_per_token: int | None = None
    bytes_per_sequence: int | None = None
    context_tokens: int | None = None
    """Of a sequence as long as the context."""
    sequences_allowed: int | None = None
    """Of that length, side by side."""


class CacheStatistics(Told):
    kv_bytes: int
    sequences: int
    running: int
    waiting: int
    num_preemptions: int
    prefix_cache: PrefixCache
    speculation: dict[str, object] | None
    workers: list[CacheWorker]


class Health(Told):
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


class Alive(Told):
    status: Literal["alive"]
    uptime_s: int


class Ready(Told):
    status: Literal["ready"]
    model: str


GENERATE = About(
    "A prompt in, its continuation out",
    Generated,
    example={"prompt": "Once upon a time", "max_tokens": 16},
    tag=_TAG,
)
LOAD = About("Load a model, and serve it from now on", Model, more_statuses=(409,), tag=_TAG)
UNLOAD = About("Free what a model holds, until it is asked for again", Model, more_statuses=(409,), tag=_TAG)
ROOT = About("What this is; a page for browsers", ServiceInfo, {"text/html": None}, tag=_TAG)
MODEL_INFO = About(
    "The model: metadata, context length, devices",
    ModelInfo,
    query={"model": "Which one; the first that is served otherwise."},
    more_statuses=(404,),
    tag=_TAG,
)
CLUSTER_STATUS = About(
    "Nodes, instances, stages: memory and times, promised and measured", ClusterStatus, tag=_TAG
)
CLUSTER_EVENTS = About(
    "The same and more, as it changes",
    None,
    {EVENT_STREAM: None},
    description="One event a second at most: `state` holds everything, `change` is a JSON patch (RFC 6902) of it, `log` holds "
    "lines of the head's log. Browsers' EventSource sends no API key; `fetch` does.",
    more_statuses=(429,),
    tag=_TAG,
)
CACHE_STATS = About("What the KV caches hold", CacheStatistics, tag=_TAG)
HEALTH = About("Measured state", Health, unwell=Health, open=True, tag=_TAG)
LIVE = About("The process runs", Alive, open=True, tag=_TAG)
READY = About("The model can answer", Ready, open=True, tag=_TAG)
METRICS = About("Measurements for Prometheus", None, {"text/plain": None}, tag=_TAG)
