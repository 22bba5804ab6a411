"""`/cache/stats`: contents of the KV caches, and how much of them was reused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired

from starlette.requests import Request
from starlette.routing import Router

from mlx_ring.api.context import ApiContext, workers_of
from mlx_ring.api.openapi import JsonObject, RouteDoc, documented_get
from mlx_ring.api.service import ModelService, ServedInstance
from mlx_ring.core.engine_stats import CacheStats, EngineStats, SchedulerStats
from mlx_ring.core.types import RankId
from mlx_ring.core.worker_status import WorkerInfo


class PrefixCache(JsonObject):
    """Prefix caches of all instances together. The counts are missing while no instance serves.

    They begin anew when an instance has lost a worker. Those of `/metrics` do not.
    """

    enabled: bool
    queries: NotRequired[int]
    hits: NotRequired[int]
    query_tokens: NotRequired[int]
    hit_tokens: NotRequired[int]
    entries: NotRequired[int]
    entry_tokens: NotRequired[int]
    evictions: NotRequired[int]
    restored_tokens: NotRequired[int]
    """Tokens whose KV came from the machines' disks, with `--kv-disk`."""
    peer_tokens: NotRequired[int]
    """Those of them of which a machine has read KV from another one's disk."""
    saved_tokens: NotRequired[int]
    moved_tokens: NotRequired[int]
    """Tokens whose KV came from the workers of another instance, when requests moved."""


class Speculation(JsonObject):
    """Speculative decoding of all instances together."""

    draft_tokens: int
    accepted_tokens: int
    acceptance: float | None
    """Accepted share of the draft tokens; null before the first one."""


class CacheWorker(JsonObject):
    """KV memory of one worker."""

    model: str
    instance: str
    stage: int
    rank: int
    kv_bytes: int
    """Bytes of KV in the worker's last report."""
    limit_bytes: NotRequired[int]
    """Upper limit of the worker's KV. This field and the next ones are missing where no limit is known."""
    used_bytes: NotRequired[int]
    """Bytes that the head has allotted, in whole blocks, to running sequences and to the prefix cache."""
    held_bytes: NotRequired[int]
    """The same as `kv_bytes`."""
    bytes_per_token: NotRequired[int]
    bytes_per_sequence: NotRequired[int]
    context_tokens: NotRequired[int]
    """Length of the longest sequence: the context."""
    sequences_allowed: NotRequired[int]
    """Number of such sequences that fit side by side."""


class CacheStatistics(JsonObject):
    """State of all KV caches."""

    kv_bytes: int
    sequences: int
    running: int
    waiting: int
    num_preemptions: int
    prefix_cache: PrefixCache
    speculation: Speculation | None
    """Null while no instance serves."""
    workers: list[CacheWorker]


def routes(context: ApiContext) -> Router:
    router = Router()

    async def cache_stats(_: Request) -> CacheStatistics:
        return cache_statistics(context)

    documented_get(
        router,
        "/cache/stats",
        cache_stats,
        RouteDoc("Report the contents of the KV caches, and how much of them was reused", CacheStatistics),
    )
    return router


def cache_statistics(context: ApiContext) -> CacheStatistics:
    """Return the caches' present state."""
    every = list(context.instances())
    stats = [instance.engine.stats() for _, instance in every if instance.error is None]
    schedulers = [each.scheduler for each in stats]
    return {
        "kv_bytes": sum(
            worker.memory["kv_bytes"] for _, instance in every for worker in workers_of(instance)
        ),
        "sequences": sum(each.sequences_held for each in schedulers),
        "running": sum(each.running for each in schedulers),
        "waiting": sum(each.waiting for each in schedulers),
        "num_preemptions": sum(each.num_preemptions for each in schedulers),
        "prefix_cache": _prefix_cache([each.cache for each in stats]),
        "speculation": _speculation(schedulers),
        "workers": [worker for model, instance in every for worker in _workers(model, instance)],
    }


def _prefix_cache(caches: Sequence[CacheStats]) -> PrefixCache:
    if not caches:
        return {"enabled": False}
    return {
        "enabled": any(cache.enabled for cache in caches),
        "queries": sum(cache.queries for cache in caches),
        "hits": sum(cache.hits for cache in caches),
        "query_tokens": sum(cache.query_tokens for cache in caches),
        "hit_tokens": sum(cache.hit_tokens for cache in caches),
        "entries": sum(cache.entries for cache in caches),
        "entry_tokens": sum(cache.entry_tokens for cache in caches),
        "evictions": sum(cache.evictions for cache in caches),
        "restored_tokens": sum(cache.restored_tokens for cache in caches),
        "peer_tokens": sum(cache.peer_tokens for cache in caches),
        "saved_tokens": sum(cache.saved_tokens for cache in caches),
        "moved_tokens": sum(cache.moved_tokens for cache in caches),
    }


def _speculation(schedulers: Sequence[SchedulerStats]) -> Speculation | None:
    if not schedulers:
        return None
    proposed = sum(each.draft_tokens for each in schedulers)
    accepted = sum(each.accepted_tokens for each in schedulers)
    return {
        "draft_tokens": proposed,
        "accepted_tokens": accepted,
        "acceptance": accepted / proposed if proposed else None,
    }


def _workers(model: ModelService, instance: ServedInstance) -> list[CacheWorker]:
    stats = None if instance.error is not None else instance.engine.stats()
    return [_worker(worker, stats, model, instance.info.name) for worker in workers_of(instance)]


def _worker(worker: WorkerInfo, stats: EngineStats | None, model: ModelService, instance: str) -> CacheWorker:
    """Join the worker's own report with the head's accounting of its memory."""
    reported: CacheWorker = {
        "model": model.model_id,
        "instance": instance,
        "stage": worker.stage,
        "rank": worker.rank,
        "kv_bytes": worker.memory["kv_bytes"],
    }
    use = None if stats is None else stats.cache.ranks.get(RankId(worker.stage, worker.rank))
    if use is None:
        return reported
    return {
        **reported,
        "limit_bytes": use.limit_bytes,
        "used_bytes": use.used_bytes,
        "held_bytes": use.held_bytes,
        "bytes_per_token": use.bytes_per_token,
        "bytes_per_sequence": use.bytes_per_sequence,
        "context_tokens": model.context_length,
        "sequences_allowed": use.sequences_allowed(model.context_length),
    }
