"""All that a watcher is told, put together from what the single routes tell."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import cast

from mlx_ring.api.live.pace import Look, pace
from mlx_ring.api.live.patch import Json
from mlx_ring.api.ops.cache import told_cache
from mlx_ring.api.ops.cluster import told_cluster
from mlx_ring.api.routes import ApiContext
from mlx_ring.api.service import ModelService, ServedInstance

MOST_REQUESTS = 64
"""That are listed; the counts tell of all."""


class Looks:
    """Looks at the service, and remembers the last look, so that it can say how fast it went since."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._last: dict[str, Look] = {}
        """By instance."""

    def take(self) -> Json:
        """How everything stands now, as plain JSON."""
        context = self._context
        return {
            "time": round(time.time(), 3),
            "version": version("mlx-ring"),
            "began": context.default.created,
            "draining": context.admission.is_draining,
            "cluster": _without_ages(told_cluster(context).model_dump(mode="json")),
            "cache": told_cache(context),
            "pace": self._paces(),
            "requests": [
                told for model, instance in context.instances() for told in _requests(model, instance)
            ][:MOST_REQUESTS],
        }

    def _paces(self) -> Json:
        """Of each instance that serves."""
        now, told = self._looks(), dict[str, object]()
        for name, look in now.items():
            told[name] = pace(self._last.get(name), look)
        self._last = now
        return told

    def _looks(self) -> dict[str, Look]:
        at_s = time.monotonic()
        return {
            instance.info.name: Look(
                at_s, instance.info.epoch, instance.engine.stats().generated_tokens, instance.engine.totals()
            )
            for _, instance in self._context.instances()
            if instance.error is None
        }


def _without_ages(cluster: Json) -> Json:
    """A link's age is another every second, and `measured_at` says the same."""
    for link in cast("list[Json]", cluster["links"]):
        link.pop("measured_s_ago", None)
    return cluster


def _requests(model: ModelService, instance: ServedInstance) -> list[Json]:
    if instance.error is not None:
        return []
    return [
        {
            "id": request.id,
            "model": model.model_id,
            "instance": instance.info.name,
            "state": request.state,
            "prompt_tokens": request.prompt_tokens,
            "cached_tokens": request.cached_tokens,
            "read_tokens": request.read_tokens,
            "tokens": request.tokens,
            "age_s": round(request.age_s, 1),
        }
        for request in instance.engine.requests()
    ]
