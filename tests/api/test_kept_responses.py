"""Responses that are kept: computed in the background, fetched, cancelled and deleted."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.api.journal_heads import (
    response_events,
    running,
)
from tests.api.twins import TwinService
from tests.eventually import run_tasks_until

from mlx_ring.api.journal_database import JournalDatabase
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
    assert refused[0] == 409
    assert "background" in refused[1]


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
