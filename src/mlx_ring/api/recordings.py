"""Kept answers while they are computed and read: their deltas, their readers, and their repetitions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Literal, Protocol

from mlx_ring.api.generation import take_deltas
from mlx_ring.api.kept_answers import (
    End,
    KeptAnswer,
    by_token,
    decode_delta,
    encode_delta,
    error_of,
    failed,
)
from mlx_ring.api.streaming import Submit
from mlx_ring.core.errors import (
    NotReady,
    Overloaded,
    RingError,
    ServingError,
    Suspended,
    WorkerLost,
    WorkerStuck,
)
from mlx_ring.core.generation import ChoiceDelta, Delta, GenerateRequest, RequestStream

_MOST_AT_ONCE = 256
"""Most deltas of a repetition between two looks at other tasks."""


PASSING = (NotReady, Overloaded, WorkerLost, WorkerStuck)
"""Errors after which an answer that runs alone is tried again."""


class Keeper(Protocol):
    """The journal, as its recordings use it."""

    has_ended: bool

    async def add(self, recording: Recording) -> None:
        """Write a new request.

        Raises:
            Overloaded: it would run alone, and cannot be written.
        """
        ...

    async def drop(self, recording: Recording) -> None:
        """Remove a request that was refused."""
        ...

    def update_soon(self, recording: Recording) -> None:
        """Write what is known of an answer's request before its next deltas, unless the disk fails."""
        ...

    async def end(self, recording: Recording, end: End) -> None:
        """End an answer that is not computed, unless it has ended."""
        ...

    def collect_soon(self, recording: Recording) -> None:
        """Write a recording's new deltas, and then let its readers have them."""
        ...

    def save(self, recording: Recording) -> None:
        """Save the deltas of a suspended answer."""
        ...

    def resumed(self) -> None:
        """Count an answer that continues."""
        ...


class Recording:
    """A kept answer in memory."""

    def __init__(self, keeper: Keeper, kept: KeptAnswer, body: bytes, *, is_new: bool) -> None:
        """Begin with what is kept.

        Args:
            keeper: the journal.
            kept: the request, and its answer so far.
            body: JSON of the request.
            is_new: True if it has not been written. Its id and prompts are known once it is submitted.
        """
        self._keeper = keeper
        self.number, self.request, self.end, self.body = kept.number, kept.request, kept.end, body
        self.prompts = kept.prompts
        self.deltas = list(kept.deltas)
        """Encoded deltas that may be sent."""
        self.is_kept = True
        """False if it could not be written. Clients get no ids of events then."""
        self.opened = asyncio.Event()
        """Event of its submission to an engine, or of its end."""
        self.was_resumed = False
        self._taken = len(self.deltas)
        """Number of deltas that were given to the journal."""
        self._on_their_way: list[ChoiceDelta] = []
        """Those of them that are not written yet."""
        self._is_new = is_new
        self._starts = asyncio.Lock()
        self._is_computed = self._is_ending = False
        self._is_written = asyncio.Event()
        """Event of the delivery of all deltas that were taken."""
        self._is_written.set()
        self._streams: dict[int, RequestStream] = {}
        """Streams of the sequences that an engine computes, by index."""
        self._setback: Suspended | None = None
        """Reason why its computation ended before the answer did; None while it is computed."""
        self._cached: dict[int, int] = {}
        """Cached prompt tokens of the sequences that were continued, when they began."""
        self._readers: set[Reader] = set()
        self.completion: asyncio.Task[object] | None = None
        """Task that reads it without a client."""

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def is_running(self) -> bool:
        return self._is_computed

    @property
    def is_busy(self) -> bool:
        """True while it is computed or read."""
        return self._is_computed or bool(self._readers)

    @property
    def is_paused(self) -> bool:
        return any(stream.is_paused for stream in self._streams.values())

    # ---- from readers

    async def open(self, submit: Submit, requests: Sequence[GenerateRequest], model: str) -> Reader:
        """Start to read. Submit what is not yet answered, unless it is in progress, or another model began it.

        Args:
            submit: submits to an engine.
            requests: the requests of its sequences.
            model: digest of the engine's model; empty if it is unknown.

        Raises:
            Overloaded: it would run alone, and cannot be written.
            RingError: the engine refuses it.
        """
        reader = Reader(self)
        self._readers.add(reader)
        try:
            async with self._starts:
                if self.end is None and not self._is_computed:
                    await self._start(submit, requests, model)
        except BaseException:
            self._readers.discard(reader)
            raise
        self.opened.set()
        return reader

    async def keep(self, requests: Sequence[GenerateRequest], model: str = "") -> None:
        """Write a new request before its submission. Raises `Overloaded` if it runs alone, and cannot be written."""
        self.request = replace(self.request, id=requests[0].request_id.rpartition("-")[0], model=model)
        self.prompts = tuple(request.prompt_tokens for request in requests)
        await self._keeper.add(self)
        self._is_new = False

    async def _start(self, submit: Submit, requests: Sequence[GenerateRequest], model: str) -> None:
        was_new = self._is_new
        if was_new:
            await self.keep(requests, model)
        await self._is_written.wait()
        answered: dict[int, list[int]] = {index: [] for index in range(len(requests))}
        for index, delta in map(decode_delta, self.deltas):
            self._cached.setdefault(index, delta.cached_tokens)
            answered[index] += delta.token_ids
            if delta.finish_reason is not None:
                del answered[index]
        rest = [
            replace(
                requests[index],
                prompt_tokens=self.prompts[index],
                answered=tuple(tokens),
                model=self.request.model,
                prompt_logprobs=None if tokens else requests[index].prompt_logprobs,
            )
            for index, tokens in answered.items()
        ]
        if rest and not await self._has_model(model):
            return
        try:
            streams = submit(*rest) if rest else []
        except BaseException:
            if was_new:
                await self._keeper.drop(self)
            raise
        self._setback = None
        if self.deltas:
            self.was_resumed = True
            self._keeper.resumed()
        self._is_computed = True
        self._streams = dict(zip(answered, streams, strict=True))
        for stream in streams:
            stream.set_listener(self._on_update)
        self._on_update()

    async def _has_model(self, model: str) -> bool:
        """Report whether a model may continue the answer. End it if another one, under the same name, began it."""
        began = self.request.model
        if self.deltas and began and model and began != model:
            problem = f"its model has other weights or another configuration than when it began ({began}, now {model})"
            error = ServingError(f"{self.id} cannot be continued, because {problem}: send the request again.")
            await self._keeper.end(self, failed(error))
            return False
        self._set_model(model)
        return True

    def _set_model(self, model: str) -> None:
        """Record the model that begins the answer. It may have been loaded since the request came."""
        if model and not self._taken and model != self.request.model:
            self.request = replace(self.request, model=model)
            self._keeper.update_soon(self)

    def _on_update(self) -> None:
        if self.is_paused:
            self._wake()
        self._keeper.collect_soon(self)

    def stop(self, index: int) -> None:
        """End a sequence as complete, because its deltas so far hold the whole answer."""
        if index in self._streams:
            self._streams[index].stop()

    async def leave(self, reader: Reader) -> None:
        """End reading. An answer without readers is suspended."""
        self._readers.discard(reader)
        if not self._readers:
            await self.suspend()

    async def suspend(self) -> None:
        """End the computation, and keep its KV for the next reader."""
        streams, self._streams = self._streams, {}
        is_cut_off = self._is_computed and not self._is_ending
        self._is_computed &= not is_cut_off
        for stream in streams.values():
            await stream.aclose()
        await self._is_written.wait()
        if self.is_kept and is_cut_off and self.end is None:
            self._keeper.save(self)

    # ---- to the journal

    def take(self) -> tuple[list[tuple[int, bytes]], End | None]:
        """Take the new deltas, encoded, each with its place, and the end, if it has come."""
        if not self._is_computed or self._is_ending:
            return [], None
        self._set_model(next((stream.model for stream in self._streams.values()), ""))
        taken, failure = take_deltas(self._streams)
        encoded: list[tuple[int, bytes]] = []
        for each in taken:
            delta = self._continued(each)
            encoded.append((self._taken, encode_delta(each.index, delta)))
            self._on_their_way.append(ChoiceDelta(each.index, delta))
            self._taken += 1
            if each.delta.finish_reason is not None:
                del self._streams[each.index]
        if encoded:
            self._is_written.clear()
        if failure is None and self._streams:
            return encoded, None
        if self.request.runs_alone and isinstance(failure, PASSING):
            self._set_back(failure)
            return encoded, None
        self._is_written.clear()
        self._is_ending = True
        return encoded, End("completed", int(time.time())) if failure is None else failed(failure)

    def _set_back(self, error: RingError) -> None:
        """Let an answer that runs alone wait until the model can continue it."""
        self._streams, self._is_computed = {}, False
        self._setback = Suspended(f"{self.id} waits: {error}")
        asyncio.get_running_loop().call_soon(self._wake)

    def _continued(self, each: ChoiceDelta) -> Delta:
        """Return a delta that counts cached tokens as before its answer continued, without the times since."""
        if each.index not in self._cached:
            return each.delta
        return replace(each.delta, cached_tokens=self._cached[each.index], timings=None)

    def deliver(self, deltas: Iterable[bytes], end: End | None) -> None:
        """Let readers have deltas that are written, and the end."""
        had = len(self.deltas)
        self.deltas += deltas
        count = len(self.deltas) - had
        written, self._on_their_way = self._on_their_way[:count], self._on_their_way[count:]
        for reader in self._readers if written else ():
            reader.give(had, written)
        if end is not None:
            self.end, self._is_computed = end, False
        if self._taken == len(self.deltas) and (self.end is not None or not self._is_ending):
            self._is_written.set()
        if end is not None or len(self.deltas) > had:
            self._wake()

    def _wake(self) -> None:
        for reader in self._readers:
            reader.listener()

    def interrupt(self) -> None:
        """Tell readers that the head ends."""
        self.opened.set()
        self._wake()

    @property
    def failure(self) -> RingError | None:
        """Error that ended the answer, or its writing; None if there is none."""
        if self.end is not None:
            return error_of(self.end)
        if self._keeper.has_ended:
            return Suspended(f"{self.id} continues with the next server.")
        return self._setback


class Reader:
    """Source of a kept answer. Its deltas have one token each, so that events do not depend on an engine's steps."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._next = 0
        self._live: list[ChoiceDelta] = []
        """Deltas from the next one on that came while it had all before them, so that they need no decoding."""
        self.listener: Callable[[], None] = _nothing

    @property
    def is_paused(self) -> bool:
        return self._recording.is_paused

    @property
    def was_resumed(self) -> bool:
        return self._recording.was_resumed

    def set_listener(self, listener: Callable[[], None]) -> None:
        self.listener = listener
        if self._recording.deltas or self._recording.failure is not None:
            listener()

    def give(self, place: int, deltas: Sequence[ChoiceDelta]) -> None:
        """Take new deltas, the first of which has that place in the answer."""
        if self._next + len(self._live) == place:
            self._live += deltas

    def take(self) -> tuple[list[ChoiceDelta], RingError | None]:
        recording = self._recording
        if self._live:
            live, self._live = self._live, []
            self._next += len(live)
            return [part for each in live for part in _by_token(each.index, each.delta)], recording.failure
        encoded = recording.deltas[self._next : self._next + _MOST_AT_ONCE]
        self._next += len(encoded)
        taken = [part for each in encoded for part in _by_token(*decode_delta(each))]
        if self._next < len(recording.deltas):
            self.listener()
            return taken, None
        return taken, recording.failure

    def stop(self, index: int) -> None:
        self._recording.stop(index)

    async def aclose(self) -> None:
        await self._recording.leave(self)


def _by_token(index: int, delta: Delta) -> Iterator[ChoiceDelta]:
    return (ChoiceDelta(index, part) for part in by_token(delta))


def _nothing() -> None:
    """Do nothing: the listener of a reader that has none yet."""


class RecordedPlayback:
    """One writing of a kept answer."""

    def __init__(
        self, recording: Recording, *, is_first: bool = False, after: int = -1, streams: bool = True
    ) -> None:
        """Prepare to write an answer.

        Args:
            recording: the answer.
            is_first: True for the client that sent the request.
            after: number of the last event that the client has; -1: none.
            streams: True for events, False for the answer or its state.
        """
        self.recording, self.is_first = recording, is_first
        self._after, self.streams, self.model = after, streams, ""
        self._random = Random(recording.request.random)  # noqa: S311 - its seed is secret
        self._next = 0
        self._gave_id = False

    @property
    def created(self) -> int:
        return self.recording.request.created

    @property
    def ended(self) -> int | None:
        return None if self.recording.end is None else self.recording.end.at

    @property
    def unfinished(self) -> Literal["queued", "in_progress"] | None:
        if self.streams or self.is_first or self.recording.end is not None:
            return None
        return "in_progress" if self.recording.deltas else "queued"

    def prompt(self, index: int) -> tuple[int, ...] | None:
        return None if self.is_first else self.recording.prompts[index]

    def draw(self, bits: int) -> int:
        return self._random.getrandbits(bits)

    def numbered(self, event: bytes) -> bytes:
        number, self._next = self._next, self._next + 1
        if number <= self._after:
            return b""
        if not self.recording.is_kept:
            # An empty id, so that the client does not ask for the events after the last one that had one.
            reset, self._gave_id = b"id:\n" if self._gave_id else b"", False
            return reset + event
        self._gave_id = True
        return b"id: %s:%d\n%s" % (self.recording.id.encode(), number, event)

    async def open(self, submit: Submit, requests: Sequence[GenerateRequest]) -> Reader:
        return await self.recording.open(submit, requests, self.model)
