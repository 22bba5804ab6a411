"""Kept answers on disks that are full, hang, are damaged, or belong to another head."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from tests.api.journal_heads import (
    SIZE,
    Head,
    events_of,
    request_of,
    running,
)

from mlx_ring.api.journal_database import FILE, JournalDatabase
from mlx_ring.api.journal_writer import KEPT_S
from mlx_ring.api.kept_answers import End, KeptRequest
from mlx_ring.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("patient_disk")


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


def test_folder_that_cannot_be_made_is_named_with_the_option_that_chooses_another(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "journal"
    with pytest.raises(ConfigError, match=rf"^{folder} cannot be .*: choose another with --journal-dir\.$"):
        asyncio.run(Head(folder).journal.open())


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


def test_head_begins_although_its_disk_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Write answers, one of them in progress as its head is killed, and let the disk refuse every later write."""
    database = JournalDatabase(tmp_path / "journal", SIZE)
    for id_ in ("resp_1", "resp_2"):
        request = KeptRequest(id_, "", "/v1/responses", int(time.time()), b"r" * 16, runs_alone=False)
        number, _ = database.add(request, b'{"input": "a"}', [(1, 2)], ())
        database.append([(number, 0, b'[0,[7],["x"]]')], (), ())
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "journal", killed)
    database.close()
    with pytest.MonkeyPatch.context() as full:
        full.setattr(
            "mlx_ring.api.journal_database.sqlite3.connect", partial(sqlite3.connect, factory=FullDisk)
        )
        # Nor can it be made smaller.
        database = JournalDatabase(killed, 4096)
        assert database.totals().answers == 2
        assert database.find("resp_1") is not None
        database.close()
    assert "can keep no more answers until there is room" in caplog.text
    database = JournalDatabase(killed, SIZE)
    found = database.find("resp_2")
    assert found is not None
    assert found[0].deltas == (b'[0,[7],["x"]]',)
    database.close()


class FullDisk(sqlite3.Connection):
    """Connection with a disk that refuses every transaction that writes."""

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if sql == "COMMIT" and self.total_changes:
            super().execute("ROLLBACK")
            raise sqlite3.OperationalError("database or disk is full")
        return super().execute(sql, parameters)


def test_answers_that_were_kept_while_the_clock_was_ahead_stay_for_a_day_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep an answer while the clock is right or behind, too: nobody knows yet which of its times is wrong."""
    now = time.time()

    async def ask(days_ahead: int) -> str:
        monkeypatch.setattr("mlx_ring.api.journal.time.time", lambda: now + days_ahead * 86400)
        async with running(tmp_path) as head:
            _, text = await head.call("POST", "/v1/responses", {"input": "a"})
            return f"/v1/responses/{json.loads(text)['id']}"

    async def run() -> list[list[int]]:
        # A clock may also go back by a little, because it is set.
        paths = [await ask(400), await ask(0)]
        monkeypatch.setattr("mlx_ring.api.journal.time.time", lambda: now - 60)
        found: list[list[int]] = []
        async with running(tmp_path) as head:
            writer = head.journal._writer  # pyright: ignore[reportPrivateUsage]
            began = time.monotonic()
            for seconds in (0.0, KEPT_S - 3600.0, KEPT_S + 3600.0):
                monkeypatch.setattr(writer, "_clock", lambda at=began + seconds: at)
                await writer.clean()
                found.append([(await head.call("GET", path))[0] for path in paths])
        return found

    assert asyncio.run(run()) == [[200, 200], [200, 200], [404, 200]]


def test_clock_that_is_behind_at_the_start_of_a_head_removes_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()

    async def run() -> tuple[int, int]:
        async with running(tmp_path) as head:
            _, text = await head.call("POST", "/v1/responses", {"input": "a"})
        monkeypatch.setattr("mlx_ring.api.journal.time.time", lambda: now - 365 * 86400)
        async with running(tmp_path) as head:
            await head.journal._writer.clean()  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr("mlx_ring.api.journal.time.time", lambda: now)
        async with running(tmp_path) as head:
            await head.journal._writer.clean()  # pyright: ignore[reportPrivateUsage]
            return (await head.call("GET", f"/v1/responses/{json.loads(text)['id']}"))[
                0
            ], head.journal.stats().ended

    assert asyncio.run(run()) == (200, 1)


def test_oldest_ended_answers_make_room_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = JournalDatabase(tmp_path, SIZE)

    def put(number: int, busy: Sequence[str] = ()) -> list[str]:
        request = KeptRequest(f"resp_{number}", "", "/v1/responses", int(time.time()), b"r", runs_alone=False)
        own, removed = database.add(request, b"x" * 20_000, [(1,)], busy)
        deltas = [b'[0,[7],["%s"]]' % (b"y" * 20_000)]
        database.append([(own, 0, deltas[0])], (), busy)
        return removed + database.append((), [(own, End("completed", 9), deltas)], busy)

    def pages() -> int:
        return database._db.execute("PRAGMA page_count").fetchone()[0]  # pyright: ignore[reportPrivateUsage]

    for number in range(8):
        assert put(number) == []
    before = pages()
    almost_full = MagicMock(return_value=MagicMock(free=100))
    monkeypatch.setattr("mlx_ring.api.journal_database.shutil.disk_usage", almost_full)
    removed = [id_ for number in range(8, 12) for id_ in put(number, busy=["resp_1"])]
    assert removed[:2] == ["resp_0", "resp_2"]
    assert pages() == before
    for id_ in ("resp_1", "resp_10", "resp_11"):
        found = database.find(id_)
        assert found is not None
        assert found[0].end is not None
    database.close()


def test_file_has_free_pages_before_it_needs_them(tmp_path: Path) -> None:
    """Let no write make the file larger while the disk is full: what is in SQLite's log could not leave it then."""
    database = JournalDatabase(tmp_path, 4 * SIZE)
    for number in range(30):
        before = (tmp_path / FILE).stat().st_size
        database._db.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()  # pyright: ignore[reportPrivateUsage]
        assert (tmp_path / FILE).stat().st_size == before
        request = KeptRequest(f"resp_{number}", "", "/v1/responses", int(time.time()), b"r", runs_alone=False)
        own, _ = database.add(request, b"x" * 20_000, [(1,)], ())
        database.append((), [(own, End("completed", 9), [b'[0,[7],["x"]]'])], ())
    database.close()


def test_journal_of_an_earlier_version_on_a_full_disk_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    JournalDatabase(tmp_path, SIZE).close()
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("ALTER TABLE answers DROP COLUMN model")
        db.execute("PRAGMA user_version = 1")
    db.close()
    connect = partial(sqlite3.connect, factory=FullDisk)
    monkeypatch.setattr("mlx_ring.api.journal_database.sqlite3.connect", connect)
    monkeypatch.setattr(FullDisk, "total_changes", 1)
    with pytest.raises(ConfigError, match=r"disk is full.*: make room on its disk, or choose another"):
        JournalDatabase(tmp_path, SIZE)
