"""`/cluster/events`: the state, its changes as JSON patches, rates, log lines and the limit of watchers."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.api.clients import error_of, serving
from tests.api.test_streaming import ENDLESS, open_requests
from tests.api.twins import TwinService
from tests.default_settings import make_api_settings
from tests.engine.engines import PLAIN, collect, make_engine, make_request
from tests.engine.twin import TwinExecutor
from tests.engine.twin_rank import hash_token
from tests.eventually import eventually

from mlx_ring.api.ops import events
from mlx_ring.api.ops.events import MOST_WATCHERS, Counters, EventFeed, json_patch, rates_between
from mlx_ring.core.engine_stats import COUNTS, RankTotals, StepTotals
from mlx_ring.core.errors import Overloaded
from mlx_ring.core.logs import LogLine
from mlx_ring.core.types import RankId


def first_state(lines: Any) -> dict[str, Any]:
    assert next(lines) == "event: state"
    return json.loads(next(lines).removeprefix("data: "))


def test_state_has_cluster_cache_and_requests_but_no_prompt() -> None:
    service = TwinService(automatic=False)
    secret = "a private prompt"  # noqa: S105 - a prompt
    body = ENDLESS | {"prompt": secret}
    with serving(service) as url, httpx.stream("POST", f"{url}/v1/completions", json=body):
        eventually(lambda: open_requests(service) == 1)
        with httpx.stream("GET", f"{url}/cluster/events") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            state = first_state(response.iter_lines())
        assert {"nodes", "instances", "devices", "models", "links"} <= set(state["cluster"])
        assert state["cache"]["running"] == 1
        assert state["pace"]["twin-1"] == {"tokens_per_s": None, "prompt_tokens_per_s": None, "stages": []}
        (request,) = state["requests"]
        assert (request["state"], request["prompt_tokens"], request["tokens"]) == (
            "answering",
            1 + len(secret),
            0,
        )
        assert secret not in json.dumps(state)


def test_only_watchers_of_this_machine_see_absolute_paths_of_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["mlx-ring", "serve", "demo", "--state-dir", "/home/joe/x"])
    with serving(TwinService()) as url:
        shown: list[list[str]] = []
        for own in ("127.0.0.1", "192.168.1.7"):
            monkeypatch.setattr(events, "is_loopback", own.__eq__)
            with httpx.stream("GET", f"{url}/cluster/events") as response:
                shown.append(first_state(response.iter_lines())["cluster"]["options"])
    assert shown == [["--state-dir", "/home/joe/x"], ["--state-dir", "DIR"]]


@pytest.mark.slow
def test_change_has_the_rates_of_each_stage() -> None:
    service = TwinService(context=10**9)
    with (
        serving(service) as url,
        httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS),
        httpx.stream("GET", f"{url}/cluster/events") as response,
    ):
        lines = response.iter_lines()
        first_state(lines)
        change = next(
            json.loads(line[6:]) for line in lines if line.startswith("data: [") and '"/time"' in line
        )
        paths = {operation["path"]: operation["value"] for operation in change}
        assert paths["/pace/twin-1/tokens_per_s"] > 0
        assert [each["stage"] for each in paths["/pace/twin-1/stages"]] == [0, 1]


def test_excess_watcher_is_429_until_another_disconnects() -> None:
    with serving(TwinService()) as url, httpx.Client(limits=httpx.Limits(max_connections=99)) as client:
        watching = [
            client.send(client.build_request("GET", f"{url}/cluster/events"), stream=True)
            for _ in range(MOST_WATCHERS)
        ]
        assert {each.status_code for each in watching} == {200}
        refused = client.get(f"{url}/cluster/events")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
        assert "already follow the events" in error_of(refused)["message"]
        for each in watching:
            each.close()

        def has_room() -> bool:
            with client.stream("GET", f"{url}/cluster/events") as again:
                return again.status_code == 200

        eventually(has_room)


def test_feed_needs_a_key_and_does_not_delay_shutdown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        serving(TwinService(), make_api_settings(api_keys=("key",))) as url,
        httpx.Client(headers={"x-api-key": "key"}) as client,
    ):
        assert httpx.get(f"{url}/cluster/events").status_code == 401
        response = client.send(client.build_request("GET", f"{url}/cluster/events"), stream=True)
        first_state(response.iter_lines())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


class Source:
    """Source of a state that counts how often it is read."""

    def __init__(self) -> None:
        self.reads = 0
        self.seen: asyncio.Queue[int] = asyncio.Queue()
        self.lines: list[LogLine] = []

    def read(self) -> dict[str, object]:
        self.reads += 1
        self.seen.put_nowait(self.reads)
        return {"reads": self.reads, "other": {"same": True}}

    def log(self, text: str) -> None:
        self.lines.append(LogLine(len(self.lines) + 1, 0.0, "INFO", "head", "a", text))

    def lines_after(self, number: int) -> list[LogLine]:
        return self.lines[number:]

    def feed(self, *, every_s: float = 0.001, most: int = 8) -> EventFeed:
        return EventFeed(self.read, self.lines_after, every_s=every_s, most=most)


async def next_event(events: AsyncGenerator[bytes]) -> tuple[str, Any]:
    """Return the next event's name and data."""
    name, data = (await anext(events)).decode().strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_watcher_gets_the_state_once_and_then_its_changes() -> None:
    async def watch() -> None:
        async with Source().feed().subscribe() as events:
            assert await next_event(events) == ("state", {"reads": 1, "other": {"same": True}})
            for reads in (2, 3):
                change = [{"op": "replace", "path": "/reads", "value": reads}]
                assert await next_event(events) == ("change", change)

    asyncio.run(watch())


def test_watcher_that_missed_a_change_gets_the_state_again() -> None:
    async def watch() -> None:
        source = Source()
        async with source.feed().subscribe() as events:
            await next_event(events)
            while await source.seen.get() < 4:
                pass
            name, state = await next_event(events)
            assert (name, state["reads"]) == ("state", source.reads)

    asyncio.run(watch())


def test_state_is_read_once_for_all_watchers_and_never_without_any() -> None:
    async def watch() -> None:
        source = Source()
        feed = source.feed(every_s=3600)
        assert source.reads == 0
        async with feed.subscribe() as one, feed.subscribe() as other:
            assert await next_event(one) == await next_event(other)
            assert source.reads == 1
        tasks = asyncio.all_tasks()
        assert tasks == {asyncio.current_task()}
        async with feed.subscribe() as events:
            assert (await next_event(events))[1]["reads"] == 2

    asyncio.run(watch())


def test_watcher_that_joins_while_the_last_one_leaves_gets_the_state() -> None:
    async def watch() -> None:
        feed = Source().feed(every_s=3600)
        last = feed.subscribe()
        await last.__aenter__()
        leave = asyncio.create_task(last.__aexit__(None, None, None))
        joining = feed.subscribe()
        await asyncio.sleep(0)
        assert not leave.done()
        events = await joining.__aenter__()
        await leave
        assert await next_event(events) == ("state", {"reads": 2, "other": {"same": True}})
        await joining.__aexit__(None, None, None)

    asyncio.run(watch())


def test_feed_refuses_an_excess_watcher_until_a_place_is_free() -> None:
    async def watch() -> None:
        feed = Source().feed(most=1)
        async with feed.subscribe():
            with pytest.raises(Overloaded, match="1 clients already follow"):
                await feed.subscribe().__aenter__()
        async with feed.subscribe() as events:
            assert (await next_event(events))[0] == "state"

    asyncio.run(watch())


def test_each_log_line_is_sent_once() -> None:
    async def watch() -> None:
        source = Source()
        source.log("first")
        async with source.feed().subscribe() as events:
            await next_event(events)
            name, lines = await next_event(events)
            assert (name, [line["text"] for line in lines]) == ("log", ["first"])
            source.log("second")
            while (event := await next_event(events))[0] != "log":
                pass
            assert [line["text"] for line in event[1]] == ["second"]

    asyncio.run(watch())


def test_failed_read_of_the_state_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Source):
        def read(self) -> dict[str, object]:
            state = super().read()
            if self.reads == 2:
                raise LookupError("unreadable")
            return state

    async def watch() -> None:
        async with Failing().feed().subscribe() as events:
            await next_event(events)
            assert await next_event(events) == ("change", [{"op": "replace", "path": "/reads", "value": 3}])

    asyncio.run(watch())
    assert "unreadable" in caplog.text


LEAVES = st.none() | st.text(max_size=3) | st.integers(2, 9)
DOCUMENTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b/c", "~1", ""]), inner)
    ),
    max_leaves=12,
)


def apply(document: Any, operations: Sequence[Mapping[str, Any]]) -> Any:
    whole = {"root": copy.deepcopy(document)}
    for operation in operations:
        place: Any = whole
        path = ["root", *operation["path"].split("/")[1:]]
        *before, last = [part.replace("~1", "/").replace("~0", "~") for part in path]
        for part in before:
            place = place[_key(place, part)]
        name = _key(place, last)
        if operation["op"] == "remove":
            del place[name]
        else:
            assert (operation["op"] == "add") == (isinstance(place, dict) and name not in place)
            place[name] = operation["value"]
    return whole["root"]


def _key(place: Any, part: str) -> Any:
    return int(part) if isinstance(place, list) else part


@given(DOCUMENTS, DOCUMENTS)
def test_patch_turns_one_document_into_the_other(before: Any, after: Any) -> None:
    assert apply(before, json_patch(before, after)) == after


def test_equal_values_are_not_in_the_patch() -> None:
    before = {"nodes": [{"id": "a", "bytes": 1}, {"id": "b", "bytes": 2}], "time": 3}
    after = {"nodes": [{"id": "a", "bytes": 1}, {"id": "b", "bytes": 5}], "time": 3}
    assert json_patch(before, before) == []
    assert json_patch(before, after) == [{"op": "replace", "path": "/nodes/1/bytes", "value": 5}]


START = Counters(0.0, 1, 0, StepTotals({}, **dict.fromkeys(COUNTS, 0)))
SECOND_US = 1_000_000


def with_rank(counters: Counters, at_s: float, **spent_us: int) -> Counters:
    """Return the counters at a later second, with the rank's totals by then."""
    totals = replace(counters.totals, ranks={RankId(0, 0): RankTotals(**spent_us)})
    return replace(counters, at_s=at_s, totals=totals)


def test_long_step_is_under_way_until_it_ends_and_never_idle() -> None:
    samples = [with_rank(START, second, idle_us=SECOND_US) for second in (1.0, 2.0, 3.0)]
    samples.append(with_rank(START, 4.0, idle_us=SECOND_US, compute_us=3 * SECOND_US))
    rates = [rates_between(before, now)["stages"] for before, now in pairwise([START, *samples])]
    assert rates == [
        [{"stage": 0, "compute": compute, "link": 0.0, "under_way": under_way}]
        for compute, under_way in ((0.0, 0.0), (0.0, 1.0), (0.0, 1.0), (1.0, 0.0))
    ]


def test_old_sample_gives_no_rates() -> None:
    now = replace(START, at_s=3600.0, generated_tokens=7200)
    assert rates_between(START, now)["tokens_per_s"] is None
    assert rates_between(replace(now, at_s=3599.0, generated_tokens=7100), now)["tokens_per_s"] == 100


def test_prompt_tokens_are_counted_beyond_the_recent_steps() -> None:
    async def read() -> tuple[int, int]:
        twin = TwinExecutor((1, 1), next_token=hash_token(256))
        engine = make_engine(twin, replace(PLAIN, prefill_chunk=8))
        for _ in range(20):
            await collect(engine.submit(make_request(30, max_tokens=20, ignore_eos=True)))
        return engine.totals().read_tokens, len(engine.stats().scheduler.recent)

    tokens, recent = asyncio.run(read())
    assert recent < 20 * 20, "more steps than the engine keeps one by one"
    assert tokens == 20 * 30
