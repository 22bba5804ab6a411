"""Kept answers: clients that come back, heads that follow each other, and who gets which answer."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from tests.api.clients import openapi_document
from tests.api.journal_heads import (
    STREAMS,
    Events,
    Head,
    events_of,
    request_of,
    response_events,
    running,
    without_times,
)
from tests.api.test_openapi import check
from tests.api.twins import TwinCatalog, TwinService
from tests.default_settings import make_api_settings
from tests.eventually import run_tasks_until

from mlx_ring.api.app import build_app
from mlx_ring.api.journal import Journal
from mlx_ring.api.journal_database import JournalDatabase
from mlx_ring.api.kept_answers import KeptRequest, decode_delta
from mlx_ring.api.openapi import ApiRoute
from mlx_ring.core.errors import StepFailed
from mlx_ring.core.generation import Delta
from mlx_ring.core.traces import owner_of
from mlx_ring.head.http_connections import HttpConfig
from mlx_ring.head.uvicorn_connection import ConnectionLimits

pytestmark = pytest.mark.usefixtures("patient_disk")


def test_every_stream_that_is_kept_has_a_request_here(tmp_path: Path) -> None:
    app = Head(tmp_path).app
    kept = {
        route.path
        for route in app.routes
        if isinstance(route, ApiRoute) and route.schema is not None and hasattr(route.schema, "is_kept")
        if not route.path.endswith(("count_tokens", "input_tokens")) and route.path.startswith("/v1")
    }
    assert kept == STREAMS.keys()


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("most", [1, 2, 7, 12])
def test_client_that_comes_back_gets_the_rest_and_nothing_twice(tmp_path: Path, path: str, most: int) -> None:
    async def run() -> tuple[Events, Events]:
        async with running(tmp_path) as head:
            whole = await head.stream(path, request_of(path))
            first = await head.stream(path, request_of(path), most=most)
            rest = await head.stream(path, {}, last_event_id=first[-1][0])
            return whole, first + rest

    whole, pieces = asyncio.run(run())
    assert [without_times(data) for _, data in pieces] == [without_times(data) for _, data in whole]
    assert [id_.split(":")[1] for id_, _ in pieces] == [str(number) for number in range(len(whole))]
    assert len({id_.split(":")[0] for id_, _ in pieces}) == 1


def test_client_of_an_answer_in_progress_gets_its_deltas_without_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, decoded = "/v1/chat/completions", list[bytes]()

    def decode(data: bytes) -> tuple[int, Delta]:
        decoded.append(data)
        return decode_delta(data)

    monkeypatch.setattr("mlx_ring.api.recordings.decode_delta", decode)

    async def run() -> tuple[Events, int, Events]:
        async with running(tmp_path) as head:
            counted = {"include_usage": True, "continuous_usage_stats": True}
            live = await head.stream(path, request_of(path, n=2, stream_options=counted))
            before = len(decoded)
            return live, before, await head.stream(path, {}, last_event_id=live[0][0])

    live, before, again = asyncio.run(run())
    assert (before, again) == (0, live[1:])
    assert decoded


@pytest.mark.parametrize("path", STREAMS)
def test_next_head_continues_what_an_earlier_one_began(tmp_path: Path, path: str) -> None:
    async def run() -> tuple[Events, Events]:
        async with running(tmp_path) as head:
            whole = await head.stream(path, request_of(path))
            tokens = head.service.engine.stats().generated_tokens
        async with running(tmp_path, automatic=False) as head:
            asked = asyncio.create_task(head.stream(path, request_of(path), most=6))
            while not asked.done():
                await head.step()
            first = await asked
        async with running(tmp_path) as head:
            rest = await head.stream(path, {}, last_event_id=first[-1][0])
            assert head.journal.stats().continued == 1
            # Only the tokens after those that were delivered are computed.
            assert head.service.engine.stats().generated_tokens < tokens
            again = await head.stream(path, {}, last_event_id=first[0][0])
            assert again[-1] == rest[-1]
            return whole, first + rest

    whole, pieces = asyncio.run(run())
    assert [without_times(data) for _, data in pieces] == [without_times(data) for _, data in whole]


def test_every_choice_continues_on_its_own(tmp_path: Path) -> None:
    body = request_of("/v1/completions", n=3, prompt=["ab", "Hello."], echo=False)

    def texts(events: Events) -> dict[int, str]:
        joined: dict[int, str] = {}
        for _, data in events:
            for choice in json.loads(data)["choices"]:
                joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
        return joined

    async def run() -> tuple[Events, Events]:
        async with running(tmp_path) as head:
            whole = await head.stream("/v1/completions", body)
        async with running(tmp_path, automatic=False) as head:
            asked = asyncio.create_task(head.stream("/v1/completions", body, most=25))
            while not asked.done():
                await head.step()
            first = await asked
        async with running(tmp_path) as head:
            return whole, first + await head.stream("/v1/completions", {}, last_event_id=first[-1][0])

    whole, pieces = asyncio.run(run())
    assert texts(pieces) == texts(whole)
    assert len(texts(whole)) == 6


def test_answer_that_nobody_reads_is_suspended_and_keeps_its_kv(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, automatic=False) as head:
            asked = asyncio.create_task(
                head.stream("/v1/chat/completions", request_of("/v1/chat/completions"), most=6)
            )
            while not asked.done():
                await head.step()
            [(last, _)] = (await asked)[-1:]
            await run_tasks_until(lambda: head.service.engine.stats().finished.get("abort"))
            assert not head.journal.has_work
            again = asyncio.create_task(head.stream("/v1/chat/completions", {}, last_event_id=last))
            while not again.done():
                await head.step()
            assert (await again)[-1][1].count('"usage"') == 1
            # The prompt of 14 tokens, and what was answered.
            assert head.service.engine.stats().cache.hit_tokens > 14

    asyncio.run(run())


def test_answers_match_the_documented_schemas(tmp_path: Path) -> None:
    async def run() -> list[tuple[str, str, str]]:
        async with running(tmp_path) as head:
            asked = {"input": "Hello.", "background": True}
            _, text = await head.call("POST", "/v1/responses", asked)
            path = f"/v1/responses/{json.loads(text)['id']}"
            one = "/v1/responses/{response_id}"
            return [
                ("/v1/responses", "post", text),
                (one, "get", (await head.call("GET", path))[1]),
                (one, "get", (await head.call("GET", f"{path}?stream=true"))[1]),
                (f"{one}/cancel", "post", (await head.call("POST", f"{path}/cancel"))[1]),
                (one, "delete", (await head.call("DELETE", path))[1]),
            ]

    for path, method, text in asyncio.run(run()):
        content = openapi_document()["paths"][path][method]["responses"]["200"]["content"]
        if text.startswith("id: "):
            for event in response_events(text):
                check(event, content["text/event-stream"]["x-each"])
        else:
            check(json.loads(text), content["application/json"]["schema"])


def test_only_the_key_that_asked_gets_the_answer(tmp_path: Path) -> None:
    keys = ("sk-first", "sk-second")

    async def run() -> tuple[list[tuple[int, str]], str]:
        async with running(tmp_path, keys=keys) as head:
            _, text = await head.call(
                "POST", "/v1/responses", {"input": "Hello."}, authorization="Bearer sk-first"
            )
            id_ = json.loads(text)["id"]
            path = f"/v1/responses/{id_}"
            answers = [
                await head.call("GET", path, authorization="Bearer sk-second"),
                await head.call("DELETE", path, authorization="Bearer sk-second"),
                await head.call(
                    "POST", "/v1/responses", {}, authorization="Bearer sk-second", last_event_id=f"{id_}:0"
                ),
                await head.call("GET", path),
                await head.call("GET", path, x_api_key="sk-first"),
            ]
        # The first key is revoked: its answers go.
        async with running(tmp_path, keys=keys[1:]) as head:
            await run_tasks_until(lambda: head.journal.stats()[1:4] == (0, 0, 0))
        return answers, id_

    answers, id_ = asyncio.run(run())
    assert [status for status, _ in answers] == [404, 404, 404, 401, 200]
    assert id_ in answers[0][1]


def test_background_answers_of_a_revoked_key_are_removed_and_not_computed(tmp_path: Path) -> None:
    """Let there be more of them than are removed at once."""
    database = JournalDatabase(tmp_path, 1 << 24)
    now = int(time.time())
    for number in range(40):
        key = "sk-known" if number == 39 else "sk-revoked"
        request = KeptRequest(
            f"resp_{number}", owner_of(f"key {key}"), "/v1/responses", now, b"r" * 16, runs_alone=True
        )
        database.add(request, b"{}", [(1, 2, 3)], ())
    database.close()
    computed: list[str] = []

    async def respond(request: Request) -> Response:
        computed.append(request.scope["request_id"])
        return await asyncio.get_running_loop().create_future()

    async def run() -> None:
        journal = Journal(tmp_path, 1 << 24, ["sk-known"])
        journal.serve(object(), {"/v1/responses": respond})
        await journal.open()
        journal.begin()
        await run_tasks_until(lambda: len(computed) > 1 or (computed and sum(journal.stats()[1:4]) == 1))
        await journal.close()

    asyncio.run(run())
    assert computed == ["resp_39"]


def test_store_false_keeps_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as head:
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
                status, text = await head.call("POST", path, request_of(path, store=False))
                assert (status, events_of(text)) == (200, [])
            await head.journal._writer.clean()  # pyright: ignore[reportPrivateUsage]
            assert head.journal.stats()[1:4] == (0, 0, 0)
            status, text = await head.call(
                "POST", "/v1/responses", {"input": "Hi", "store": False, "background": True}
            )
            assert (status, json.loads(text)["error"]["param"]) == (400, "background")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("given", "says"),
    [("x", "Last-Event-ID is 'x'"), ("resp_1:-1", "Last-Event-ID"), ("resp_1:2", "no answer 'resp_1'")],
)
def test_wrong_ids_of_events_get_one_sentence(tmp_path: Path, given: str, says: str) -> None:
    async def run() -> tuple[int, str]:
        async with running(tmp_path) as head:
            return await head.call("POST", "/v1/chat/completions", {}, last_event_id=given)

    status, text = asyncio.run(run())
    assert status in (400, 404)
    assert says in json.loads(text)["error"]["message"]


def test_id_of_an_event_fetches_nothing_but_the_events_of_the_response_in_the_path(tmp_path: Path) -> None:
    async def run() -> list[tuple[int, str]]:
        async with running(tmp_path) as head:
            texts = [(await head.call("POST", "/v1/responses", {"input": "Hi."}))[1] for _ in range(2)]
            one, other = (json.loads(text)["id"] for text in texts)
            path = f"/v1/responses/{one}"
            return [
                await head.call("GET", path, last_event_id=f"{other}:1"),
                await head.call("GET", f"{path}?stream=true", last_event_id=f"{one}:1"),
                await head.call("GET", f"{path}?stream=true", last_event_id=f"{other}:1"),
                await head.call("GET", f"{path}?stream=true&starting_after=3", last_event_id=f"{one}:1"),
            ]

    whole, rest, foreign, explicit = asyncio.run(run())
    assert json.loads(whole[1])["status"] == "completed"
    assert [response_events(text)[0]["sequence_number"] for _, text in (rest, explicit)] == [2, 4]
    assert foreign[0] == 400
    assert "Last-Event-ID names an event of" in foreign[1]


def test_server_without_a_journal_says_how_to_get_one() -> None:
    app_only = Head.__new__(Head)
    app_only.app = build_app(TwinCatalog(TwinService()), make_api_settings())

    async def run() -> list[tuple[int, str]]:
        return [
            await app_only.call("POST", "/v1/responses", {"input": "Hi", "background": True}),
            await app_only.call("GET", "/v1/responses/resp_1"),
            await app_only.call("POST", "/v1/chat/completions", {}, last_event_id="chatcmpl-1:3"),
        ]

    answers = asyncio.run(run())
    assert [status for status, _ in answers] == [400, 404, 404]
    assert all("--journal" in text for _, text in answers)


def test_failure_is_kept_and_reported_again(tmp_path: Path) -> None:
    async def run() -> list[tuple[int, str]]:
        async with running(tmp_path, automatic=False) as head:
            _, text = await head.call("POST", "/v1/responses", {"input": "Hello.", "background": True})
            path = f"/v1/responses/{json.loads(text)['id']}"
            head.service.engine.fail(StepFailed("Step 3 raised in worker 1."))
            await run_tasks_until(lambda: not head.journal.has_work)
        async with running(tmp_path) as head:
            return [await head.call("GET", path), await head.call("GET", f"{path}?stream=true")]

    kept, events = asyncio.run(run())
    response = json.loads(kept[1])
    assert response["status"] == "failed"
    assert response["error"]["message"] == "Step 3 raised in worker 1."
    *_, reported, raised = response_events(events[1])
    assert (reported["type"], raised["type"]) == ("response.failed", "error")


def test_server_that_ends_cuts_a_kept_stream_instead_of_ending_it(tmp_path: Path) -> None:
    async def run() -> str:
        head = Head(tmp_path, automatic=False)
        await head.journal.open()
        asked = asyncio.create_task(
            head.call("POST", "/v1/chat/completions", request_of("/v1/chat/completions"))
        )
        while head.service.engine.stats().generated_tokens < 5:
            await head.step()
        await head.journal.close()
        return (await asked)[1]

    text = asyncio.run(run())
    assert len(events_of(text)) >= 2
    assert "error" not in text
    assert "[DONE]" not in text


def test_requests_of_one_connection_do_not_share_an_answer(tmp_path: Path) -> None:
    """Send a large body: the server resumes reading within the request's context, which later requests then inherit."""
    head = Head(tmp_path, keys=("sk-first", "sk-second"))

    async def run(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            answers: list[httpx.Response] = []
            for key, more in (
                ("sk-first", {"metadata": {"m": "z" * 1_000_000}}),
                ("sk-second", {}),
                ("sk-second", {}),
            ):
                headers = {"authorization": f"Bearer {key}"}
                answers.append(
                    await client.post("/v1/responses", json={"input": "Hi", **more}, headers=headers)
                )
            return answers

    async def serve() -> list[httpx.Response]:
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(HttpConfig(head.app, ConnectionLimits(), None, end_s=1))
        await head.journal.open()
        serving = asyncio.create_task(server.serve([listener]))
        try:
            return await run(f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            server.should_exit = True
            await serving
            await head.journal.close()

    answers = asyncio.run(serve())
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert len({answer.json()["id"] for answer in answers}) == 3


def test_each_answer_belongs_to_its_endpoint(tmp_path: Path) -> None:
    async def run() -> list[tuple[int, str]]:
        async with running(tmp_path) as head:
            chat = await head.stream("/v1/chat/completions", request_of("/v1/chat/completions"))
            _, text = await head.call("POST", "/v1/responses", {"input": "Hello."})
            id_, response_id = chat[0][0].rpartition(":")[0], json.loads(text)["id"]
            return [
                await head.call("GET", f"/v1/responses/{id_}"),
                await head.call("DELETE", f"/v1/responses/{id_}"),
                await head.call("POST", "/v1/messages", {}, last_event_id=f"{id_}:0"),
                await head.call("POST", "/v1/chat/completions", {}, last_event_id=f"{response_id}:0"),
                await head.call("POST", "/chat/completions", {}, last_event_id=f"{id_}:0"),
            ]

    answers = asyncio.run(run())
    assert [status for status, _ in answers] == [404, 404, 404, 404, 200]
    assert "is an answer of /v1/chat/completions, not of /v1/responses" in answers[0][1]


def test_key_that_is_not_ascii_has_one_owner_however_it_is_sent(tmp_path: Path) -> None:
    async def run() -> list[int]:
        async with running(tmp_path, keys=("schlüssel",)) as head:
            utf8, latin1 = ("schlüssel".encode(code).decode("latin-1") for code in ("utf-8", "latin-1"))
            _, text = await head.call("POST", "/v1/responses", {"input": "Hello."}, x_api_key=utf8)
            path = f"/v1/responses/{json.loads(text)['id']}"
            await head.journal._writer.clean()  # pyright: ignore[reportPrivateUsage]
            return [(await head.call("GET", path, x_api_key=key))[0] for key in (utf8, latin1)]

    assert asyncio.run(run()) == [200, 200]


def test_refused_stream_is_not_counted_as_an_answer(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as head:
            for prompt in ("x" * 5000, [2**31]):
                status, text = await head.call("POST", "/v1/completions", {"prompt": prompt, "stream": True})
                assert status == 400, text
            stats = head.journal.stats()
            assert (stats.running, stats.suspended, stats.ended, stats.lost) == (0, 0, 0, 0)

    asyncio.run(run())
