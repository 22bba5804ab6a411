"""An answer on its way to the client: what the engine puts in, the API takes out.

A request that is being answered, and what is told of it: to who asked, to who looks on, and at its end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from mlx_ring.core.errors import RingError
from mlx_ring.core.traces import Span
from mlx_ring.core.types import FinishReason, TokenLogprob
from mlx_ring.engine.detokenizer import AnswerText, Reading
from mlx_ring.engine.sequence import Sequence
from mlx_ring.engine.stats import EndedRequest, OpenRequest, RequestState


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Where a request's time went."""

    queue_s: float
    """From submission to its first step."""
    prefill_s: float
    """From there to the first token (without one: to the end of the prompt)."""
    decode_s: float
    """From the first token to the last."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to an answer."""

    text: str
    """Empty while a character or a possible stop string is incomplete, and for special tokens."""
    token_ids: tuple[int, ...]
    """Every token sampled, the one that ends the answer included."""
    logprobs: tuple[TokenLogprob, ...]
    """One for each of `token_ids`, where asked for; empty otherwise."""
    prompt_tokens: int
    completion_tokens: int
    """So far; the token that ends the answer counts, as in OpenAI's usage."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed again."""
    finish_reason: FinishReason | None = None
    """Set on the last delta, and only there."""
    stop_match: str | None = None
    """The stop string that ended the answer; it and what follows are not in `text`."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """On the first delta, one for each prompt token, where asked for; nothing scores the first."""
    pooled: tuple[float, ...] | None = None
    """On the last delta, the prompt's vector, where asked for: as pooled, not normalised."""
    timings: RequestTimings | None = None
    """On the last delta."""
    pieces: tuple[str, ...] = ()
    """What each of `token_ids` added to `text`; joined they are it. Without tokens one, of what was held back."""


def _nobody() -> None:
    """Who listens to a stream that is iterated."""


class RequestStream(AsyncIterator[Delta]):
    """One request's deltas. Leaving `async with`, or `aclose`, before the end aborts the request; `stop` ends it well.

    Iterating raises the `RingError` that ended the request, if one did, after what came before it.
    """

    def __init__(self, abort: Callable[[], None], stop: Callable[[], None] = _nobody) -> None:
        self._abort = abort
        self._stop = stop
        self._deltas: deque[Delta] = deque()
        self._arrived = asyncio.Event()
        self._listener: Callable[[], None] = _nobody
        self._error: RingError | None = None
        self._ended = False

    def put(self, delta: Delta) -> None:
        """Hand on a delta; the engine's end of the stream."""
        self._deltas.append(delta)
        self._ended = delta.finish_reason is not None
        self._arrived.set()
        self._listener()

    def fail(self, error: RingError) -> None:
        """End with an error; the engine's end of the stream."""
        self._error = error
        self._ended = True
        self._arrived.set()
        self._listener()

    def tell(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever there is something to take: for one reader of several streams."""
        self._listener = listener
        if self._deltas or self._ended:
            listener()

    def take(self) -> list[Delta]:
        """The deltas that have come since the last time."""
        taken = list(self._deltas)
        self._deltas.clear()
        return taken

    @property
    def error(self) -> RingError | None:
        """What ended the request, after the deltas that are still to be taken."""
        return self._error

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._error is not None:
                raise self._error.with_traceback(None)
            if self._ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._deltas.popleft()

    def stop(self) -> None:
        """The answer is all there, in what was taken: it ends now, as if by itself, with one more delta that has no text."""
        if not self._ended:
            self._deltas.clear()
            self._stop()

    async def aclose(self) -> None:
        """Leave. The sequence stops and its KV is freed at once; deltas not taken are gone."""
        self._deltas.clear()
        if not self._ended:
            self._ended = True
            self._arrived.set()
            self._abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


@dataclass(slots=True)
class LiveRequest:
    """From its coming until it is answered, fails or is given up. Times are of the engine's clock, in seconds."""

    sequence: Sequence
    stream: RequestStream
    text: AnswerText
    completion_tokens: int = 0
    is_first: bool = True
    """Whether nothing came yet."""
    last_at: float = 0.0
    """When tokens came last."""
    span: Span | None = None
    """Where the request is traced."""
    client: str = ""
    """Who asks."""
    deadline: asyncio.TimerHandle | None = None

    def delta(
        self,
        tokens: tuple[TokenLogprob, ...],
        reading: Reading,
        finish_reason: FinishReason | None,
        now: float,
    ) -> Delta:
        """What has come since the last one; the first and the last bring what belongs to the whole answer."""
        sequence, request = self.sequence, self.sequence.request
        is_first, self.is_first = self.is_first, False
        self.last_at = now
        self.completion_tokens += len(tokens)
        scored = is_first and request.prompt_logprobs is not None
        return Delta(
            text=reading.text,
            token_ids=tuple(token.token for token in tokens),
            logprobs=tokens if request.sampling.logprobs else (),
            prompt_tokens=sequence.prompt_length,
            completion_tokens=self.completion_tokens,
            cached_tokens=sequence.cached_tokens,
            finish_reason=finish_reason,
            stop_match=reading.stop_match,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if scored else None,
            pooled=None if finish_reason is None else sequence.pooled,
            timings=None if finish_reason is None else self._timings(now),
            pieces=reading.pieces,
        )

    def as_open(self, now: float) -> OpenRequest:
        """How it stands."""
        sequence = self.sequence
        return OpenRequest(
            id=sequence.request.request_id,
            state=self._state,
            prompt_tokens=sequence.prompt_length,
            cached_tokens=sequence.cached_tokens,
            read_tokens=min(sequence.scheduled, sequence.prompt_length),
            tokens=self.completion_tokens,
            age_s=now - sequence.submitted_at,
        )

    def as_ended(self, reason: FinishReason, error: RingError | None, now: float) -> EndedRequest:
        """What became of it."""
        sequence = self.sequence
        return EndedRequest(
            submitted_at=sequence.submitted_at,
            opened_at=sequence.opened_at,
            first_token_at=sequence.first_token_at,
            last_token_at=sequence.last_token_at,
            ended_at=now,
            prompt_tokens=sequence.prompt_length,
            completion_tokens=self.completion_tokens,
            cached_tokens=sequence.cached_tokens,
            reason=reason,
            error=error,
        )

    @property
    def _state(self) -> RequestState:
        """One that was put back waits too."""
        if not self.sequence.scheduled:
            return "waiting"
        return "answering" if self.sequence.is_prefilled else "reading"

    def _timings(self, now: float) -> RequestTimings:
        sequence = self.sequence
        opened = sequence.submitted_at if sequence.opened_at is None else sequence.opened_at
        first = now if sequence.first_token_at is None else sequence.first_token_at
        last = now if sequence.last_token_at is None else sequence.last_token_at
        return RequestTimings(opened - sequence.submitted_at, first - opened, last - first)
