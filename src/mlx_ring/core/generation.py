"""A generation request: its stream of answer text, its stop strings, its state for reports, and its ways back.

The API makes the requests and reads the streams; the engine answers them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

from mlx_ring.core.errors import ContextExceeded, RingError
from mlx_ring.core.types import FinishReason, PoolingKind, SamplingParams, TokenLogprob, Way


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request in tokens. Templates, tools and formats belong to the API."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    prompt_logprobs: int | None = None
    """Number of alternatives to give beside each prompt token's own log-probability; None: off."""
    shown_tokens: frozenset[int] = frozenset()
    """Special tokens that the answer's text shows, because they mark where a part of it begins."""
    continues_text: bool = False
    """True if the answer continues the prompt's own text."""
    pooling: PoolingKind | None = None
    """Tokens whose hidden states after the final norm make the prompt's vector; None: off."""
    answered: tuple[int, ...] = ()
    """Tokens of the answer that were delivered before. Deltas contain only those after them."""
    model: str = ""
    """Digest of the model that answered them; empty if it is unknown."""

    @property
    def computes_all(self) -> bool:
        """True if every position's result is wanted, so that no cached position can replace it."""
        return self.prompt_logprobs is not None or self.pooling in ("mean", "cls")


def context_exceeded(
    prompt_tokens: int, context_tokens: int, *, param: str = "messages", is_counted: bool = True
) -> ContextExceeded:
    """Return the error of a prompt that does not fit.

    Args:
        prompt_tokens: length of the prompt.
        context_tokens: the model's context length.
        param: field of the request that holds the prompt.
        is_counted: False if the prompt was not read to its end and may be longer.
    """
    error = ContextExceeded(
        f"This model's maximum context length is {context_tokens} tokens for prompt and answer together, "
        f"but the prompt has {'' if is_counted else 'at least '}{prompt_tokens}: shorten the prompt.",
        prompt_tokens=prompt_tokens,
        context_tokens=context_tokens,
    )
    error.param = param
    return error


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Durations of a request's phases."""

    queue_s: float
    """Seconds from submission to the request's first step."""
    prefill_s: float
    """Seconds from there to the first token; without one, to the end of the prompt."""
    decode_s: float
    """Seconds from the first token to the last."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Part of an answer that one step added."""

    text: str
    """Empty while a character or a possible stop string is incomplete, and for special tokens."""
    token_ids: tuple[int, ...]
    """Every sampled token, the one that ends the answer included."""
    logprobs: tuple[TokenLogprob, ...]
    """Log-probability of each of `token_ids`, if requested; else empty."""
    prompt_tokens: int
    completion_tokens: int
    """Tokens so far. The token that ends the answer counts, as in OpenAI's usage."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache supplied."""
    finish_reason: FinishReason | None = None
    """Set on the last delta, and only there."""
    stop_match: str | None = None
    """Stop string that ended the answer; `text` contains neither it nor what follows."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Log-probability of each prompt token, on the first delta, if requested; the first token has none."""
    pooled: tuple[float, ...] | None = None
    """The prompt's vector, on the last delta, if requested: as pooled, not normalized."""
    timings: RequestTimings | None = None
    """Set on the last delta."""
    pieces: tuple[str, ...] = ()
    """Text that each of `token_ids` added; joined they are `text`. Without tokens, one piece of held-back text."""


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """Delta of the answer with that index."""

    index: int
    delta: Delta


class Source(Protocol):
    """Deltas of the answers to requests that belong together."""

    @property
    def is_paused(self) -> bool:
        """True while one of them waits for an engine, or for its first new token after a loss."""
        ...

    @property
    def was_resumed(self) -> bool:
        """True if one of them continued after a loss."""
        ...

    def set_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever there are deltas to take, or one of the answers is paused."""
        ...

    def take(self) -> tuple[list[ChoiceDelta], RingError | None]:
        """Take the deltas that arrived since the last call, and the error that ended the first failed answer."""
        ...

    def stop(self, index: int) -> None:
        """End an answer as complete, because the deltas taken hold all of it."""
        ...

    async def aclose(self) -> None:
        """End all answers that have not ended."""
        ...


def _no_action() -> None:
    """Do nothing: the listener of a stream that is iterated."""


class RequestStream(AsyncIterator[Delta]):
    """Deltas of one request.

    Leaving `async with`, or `aclose`, before the end aborts the request; `stop` ends it as complete. Iterating raises
    the `RingError` that ended the request, if one did, after the deltas before it.
    """

    def __init__(self, abort: Callable[[], None], stop: Callable[[], None] = _no_action) -> None:
        self._abort = abort
        self._stop = stop
        self._deltas: deque[Delta] = deque()
        self._arrived = asyncio.Event()
        self._listener: Callable[[], None] = _no_action
        self._error: RingError | None = None
        self._ended = False
        self.is_paused = False
        """True while the request waits for an engine, or for its first new token after a loss."""
        self.was_resumed = False
        """True if the answer continued after a loss."""
        self.model = ""
        """Digest of the model that answers; empty if it is unknown, or the request still waits for an engine."""

    def pause(self) -> None:
        """Record that the request waits for another engine, and inform the reader."""
        self.is_paused = True
        self._listener()

    def resume(self, *, continues: bool) -> None:
        """Record that the request no longer waits, and whether an interrupted answer continues."""
        self.was_resumed |= continues
        self.is_paused = False

    def put(self, delta: Delta) -> None:
        """Append a delta; called by the engine."""
        self._deltas.append(delta)
        self._ended = delta.finish_reason is not None
        self._arrived.set()
        self._listener()

    def fail(self, error: RingError) -> None:
        """End with an error; called by the engine."""
        self._error = error
        self._ended = True
        self._arrived.set()
        self._listener()

    def set_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever there are deltas to take, so that one reader can follow several streams."""
        self._listener = listener
        if self._deltas or self._ended:
            listener()

    def take(self) -> list[Delta]:
        """Take the deltas that arrived since the last call."""
        taken = list(self._deltas)
        self._deltas.clear()
        return taken

    @property
    def error(self) -> RingError | None:
        """Error that ended the request, after the deltas that are still to be taken."""
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
        """End now as if complete, because the deltas taken hold the whole answer. One more delta without text follows."""
        if not self._ended:
            self._deltas.clear()
            self._stop()

    async def aclose(self) -> None:
        """Abort: the sequence stops. Deltas that were not taken are lost. The prefix cache keeps the KV."""
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


class StopMatcher:
    """A filter that passes text until a stop string is complete, and holds back what could become one.

    The stop string that is complete first wins; of several that end together, the longest. The result therefore does
    not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be sent now, and the stop string that ends it, if one does."""
        if not self._stops:
            return text, None
        text = self._held + text
        self._held = ""
        match = self._first_match(text)
        if match is not None:
            start, stop = match
            return text[:start], stop
        held = open_end(text, self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = ((text.find(stop), stop) for stop in self._stops)
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop


def open_end(text: str, marks: Iterable[str]) -> int:
    """Return the number of characters at the end of `text` that may start a mark."""
    return max((_open_end(text, mark) for mark in marks), default=0)


def _open_end(text: str, mark: str) -> int:
    place = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while place >= 0 and not mark.startswith(text[place:]):
        place = text.find(mark[0], place + 1)
    return len(text) - place if place >= 0 else 0


# ---- reports

RequestState = Literal["waiting", "reading", "answering", "paused"]


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request that has not ended, without its text."""

    id: str
    state: RequestState
    """`reading` means prefill, `answering` decode, `paused` that its instance was lost and is loaded again."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the prefix cache supplied."""
    read_tokens: int
    """Prompt tokens in the KV cache, cached ones included."""
    tokens: int
    """Tokens of the answer so far."""
    age_s: float


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended. Times are in seconds of the engine's clock."""

    submitted_at: float
    opened_at: float | None
    """Time of its first admission; None if it was never admitted."""
    first_token_at: float | None
    last_token_at: float | None
    ended_at: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reason: FinishReason
    error: RingError | None = None

    @property
    def queue_s(self) -> float:
        return (self.ended_at if self.opened_at is None else self.opened_at) - self.submitted_at


# ---- ways back

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class WayBack:
    """Way on which a sequence gets back to its next token. Times are in seconds of the engine's clock."""

    way: Way
    seconds: float | None
    """Predicted time from `since`; None: unknown."""
    since: float
    """Time of the loss, or of the choice."""
    group: WaysBack
    has_ended: bool = False

    def arrive(self, now: float | None) -> None:
        """Record the time of the next token, once; None if there will be none on this way."""
        if not self.has_ended:
            self.has_ended = True
            self.group.record(self, None if now is None else now - self.since)

    def turn(self, way: Way, more_s: float | None) -> None:
        """Take another way, or a part of the way, whose predicted time is longer by some seconds; None: unknown."""
        self.way = way
        self.seconds = None if self.seconds is None or more_s is None else max(0.0, self.seconds + more_s)


class WaysBack:
    """Ways back of sequences that were interrupted together. Once all have arrived, one line of the log has them."""

    def __init__(
        self, what: str, record: Callable[[Way, float | None, float], None], about: str = ""
    ) -> None:
        """Start without any.

        Args:
            what: their common name for the log.
            record: receives each way that was taken, with the predicted and the taken seconds.
            about: text for the end of the line, as other ways and their predictions.
        """
        self.what, self._record, self._about = what, record, about
        self._begun = 0
        self._arrived: dict[Way, list[tuple[float | None, float]]] = {}

    def begin(self, way: Way, seconds: float | None, since: float) -> WayBack:
        """Begin one more way; see `WayBack`."""
        self._begun += 1
        return WayBack(way, seconds, since, self)

    def record(self, back: WayBack, taken_s: float | None) -> None:
        """Record that a sequence has arrived, or with None that it does not."""
        self._begun -= 1
        if taken_s is not None:
            self._record(back.way, back.seconds, taken_s)
            self._arrived.setdefault(back.way, []).append((back.seconds, taken_s))
        if not self._begun and self._arrived:
            parts = [_describe_way(way, times) for way, times in self._arrived.items()]
            log.info("Ways back of %s: %s%s", self.what, "; ".join(parts), self._about)
            self._arrived = {}


def _describe_way(way: Way, times: Sequence[tuple[float | None, float]]) -> str:
    """Describe the sequences that took a way, with the longest times."""
    known = [seconds for seconds, _ in times if seconds is not None]
    predicted = f"predicted {max(known):.2f} s" if known else "without a prediction"
    return f"{way} ({len(times)}), {predicted}, took {max(taken for _, taken in times):.2f} s"
