"""Database of the journal: appends, suspensions and ends in any order, and files that are damaged."""

from __future__ import annotations

import re
import sqlite3
import tempfile
from itertools import count
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule
from tests.examples import examples

from mlx_ring.api.journal_database import FILE, JournalDatabase
from mlx_ring.api.kept_answers import End, KeptRequest

SIZE = 1 << 20


def test_file_is_private(tmp_path: Path) -> None:
    JournalDatabase(tmp_path / "journal", SIZE).close()
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "journal" / FILE).stat().st_mode & 0o777 == 0o600


def kept_request(id_: str) -> KeptRequest:
    return KeptRequest(id_, "", "/v1/responses", 7, b"r" * 16, runs_alone=True)


def test_deltas_after_a_gap_are_computed_again(tmp_path: Path) -> None:
    database = JournalDatabase(tmp_path, SIZE)
    number, removed = database.add(kept_request("resp_1"), b"{}", [(1, 2), (1, 2), (3,)], ())
    assert removed == []
    database.append([(number, 0, b"a"), (number, 1, b"b"), (number, 3, b"d")], (), ())
    database.fold()
    found = database.find("resp_1")
    assert found is not None
    answer, body = found
    assert (answer.request, body) == (kept_request("resp_1"), b"{}")
    assert (answer.prompts, answer.deltas, answer.end) == (((1, 2), (1, 2), (3,)), (b"a", b"b"), None)
    assert database.find("resp_2") is None
    database.close()


def test_answers_after_a_clock_went_back_are_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = JournalDatabase(tmp_path, SIZE)
    before, _ = database.add(kept_request("resp_1"), b"{}", [(1,)], ())
    database.close()
    numbers = [before]
    for id_, now in (("resp_2", before * 1000), ("resp_3", 7)):
        monkeypatch.setattr("mlx_ring.api.journal_database.time.time_ns", lambda now=now: now)
        database = JournalDatabase(tmp_path, SIZE)
        numbers.append(database.add(kept_request(id_), b"{}", [(1,)], ())[0])
        database.close()
    assert numbers == [before, before + 1, before + 2]
    database = JournalDatabase(tmp_path, SIZE)
    assert database.unfinished() == ["resp_1", "resp_2", "resp_3"]
    database.close()


class DatabaseMachine(RuleBasedStateMachine):
    """Appends, suspensions, ends, removals, folds and restarts in any order: no delta is lost, doubled or confused."""

    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.database = JournalDatabase(Path(self.folder.name), SIZE)
        self.numbers: dict[str, int] = {}
        self.kept: dict[str, list[bytes]] = {}
        self.open: set[str] = set()
        self.steps = count()
        self.numbers_before = set[int]()

    @rule(target=ids)
    def add(self) -> str:
        id_ = f"resp_{next(self.steps)}"
        self.numbers[id_], _ = self.database.add(kept_request(id_), b"{}", [(1,)], ())
        assert self.numbers[id_] not in self.numbers_before
        self.kept[id_] = []
        self.open.add(id_)
        return id_

    @rule(some=st.lists(ids, min_size=1, max_size=4, unique=True))
    def append(self, some: list[str]) -> None:
        delta = b'["%d"]' % next(self.steps)
        new = [(self.numbers[id_], len(self.kept[id_]), delta) for id_ in some if id_ in self.open]
        for id_ in self.open.intersection(some):
            self.kept[id_].append(delta)
        if new:
            self.database.append(new, (), ())

    @rule(id_=ids)
    def suspend(self, id_: str) -> None:
        if id_ in self.open:
            self.database.save(self.numbers[id_], list(self.kept[id_]))

    @rule(id_=ids)
    def end(self, id_: str) -> None:
        if id_ in self.open:
            end = self.numbers[id_], End("completed", 9), list(self.kept[id_])
            self.database.append((), [end], ())
            self.open.discard(id_)

    @rule(id_=consumes(ids))
    def remove(self, id_: str) -> None:
        self.database.remove([id_])
        self.kept.pop(id_, None)
        self.open.discard(id_)

    @rule()
    def fold(self) -> None:
        self.database.fold()

    @rule()
    def start_again(self) -> None:
        self.database.close()
        self.database = JournalDatabase(Path(self.folder.name), SIZE)

    @rule()
    def lose_the_file(self) -> None:
        """Begin anew: numbers are never used again, so that what comes for earlier answers hits no other."""
        before, self.numbers_before = dict(self.numbers), self.numbers_before | set(self.numbers.values())
        self.database.begin_anew(sqlite3.DatabaseError("malformed"), self.database.generation)
        self.kept.clear()
        self.open.clear()
        for number in before.values():
            self.database.append([(number, 0, b"[]")], [(number, End("completed", 9), [b"[]"])], ())
            self.database.save(number, [b"[]"])

    def teardown(self) -> None:
        self.database.fold()
        assert self.database.totals().answers == len(self.kept)
        for id_, deltas in self.kept.items():
            found = self.database.find(id_)
            assert found is not None
            assert found[0].deltas == tuple(deltas)
            assert (found[0].end is None) == (id_ in self.open)
        self.database.close()
        self.folder.cleanup()


TestDatabase = DatabaseMachine.TestCase
TestDatabase.settings = examples(0.4, stateful_step_count=20)


def test_two_heads_cannot_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_ring.api.journal_database._BUSY_S", 0.01)
    first = JournalDatabase(tmp_path, SIZE)
    with pytest.raises(Exception, match="Another head has the journal"):
        JournalDatabase(tmp_path, SIZE)
    first.close()
    JournalDatabase(tmp_path, SIZE).close()


def test_file_that_is_no_database_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database at all" * 1000)
    database = JournalDatabase(tmp_path, SIZE)
    assert database.totals().answers == 0
    assert (tmp_path / "journal.damaged").read_bytes().startswith(b"no database")
    database.close()


def test_file_of_another_version_is_set_aside(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE) as other:
        other.execute("CREATE TABLE answers (id TEXT)")
    other.close()
    database = JournalDatabase(tmp_path, SIZE)
    assert database.totals().answers == 0
    database.close()
    assert (tmp_path / "journal.damaged").exists()


def test_changed_bytes_are_found(tmp_path: Path) -> None:
    """Change each byte in turn: an answer is missing, or its deltas end before the byte."""
    database = JournalDatabase(tmp_path, SIZE)
    bodies = {f"resp_{n}": b'{"input": "SOME-BODY-%d"}' % n for n in range(3)}
    number = 0
    for id_, body in bodies.items():
        number, _ = database.add(kept_request(id_), body, [(1, 2)], ())
        database.append([(number, place, b'[0,[7],["WORD-%d"]]' % place) for place in range(4)], (), ())
    database.append((), [(number, End("completed", 9), [b'[0,[7],["WORD-0"]]'])], ())
    database.close()
    whole = (tmp_path / FILE).read_bytes()
    assert not (tmp_path / f"{FILE}-wal").exists()
    noticed = 0
    for found in re.finditer(b"SOME-BODY|WORD-", whole):
        changed = bytearray(whole)
        changed[found.start()] ^= 1
        (tmp_path / FILE).write_bytes(changed)
        database = JournalDatabase(tmp_path, SIZE)
        answers = {id_: database.find(id_) for id_ in bodies}
        kept = {id_: answer for id_, answer in answers.items() if answer is not None}
        for id_, (answer, body) in kept.items():
            assert body == bodies[id_]
            assert all(b"WORD-" in delta for delta in answer.deltas)
        noticed += len(kept) < 3 or sum(len(answer.deltas) for answer, _ in kept.values()) < 9
        database.close()
    # Three bodies, and nine deltas.
    assert noticed >= 12
