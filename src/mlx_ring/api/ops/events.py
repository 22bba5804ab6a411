"""`/cluster/events`: what `/cluster/status` and `/cache/stats` tell, and more, as it changes.

What changed in a JSON document, as RFC 6902 writes it.

One look a second for all who watch, none while nobody does.

How fast an instance went since it was last looked at, and where the time of its stages went. Pure.

All that a watcher is told, put together from what the single routes tell.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from mlx_ring.api.context import ApiContext
from mlx_ring.api.errors import error_body
from mlx_ring.api.openapi import documented_get
from mlx_ring.api.ops import answers as about
from mlx_ring.api.ops.cache import told_cache
from mlx_ring.api.ops.cluster import told_cluster
from mlx_ring.api.service import ModelService, ServedInstance
from mlx_ring.api.streaming import StreamedAnswer
from mlx_ring.core.engine_stats import RankTotals, StepTotals
from mlx_ring.core.errors import Overloaded
from mlx_ring.core.logs import LogLine, recent_lines

Json = dict[str, object]


def json_patch(before: object, after: object) -> list[Json]:
    """The operations that make `after` of `before`. A list of another length is replaced whole.

    What Python takes for equal is not told, so a number must not become a truth value.
    """
    return list(_changes("", before, after))


def _changes(path: str, before: object, after: object) -> Iterator[Json]:
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _of_objects(path, cast("Json", before), cast("Json", after))
    elif isinstance(before, list) and isinstance(after, list):
        yield from _of_lists(path, cast("list[object]", before), cast("list[object]", after))
    else:
        yield _replaced(path, after)


def _of_objects(path: str, before: Json, after: Json) -> Iterator[Json]:
    for name in before.keys() - after.keys():
        yield {"op": "remove", "path": f"{path}/{_escaped(name)}"}
    for name, value in after.items():
        inner = f"{path}/{_escaped(name)}"
        if name in before:
            yield from _changes(inner, before[name], value)
        else:
            yield {"op": "add", "path": inner, "value": value}


def _of_lists(path: str, before: list[object], after: list[object]) -> Iterator[Json]:
    if len(before) != len(after):
        yield _replaced(path, after)
        return
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        yield from _changes(f"{path}/{place}", old, new)


def _replaced(path: str, value: object) -> Json:
    return {"op": "replace", "path": path, "value": value}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


log = logging.getLogger(__name__)

MOST_WATCHERS = 32
_RETRY_AFTER_S = 10.0
_ENCODER = json.JSONEncoder(separators=(",", ":"))


class Feed:
    """Tells how things stand: the whole of it first, and then what has changed.

    Who cannot keep up is told the whole again, so nobody's events are kept for later.
    """

    def __init__(
        self,
        look: Callable[[], Json],
        lines: Callable[[int], Sequence[LogLine]],
        *,
        every_s: float = 1.0,
        most: int = MOST_WATCHERS,
    ) -> None:
        """What is told.

        Args:
            look: gives how things stand, as plain JSON.
            lines: gives the log's lines after the one with that number.
            every_s: between two looks.
            most: watchers at the same time.
        """
        self._look, self._lines = look, lines
        self._every_s, self._most = every_s, most
        self._watchers = 0
        self._looking: asyncio.Task[None] | None = None
        self._number = 0
        """Of the last look."""
        self._state: Json = {}
        self._change = b""
        self._news = asyncio.Event()

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[AsyncGenerator[bytes]]:
        """A watcher's place, and its events.

        Raises:
            Overloaded: there are too many watchers already.
        """
        if self._watchers >= self._most:
            raise Overloaded(
                f"{self._watchers} watch already, and the server tells no more at a time: close a page, or try again later.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._watchers += 1
        try:
            if self._looking is None:
                self._take()
                self._looking = asyncio.create_task(self._keep_looking(), name="live feed")
            events = self._events()
            try:
                yield events
            finally:
                await events.aclose()
        finally:
            self._watchers -= 1
            await self._rest()

    async def _rest(self) -> None:
        """Nobody watches: nothing is looked at any more."""
        task = self._looking
        if self._watchers or task is None:
            return
        # Before it is waited for: who comes meanwhile has a state of their own.
        self._looking, self._state = None, {}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                self._take()
            except Exception:
                log.exception("watchers are told nothing this time")

    def _take(self) -> None:
        state = self._look()
        self._change = event("change", json_patch(self._state, state))
        self._state = state
        self._number += 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _events(self) -> AsyncGenerator[bytes]:
        told = line = 0
        while True:
            if told != self._number:
                is_next = told and told == self._number - 1
                told = self._number
                yield self._change if is_next else event("state", self._state)
            lines = self._lines(line)
            if lines:
                line = lines[-1].number
                yield event("log", [each.as_json() for each in lines])
            if told == self._number:
                await self._news.wait()


def event(name: str, value: object) -> bytes:
    """One server-sent event."""
    return f"event: {name}\ndata: {_ENCODER.encode(value)}\n\n".encode()


_LONG_AGO_S = 5.0
"""Between looks lies a second. Where nobody looked for long, the time before tells nothing of now."""


@dataclass(frozen=True, slots=True)
class Look:
    """An instance at a moment."""

    at_s: float
    """On a clock that does not jump."""
    epoch: int
    generated_tokens: int
    totals: StepTotals
    """As they were then."""


def pace(before: Look | None, now: Look) -> Json:
    """Tokens per second, and of each stage the shares of the time in which it did what.

    Without an earlier look at the same epoch, a moment ago, nothing is known.
    """
    if before is None or before.epoch != now.epoch or not before.at_s < now.at_s <= before.at_s + _LONG_AGO_S:
        return {"tokens_per_s": None, "prompt_tokens_per_s": None, "stages": []}
    span_s = now.at_s - before.at_s
    return {
        "tokens_per_s": round((now.generated_tokens - before.generated_tokens) / span_s, 1),
        "prompt_tokens_per_s": round((now.totals.read_tokens - before.totals.read_tokens) / span_s, 1),
        "stages": [
            _shares(rank.stage, before.totals.ranks.get(rank, RankTotals()), totals, 1e6 * span_s)
            for rank, totals in sorted(now.totals.ranks.items())
            if rank.rank == 0
        ],
    }


def _shares(stage: int, before: RankTotals, now: RankTotals, span_us: float) -> Json:
    """A step counts where it ends, and could seem to be more than all; until then its time is under way."""
    link_us = now.link_wait_us + now.link_send_us - before.link_wait_us - before.link_send_us
    idle = min(1.0, max(0.0, (now.idle_us - before.idle_us) / span_us))
    compute = min(1.0 - idle, (now.compute_us - before.compute_us) / span_us)
    link = min(1.0 - idle - compute, link_us / span_us)
    shares = {"compute": compute, "link": link, "under_way": 1.0 - idle - compute - link}
    return {"stage": stage, **{name: round(max(0.0, share), 3) for name, share in shares.items()}}


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


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()
    feed = Feed(Looks(context).take, recent_lines)

    async def cluster_events(request: Request) -> Response:
        def failure(error: Exception) -> bytes:
            return event("error", error_body(error, request.scope))

        return StreamedAnswer(feed.watching, _as_they_come, failure=failure)

    documented_get(router, "/cluster/events", cluster_events, about.CLUSTER_EVENTS)
    return router


def _as_they_come(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    return events
