"""Database of the journal: requests, the deltas of their answers, and how these ended, in one SQLite file.

Deltas of answers in progress go to a log, with one row for all that a step made. A row for each answer would cost ten
times as much. When an answer ends or is suspended, its deltas are saved in one value. `fold` does so for all others,
and empties the log. Checksums find bytes that changed.

Methods block on the disk, so one thread calls them, never the event loop. A killed process loses nothing that a method
has returned from. A power cut may lose the last seconds, but no request that runs alone.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from mlx_ring.api.kept_answers import (
    SAVE,
    SCHEMA,
    End,
    KeptAnswer,
    KeptRequest,
    Totals,
    check_version,
    checked,
    checksum_of,
    decode_prompts,
    encode_prompts,
    fold_log,
    grow_ahead,
    join_deltas,
    transaction,
    unless_full,
    used_pages,
    whole_deltas,
)
from mlx_ring.core.errors import ConfigError, RingError
from mlx_ring.host.private_files import make_private_folder

log = logging.getLogger(__name__)

FILE = "journal.sqlite"
_PAGE = 4096
_WAL_PAGES = 256
"""Pages of SQLite's write-ahead log after which they are copied to the file."""
_BUSY_S = 10.0
"""Longest wait for a head that is about to end and still holds the file."""
_FULL = 0.9
"""Part of the size above which old answers are removed. The rest is for answers in progress."""
_LOG_BYTES = 1 << 20
"""Largest size of the log, so that folding it takes a fraction of a second; at most an eighth of the file."""
_LEFT_BYTES = 4 << 20
"""Bytes of the disk that the journal leaves free, for SQLite's log."""
_SPARE_PAGES = 8
"""Pages for the tables and indexes of a write, on a full disk."""
_LARGEST_PART = 1 / 4
"""Part of the size that one request may take."""


class JournalFull(RingError):
    """Answers in progress need the whole size of the journal, or a request is too large for it."""


_FLAG = "--journal-dir"
"""Option that chooses another folder."""
FAILURES = (JournalFull, ConfigError, sqlite3.Error, OSError)
"""Errors of the disk, a disk that does not answer in time included (`TimeoutError`)."""


class JournalDatabase:
    """The open file. No other process can open it meanwhile."""

    def __init__(self, folder: Path, size: int) -> None:
        """Open or create the file. A damaged one is set aside.

        Args:
            folder: its folder, private to this user.
            size: most bytes of the file.

        Raises:
            ConfigError: the folder cannot be used, or another head has the file open.
        """
        self._folder, self._size = folder, size
        self._file = make_private_folder(folder, _FLAG) / FILE
        self._logged = 0
        """Bytes in the log."""
        self._last = 0
        """Largest number of an answer. Numbers are never used again, also not in another file or after a clock went back."""
        self.generation = 0
        """Number of files before this one. Answers that were added to an earlier one are lost."""
        self._db = self._open()
        self._inode = self._file.stat().st_ino

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.OperationalError as error:
            problem = str(error)
            if "locked" in problem:
                raise ConfigError(
                    f"Another head has the journal in {self._folder} open: give this one another --journal-dir."
                ) from None
            hint = "make room on its disk, or " if "full" in problem else ""
            raise ConfigError(
                f"The journal {self._file} cannot be opened ({problem}): {hint}choose another --journal-dir."
            ) from None
        except sqlite3.DatabaseError as error:
            self._set_aside(error)
            return self._connect()
        except JournalFull:
            raise ConfigError(
                f"Unfinished answers in {self._file} need more than --journal allows: give it more than "
                f"{self._file.stat().st_size} bytes."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"The journal {self._file} cannot be opened ({error}): choose another --journal-dir."
            ) from None

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._file, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            self._file.chmod(0o600)
            # Nobody else needs the shared memory of a WAL, and removed prompts must not stay readable.
            for pragma in (
                f"page_size = {_PAGE}",
                "locking_mode = EXCLUSIVE",
                "journal_mode = WAL",
                "synchronous = NORMAL",
                "secure_delete = ON",
                f"wal_autocheckpoint = {_WAL_PAGES}",
                f"journal_size_limit = {_WAL_PAGES * _PAGE}",
            ):
                db.execute(f"PRAGMA {pragma}")
            check_version(db)
            db.executescript(SCHEMA)
            self._last = max(self._last, db.execute("SELECT MAX(number) FROM answers").fetchone()[0] or 0)
            with unless_full():
                fold_log(db)
                db.execute("DELETE FROM deltas WHERE number NOT IN (SELECT number FROM answers)")
                if used_pages(db) * _PAGE > self._size * _FULL:
                    self._make_room_in(db, 0, ())
                if self._file.stat().st_size > self._size:
                    db.execute("VACUUM")
            self._limit_growth(db)
        except BaseException:
            db.close()
            raise
        return db

    def _set_aside(self, error: sqlite3.Error) -> None:
        damaged = self._file.with_suffix(".damaged")
        self._file.replace(damaged)
        for suffix in ("-wal", "-shm"):
            Path(f"{self._file}{suffix}").unlink(missing_ok=True)
        log.warning("The journal is damaged (%s), and begins anew: %s has what is left", error, damaged)

    def begin_anew(self, error: sqlite3.Error, generation: int) -> None:
        """Set a damaged file aside and make a new one, unless that was done since."""
        if generation == self.generation:
            self._db.close()
            with contextlib.suppress(FileNotFoundError):
                self._set_aside(error)
            self._open_next()

    def _open_next(self) -> None:
        """Open the next file, in which nothing is."""
        self.generation += 1
        self._db, self._logged = self._open(), 0
        self._inode = self._file.stat().st_ino

    def close(self) -> None:
        self._db.close()

    # ---- answers

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
            JournalFull: it is too large, or answers in progress leave no room.
            sqlite3.Error: the disk fails.
        """
        self._reopen_if_removed()
        self._limit_growth(self._db)
        encoded = encode_prompts(prompts)
        needs = len(body) + len(encoded)
        removed = self._make_room(needs, busy)
        self._last = number = max(self._last + 1, time.time_ns() // 1000)
        values = {**asdict(request), "number": number, "checksum": checksum_of(request, body, encoded)}
        if request.runs_alone:
            self._db.execute("PRAGMA synchronous = FULL")
        try:
            removed += self._write_anyhow(lambda: self._insert(values, body, encoded), needs, busy)
        finally:
            if request.runs_alone:
                self._db.execute("PRAGMA synchronous = NORMAL")
        return number, removed

    def _insert(self, values: Mapping[str, object], body: bytes, prompts: bytes) -> None:
        names = ", ".join(values)
        with transaction(self._db):
            self._db.execute(
                f"INSERT INTO answers ({names}) VALUES (:{names.replace(', ', ', :')})",  # noqa: S608 - fields' names
                values,
            )
            self._db.execute("INSERT INTO requests VALUES (?, ?, ?)", (values["number"], body, prompts))

    def append(
        self,
        deltas: Sequence[tuple[int, int, bytes]],
        ends: Sequence[tuple[int, End, Sequence[bytes]]],
        busy: Collection[str],
    ) -> list[str]:
        """Append deltas to answers in progress, and end others. Return the ids of removed answers, as `add` does.

        Args:
            deltas: the answer's number, the delta's place in it, and the delta.
            ends: the answer's number, its end, and all of its deltas.
            busy: ids of answers that are computed or read, which stay.

        Raises:
            JournalFull: answers in progress leave no room.
            sqlite3.Error: the disk fails.
        """
        row = b"\n".join(b"%d %d %b" % (number, place, checked(delta)) for number, place, delta in deltas)
        joined = [(number, end, join_deltas(every)) for number, end, every in ends]
        try:
            self._append(row, joined)
            if self._logged > min(_LOG_BYTES, self._size // 8):
                self.fold()
        except sqlite3.OperationalError as error:
            if "full" not in str(error):
                raise
            needs = self._logged + len(row) + sum(len(value) for _, _, value in joined)
            removed = self._make_room(needs, busy, is_one=False)

            def write() -> None:
                self.fold()
                self._append(row, joined)

            return removed + self._write_anyhow(write, needs, busy)
        return []

    def _append(self, row: bytes, ends: Sequence[tuple[int, End, bytes]]) -> None:
        insert = ("INSERT INTO log (deltas) VALUES (?)", (row,))
        if not ends:
            self._db.execute(*insert)
        else:
            with transaction(self._db):
                if row:
                    self._db.execute(*insert)
                for number, end, joined in ends:
                    self._db.execute(SAVE, (joined, number))
                    self._db.execute(
                        "UPDATE answers SET end = ?, ended = ?, error = ?, message = ?, param = ? WHERE number = ?",
                        (end.kind, end.at, end.error, end.message, end.param, number),
                    )
        self._logged += len(row)

    def save(self, number: int, deltas: Iterable[bytes]) -> None:
        """Save all deltas of an answer that is suspended."""
        self._db.execute(SAVE, (join_deltas(deltas), number))

    def fold(self) -> None:
        """Save the logged deltas of each answer that has not ended, and empty the log."""
        fold_log(self._db)
        self._logged = 0
        self._limit_growth(self._db)

    def find(self, id_: str) -> tuple[KeptAnswer, bytes] | None:
        """Return a kept answer and the JSON of its request; None if there is none of this id, or it is damaged."""
        found = self._db.execute(
            "SELECT answers.*, body, prompts, joined FROM answers JOIN requests USING (number) "
            "LEFT JOIN deltas USING (number) WHERE id = ?",
            (id_,),
        ).fetchone()
        if found is None:
            return None
        number, _, owner, path, created, random, runs_alone, checksum, kind, *rest = found
        at, error, message, param, model, body, prompts, joined = rest
        request = KeptRequest(id_, owner, path, created, random, bool(runs_alone), model)
        lines = (joined or b"").splitlines()
        deltas = tuple(whole_deltas(lines))
        if checksum_of(request, body, prompts) != checksum or (kind is not None and len(deltas) < len(lines)):
            log.warning("%s is damaged in the journal, and removed", id_)
            self.remove([id_])
            return None
        end = None if kind is None else End(kind, at, error, message, param)
        return KeptAnswer(number, request, decode_prompts(prompts), deltas, end), body

    def unfinished(self, owners: Collection[str] | None = None) -> list[str]:
        """Return the ids of answers that are computed without a client and have not ended, the oldest first.

        Args:
            owners: owners whose answers are returned; None: all.
        """
        rows = self._db.execute(
            "SELECT id, owner FROM answers WHERE runs_alone AND end IS NULL ORDER BY number"
        )
        return [id_ for id_, owner in rows if owners is None or owner in owners]

    def update(self, request: KeptRequest, body: bytes, prompts: Iterable[Sequence[int]]) -> None:
        """Record whether an answer runs alone, and its model."""
        checksum = checksum_of(request, body, encode_prompts(prompts))
        values = request.runs_alone, request.model, checksum, request.id
        self._db.execute("UPDATE answers SET runs_alone = ?, model = ?, checksum = ? WHERE id = ?", values)

    def drop(self, ids: Collection[str]) -> None:
        """Remove answers. Their deltas stay in the log until it is folded."""
        with transaction(self._db):
            self._db.executemany("DELETE FROM answers WHERE id = ?", [(id_,) for id_ in ids])

    def remove(self, ids: Collection[str]) -> None:
        """Remove answers, also from the log and from what SQLite has not yet copied to its file."""
        self.drop(ids)
        self.fold()
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def ahead(self, of: int) -> list[str]:
        """Return the ids of answers to requests from after a time, in Unix seconds."""
        return [id_ for (id_,) in self._db.execute("SELECT id FROM answers WHERE created > ?", (of,))]

    def old(
        self, since: int, late: Collection[str], owners: Collection[str] | None, busy: Collection[str]
    ) -> list[str]:
        """Return the ids of answers to requests from before a time, in Unix seconds, of late ones, and of other owners.

        Args:
            since: the time.
            late: ids of answers that are old whatever their times say.
            owners: known owners; None: all.
            busy: ids of answers that are computed or read, which stay.
        """
        rows = self._db.execute("SELECT id, owner, created FROM answers").fetchall()
        return [
            id_
            for id_, owner, created in rows
            if id_ not in busy
            and (created < since or id_ in late or (owners is not None and owner not in owners))
        ]

    def totals(self) -> Totals:
        answers, ended = self._db.execute("SELECT COUNT(*), COUNT(end) FROM answers").fetchone()
        return Totals(used_pages(self._db) * _PAGE, answers, ended)

    # ---- room

    def _make_room(self, nbytes: int, busy: Collection[str], *, is_one: bool = True) -> list[str]:
        """Remove old answers until so many bytes fit; nothing if they cannot. Return the ids.

        Raises:
            JournalFull: they cannot fit, or one request is too large.
        """
        if is_one and nbytes > self._size * _LARGEST_PART:
            raise JournalFull(
                f"one request may have {int(self._size * _LARGEST_PART)} bytes, and it has {nbytes}"
            )
        if used_pages(self._db) * _PAGE <= self._size * _FULL - nbytes:
            return []
        return self._make_room_in(self._db, nbytes, busy)

    def _make_room_in(self, db: sqlite3.Connection, nbytes: int, busy: Collection[str]) -> list[str]:
        removed: list[str] = []
        most = self._size * _FULL - nbytes
        # Ended answers go first, then suspended ones, the oldest first. Those that run alone were promised.
        rows = db.execute(
            "SELECT id FROM answers WHERE end IS NOT NULL OR NOT runs_alone ORDER BY end IS NULL, number"
        ).fetchall()
        with transaction(db):
            for (id_,) in rows:
                if id_ in busy:
                    continue
                db.execute("DELETE FROM answers WHERE id = ?", (id_,))
                removed.append(id_)
                if used_pages(db) * _PAGE <= most:
                    return removed
            if nbytes > self._size - used_pages(db) * _PAGE:
                raise JournalFull(f"answers in progress leave no room for {nbytes} bytes")
        return removed

    def _write_anyhow(self, write: Callable[[], None], nbytes: int, busy: Collection[str]) -> list[str]:
        """Write; if the disk is full, remove the oldest ended answers and write again. Return the ids.

        Raises:
            sqlite3.Error: the disk has no room for that either, or fails.
        """
        try:
            write()
        except sqlite3.OperationalError as error:
            if "full" not in str(error):
                raise
            removed = self._free_pages(nbytes, busy)
            write()
            return removed
        return []

    def _free_pages(self, nbytes: int, busy: Collection[str]) -> list[str]:
        """Remove the oldest ended answers until the file itself has room for so many bytes. Return the ids.

        Each removal fits into SQLite's log, which keeps its size, once what was there is in the file.
        """
        removed: list[str] = []
        rows = self._db.execute("SELECT id FROM answers WHERE end IS NOT NULL ORDER BY number").fetchall()
        for (id_,) in rows:
            self._db.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
            if self._db.execute("PRAGMA freelist_count").fetchone()[0] >= nbytes // _PAGE + _SPARE_PAGES:
                break
            if id_ not in busy:
                self.drop([id_])
                removed.append(id_)
        return removed

    def _limit_growth(self, db: sqlite3.Connection) -> None:
        """Let the file grow to its size, but no more while its disk is almost full: its log needs the rest."""
        with contextlib.suppress(OSError):
            is_tight = shutil.disk_usage(self._folder).free < _LEFT_BYTES
            # SQLite takes the pages that there are for a smaller number.
            most = 1 if is_tight else max(self._size // _PAGE, 16)
            db.execute(f"PRAGMA max_page_count = {most}")
            grow_ahead(db, min(_WAL_PAGES, most // 8), most)

    def _reopen_if_removed(self) -> None:
        """Make a new file if somebody removed it: SQLite would continue to write to the removed one."""
        with contextlib.suppress(OSError):
            if self._file.stat().st_ino == self._inode:
                return
        self._db.close()
        make_private_folder(self._folder, _FLAG)
        self._open_next()
