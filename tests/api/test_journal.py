"""Kept answers: clients that come back, heads that follow each other, and disks that fail."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import sqlite3
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import Message
from tests.api.clients import openapi_document
from tests.api.test_openapi import check
from tests.api.twins import TwinCatalog, TwinService
from tests.default_settings import make_api_settings
from tests.eventually import run_tasks_until

from mlx_ring.api.app import build_app
from mlx_ring.api.journal import Journal
from mlx_ring.api.journal_database import FILE, JournalDatabase
from mlx_ring.api.kept_answers import decode_delta
from mlx_ring.api.openapi import ApiRoute
from mlx_ring.core.errors import ConfigError, NotReady, StepFailed
from mlx_ring.core.generation import Delta
from mlx_ring.head.http_connections import HttpConfig
from mlx_ring.head.uvicorn_connection import ConnectionLimits

SIZE = 1 << 20
HELLO = [{"role": "user", "content": "Hello."}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "stream_options": {"include_usage": True}, "logprobs": True},
    "/v1/completions": {"prompt": "Hello.", "max_tokens": 20, "logprobs": 2, "echo": True},
    "/v1/responses": {"input": "Hello."},
    "/v1/messages": {"messages": HELLO, "max_tokens": 100},
}
"""A streamed request of each endpoint whose answers are kept."""
Events = list[tuple[str, str]]
"""Ids and data of events."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not take a busy disk for one that hangs. Tests of such disks set less."""
    monkeypatch.setattr("mlx_ring.api.disk_thread._SLOWEST_S", 60.0)


class Head:
    """One run of a head with a journal, whose ranks answer a step when the test says so."""

    def __init__(
        self, folder: Path, *, keys: Sequence[str] = (), automatic: bool = True, size: int = SIZE
    ) -> None:
        self.service = TwinService(automatic=automatic)
        self.catalog = TwinCatalog(self.service)
        self.journal = Journal(folder, size, keys)
        settings = make_api_settings(api_keys=tuple(keys))
        self.app = build_app(self.catalog, settings, journal=self.journal)

    async def step(self) -> None:
        """Let every rank execute what it was sent and deliver the answers, and clients get what is written of these."""
        executor = self.service.executor
        for rank in executor.runnable():
            executor.run(rank)
        for rank in executor.answering():
            executor.deliver(rank)
        for _ in range(10):
            await asyncio.sleep(0)
        await run_tasks_until(lambda: not self.journal._writer._is_writing)  # pyright: ignore[reportPrivateUsage]
        for _ in range(10):
            await asyncio.sleep(0)

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        leaves: Callable[[bytes], bool] = lambda _: False,
        **headers: str,
    ) -> tuple[int, str]:
        """Send a request, and return the status and what came of the answer.

        Args:
            method: the request's method.
            path: its path and query.
            body: its body, as JSON.
            leaves: returns True of the bytes so far when the client closes its connection.
            headers: its headers, with underscores for hyphens.
        """
        received, status, has_left = bytearray(), 0, asyncio.Event()
        messages = iter(
            [{"type": "http.request", "body": json.dumps(body).encode() if body is not None else b""}]
        )

        async def receive() -> Message:
            message = next(messages, None)
            if message is None:
                await has_left.wait()
            return message or {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if not has_left.is_set():
                received.extend(message.get("body", b""))
            if leaves(bytes(received)):
                has_left.set()

        path, _, query = path.partition("?")
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        await self.app(
            {
                "type": "http",
                "http_version": "1.1",
                "method": method,
                "path": path,
                "root_path": "",
                "raw_path": path.encode(),
                "query_string": query.encode(),
                "scheme": "http",
                "server": ("localhost", 8100),
                "client": ("127.0.0.1", 5000),
                "state": {},
                "headers": [
                    (name.encode(), value.encode("latin-1"))
                    for name, value in {"host": "localhost", **given}.items()
                ],
            },
            receive,
            send,
        )
        return status, received.decode()

    async def stream(self, path: str, body: object, *, most: int | None = None, **headers: str) -> Events:
        """Return the events of a streamed answer, of which the client may read only the first ones."""
        status, text = await self.call(
            "POST",
            path,
            body,
            leaves=lambda data: most is not None and data.count(b"\ndata: ") >= most,
            **headers,
        )
        assert status == 200, text
        return events_of(text)[:most]


def events_of(text: str) -> Events:
    return re.findall(r"^id: (.*)\n(?:event: .*\n)?data: (.*)$", text, re.MULTILINE)


@asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncGenerator[Head]:
    """Run a head, and end it in order."""
    head = Head(folder, **options)
    await head.journal.open()
    head.journal.begin()
    try:
        yield head
    finally:
        await head.journal.close()


def request_of(path: str, **more: object) -> dict[str, object]:
    return (
        {**STREAMS[path], "stream": True, "seed": 5, **more}
        if path != "/v1/messages"
        else {**STREAMS[path], "stream": True}
    )


def without_times(data: str) -> str:
    """Return an event without the figures that differ from run to run: times, speeds, ids and the prefix cache's part."""
    data = re.sub(r'"(created|created_at|completed_at)":\d+', "", data)
    data = re.sub(r'"performance":\{.*?\}', "", data)
    data = re.sub(r'"cached_tokens":\d+|"cache_\w+_input_tokens":\d+|"input_tokens":\d+', "", data)
    return re.sub(r"(chatcmpl-|cmpl-|resp_|msg_)[0-9a-f]+", r"\1", data)


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
            live = await head.stream(path, request_of(path, n=2))
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


def response_events(text: str) -> list[dict[str, Any]]:
    return [json.loads(data) for _, data in events_of(text)]


def test_background_response_is_computed_without_its_client_and_by_the_next_head(tmp_path: Path) -> None:
    body = {"input": "Hello.", "background": True}

    async def run() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async with running(tmp_path, automatic=False) as head:
            status, text = await head.call("POST", "/v1/responses", body)
            assert status == 200, text
            queued = json.loads(text)
            assert (queued["status"], queued["background"], queued["store"]) == ("queued", True, True)
            while head.service.engine.stats().generated_tokens < 5:
                await head.step()
            await run_tasks_until(lambda: head.journal._writer.recordings[queued["id"]].deltas)  # pyright: ignore[reportPrivateUsage]
            _, text = await head.call("GET", f"/v1/responses/{queued['id']}")
            assert json.loads(text)["status"] == "in_progress"
            assert json.loads(text)["output"] == []
        async with running(tmp_path) as head:
            # Nobody asks for it.
            await run_tasks_until(lambda: head.service.engine.stats().finished.get("stop"))
            await run_tasks_until(lambda: not head.journal.has_work)
            assert head.journal.stats()[1:4] == (0, 0, 1)
            _, text = await head.call("GET", f"/v1/responses/{queued['id']}")
            _, events = await head.call("GET", f"/v1/responses/{queued['id']}?stream=true&starting_after=3")
        return json.loads(text), response_events(events)

    response, events = asyncio.run(run())
    assert response["status"] == "completed"
    assert response["output"][0]["content"][0]["text"] == "Grüße: 日本, and 🙂 to you."
    assert [event["sequence_number"] for event in events] == list(range(4, 4 + len(events)))
    assert events[-1]["response"] == response


def test_events_of_a_background_response_begin_with_its_place_in_the_queue(tmp_path: Path) -> None:
    async def run() -> str:
        async with running(tmp_path) as head:
            return (
                await head.call("POST", "/v1/responses", {"input": "Hi", "background": True, "stream": True})
            )[1]

    events = response_events(asyncio.run(run()))
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]
    assert events[-1]["type"] == "response.completed"


def test_background_response_is_cancelled_and_deleted(tmp_path: Path) -> None:
    async def run() -> list[tuple[int, str]]:
        async with running(tmp_path, automatic=False) as head:
            _, text = await head.call("POST", "/v1/responses", {"input": "Hello.", "background": True})
            path = f"/v1/responses/{json.loads(text)['id']}"
            reading = asyncio.create_task(head.call("GET", f"{path}?stream=true"))
            while head.service.engine.stats().generated_tokens < 5:
                await head.step()
            answers = [await head.call("POST", f"{path}/cancel"), await reading, await head.call("GET", path)]
            assert not head.journal.has_work
            answers += [await head.call("DELETE", path), await head.call("GET", path)]
            return answers

    cancelled, read, kept, deleted, missing = asyncio.run(run())
    assert json.loads(cancelled[1])["status"] == json.loads(kept[1])["status"] == "cancelled"
    last = response_events(read[1])[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    assert json.loads(deleted[1])["deleted"] is True
    assert missing[0] == 404


def test_foreground_response_can_be_fetched_but_not_cancelled(tmp_path: Path) -> None:
    async def run() -> list[tuple[int, str]]:
        async with running(tmp_path) as head:
            made = await head.call("POST", "/v1/responses", {"input": "Hello."})
            path = f"/v1/responses/{json.loads(made[1])['id']}"
            return [made, await head.call("GET", path), await head.call("POST", f"{path}/cancel")]

    made, kept, refused = asyncio.run(run())
    assert json.loads(made[1]) == json.loads(kept[1])
    assert refused[0] == 409
    assert "background" in refused[1]


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


# ---- disks


def test_oldest_answers_go_when_the_journal_is_full(tmp_path: Path) -> None:
    size = 128 << 10

    async def run() -> tuple[list[int], int]:
        async with running(tmp_path, size=size) as head:
            ids: list[str] = []
            for number in range(40):
                _, text = await head.call("POST", "/v1/responses", {"input": f"{number}" + "x" * 3000})
                ids.append(json.loads(text)["id"])
            return [
                (await head.call("GET", f"/v1/responses/{id_}"))[0] for id_ in ids
            ], head.journal.stats().lost

    statuses, lost = asyncio.run(run())
    kept = statuses.count(200)
    assert 3 <= kept < 40
    assert statuses == [404] * (40 - kept) + [200] * kept
    assert lost == 0
    assert (tmp_path / FILE).stat().st_size <= size


def test_request_that_is_too_large_for_the_journal_is_answered_without_ids(tmp_path: Path) -> None:
    async def run() -> tuple[tuple[int, str], tuple[int, str], int]:
        async with running(tmp_path, size=128 << 10) as head:
            large = {"input": "y" * 3000, "instructions": "x" * 200, "metadata": {"m": "z" * 200_000}}
            streamed = await head.call("POST", "/v1/responses", {**large, "stream": True})
            refused = await head.call("POST", "/v1/responses", {**large, "background": True})
            return streamed, refused, head.journal.stats().lost

    streamed, refused, lost = asyncio.run(run())
    assert streamed[0] == 200
    assert "response.completed" in streamed[1]
    assert events_of(streamed[1]) == []
    assert refused[0] == 429
    assert "journal" in json.loads(refused[1])["error"]["message"]
    assert lost == 2


def test_answers_go_on_while_the_disk_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_ring.api.disk_thread._SLOWEST_S", 0.05)
    answers_again = threading.Event()

    def hang(*_: object) -> list[str]:
        answers_again.wait()
        return []

    monkeypatch.setattr(JournalDatabase, "append", hang)

    async def run() -> tuple[tuple[int, str], tuple[int, str], int]:
        async with running(tmp_path) as head:
            try:
                body = request_of("/v1/chat/completions")
                first = await head.call("POST", "/v1/chat/completions", body)
                # The disk is known to hang, so that this one does not wait.
                second = await head.call("POST", "/v1/chat/completions", body)
                return first, second, head.journal.stats().lost
            finally:
                answers_again.set()

    first, second, lost = asyncio.run(run())
    assert lost == 2
    assert first[1].count('"delta"') == second[1].count('"delta"')
    assert first[1].endswith("[DONE]\n\n")
    assert events_of(second[1]) == []


def test_folder_that_disappears_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "journal"

    async def run() -> list[int]:
        async with running(folder) as head:
            before = json.loads((await head.call("POST", "/v1/responses", {"input": "a"}))[1])["id"]
            shutil.rmtree(folder)
            after = json.loads((await head.call("POST", "/v1/responses", {"input": "b"}))[1])["id"]
        async with running(folder) as head:
            return [(await head.call("GET", f"/v1/responses/{id_}"))[0] for id_ in (before, after)]

    assert asyncio.run(run()) == [404, 200]


def test_second_head_says_which_folder_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_ring.api.journal_database._BUSY_S", 0.01)

    async def run() -> None:
        async with running(tmp_path):
            with pytest.raises(ConfigError, match=r"--journal-dir"):
                await Head(tmp_path).journal.open()

    asyncio.run(run())


def test_database_that_is_damaged_while_it_is_open_begins_anew(tmp_path: Path) -> None:
    async def run() -> list[int]:
        async with running(tmp_path) as head:
            path = f"/v1/responses/{json.loads((await head.call('POST', '/v1/responses', {'input': 'a'}))[1])['id']}"
            problem = sqlite3.DatabaseError("database disk image is malformed")
            head.journal._writer._note(problem)  # pyright: ignore[reportPrivateUsage]
            missing = await head.call("GET", path)
            after = await head.call("POST", "/v1/responses", {"input": "b"})
            kept = await head.call("GET", f"/v1/responses/{json.loads(after[1])['id']}")
            return [missing[0], after[0], kept[0]]

    statuses = asyncio.run(run())
    assert statuses[1:] == [200, 200]
    assert (tmp_path / "journal.damaged").exists()


def test_folder_that_cannot_be_used_costs_no_answer(tmp_path: Path) -> None:
    folder = tmp_path / "journal"

    async def run() -> list[int]:
        async with running(folder) as head:
            shutil.rmtree(folder)
            folder.write_text("in the way")
            answers = [await head.call("POST", "/v1/responses", {"input": "a"})]
            answers.append(await head.call("POST", "/v1/responses", {"input": "a", "background": True}))
            folder.unlink()
            answers.append(await head.call("POST", "/v1/responses", {"input": "a", "background": True}))
            return [status for status, _ in answers]

    assert asyncio.run(run()) == [200, 429, 200]


def test_large_request_does_not_remove_the_answers_of_others(tmp_path: Path) -> None:
    async def run() -> tuple[int, int]:
        async with running(tmp_path, size=256 << 10) as head:
            _, text = await head.call("POST", "/v1/responses", {"input": "Hello."})
            await head.call("POST", "/v1/responses", {"input": "x", "metadata": {"m": "z" * 300_000}})
            return (await head.call("GET", f"/v1/responses/{json.loads(text)['id']}"))[
                0
            ], head.journal.stats().lost

    assert asyncio.run(run()) == (200, 1)


# ---- clients


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


def test_response_that_waits_for_its_model_is_queued_once_however_often_it_is_asked_for(
    tmp_path: Path,
) -> None:
    async def run() -> tuple[dict[str, Any], int, dict[str, Any]]:
        async with running(tmp_path) as head:
            head.service.is_loaded = False
            begun = asyncio.Event()

            async def ready(model: object) -> None:
                del model
                begun.set()
                await asyncio.get_running_loop().create_future()

            loads, head.catalog.ready = head.catalog.ready, ready
            _, text = await head.call("POST", "/v1/responses", {"input": "Hello.", "background": True})
            queued = json.loads(text)
            path = f"/v1/responses/{queued['id']}"
            await begun.wait()
            tasks = len(asyncio.all_tasks())
            for _ in range(5):
                _, text = await head.call("GET", path)
                assert json.loads(text)["status"] == "queued"
            more = len(asyncio.all_tasks()) - tasks
            head.catalog.ready = loads
        # The next head has the model.
        async with running(tmp_path) as head:
            await run_tasks_until(lambda: head.journal.stats().ended)
            return queued, more, json.loads((await head.call("GET", path))[1])

    queued, more, ended = asyncio.run(run())
    assert (queued["status"], more, ended["status"]) == ("queued", 0, "completed")


def test_response_that_the_model_drops_is_continued_when_it_can_be(tmp_path: Path) -> None:
    """Let the engine fail with an error that passes: the response waits, and its reader is cut off."""

    async def run() -> tuple[str, dict[str, Any]]:
        async with running(tmp_path, automatic=False) as head:
            _, text = await head.call("POST", "/v1/responses", {"input": "Hello.", "background": True})
            path = f"/v1/responses/{json.loads(text)['id']}"
            reading = asyncio.create_task(head.call("GET", f"{path}?stream=true"))
            while head.service.engine.stats().generated_tokens < 5:
                await head.step()
            head.service.engine.fail(NotReady("The model is unloaded."))
            cut = (await reading)[1]
            # The model is loaded again.
            head.service.engine = TwinService().engine
            await run_tasks_until(lambda: head.journal.stats().ended)
            return cut, json.loads((await head.call("GET", path))[1])

    cut, ended = asyncio.run(run())
    assert "error" not in cut.replace('"error":null', "")
    assert ended["status"] == "completed"
    assert ended["output"][0]["content"][0]["text"] == "Grüße: 日本, and 🙂 to you."


def test_key_that_is_not_ascii_has_one_owner_however_it_is_sent(tmp_path: Path) -> None:
    async def run() -> list[int]:
        async with running(tmp_path, keys=("schlüssel",)) as head:
            utf8, latin1 = ("schlüssel".encode(code).decode("latin-1") for code in ("utf-8", "latin-1"))
            _, text = await head.call("POST", "/v1/responses", {"input": "Hello."}, x_api_key=utf8)
            path = f"/v1/responses/{json.loads(text)['id']}"
            await head.journal._writer.clean()  # pyright: ignore[reportPrivateUsage]
            return [(await head.call("GET", path, x_api_key=key))[0] for key in (utf8, latin1)]

    assert asyncio.run(run()) == [200, 200]


def test_cancel_holds_although_the_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[str]:
        raise sqlite3.OperationalError("disk I/O error")

    async def run() -> tuple[int, str]:
        async with running(tmp_path, automatic=False) as head:
            _, text = await head.call("POST", "/v1/responses", {"input": "Hello.", "background": True})
            id_ = json.loads(text)["id"]
            reading = asyncio.create_task(head.call("GET", f"/v1/responses/{id_}?stream=true"))
            await run_tasks_until(lambda: len(head.journal._writer.recordings[id_]._readers) == 2)  # pyright: ignore[reportPrivateUsage]
            monkeypatch.setattr(JournalDatabase, "append", fail)
            status, _ = await head.call("POST", f"/v1/responses/{id_}/cancel")
            return status, (await reading)[1]

    status, text = asyncio.run(run())
    assert status == 200
    # Its last event has an empty id, because it is not kept.
    *_, last = re.findall(r"^id:\n(?:event: .*\n)?data: (.*)$", text, re.MULTILINE)
    assert json.loads(last)["response"]["status"] == "cancelled"
