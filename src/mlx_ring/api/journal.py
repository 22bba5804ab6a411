"""Journal: answers that outlive their connection, and their head.

With `--journal`, the request of a stream, or of a response, is kept with the deltas of its answer. A delta is written
before it is sent. So a client that comes back, also to the next head, gets what it lacks and nothing twice. Its answer
is written again from the recorded deltas, by the endpoint that wrote it first, and continues from there.

An answer that nobody reads is suspended: its KV stays in the prefix cache, and the next reader continues it. One that
runs alone (`background`) has the journal itself as a reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from mlx_ring.api.disk_thread import DiskThread
from mlx_ring.api.journal_database import (
    FAILURES,
    End,
    JournalDatabase,
    KeptAnswer,
    KeptRequest,
    Totals,
    join_deltas,
)
from mlx_ring.api.recordings import RecordedPlayback, Recording, failed
from mlx_ring.api.streaming import PLAYBACK, Endpoint
from mlx_ring.core.errors import (
    Conflict,
    NotReady,
    Overloaded,
    RequestError,
    RingError,
    UnknownAnswer,
    WorkerLost,
    WorkerStuck,
)
from mlx_ring.core.traces import CLIENT

log = logging.getLogger(__name__)

_KEPT_S = 24 * 3600
"""Time after which an answer is removed, counted from its request."""
_CLEAN_EVERY_S = 600.0
_LOOK_AGAIN_S = 1.0
"""Time after which an answer that runs alone is submitted again, if the model could not take it."""
_LONGEST_NUMBER = 9


class Journal:
    """All kept answers of a head."""

    def __init__(self, folder: Path, size: int, keys: Collection[str] = ()) -> None:
        """Prepare a journal.

        Args:
            folder: its folder.
            size: most bytes of its file.
            keys: the server's API keys. Answers to requests with other keys are removed.
        """
        self._folder, self._size = folder, size
        self._owners = {owner_of(f"key {key}") for key in keys}
        self._disk = DiskThread()
        self._database: JournalDatabase | None = None
        self._endpoints: Mapping[str, Endpoint] = {}
        self._app: object = None
        self._recordings = WeakValueDictionary[str, Recording]()
        """Recordings that somebody uses, by id."""
        self._updated: dict[Recording, None] = {}
        """Recordings with new deltas, in the order of their first one."""
        self._is_collecting = self._is_writing = self.has_ended = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.totals = Totals(0, 0, 0)
        self.continued = 0
        """Number of answers that continued for a client that came back, or with another head."""
        self.lost = 0
        """Number of answers that the disk could not keep."""

    # ---- life

    async def open(self) -> None:
        """Open the file. Raises `ConfigError` if that fails."""
        self._database = await self._disk.run(lambda: JournalDatabase(self._folder, self._size))
        await self.clean()

    def serve(self, app: object, endpoints: Mapping[str, Endpoint]) -> None:
        """Use the endpoints of an application, by path, to write answers again."""
        self._app, self._endpoints = app, endpoints

    def begin(self) -> None:
        """Continue the answers that run alone."""
        self._run(self._continue_all())
        self._run(self._keep_clean())

    async def close(self) -> None:
        """Suspend all answers, and close the file. The next head continues them."""
        self.has_ended = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for recording in list(self._recordings.values()):
            await recording.suspend()
            recording.interrupt()
        if self._database is not None:
            with contextlib.suppress(*FAILURES):
                await self._disk.run(self._database.close)

    @property
    def has_work(self) -> bool:
        """True while an answer is computed."""
        return any(recording.is_running for recording in self._recordings.values())

    @property
    def running(self) -> int:
        """Number of kept answers that are computed."""
        return sum(recording.is_running and recording.is_kept for recording in self._recordings.values())

    @property
    def suspended(self) -> int:
        """Number of kept answers that have not ended and are not computed."""
        return max(0, self.totals.answers - self.totals.ended - self.running)

    def _run(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- from the API

    def record(self, request: Request, body: bytes) -> None:
        """Keep the answer to the request in this context, once it is submitted."""
        if self.has_ended or PLAYBACK.get() is not None:
            return
        owner, now = owner_of(CLIENT.get()), int(time.time())
        kept = KeptRequest("", owner, request.url.path, now, secrets.token_bytes(16), runs_alone=False)
        recording = Recording(self, KeptAnswer(0, kept, (), (), None), body, is_new=True)
        PLAYBACK.set(RecordedPlayback(recording, is_first=True))

    async def run_alone(self, request: Request, answer: Response, *, streams: bool) -> Response:
        """Compute an answer whether or not its client waits. Return its state, or its events.

        Raises:
            RingError: it cannot be computed now.
        """
        recording = self._first_recording()
        recording.request = replace(recording.request, runs_alone=True)
        work = self._run(_read_all(answer, self._scope(recording)))
        opened = asyncio.ensure_future(recording.opened.wait())
        try:
            await asyncio.wait((work, opened), return_when=asyncio.FIRST_COMPLETED)
        finally:
            opened.cancel()
        if work.done():
            work.result()
        return await self._play(recording, request.receive, streams=streams)

    def _first_recording(self) -> Recording:
        playback = PLAYBACK.get()
        if not isinstance(playback, RecordedPlayback):
            raise NotReady("The server is shutting down.")
        return playback.recording

    async def write_again(self, request: Request, id_: str, *, streams: bool, after: int = -1) -> Response:
        """Return a kept answer: its events after that number, or its state. If it was suspended, it continues.

        Raises:
            UnknownAnswer: it is not kept, or another key sent its request.
        """
        recording = await self._find(id_)
        if not streams and recording.end is None and not recording.is_running:
            await self._continue(recording)
        return await self._play(recording, request.receive, streams=streams, after=after)

    async def rest(self, request: Request) -> Response:
        """Return the events of a kept answer that follow the one in `Last-Event-ID`."""
        given = request.headers["last-event-id"]
        id_, _, number = given.rpartition(":")
        if not id_ or not number.isdecimal() or len(number) > _LONGEST_NUMBER:
            raise RequestError(f"Last-Event-ID is '{given}', which is no id of an event of this server.")
        async for _ in request.stream():
            pass
        return await self.write_again(request, id_, streams=True, after=int(number))

    async def cancel(self, id_: str) -> None:
        """End an answer that runs alone; one that has ended stays as it is.

        Raises:
            UnknownAnswer: it is not kept.
            Conflict: it belongs to a client that waits for it.
        """
        recording = await self._find(id_)
        if not recording.request.runs_alone:
            raise Conflict(f"{id_} was not requested with 'background': close its connection to end it.")
        if recording.end is None:
            await recording.suspend()
            await self._end(recording, End("cancelled", int(time.time())))

    async def delete(self, id_: str) -> None:
        """Remove an answer, and end it if it is in progress. Raises `UnknownAnswer`."""
        recording = await self._find(id_)
        await recording.suspend()
        if recording.end is None:
            recording.deliver((), End("cancelled", int(time.time())))
        recording.is_kept = False
        await self.remove(recording)

    async def _find(self, id_: str) -> Recording:
        recording = self._recordings.get(id_)
        if recording is None:
            found = await self._disk.run(lambda: self._db.find(id_))
            # Another reader may have found it meanwhile.
            recording = self._recordings.get(id_)
            if recording is None and found is not None:
                recording = self._recordings[id_] = Recording(self, *found, is_new=False)
        if recording is None or recording.request.owner != owner_of(CLIENT.get()):
            raise UnknownAnswer(
                f"The journal has no answer '{id_}': it may be too old, or another API key asked for it."
            )
        return recording

    async def _play(
        self, recording: Recording, receive: Receive, *, streams: bool, after: int = -1
    ) -> Response:
        """Let the endpoint of the request write its answer again."""
        body = cast("dict[str, object]", json.loads(recording.body))
        body["stream"] = streams
        if not streams:
            body.pop("stream_options", None)
        sent = iter(({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False},))

        async def receive_again() -> Message:
            return next(sent, None) or await receive()

        playback = RecordedPlayback(recording, after=after, waits=streams)
        marker = PLAYBACK.set(playback)
        try:
            endpoint = self._endpoints[recording.request.path]
            return await endpoint(Request(self._scope(recording), receive_again))
        finally:
            PLAYBACK.reset(marker)

    def _scope(self, recording: Recording) -> dict[str, Any]:
        path = recording.request.path
        return {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [],
            "app": self._app,
            "request_id": recording.id or "-",
        }

    # ---- answers that run alone

    async def _continue_all(self) -> None:
        for id_ in await self._disk.run(self._db.unfinished):
            found = await self._disk.run(lambda id_=id_: self._db.find(id_))
            if found is not None and id_ not in self._recordings:
                self._recordings[id_] = recording = Recording(self, *found, is_new=False)
                self._run(self._complete(recording))

    async def _continue(self, recording: Recording) -> None:
        """Compute the rest of a suspended answer without a client."""
        recording.request = replace(recording.request, runs_alone=True)
        await self._disk.run(lambda: self._db.set_alone(recording.id))
        self._run(self._complete(recording))

    async def _complete(self, recording: Recording) -> None:
        """Read an answer to its end, as often as the model could not take it."""
        CLIENT.set(f"journal {recording.request.owner}")
        while recording.end is None:
            try:
                response = await self._play(recording, _silent, streams=True)
                await _read_all(response, self._scope(recording))
            except (NotReady, Overloaded, WorkerLost, WorkerStuck) as error:
                log.debug("%s waits: %s", recording.id, error)
                await asyncio.sleep(_LOOK_AGAIN_S)
            except RingError as error:
                log.warning("%s cannot be continued: %s", recording.id, error)
                await self._end(recording, failed(error))
            else:
                return

    async def _end(self, recording: Recording, end: End) -> None:
        """End an answer that is not computed."""
        ends = [(recording.number, end, recording.joined)]
        await self._disk.run(lambda: self._db.append((), ends, ()))
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
        self._recordings[recording.id] = recording
        db, running = self._db, self._busy()

        def write() -> tuple[int, list[str], Totals]:
            return *db.add(recording.request, recording.body, recording.prompts, running), db.totals()

        try:
            recording.number, removed, self.totals = await self._disk.run(write)
        except FAILURES as error:
            self._lose([recording], error)
            if recording.request.runs_alone:
                raise Overloaded(
                    f"The journal cannot keep this answer ({error}): leave 'background' out, or retry later.",
                    retry_after_s=_LOOK_AGAIN_S,
                ) from None
            return
        for id_ in removed:
            self._recordings.pop(id_, None)

    def resumed(self) -> None:
        self.continued += 1

    def _busy(self) -> list[str]:
        """Return the ids of answers that are computed or read."""
        return [id_ for id_, recording in self._recordings.items() if recording.is_busy]

    async def remove(self, recording: Recording) -> None:
        """Remove an answer from the file."""
        self._recordings.pop(recording.id, None)
        with contextlib.suppress(*FAILURES):
            await self._disk.run(lambda: self._db.remove([recording.id]))

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
            (recording.number, end, recording.joined + join_deltas(data for _, data in new))
            for recording, new, end in kept
            if end is not None
        ]

        def deliver(_: object, error: Exception | None) -> None:
            if error is not None:
                self._lose([recording for recording, *_ in kept], error)
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
        db, number, joined = self._db, recording.number, recording.joined

        def report(_: object, error: Exception | None) -> None:
            if error is not None:
                self._lose([recording], error)

        self._disk.start(lambda: db.save(number, joined), report)

    def _lose(self, recordings: Sequence[Recording], error: Exception) -> None:
        """Keep these answers no longer."""
        for recording in recordings:
            recording.is_kept = False
            # The file lacks some of its deltas.
            self._run(self.remove(recording))
        self.lost += len(recordings)
        log.warning("The journal cannot keep %d answers: %s", len(recordings), error)

    async def clean(self) -> None:
        """Remove answers that are too old, or whose key is unknown, and count the others."""
        owners, before, busy, db = self._owners or None, int(time.time()) - _KEPT_S, self._busy(), self._db

        def clean() -> Totals:
            db.remove_old(before, owners, busy)
            db.fold()
            return db.totals()

        self.totals = await self._disk.run(clean)

    async def _keep_clean(self) -> None:
        while True:
            await asyncio.sleep(_CLEAN_EVERY_S)
            try:
                await self.clean()
            except FAILURES as error:
                log.warning("Old answers cannot be removed from the journal: %s", error)


def owner_of(client: str) -> str:
    """Return the digest of a client's API key; empty for a client without one."""
    return hashlib.sha256(client.encode()).hexdigest()[:32] if client.startswith("key ") else ""


async def _silent() -> Message:
    """Wait for ever, as the client of an answer that runs alone."""
    return await asyncio.get_running_loop().create_future()


async def _discard(_: Message) -> None:
    """Send nothing."""


async def _read_all(answer: Response, scope: dict[str, Any]) -> None:
    """Let an answer be written to its end, for nobody."""
    await answer(scope, _silent, _discard)
