"""`/cache/stats`: what the KV caches hold, and what was reused of them."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter

from mlx_ring.api.context import ApiContext, workers_of
from mlx_ring.api.openapi import documented_get
from mlx_ring.api.ops import answers as about
from mlx_ring.api.service import ModelService, ServedInstance
from mlx_ring.core.engine_stats import CacheStats, EngineStats, SchedulerStats
from mlx_ring.core.types import RankId
from mlx_ring.core.worker_status import WorkerInfo


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()

    async def cache_stats() -> dict[str, object]:
        return told_cache(context)

    documented_get(router, "/cache/stats", cache_stats, about.CACHE_STATS)
    return router


def told_cache(context: ApiContext) -> dict[str, object]:
    """How the caches stand now."""
    every = list(context.instances())
    stats = [instance.engine.stats() for _, instance in every if instance.error is None]
    steps = [each.scheduler for each in stats]
    return {
        "kv_bytes": sum(worker.kv_bytes for _, instance in every for worker in workers_of(instance)),
        "sequences": sum(each.sequences_held for each in steps),
        "running": sum(each.running for each in steps),
        "waiting": sum(each.waiting for each in steps),
        "num_preemptions": sum(each.num_preemptions for each in steps),
        "prefix_cache": _prefix_cache([each.cache for each in stats]),
        "speculation": _speculation(steps),
        "workers": [told for model, instance in every for told in _workers(model, instance)],
    }


_COUNTS = ("queries", "hits", "query_tokens", "hit_tokens", "entries", "entry_tokens", "evictions")


def _prefix_cache(caches: Sequence[CacheStats]) -> dict[str, object]:
    """Of all instances together."""
    if not caches:
        return {"enabled": False}
    told: dict[str, object] = {"enabled": any(cache.enabled for cache in caches)}
    return told | {name: sum(getattr(cache, name) for cache in caches) for name in _COUNTS}


def _speculation(steps: Sequence[SchedulerStats]) -> dict[str, object] | None:
    if not steps:
        return None
    proposed = sum(each.draft_tokens for each in steps)
    accepted = sum(each.accepted_tokens for each in steps)
    return {
        "draft_tokens": proposed,
        "accepted_tokens": accepted,
        "acceptance": accepted / proposed if proposed else None,
    }


def _workers(model: ModelService, instance: ServedInstance) -> list[dict[str, object]]:
    stats = None if instance.error is not None else instance.engine.stats()
    of: dict[str, object] = {"model": model.model_id, "instance": instance.info.name}
    return [of | _worker(worker, stats, model.context_length) for worker in workers_of(instance)]


def _worker(worker: WorkerInfo, stats: EngineStats | None, context: int) -> dict[str, object]:
    """What the worker says it holds, and what the head has given out of its memory."""
    told: dict[str, object] = {"stage": worker.stage, "rank": worker.rank, "kv_bytes": worker.kv_bytes}
    use = None if stats is None else stats.cache.ranks.get(RankId(worker.stage, worker.rank))
    if use is not None:
        told |= {
            "limit_bytes": use.limit_bytes,
            "used_bytes": use.used_bytes,
            "held_bytes": use.held_bytes,
            "bytes_per_token": use.bytes_per_token,
            "bytes_per_sequence": use.bytes_per_sequence,
            "context_tokens": context,
            "sequences_allowed": use.sequences_allowed(context),
        }
    return told
