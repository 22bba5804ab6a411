"""Responses that are kept: computed in the background, fetched, cancelled and deleted."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.api.journal_heads import (
    HELLO,
    SIZE,
    STREAMS,
    Events,
    Head,
    request_of,
    response_events,
    running,
)
from tests.api.twins import TwinService
from tests.eventually import run_tasks_until

from mlx_ring.api.journal_database import FILE, JournalDatabase
from mlx_ring.api.openai.responses import route
from mlx_ring.api.streaming import JsonAnswer
from mlx_ring.core.errors import NotReady

pytestmark = pytest.mark.usefixtures("patient_disk")


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
    assert refused[0] == 400  # clients repeat a 409
    assert "background" in refused[1]


def test_input_items_are_listed_by_page_in_both_orders(tmp_path: Path) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}", "id": "fc_1"}
    items = [
        {"role": "user", "content": "Add."},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "It is 3."}]},
        {"role": "user", "content": "Thanks."},
    ]

    async def run() -> list[dict[str, Any]]:
        async with running(tmp_path) as head:
            listed: list[dict[str, Any]] = []
            for given in (items, "Hello."):
                _, text = await head.call("POST", "/v1/responses", {"input": given})
                path = f"/v1/responses/{json.loads(text)['id']}/input_items"
                queries = [
                    "order=asc",
                    "",
                    "limit=2",
                    "limit=2&after=fc_1",
                    "limit=0",
                    "order=up",
                    "after=none",
                ]
                listed += [json.loads((await head.call("GET", f"{path}?{query}"))[1]) for query in queries]
            return listed

    ascending, descending, first, rest, *refused, text, _, _, _, _, _, _ = asyncio.run(run())
    data = ascending["data"]
    assert [item["type"] for item in data] == [
        "message", "function_call", "function_call_output", "message", "message",
    ]  # fmt: skip
    assert data[0]["content"] == [{"type": "input_text", "text": "Add."}]
    assert data[1] == {**call, "status": "completed"}
    assert data[3]["content"] == items[3]["content"]
    assert len({item["id"] for item in data}) == len(items)
    assert descending["data"] == data[::-1]
    assert (first["data"], first["has_more"], first["last_id"]) == (data[:2:-1], True, data[3]["id"])
    assert (rest["data"], rest["has_more"], rest["first_id"]) == (data[:1], False, data[0]["id"])
    assert [each["error"]["param"] for each in refused] == ["limit", "order", "after"]
    [item] = text["data"]
    assert (item["role"], item["content"]) == ("user", [{"type": "input_text", "text": "Hello."}])


async def list_by_page(head: Head, given: object, query: str) -> list[dict[str, Any]]:
    """Return the input items of a response, page by page; one page more than there are items at most."""
    _, text = await head.call("POST", "/v1/responses", {"input": given})
    path = f"/v1/responses/{json.loads(text)['id']}/input_items?{query}"
    listed: list[dict[str, Any]] = []
    after = ""
    for _ in range(6):
        _, text = await head.call("GET", f"{path}{after}")
        page = json.loads(text)
        listed += page["data"]
        after = f"&after={page['last_id']}"
        if not page["has_more"]:
            break
    return listed


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_paging_ends_whatever_ids_clients_give_to_input_items(tmp_path: Path, order: str) -> None:
    ids: list[str | None] = ["m", "m", "", None, "m"]
    given = [{"role": "user", "content": str(at), "id": id_} for at, id_ in enumerate(ids)]

    async def run() -> list[dict[str, Any]]:
        async with running(tmp_path) as head:
            return await list_by_page(head, given, f"order={order}&limit=1")

    listed = asyncio.run(run())
    texts = [item["content"][0]["text"] for item in listed]
    assert texts == [str(at) for at in range(len(ids))][:: 1 if order == "asc" else -1]
    assert len({item["id"] for item in listed}) == len(ids)
    assert "m" in {item["id"] for item in listed}
    assert all(item["id"] for item in listed)


@pytest.mark.parametrize(
    "query",
    [
        "limit=00000000100000",
        f"limit={'0' * 5000}1",
        "limit=%D9%A3",
        "limit=101",
        "limit=-1",
        f"after={'x' * 3000}",
        f"order={'x' * 3000}",
    ],
    ids=lambda query: query[:20],
)
def test_wrong_query_for_input_items_is_refused_in_one_short_sentence(tmp_path: Path, query: str) -> None:
    async def run() -> tuple[int, str]:
        async with running(tmp_path) as head:
            _, text = await head.call("POST", "/v1/responses", {"input": "Hello."})
            return await head.call("GET", f"/v1/responses/{json.loads(text)['id']}/input_items?{query}")

    status, text = asyncio.run(run())
    assert (status, json.loads(text)["error"]["param"]) == (400, query.partition("=")[0])
    assert len(text) < 400


def test_input_items_of_a_large_request_are_read_and_written_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []

    def parse(data: bytes) -> object:
        threads.append(threading.current_thread() is threading.main_thread())
        return json.loads(data)

    def render(answer: JsonAnswer[Any], content: dict[str, Any]) -> bytes:
        if "first_id" in content:
            threads.append(threading.current_thread() is threading.main_thread())
            assert content["data"] == [], "each item is encoded by itself"
        return written(answer, content)

    written = JsonAnswer[Any].render
    monkeypatch.setattr(route, "parse_json", parse)
    monkeypatch.setattr(JsonAnswer, "render", render)

    async def run() -> None:
        async with running(tmp_path, size=8 * SIZE) as head:
            for length in (1, 300_000):
                summary = [{"type": "summary_text", "text": "x" * length}]
                await list_by_page(head, [{"type": "reasoning", "summary": summary}, *HELLO], "limit=2")

    asyncio.run(run())
    assert threads == [True, True, False, False]


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


async def begin_stream(folder: Path, path: str, digest: str) -> Events:
    """Return the first events of an answer by a model of that digest. Its client leaves, and then its head ends."""
    async with running(folder, automatic=False, digest=digest) as head:
        asked = asyncio.create_task(head.stream(path, request_of(path), most=6))
        while not asked.done():
            await head.step()
        return await asked


@pytest.mark.parametrize("path", STREAMS)
def test_another_model_under_the_same_name_continues_no_answer(tmp_path: Path, path: str) -> None:
    async def run() -> tuple[Events, str, Events, int]:
        first = await begin_stream(tmp_path, path, "a-1")
        async with running(tmp_path, digest="a-2") as head:
            _, rest = await head.call("POST", path, {}, last_event_id=first[-1][0])
            again = await head.stream(path, {}, last_event_id=first[0][0])
            return first, rest, again, head.service.engine.stats().generated_tokens

    first, rest, again, generated = asyncio.run(run())
    assert "other weights or another configuration than when it began (a-1, now a-2)" in rest
    assert "send the request again" in rest
    # Delivered events stay, and nothing is added.
    assert again[: len(first) - 1] == first[1:]
    assert generated == 0


def test_background_response_of_another_model_fails_and_keeps_its_output(tmp_path: Path) -> None:
    async def run() -> dict[str, Any]:
        async with running(tmp_path, automatic=False, digest="a-1") as head:
            _, text = await head.call("POST", "/v1/responses", {"input": "Hello.", "background": True})
            path = f"/v1/responses/{json.loads(text)['id']}"
            while head.service.engine.stats().generated_tokens < 5:
                await head.step()
        async with running(tmp_path, digest="a-2") as head:
            await run_tasks_until(lambda: head.journal.stats().ended)
        # The first model is back, but the answer has ended.
        async with running(tmp_path, digest="a-1") as head:
            return json.loads((await head.call("GET", path))[1])

    failed = asyncio.run(run())
    assert failed["status"] == "failed"
    assert "cannot be continued" in failed["error"]["message"]
    text = failed["output"][0]["content"][0]["text"]
    assert text
    assert "Grüße: 日本".startswith(text)


def test_another_model_may_answer_what_none_has_begun(tmp_path: Path) -> None:
    async def run() -> dict[str, Any]:
        async with running(tmp_path, automatic=False, digest="a-1") as head:
            _, text = await head.call("POST", "/v1/responses", {"input": "Hello.", "background": True})
        async with running(tmp_path, digest="a-2") as head:
            await run_tasks_until(lambda: head.journal.stats().ended)
            return json.loads((await head.call("GET", f"/v1/responses/{json.loads(text)['id']}"))[1])

    assert asyncio.run(run())["status"] == "completed"


def test_model_that_made_the_first_token_is_kept_rather_than_the_one_of_the_request(tmp_path: Path) -> None:
    async def run() -> tuple[dict[str, Any], dict[str, Any]]:
        async with running(tmp_path, automatic=False, digest="a-1") as head:
            # Its files are replaced while the request waits for an engine.
            head.service.engine.limits = replace(head.service.engine.limits, model="a-2")
            _, text = await head.call("POST", "/v1/responses", {"input": "Hello.", "background": True})
            path = f"/v1/responses/{json.loads(text)['id']}"
            while head.service.engine.stats().generated_tokens < 5:
                await head.step()
        answers: list[dict[str, Any]] = []
        for digest in ("a-2", "a-1"):
            async with running(tmp_path, automatic=False, digest=digest) as head:
                await run_tasks_until(lambda head=head: head.journal.has_work or head.journal.stats().ended)
                answers.append(json.loads((await head.call("GET", path))[1]))
        return answers[0], answers[1]

    same, other = asyncio.run(run())
    assert same["status"] == "in_progress"
    assert other["status"] == "failed"
    assert "(a-2, now a-1)" in other["error"]["message"]


def test_answer_is_not_continued_by_an_engine_with_other_weights_than_the_server_said(tmp_path: Path) -> None:
    """Continue on an engine that has another model than the server said when the answer was submitted."""

    async def run() -> str:
        first = await begin_stream(tmp_path, "/v1/chat/completions", "a-1")
        async with running(tmp_path, digest="a-1") as head:
            head.service.engine.limits = replace(head.service.engine.limits, model="a-2")
            _, text = await head.call("POST", "/v1/chat/completions", {}, last_event_id=first[-1][0])
            assert head.service.engine.stats().generated_tokens == 0
            return text

    assert "replaced while it was in progress (digest a-1, now a-2)" in asyncio.run(run())


async def never_ready(model: object) -> None:
    del model
    await asyncio.get_running_loop().create_future()


def test_model_of_a_queued_response_is_kept_when_its_computation_begins(tmp_path: Path) -> None:
    async def run() -> tuple[str, str]:
        async with running(tmp_path, automatic=False, digest="a-1") as head:
            head.service.is_loaded = False
            head.catalog.ready = never_ready
            _, text = await head.call("POST", "/v1/responses", {"input": "Hello.", "background": True})
            path = f"/v1/responses/{json.loads(text)['id']}"
        # It was not begun, so that any model may.
        async with running(tmp_path, automatic=False, digest="a-2") as head:
            await run_tasks_until(lambda: head.journal.has_work)
            while head.service.engine.stats().generated_tokens < 5:
                await head.step()
        statuses: list[str] = []
        for digest in ("a-2", "a-3"):
            async with running(tmp_path, automatic=False, digest=digest) as head:
                await run_tasks_until(lambda head=head: head.journal.has_work or head.journal.stats().ended)
                statuses.append(json.loads((await head.call("GET", path))[1])["status"])
        return statuses[0], statuses[1]

    assert asyncio.run(run()) == ("in_progress", "failed")


def test_journal_of_an_earlier_version_without_models_is_continued(tmp_path: Path) -> None:
    path = "/v1/chat/completions"

    async def run() -> Events:
        first = await begin_stream(tmp_path, path, "")
        with sqlite3.connect(tmp_path / FILE) as db:
            db.execute("ALTER TABLE answers DROP COLUMN model")
            db.execute("PRAGMA user_version = 1")
        db.close()
        async with running(tmp_path, digest="a-2") as head:
            return await head.stream(path, {}, last_event_id=first[-1][0])

    *_, end, usage = (json.loads(data) for _, data in asyncio.run(run()))
    assert end["choices"][0]["finish_reason"] == "stop"
    assert usage["usage"]["completion_tokens"] > 6
    assert not (tmp_path / "journal.damaged").exists()
