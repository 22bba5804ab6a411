"""Database of the journal: requests, the deltas of their answers, and how these ended, in one SQLite file.

Deltas of answers in progress go to a log, one row for all that a step made, because a row for each answer costs ten
times as much. When an answer ends or is suspended, its deltas are saved beside its request. `fold` does so for all
others, and empties the log.

Methods block on the disk, so one thread calls them, never the event loop. A killed process loses nothing that a method
has returned from. A power cut may lose the last seconds, but no request that runs alone.
"""

from __future__ import annotations

import array
import contextlib
import sqlite3
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlx_ring.core.errors import ConfigError, RingError
from mlx_ring.host.private_files import make_private_folder

FILE = "journal.sqlite"
_PAGE = 4096
_BUSY_S = 10.0
"""Longest wait for a head that is about to end and still holds the file."""
_FULL = 0.9
"""Part of the size above which old answers are removed. The rest is for answers in progress."""
_LOG_PART = 1 / 8
"""Part of the size above which the log is folded."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, path TEXT NOT NULL,
    created INTEGER NOT NULL, random BLOB NOT NULL, runs_alone INTEGER NOT NULL, body BLOB NOT NULL,
    prompts BLOB NOT NULL, deltas BLOB NOT NULL DEFAULT x'', end TEXT, ended INTEGER, error TEXT, message TEXT,
    param TEXT);
CREATE TABLE IF NOT EXISTS log (step INTEGER PRIMARY KEY, deltas BLOB NOT NULL);
"""
EndKind = Literal["completed", "failed", "cancelled"]


class JournalFull(RingError):
    """Answers in progress need the whole size of the journal."""


FAILURES = (JournalFull, sqlite3.Error, OSError)
"""Errors of the disk, a disk that does not answer in time included (`TimeoutError`)."""


@dataclass(frozen=True, slots=True)
class End:
    """End of an answer."""

    kind: EndKind
    at: int
    """Unix seconds."""
    error: str = ""
    """Name of the error's class, if it failed."""
    message: str = ""
    param: str | None = None


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """HTTP request whose answer is kept."""

    id: str
    """Id of its answer, which clients know."""
    owner: str
    """Digest of the API key that sent it; empty without one."""
    path: str
    created: int
    """Unix seconds."""
    random: bytes
    """Source of the answer's ids and of seeds that the request leaves open."""
    runs_alone: bool
    """True if the answer is computed whether or not a client reads it."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """Kept request, with its answer so far."""

    number: int
    """Number in the database; 0 if it is not there yet."""
    request: KeptRequest
    prompts: tuple[tuple[int, ...], ...]
    deltas: tuple[bytes, ...]
    end: End | None
    """None: it has not ended, but may be interrupted."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Contents of the journal."""

    bytes: int
    answers: int
    ended: int


class JournalDatabase:
    """The open file. No other process can open it meanwhile."""

    def __init__(self, folder: Path, size: int) -> None:
        """Open or create the file.

        Args:
            folder: its folder, private to this user.
            size: most bytes of the file.

        Raises:
            ConfigError: the folder cannot be used, the file is no journal, or another head has it open.
        """
        self._folder, self._size = folder, size
        self._file = make_private_folder(folder) / FILE
        self._logged = 0
        """Bytes in the log."""
        self._db = self._open()
        self._inode = self._file.stat().st_ino

    def _open(self) -> sqlite3.Connection:
        try:
            db = sqlite3.connect(self._file, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            self._file.chmod(0o600)
            # Nobody else needs the shared memory of a WAL, and removed prompts must not stay readable.
            for pragma in (
                f"page_size = {_PAGE}",
                "locking_mode = EXCLUSIVE",
                "journal_mode = WAL",
                "synchronous = NORMAL",
                "secure_delete = ON",
                f"journal_size_limit = {1 << 20}",
            ):
                db.execute(f"PRAGMA {pragma}")
            with _transaction(db):
                for statement in _SCHEMA.split(";"):
                    db.execute(statement)
            db.execute(f"PRAGMA max_page_count = {max(self._size // _PAGE, 16)}")
            _fold(db)
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise ConfigError(
                    f"Another head has the journal in {self._folder} open: give this one another --journal-dir."
                ) from None
            raise ConfigError(
                f"The journal {self._file} cannot be opened ({error}): choose another --journal-dir."
            ) from None
        except (sqlite3.DatabaseError, OSError) as error:
            raise ConfigError(
                f"{self._file} is no journal, or damaged ({error}): remove it, or choose another --journal-dir."
            ) from None
        return db

    def close(self) -> None:
        self._db.close()

    def add(
        self, request: KeptRequest, body: bytes, prompts: Iterable[Sequence[int]], busy: Collection[str]
    ) -> tuple[int, list[str]]:
        """Add a request, and remove old answers if the file is almost full.

        Args:
            request: the request.
            body: its JSON.
            prompts: the prompt of each of its sequences.
            busy: ids of answers that are computed or read, which stay.

        Returns:
            Its number, and the ids of removed answers.

        Raises:
            JournalFull: answers in progress leave no room.
            sqlite3.Error: the disk fails.
        """
        self._reopen_if_removed()
        encoded = _encode_prompts(prompts)
        removed = self._make_room(len(body) + len(encoded), busy)
        values = (
            *(request.id, request.owner, request.path, request.created, request.random),
            *(request.runs_alone, body, encoded),
        )
        if request.runs_alone:
            self._db.execute("PRAGMA synchronous = FULL")
        try:
            with _transaction(self._db):
                number = self._db.execute(
                    "INSERT INTO answers (id, owner, path, created, random, runs_alone, body, prompts) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    values,
                ).lastrowid
        except sqlite3.OperationalError as error:
            if "full" not in str(error):
                raise
            raise JournalFull(f"The journal has no room for {len(body)} more bytes.") from None
        finally:
            if request.runs_alone:
                self._db.execute("PRAGMA synchronous = NORMAL")
        return number or 0, removed

    def append(
        self,
        deltas: Sequence[tuple[int, int, bytes]],
        ends: Sequence[tuple[int, End, bytes]],
        busy: Collection[str],
    ) -> list[str]:
        """Append deltas to answers in progress, and end others. Return the ids of removed answers, as `add` does.

        Args:
            deltas: the answer's number, the delta's place in it, and the delta.
            ends: the answer's number, its end, and all of its deltas as `join_deltas` makes them.
            busy: ids of answers that are computed or read, which stay.

        Raises:
            JournalFull: answers in progress leave no room.
            sqlite3.Error: the disk fails.
        """
        try:
            self._append(deltas, ends)
            if self._logged > self._size * _LOG_PART:
                self.fold()
        except sqlite3.OperationalError as error:
            if "full" not in str(error):
                raise
            removed = self._make_room(
                self._logged + sum(len(joined) for *_, joined in (*deltas, *ends)), busy
            )
            self.fold()
            self._append(deltas, ends)
            return removed
        return []

    def _append(
        self, deltas: Sequence[tuple[int, int, bytes]], ends: Sequence[tuple[int, End, bytes]]
    ) -> None:
        row = b"\n".join(b"%d %d %b" % each for each in deltas)
        insert = ("INSERT INTO log (deltas) VALUES (?)", (row,))
        if not ends:
            self._db.execute(*insert)
        else:
            with _transaction(self._db):
                if row:
                    self._db.execute(*insert)
                for number, end, joined in ends:
                    self._db.execute(
                        "UPDATE answers SET deltas = ?, end = ?, ended = ?, error = ?, message = ?, param = ? "
                        "WHERE number = ?",
                        (joined, end.kind, end.at, end.error, end.message, end.param, number),
                    )
        self._logged += len(row)

    def save(self, number: int, joined: bytes) -> None:
        """Save all deltas of an answer that is suspended, as `join_deltas` makes them."""
        self._db.execute("UPDATE answers SET deltas = ? WHERE number = ?", (joined, number))

    def fold(self) -> None:
        """Save the logged deltas beside the requests of answers that have not ended, and empty the log."""
        _fold(self._db)
        self._logged = 0

    def find(self, id_: str) -> tuple[KeptAnswer, bytes] | None:
        """Return a kept answer and the JSON of its request; None if there is none of this id."""
        found = self._db.execute(
            "SELECT number, owner, path, created, random, runs_alone, body, prompts, deltas, end, ended, error, message, "
            "param FROM answers WHERE id = ?",
            (id_,),
        ).fetchone()
        if found is None:
            return None
        number, owner, path, created, random, runs_alone, body, prompts, deltas, kind, *rest = found
        at, error, message, param = rest
        request = KeptRequest(id_, owner, path, created, random, bool(runs_alone))
        end = None if kind is None else End(kind, at, error, message, param)
        return KeptAnswer(number, request, _decode_prompts(prompts), tuple(deltas.splitlines()), end), body

    def unfinished(self) -> list[str]:
        """Return the ids of answers that are computed without a client and have not ended, the oldest first."""
        rows = self._db.execute("SELECT id FROM answers WHERE runs_alone AND end IS NULL ORDER BY number")
        return [row[0] for row in rows]

    def set_alone(self, id_: str) -> None:
        """Record that an answer is computed whether or not a client reads it."""
        with _transaction(self._db):
            self._db.execute("UPDATE answers SET runs_alone = 1 WHERE id = ?", (id_,))

    def remove(self, ids: Collection[str]) -> None:
        """Remove answers, also from the log."""
        with _transaction(self._db):
            self._db.executemany("DELETE FROM answers WHERE id = ?", [(id_,) for id_ in ids])
        self.fold()

    def remove_old(self, before: int, owners: Collection[str] | None, busy: Collection[str]) -> list[str]:
        """Remove answers to requests from before a time, and those of other owners. Return their ids.

        Args:
            before: Unix seconds.
            owners: known owners; None: all.
            busy: ids of answers that are computed or read, which stay.
        """
        rows = self._db.execute("SELECT id, owner, created FROM answers").fetchall()
        old = [
            id_
            for id_, owner, created in rows
            if id_ not in busy and (created < before or (owners is not None and owner not in owners))
        ]
        self.remove(old)
        return old

    def totals(self) -> Totals:
        answers, ended = self._db.execute("SELECT COUNT(*), COUNT(end) FROM answers").fetchone()
        return Totals(self._used() * _PAGE, answers, ended)

    def _used(self) -> int:
        """Return the number of pages that hold something."""
        pages: int = self._db.execute("PRAGMA page_count").fetchone()[0]
        free: int = self._db.execute("PRAGMA freelist_count").fetchone()[0]
        return pages - free

    def _make_room(self, nbytes: int, busy: Collection[str]) -> list[str]:
        """Remove ended answers, then interrupted ones, the oldest first, until so many bytes fit. Return their ids."""
        removed: list[str] = []
        most = int(self._size * _FULL) - nbytes
        if self._used() * _PAGE <= most:
            return removed
        rows = self._db.execute("SELECT id FROM answers ORDER BY end IS NULL, number").fetchall()
        for (id_,) in rows:
            if id_ in busy:
                continue
            self._db.execute("DELETE FROM answers WHERE id = ?", (id_,))
            removed.append(id_)
            if self._used() * _PAGE <= most:
                return removed
        if nbytes > self._size - self._used() * _PAGE:
            raise JournalFull(f"The journal has no room for {nbytes} more bytes.")
        return removed

    def _reopen_if_removed(self) -> None:
        """Make a new file if somebody removed it: SQLite would continue to write to the removed one."""
        try:
            if self._file.stat().st_ino == self._inode:
                return
        except OSError:
            pass
        self._db.close()
        make_private_folder(self._folder)
        self._db = self._open()
        self._inode = self._file.stat().st_ino


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Generator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def _fold(db: sqlite3.Connection) -> None:
    """Save the logged deltas beside the requests of answers that have not ended, and empty the log."""
    more: dict[int, list[bytes]] = {}
    known: dict[int, int] = {}
    for number, deltas in db.execute("SELECT number, deltas FROM answers WHERE end IS NULL"):
        more[number], known[number] = [], deltas.count(b"\n")
    for (row,) in db.execute("SELECT deltas FROM log ORDER BY step"):
        for line in row.splitlines():
            number, place, delta = line.split(b" ", 2)
            added = more.get(int(number))
            # A failed write leaves a gap: deltas after it are computed again.
            if added is not None and int(place) == known[int(number)] + len(added):
                added.append(delta)
    with _transaction(db):
        for number, added in more.items():
            if added:
                db.execute(
                    "UPDATE answers SET deltas = CAST(deltas || ? AS BLOB) WHERE number = ?",
                    (join_deltas(added), number),
                )
        db.execute("DELETE FROM log")


def join_deltas(deltas: Iterable[bytes]) -> bytes:
    """Return deltas as one value, in which each is a line."""
    return b"".join(b"%b\n" % delta for delta in deltas)


def _encode_prompts(prompts: Iterable[Sequence[int]]) -> bytes:
    """Encode prompts as int32: the number of each one's tokens, then the tokens. A repeated prompt is a -1."""
    encoded, last = array.array("i"), None
    for prompt in prompts:
        if prompt == last:
            encoded.append(-1)
        else:
            encoded.append(len(prompt))
            encoded.extend(prompt)
        last = prompt
    return encoded.tobytes()


def _decode_prompts(data: bytes) -> tuple[tuple[int, ...], ...]:
    encoded = array.array("i")
    encoded.frombytes(data)
    prompts: list[tuple[int, ...]] = []
    at = 0
    while at < len(encoded):
        length, at = encoded[at], at + 1
        if length < 0:
            prompts.append(prompts[-1])
        else:
            prompts.append(tuple(encoded[at : at + length]))
            at += length
    return tuple(prompts)
