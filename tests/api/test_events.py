"""`/cluster/events` over a socket."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest
from tests.api.clients import error_of, serving
from tests.api.test_streaming import ENDLESS, waiting
from tests.api.twins import TwinService
from tests.eventually import eventually

from mlx_ring.api.ops.events import MOST_WATCHERS
from mlx_ring.api.settings import ApiSettings


def first_state(lines: Any) -> dict[str, Any]:
    assert next(lines) == "event: state"
    return json.loads(next(lines).removeprefix("data: "))


def test_the_state_holds_the_cluster_the_cache_and_who_asks_but_nothing_of_what_is_said() -> None:
    service = TwinService(automatic=False)
    secret = "what nobody else should read"  # noqa: S105 - a prompt
    asked = ENDLESS | {"prompt": secret}
    with serving(service) as url, httpx.stream("POST", f"{url}/v1/completions", json=asked):
        eventually(lambda: waiting(service) == 1)
        with httpx.stream("GET", f"{url}/cluster/events") as watched:
            assert watched.headers["content-type"].startswith("text/event-stream")
            state = first_state(watched.iter_lines())
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


def test_a_change_has_the_rates_of_each_stage() -> None:
    service = TwinService(context=10**9)
    with (
        serving(service) as url,
        httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS),
        httpx.stream("GET", f"{url}/cluster/events") as watched,
    ):
        lines = watched.iter_lines()
        first_state(lines)
        change = next(
            json.loads(line[6:]) for line in lines if line.startswith("data: [") and '"/time"' in line
        )
        paths = {operation["path"]: operation["value"] for operation in change}
        assert paths["/pace/twin-1/tokens_per_s"] > 0
        assert [each["stage"] for each in paths["/pace/twin-1/stages"]] == [0, 1]


def test_who_leaves_makes_room_and_too_many_are_refused() -> None:
    with serving(TwinService()) as url, httpx.Client(limits=httpx.Limits(max_connections=99)) as client:
        watching = [
            client.send(client.build_request("GET", f"{url}/cluster/events"), stream=True)
            for _ in range(MOST_WATCHERS)
        ]
        assert {each.status_code for each in watching} == {200}
        refused = client.get(f"{url}/cluster/events")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
        assert "watch already" in error_of(refused)["message"]
        for each in watching:
            each.close()

        def has_room() -> bool:
            with client.stream("GET", f"{url}/cluster/events") as again:
                return again.status_code == 200

        eventually(has_room)


def test_it_needs_a_key_and_a_server_that_ends_does_not_wait_for_watchers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        serving(TwinService(), ApiSettings(api_keys=("key",))) as url,
        httpx.Client(headers={"x-api-key": "key"}) as client,
    ):
        assert httpx.get(f"{url}/cluster/events").status_code == 401
        watched = client.send(client.build_request("GET", f"{url}/cluster/events"), stream=True)
        first_state(watched.iter_lines())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
