"""Writer of the journal: it writes what recordings get before clients get it, and finds it again.

A disk that fails or hangs costs a line in the log and the keeping of some answers, never an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Collection, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from mlx_ring.api.disk_thread import DiskThread
from mlx_ring.api.journal_database import FAILURES, JournalDatabase
from mlx_ring.api.kept_answers import End, Totals
from mlx_ring.api.recordings import Recording
from mlx_ring.core.errors import NotReady, Overloaded

log = logging.getLogger(__name__)

KEPT_S = 24 * 3600
"""Time after which an answer is removed, counted from its request."""
_CLEAN_EVERY_S = 600.0
_CLEANED_AT_ONCE = 16
"""Number of old answers that are removed while others wait for the disk."""
_RETRY_AFTER_S = 1.0


class JournalWriter:
    """The recordings in use, and their file."""

    def __init__(self, folder: Path, size: int, owners: Collection[str]) -> None:
        """Prepare a writer.

        Args:
            folder: folder of the file.
            size: most bytes of the file.
            owners: owners whose answers are kept; empty: all.
        """
        self._folder, self._size, self._owners = folder, size, owners
        self._disk = DiskThread()
        self._database: JournalDatabase | None = None
        self.recordings = WeakValueDictionary[str, Recording]()
        """Recordings that somebody uses, by id."""
        self._updated: dict[Recording, None] = {}
        """Recordings with new deltas, in the order of their first one."""
        self._is_collecting = self._is_writing = self.has_ended = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._clock = time.monotonic
        self._ahead: dict[str, float] = {}
        """Answers whose requests have a later time than the wall clock, with the time at which they were first seen."""
        self._to_remove = set[str]()
        """Ids of answers that the file should no longer have."""
        self._generation = 0
        """Generation of the file that the recordings are in."""
        self.totals = Totals(0, 0, 0)
        self.continued = 0
        """Number of answers that continued for a client that came back, or with another head."""
        self.lost = 0
        """Number of answers that the disk could not keep."""

    async def open(self) -> None:
        """Open the file. Raises `ConfigError` if that fails."""
        self._database = await asyncio.to_thread(JournalDatabase, self._folder, self._size)
        self.totals = await asyncio.to_thread(self._database.totals)

    def run(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        """Run a task until the head ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Suspend all recordings, and close the file."""
        self.has_ended = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for recording in list(self.recordings.values()):
            await recording.suspend()
            recording.interrupt()
        if self._database is not None:
            with contextlib.suppress(*FAILURES):
                await self._disk.run(self._database.close)

    # ---- from the journal

    async def load(self, id_: str) -> Recording | None:
        """Return a kept answer; None if there is none. Raises `NotReady` if the disk fails."""
        try:
            found = await self._disk.run(lambda: self._db.find(id_))
        except FAILURES as error:
            self._note(error)
            raise NotReady(f"The journal cannot be read now: {error}.") from None
        # Another reader may have found it meanwhile.
        recording = self.recordings.get(id_)
        if recording is None and found is not None:
            recording = self.recordings[id_] = Recording(self, *found, is_new=False)
        return recording

    async def unfinished(self) -> list[str]:
        """Return the ids of answers that run alone and have not ended, once the disk gives them.

        Those of unknown owners are not continued, also if the disk cannot remove them yet.
        """
        while True:
            try:
                return await self._disk.run(lambda: self._db.unfinished(self._owners or None))
            except FAILURES as error:
                self._note(error)
                await asyncio.sleep(_RETRY_AFTER_S)

    async def set_alone(self, recording: Recording) -> None:
        """Record that an answer is computed whether or not a client reads it."""
        recording.request = replace(recording.request, runs_alone=True)
        await self.update(recording)

    async def update(self, recording: Recording) -> None:
        """Write what is known of an answer's request, unless the disk fails."""
        with contextlib.suppress(*FAILURES):
            await self._disk.run(
                lambda: self._db.update(recording.request, recording.body, recording.prompts)
            )

    def update_soon(self, recording: Recording) -> None:
        """Write what is known of an answer's request before its next deltas. If the disk fails, it is kept no longer."""
        db, values = self._db, (recording.request, recording.body, recording.prompts)

        def report(_: object, error: Exception | None) -> None:
            if error is not None:
                self._lose([recording], error)

        self._disk.start(lambda: db.update(*values), report)

    async def end(self, recording: Recording, end: End) -> None:
        """End an answer that is not computed, unless it has ended."""
        if recording.is_kept and recording.end is None:
            db, ends = self._db, [(recording.number, end, list(recording.deltas))]
            try:
                await self._disk.run(lambda: db.append((), ends, ()))
            except FAILURES as error:
                self._lose([recording], error)
            else:
                self.totals = replace(self.totals, ended=self.totals.ended + 1)
        if recording.end is None:
            recording.deliver((), end)

    # ---- from recordings

    @property
    def _db(self) -> JournalDatabase:
        if self._database is None:
            raise NotReady("The journal is not open yet.")
        return self._database

    async def add(self, recording: Recording) -> None:
        """Write a new request. If the disk fails, it is answered without being kept, unless it would run alone.

        Raises:
            Overloaded: it would run alone, and cannot be written.
        """
        self.recordings[recording.id] = recording
        db, busy = self._db, self._busy()

        def write() -> tuple[int, list[str], Totals]:
            return *db.add(recording.request, recording.body, recording.prompts, busy), db.totals()

        try:
            recording.number, removed, self.totals = await self._disk.run(write)
        except FAILURES as error:
            self._lose([recording], error)
            if recording.request.runs_alone:
                raise Overloaded(
                    f"The journal cannot keep this answer ({error}): leave 'background' out, or retry later.",
                    retry_after_s=_RETRY_AFTER_S,
                ) from None
        else:
            self._forget(removed)
            self._look_for_next_file(besides=recording)

    def _look_for_next_file(self, besides: Recording | None = None) -> None:
        """Keep no answers any more that were in a file before this one."""
        if self._generation == self._db.generation:
            return
        self._generation = self._db.generation
        lost = [each for each in self.recordings.values() if each.is_kept and each is not besides]
        for recording in lost:
            recording.is_kept = False
        self.lost += len(lost)
        log.warning("The journal begins anew, without %d answers in use", len(lost))

    def resumed(self) -> None:
        self.continued += 1

    def _busy(self) -> list[str]:
        """Return the ids of answers that are computed or read, or about to be."""
        used = (reference() for reference in self.recordings.valuerefs())
        return [each.id for each in used if each is not None and (each.end is None or each.is_busy)]

    def _forget(self, removed: Collection[str]) -> None:
        for id_ in removed:
            self.recordings.pop(id_, None)

    async def drop(self, recording: Recording) -> None:
        """Remove a request that was refused."""
        self.recordings.pop(recording.id, None)
        db = self._db

        def work() -> Totals:
            db.drop([recording.id])
            return db.totals()

        try:
            self.totals = await self._disk.run(work)
        except FAILURES as error:
            self._remove_later([recording], error)

    async def remove(self, recording: Recording) -> None:
        """Remove an answer, now or as soon as the disk can."""
        self.recordings.pop(recording.id, None)
        self._to_remove.add(recording.id)
        await self._remove_lost()

    def _remove_later(self, recordings: Iterable[Recording], error: Exception) -> None:
        self._note(error)
        self._to_remove.update(recording.id for recording in recordings)
        if not self.has_ended:
            self.run(self._keep_removing())

    async def _keep_removing(self) -> None:
        while True:
            if await self._remove_lost():
                return
            await asyncio.sleep(_RETRY_AFTER_S)

    async def _remove_lost(self) -> bool:
        """Remove what is to be removed; return False if the disk failed."""
        db, ids = self._db, list(self._to_remove)
        if not ids:
            return True

        def work() -> Totals:
            db.remove(ids)
            return db.totals()

        try:
            self.totals = await self._disk.run(work)
        except FAILURES as error:
            self._note(error)
            return False
        self._to_remove.difference_update(ids)
        return True

    def collect_soon(self, recording: Recording) -> None:
        """Write a recording's new deltas, with those of others, and then let its readers have them."""
        self._updated[recording] = None
        if not self._is_collecting:
            self._is_collecting = True
            asyncio.get_running_loop().call_soon(self._collect)

    def _collect(self) -> None:
        self._is_collecting = False
        if self._is_writing or self.has_ended:
            return
        updated, self._updated = self._updated, {}
        batch = [(recording, *recording.take()) for recording in updated]
        kept = [each for each in batch if each[0].is_kept]
        deltas = [
            (recording.number, place, data)
            for recording, new, end in kept
            if end is None
            for place, data in new
        ]
        ends = [
            (recording.number, end, [*recording.deltas, *(data for _, data in new)])
            for recording, new, end in kept
            if end is not None
        ]

        def deliver(removed: list[str] | None, error: Exception | None) -> None:
            self._forget(removed or ())
            self._look_for_next_file()
            if error is not None:
                self._lose([recording for recording, *_ in kept], error)
            elif ends:
                self.totals = replace(self.totals, ended=self.totals.ended + len(ends))
            for recording, new, end in batch:
                recording.deliver([data for _, data in new], end)
            self._is_writing = False
            if self._updated:
                self._collect()

        if not (deltas or ends):
            deliver(None, None)
            return
        self._is_writing = True
        db, busy = self._db, self._busy()
        self._disk.start(lambda: db.append(deltas, ends, busy), deliver)

    def save(self, recording: Recording) -> None:
        """Save the deltas of a suspended answer."""
        db, number, deltas = self._db, recording.number, list(recording.deltas)

        def report(_: object, error: Exception | None) -> None:
            if error is not None:
                self._lose([recording], error)

        self._disk.start(lambda: db.save(number, deltas), report)

    def _lose(self, recordings: Sequence[Recording], error: Exception) -> None:
        """Keep these answers no longer."""
        for recording in recordings:
            recording.is_kept = False
        self.lost += len(recordings)
        log.warning("The journal cannot keep %d answers: %s", len(recordings), error)
        # The file may lack some of their deltas.
        self._remove_later(recordings, error)

    def _note(self, error: Exception) -> None:
        """Set a damaged file aside; other errors may pass."""
        if type(error) is sqlite3.DatabaseError:
            db, generation = self._db, self._generation

            def report(_: object, problem: Exception | None) -> None:
                self._look_for_next_file()
                if problem is not None:
                    log.warning("The journal cannot begin anew: %s", problem)

            self._disk.start(lambda: db.begin_anew(error, generation), report)
        else:
            log.debug("The journal failed: %s", error)

    async def clean(self) -> None:
        """Remove answers that are too old, or whose key is unknown, a few at a time, and count the others."""
        db, now, busy = self._db, int(time.time()), self._busy()
        ahead = await self._disk.run(lambda: db.ahead(now + KEPT_S))
        # Whether the clock was ahead then or is behind now, as before the network sets it, time will tell.
        self._ahead = {id_: self._ahead.get(id_, self._clock()) for id_ in ahead}
        late = {id_ for id_, seen in self._ahead.items() if self._clock() - seen > KEPT_S}
        old = await self._disk.run(lambda: db.old(now - KEPT_S, late, self._owners or None, busy))
        for start in range(0, len(old), _CLEANED_AT_ONCE):
            busy = self._busy()
            some = [id_ for id_ in old[start : start + _CLEANED_AT_ONCE] if id_ not in busy]
            self._forget(some)
            await self._disk.run(lambda some=some: db.remove(some))
        await self._disk.run(db.fold)
        self.totals = await self._disk.run(db.totals)

    async def keep_clean(self) -> None:
        while True:
            try:
                await self.clean()
            except Exception as error:
                log.warning(
                    "Old answers cannot be removed from the journal: %s",
                    error,
                    exc_info=not isinstance(error, FAILURES),
                )
                self._note(error)
            await asyncio.sleep(_CLEAN_EVERY_S)
