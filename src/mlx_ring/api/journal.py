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
import logging
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive

from mlx_ring.api.journal_writer import KEPT_S, JournalWriter
from mlx_ring.api.kept_answers import End, KeptAnswer, KeptRequest, failed
from mlx_ring.api.recordings import PASSING, RecordedPlayback, Recording
from mlx_ring.api.streaming import PLAYBACK, Endpoint
from mlx_ring.core.errors import (
    NotReady,
    RequestError,
    RingError,
    ServingError,
    UnknownAnswer,
    UnknownModel,
)
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.traces import CLIENT, FOR_OWNER, REQUEST_TASK, owner_of

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
"""Time after which an answer that runs alone is submitted again, if the model could not take it."""
_LONGEST_WAIT_S = 30.0
_MOST_ALONE = 64
"""Largest number of answers that are continued without a client at the same time."""
_LONGEST_NUMBER = 9


class JournalStats(NamedTuple):
    """Contents and counts of a journal."""

    bytes: int = 0
    running: int = 0
    suspended: int = 0
    """Number of answers that have not ended and are not computed."""
    ended: int = 0
    continued: int = 0
    """Number of answers that continued for a client that came back, or with another head."""
    lost: int = 0
    """Number of answers that the disk could not keep."""


class Journal:
    """All kept answers of a head."""

    def __init__(self, folder: Path, size: int, keys: Collection[str] = ()) -> None:
        """Prepare a journal.

        Args:
            folder: its folder.
            size: most bytes of its file.
            keys: API keys. Answers to requests with others are removed.
        """
        self._writer = JournalWriter(folder, size, {owner_of(f"key {key}") for key in keys})
        self._endpoints: Mapping[str, Endpoint] = {}
        self._app: object = None
        self._alone = asyncio.Semaphore(_MOST_ALONE)

    # ---- life

    async def open(self) -> None:
        """Open the file. Raises `ConfigError` if that fails."""
        await self._writer.open()

    def serve(self, app: object, endpoints: Mapping[str, Endpoint]) -> None:
        """Use the endpoints of an application, by path, to write answers again."""
        self._app, self._endpoints = app, endpoints

    def begin(self) -> None:
        """Continue the answers that run alone, and remove old ones."""
        self._writer.run(self._continue_all())
        self._writer.run(self._writer.keep_clean())

    async def close(self) -> None:
        """Suspend all answers, and close the file. The next head continues them."""
        await self._writer.close()

    @property
    def has_work(self) -> bool:
        """True while an answer is computed."""
        return any(recording.is_running for recording in self._writer.recordings.values())

    def stats(self) -> JournalStats:
        """Return what the journal keeps, and what it did."""
        writer = self._writer
        running = sum(each.is_running and each.is_kept for each in writer.recordings.values())
        totals = writer.totals
        suspended = max(0, totals.answers - totals.ended - running)
        return JournalStats(totals.bytes, running, suspended, totals.ended, writer.continued, writer.lost)

    # ---- from the API

    def record(self, request: Request, body: bytes) -> None:
        """Keep the answer to the request in this context, once it is submitted."""
        if self._writer.has_ended or PLAYBACK.get() is not None:
            return
        owner, now = owner_of(CLIENT.get()), int(time.time())
        kept = KeptRequest("", owner, request.url.path, now, secrets.token_bytes(16), runs_alone=False)
        recording = Recording(self._writer, KeptAnswer(0, kept, (), (), None), body, is_new=True)
        PLAYBACK.set(RecordedPlayback(recording, is_first=True))

    async def run_alone(self, request: Request, answer: Response, *, streams: bool) -> Response:
        """Compute an answer whether or not its client waits. Return its state, or its events.

        Raises:
            RingError: it cannot be computed now.
        """
        recording = self._first_recording()
        work = self._writer.run(self._read_first(recording, answer))
        opened = asyncio.ensure_future(recording.opened.wait())
        try:
            await asyncio.wait((work, opened), return_when=asyncio.FIRST_COMPLETED)
        finally:
            opened.cancel()
        if work.cancelled():
            raise NotReady("The server is shutting down.")
        if work.done():
            work.result()
        return await self._play(recording, request.receive, streams=streams)

    async def _read_first(self, recording: Recording, answer: Response) -> None:
        with contextlib.suppress(ClientDisconnect):
            await _read_all(answer, self._scope(recording))
        if recording.end is None:
            self._complete_soon(recording)

    async def queue_alone(
        self, request: Request, requests: Sequence[GenerateRequest], *, streams: bool
    ) -> Response:
        """Compute an answer like `run_alone`, once its model is loaded.

        Raises:
            Overloaded: it cannot be kept.
        """
        recording = self._first_recording()
        await recording.keep(requests)
        self._complete_soon(recording)
        return await self._play(recording, request.receive, streams=streams)

    def _first_recording(self) -> Recording:
        """Return the recording of the request in this context, which from now on runs alone."""
        playback = PLAYBACK.get()
        if not isinstance(playback, RecordedPlayback):
            raise NotReady("The server is shutting down.")
        playback.recording.request = replace(playback.recording.request, runs_alone=True)
        return playback.recording

    async def write_again(self, request: Request, id_: str, *, streams: bool, after: int = -1) -> Response:
        """Return a kept answer: its events after that number, or its state. If it was suspended, it continues.

        Raises:
            UnknownAnswer: it is not kept, belongs to another endpoint, or another key sent its request.
            NotReady: the disk fails.
        """
        recording = await self._find(id_, request)
        if not streams and recording.end is None and not recording.is_running:
            await self._continue(recording)
        return await self._play(recording, request.receive, streams=streams, after=after)

    async def rest(self, request: Request) -> Response:
        """Return the events of a kept answer that follow the one in `Last-Event-ID`."""
        id_, after = last_event(request)
        return await self.write_again(request, id_, streams=True, after=after)

    async def body_of(self, request: Request, id_: str) -> bytes:
        """Return the JSON of the request whose answer is kept. Raises `UnknownAnswer` if it is not."""
        return (await self._find(id_, request)).body

    async def cancel(self, request: Request, id_: str) -> None:
        """End an answer that runs alone; one that has ended stays as it is.

        Raises:
            UnknownAnswer: it is not kept.
            RequestError: it belongs to a client that waits for it.
        """
        recording = await self._find(id_, request)
        if not recording.request.runs_alone:
            raise RequestError(f"{id_} was not requested with 'background': close its connection to end it.")
        await self._cancel(recording)

    async def delete(self, request: Request, id_: str) -> None:
        """Remove an answer, and end it if it is in progress. Raises `UnknownAnswer` if it is not kept."""
        recording = await self._find(id_, request)
        await self._cancel(recording)
        recording.is_kept = False
        await self._writer.remove(recording)

    async def _cancel(self, recording: Recording) -> None:
        await recording.suspend()
        if recording.end is None:
            await self._writer.end(recording, End("cancelled", int(time.time())))

    async def _find(self, id_: str, request: Request) -> Recording:
        recording = self._writer.recordings.get(id_) or await self._writer.load(id_)
        if recording is None or recording.request.owner != owner_of(CLIENT.get()):
            raise UnknownAnswer(
                f"The journal has no answer '{id_}': it may be too old, or another API key asked for it."
            )
        path = recording.request.path.removeprefix("/v1")
        if not request.url.path.removeprefix("/v1").startswith(path):
            raise UnknownAnswer(
                f"'{id_}' is an answer of {recording.request.path}, not of {request.url.path}."
            )
        return recording

    async def _play(
        self, recording: Recording, receive: Receive, *, streams: bool, after: int = -1
    ) -> Response:
        """Let the endpoint of the request write its answer again."""
        sent = iter(({"type": "http.request", "body": recording.body, "more_body": False},))

        async def receive_again() -> Message:
            return next(sent, None) or await receive()

        marker = PLAYBACK.set(RecordedPlayback(recording, after=after, streams=streams))
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
        """Continue the answers of earlier heads."""
        for id_ in await self._writer.unfinished():
            self._writer.run(self._complete_kept(id_))

    async def _complete_kept(self, id_: str) -> None:
        """Complete an answer of an earlier head, once the disk gives it."""
        while True:
            try:
                recording = self._writer.recordings.get(id_) or await self._writer.load(id_)
            except NotReady as error:
                log.debug("%s waits: %s", id_, error)
                await asyncio.sleep(_LOOK_AGAIN_S)
            else:
                break
        if recording is not None:
            self._complete_soon(recording)

    async def _continue(self, recording: Recording) -> None:
        """Compute the rest of a suspended answer without a client."""
        if not recording.request.runs_alone:
            await self._writer.set_alone(recording)
        self._complete_soon(recording)

    def _complete_soon(self, recording: Recording) -> None:
        if recording.completion is None or recording.completion.done():
            recording.completion = self._writer.run(self._complete(recording))

    async def _complete(self, recording: Recording) -> None:
        """Read an answer to its end, as often as the model could not take it."""
        CLIENT.set(f"{FOR_OWNER}{recording.request.owner}")
        REQUEST_TASK.set(asyncio.current_task())
        wait_s = _LOOK_AGAIN_S
        while recording.end is None:
            try:
                async with self._alone:
                    _check_age(recording)
                    response = await self._play(recording, _silent, streams=True)
                    await _read_all(response, self._scope(recording))
            except UnknownModel as error:
                log.warning("%s waits for a head that serves its model: %s", recording.id, error)
                return
            except (ClientDisconnect, *PASSING) as error:
                log.debug("%s waits: %r", recording.id, error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            except Exception as error:
                is_bug = not isinstance(error, RingError)
                log.warning("%s cannot be continued: %s", recording.id, error, exc_info=is_bug)
                own = (
                    error if isinstance(error, RingError) else ServingError("The answer cannot be continued.")
                )
                await self._writer.end(recording, failed(own))
            else:
                return


def last_event(request: Request) -> tuple[str, int]:
    """Return the answer and the number of the event in `Last-Event-ID`. Raises `RequestError`."""
    given = request.headers["last-event-id"]
    id_, _, number = given.rpartition(":")
    if not id_ or not number.isdecimal() or len(number) > _LONGEST_NUMBER:
        raise RequestError(f"Last-Event-ID is '{given}', which is no id of an event of this server.")
    return id_, int(number)


def _check_age(recording: Recording) -> None:
    if time.time() > recording.request.created + KEPT_S:
        raise ServingError(f"The answer was not computed within {KEPT_S // 3600} hours.")


async def _silent() -> Message:
    """Wait for ever, as the client of an answer that runs alone."""
    return await asyncio.get_running_loop().create_future()


async def _discard(_: Message) -> None:
    """Send nothing."""


async def _read_all(answer: Response, scope: dict[str, Any]) -> None:
    """Let an answer be written to its end, for nobody."""
    await answer(scope, _silent, _discard)
