"""`/cluster/events`: the server's state as server-sent events.

A watcher first gets the whole state, then a JSON patch (RFC 6902) for each change, and the head's new log lines.
The state is read once a second for all watchers together, and never while there are none.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Annotated, Literal, NotRequired, cast

from pydantic import GetPydanticSchema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router

from mlx_ring.api.context import ApiContext
from mlx_ring.api.dialect import Json
from mlx_ring.api.errors import error_body
from mlx_ring.api.openapi import JsonObject, RouteDoc, documented_get
from mlx_ring.api.ops.cache import CacheStatistics, cache_statistics
from mlx_ring.api.ops.cluster import ClusterStatus, cluster_status, start_options
from mlx_ring.api.ops.models import client_host, is_loopback
from mlx_ring.api.service import ModelService
from mlx_ring.api.streaming import EVENT_STREAM, StreamedAnswer
from mlx_ring.core.engine_stats import RankTotals, StepTotals
from mlx_ring.core.errors import Overloaded
from mlx_ring.core.generation import OpenRequest, RequestState
from mlx_ring.core.logs import LogLine, recent_lines

log = logging.getLogger(__name__)

MOST_WATCHERS = 32
MOST_REQUESTS = 64
"""Largest number of requests in a snapshot. Its counts include all of them."""
_RETRY_AFTER_S = 10.0
_ENCODER = json.JSONEncoder(separators=(",", ":"))


# ---- the events' data


class StageShares(JsonObject):
    """Shares of the last second, from 0 to 1, by a stage's activity."""

    stage: int
    compute: float
    link: float
    under_way: float
    """Share of steps that have not ended: only their end reports how they spent it."""


class Rates(JsonObject):
    """Speed of an instance in the last second. Null and empty where it was not measured."""

    tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    stages: list[StageShares]


class RequestStatus(JsonObject):
    """A request in progress, without its text."""

    id: str
    model: str
    instance: str
    """Empty while the request waits for the model to be loaded again."""
    state: RequestState
    """`reading` means prefill, `answering` decode, `paused` an answer whose instance was lost."""
    prompt_tokens: int
    cached_tokens: int
    read_tokens: int
    """Prompt tokens after prefill, cached ones included."""
    tokens: int
    age_s: float


class ClusterState(JsonObject):
    """State of the server: data of the event `state`."""

    time: float
    """Unix seconds."""
    version: str
    began: int
    """Unix seconds when the server started."""
    draining: bool
    cluster: Annotated[dict[str, object], GetPydanticSchema(lambda _, schema: schema(ClusterStatus))]
    """Answer of `/cluster/status`, without the links' `measured_s_ago`."""
    cache: CacheStatistics
    """Answer of `/cache/stats`."""
    pace: dict[str, Rates]
    """Rates by instance."""
    requests: list[RequestStatus]


class PatchOperation(JsonObject):
    """Operation of a JSON patch. The event `change` holds a list of them."""

    op: Literal["add", "remove", "replace"]
    path: str
    value: NotRequired[object]


_DOC: RouteDoc[Response] = RouteDoc(
    "Stream the state of nodes, instances and requests on each change, as server-sent events",
    None,
    {EVENT_STREAM: None},
    events={"state": ClusterState, "change": list[PatchOperation], "log": list[LogLine]},
    description="At most one event per second and kind. `state` holds everything, `change` is a JSON patch (RFC 6902) of it, and "
    "`log` holds lines of the head's log. A browser's EventSource cannot send an API key; use `fetch` instead.",
    more_statuses=(429,),
)


def routes(context: ApiContext) -> Router:
    router = Router()
    feed = EventFeed(SnapshotReader(context).read, recent_lines)

    async def cluster_events(request: Request) -> Response:
        def failure(error: Exception) -> bytes:
            return event("error", error_body(error, request.scope))

        shows_folders = is_loopback(client_host(request))
        return StreamedAnswer(
            partial(feed.subscribe, _with_folders if shows_folders else dict), failure=failure
        )

    documented_get(router, "/cluster/events", cluster_events, _DOC)
    return router


def _with_folders(state: Mapping[str, object]) -> Mapping[str, object]:
    """Return a state for a client of this machine. Changes never concern the options, because they stay the same."""
    return {
        **state,
        "cluster": {**cast("Json", state["cluster"]), "options": start_options(shows_folders=True)},
    }


def event(name: str, value: object) -> bytes:
    """Encode a server-sent event."""
    return f"event: {name}\ndata: {_ENCODER.encode(value)}\n\n".encode()


# ---- the feed


class EventFeed:
    """Events for any number of watchers. One that missed a change gets the whole state again, so nothing is queued."""

    def __init__(
        self,
        read: Callable[[], Mapping[str, object]],
        lines: Callable[[int], Sequence[LogLine]],
        *,
        every_s: float = 1.0,
        most: int = MOST_WATCHERS,
    ) -> None:
        """Create a feed without watchers.

        Args:
            read: returns the present state as plain JSON.
            lines: returns the log's lines after the one with a number.
            every_s: time between two reads.
            most: largest number of watchers.
        """
        self._read, self._lines = read, lines
        self._every_s, self._most = every_s, most
        self._watchers = 0
        self._reader: asyncio.Task[None] | None = None
        self._number = 0
        """Number of the last read."""
        self._state: Mapping[str, object] = {}
        self._change = b""
        self._updated = asyncio.Event()

    @asynccontextmanager
    async def subscribe(
        self, shown: Callable[[Mapping[str, object]], Mapping[str, object]] = dict
    ) -> AsyncGenerator[AsyncGenerator[bytes]]:
        """Yield the events of a new watcher.

        Args:
            shown: returns a whole state as the watcher may see it, which differs only in what never changes.

        Raises:
            Overloaded: there are too many watchers.
        """
        if self._watchers >= self._most:
            raise Overloaded(
                f"{self._watchers} clients already follow the events, the maximum: close a page, or try again later.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._watchers += 1
        try:
            if self._reader is None:
                self._update()
                self._reader = asyncio.create_task(self._keep_updating(), name="live feed")
            events = self._events(shown)
            try:
                yield events
            finally:
                await events.aclose()
        finally:
            self._watchers -= 1
            await self._stop_if_unwatched()

    async def _stop_if_unwatched(self) -> None:
        task = self._reader
        if self._watchers or task is None:
            return
        # Cleared before the wait, so that a watcher that comes meanwhile starts its own reader.
        self._reader, self._state = None, {}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _keep_updating(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                self._update()
            except Exception:
                log.exception("Cannot read the state for the event stream this time")

    def _update(self) -> None:
        state = self._read()
        self._change = event("change", json_patch(self._state, state))
        self._state = state
        self._number += 1
        updated, self._updated = self._updated, asyncio.Event()
        updated.set()

    async def _events(
        self, shown: Callable[[Mapping[str, object]], Mapping[str, object]]
    ) -> AsyncGenerator[bytes]:
        sent = line = 0
        while True:
            if sent != self._number:
                is_next = sent and sent == self._number - 1
                sent = self._number
                yield self._change if is_next else event("state", shown(self._state))
            lines = self._lines(line)
            if lines:
                line = lines[-1].number
                yield event("log", [each.as_json() for each in lines])
            if sent == self._number:
                await self._updated.wait()


# ---- snapshots


class SnapshotReader:
    """Reader of the server's state. It keeps the last counters, from which rates are computed."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._last: dict[str, Counters] = {}
        """Counters by instance."""

    def read(self) -> ClusterState:
        """Return the present state."""
        context = self._context
        return {
            "time": round(time.time(), 3),
            "version": version("mlx-ring"),
            "began": context.default.created,
            "draining": context.admission.is_draining,
            "cluster": _without_ages(cluster_status(context).model_dump(mode="json")),
            "cache": cache_statistics(context),
            "pace": self._rates(),
            "requests": [status for model in context.catalog.models for status in _requests(model)][
                :MOST_REQUESTS
            ],
        }

    def _rates(self) -> dict[str, Rates]:
        now = self._counters()
        rates = {name: rates_between(self._last.get(name), counters) for name, counters in now.items()}
        self._last = now
        return rates

    def _counters(self) -> dict[str, Counters]:
        at_s = time.monotonic()
        return {
            instance.info.name: Counters(
                at_s, instance.info.epoch, instance.engine.stats().generated_tokens, instance.engine.totals()
            )
            for _, instance in self._context.instances()
            if instance.error is None
        }


def _without_ages(cluster: Json) -> Json:
    """Remove the links' ages, which change every second; `measured_at` holds the same fact."""
    for link in cast("list[Json]", cluster["links"]):
        link.pop("measured_s_ago", None)
    return cluster


def _requests(model: ModelService) -> Iterator[RequestStatus]:
    """Yield the requests of a model: those without an instance, then those of each instance."""
    serving = [instance for instance in model.instances if instance.error is None]
    yield from (_request(model, "", request) for request in model.held_requests)
    for instance in serving:
        yield from (_request(model, instance.info.name, request) for request in instance.engine.requests())


def _request(model: ModelService, instance: str, request: OpenRequest) -> RequestStatus:
    return {
        "id": request.id,
        "model": model.model_id,
        "instance": instance,
        "state": request.state,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "read_tokens": request.read_tokens,
        "tokens": request.tokens,
        "age_s": round(request.age_s, 1),
    }


# ---- rates

_LONGEST_SPAN_S = 5.0
"""Longest time between two samples whose difference still describes the present. Reads are a second apart."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of an instance at one moment."""

    at_s: float
    """Time on a monotonic clock."""
    epoch: int
    generated_tokens: int
    totals: StepTotals


def rates_between(before: Counters | None, now: Counters) -> Rates:
    """Return the rates between two samples, which must belong to one epoch and lie close together."""
    if (
        before is None
        or before.epoch != now.epoch
        or not before.at_s < now.at_s <= before.at_s + _LONGEST_SPAN_S
    ):
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


def _shares(stage: int, before: RankTotals, now: RankTotals, span_us: float) -> StageShares:
    """Return how a stage spent the span. A step counts when it ends, so one step may claim more than the whole span."""
    link_us = now.link_wait_us + now.link_send_us - before.link_wait_us - before.link_send_us
    idle = min(1.0, max(0.0, (now.idle_us - before.idle_us) / span_us))
    compute = min(1.0 - idle, (now.compute_us - before.compute_us) / span_us)
    link = min(1.0 - idle - compute, link_us / span_us)
    return {
        "stage": stage,
        "compute": _rounded(compute),
        "link": _rounded(link),
        "under_way": _rounded(1.0 - idle - compute - link),
    }


def _rounded(share: float) -> float:
    return round(max(0.0, share), 3)


# ---- JSON patches


def json_patch(before: object, after: object) -> list[PatchOperation]:
    """Return the operations that turn `before` into `after`. A list of another length is replaced as a whole.

    Values that Python considers equal count as unchanged, so a number must not become a boolean.
    """
    return list(_changes("", before, after))


def _changes(path: str, before: object, after: object) -> Iterator[PatchOperation]:
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _object_changes(path, cast("Json", before), cast("Json", after))
    elif isinstance(before, list) and isinstance(after, list):
        yield from _list_changes(path, cast("list[object]", before), cast("list[object]", after))
    else:
        yield _replacement(path, after)


def _object_changes(path: str, before: Json, after: Json) -> Iterator[PatchOperation]:
    for name in before.keys() - after.keys():
        yield {"op": "remove", "path": f"{path}/{_escaped(name)}"}
    for name, value in after.items():
        inner = f"{path}/{_escaped(name)}"
        if name in before:
            yield from _changes(inner, before[name], value)
        else:
            yield {"op": "add", "path": inner, "value": value}


def _list_changes(path: str, before: list[object], after: list[object]) -> Iterator[PatchOperation]:
    if len(before) != len(after):
        yield _replacement(path, after)
        return
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        yield from _changes(f"{path}/{index}", old, new)


def _replacement(path: str, value: object) -> PatchOperation:
    return {"op": "replace", "path": path, "value": value}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
