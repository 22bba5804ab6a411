"""Answers to one chat: the engine's text, split into parts, streamed or whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from starlette.requests import Request

from mlx_ring.api.chat.prepare import PreparedChat
from mlx_ring.api.chat.reader import AnswerReader, join_parts
from mlx_ring.api.chat.request import (
    AnswerPart,
    CallArguments,
    CallOpening,
    ContentText,
    EndReason,
    ReasoningText,
)
from mlx_ring.api.generation import AnswerCounts, Generation
from mlx_ring.api.service import Answering
from mlx_ring.api.streaming import EventT, JsonStream, QuietReason, StreamFormat, while_connected
from mlx_ring.core.generation import ChoiceDelta, Delta, RequestTimings
from mlx_ring.core.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Call:
    """Complete tool call."""

    id: str
    name: str
    arguments: str
    """JSON, unless the answer was cut off in the call."""


@dataclass(slots=True)
class ChatAnswer:
    """Answer so far."""

    parts: list[AnswerPart] = field(default_factory=list[AnswerPart])
    """Parts in the order of their arrival."""
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    """Log-probabilities of all tokens, if requested: also of reasoning, calls and marks."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    """Number of completion tokens that are reasoning, its marks included."""
    end: EndReason | None = None
    """Reason of the answer's end; None if it has not ended."""
    stop_match: str | None = None
    """Stop string that ended the answer."""
    timings: RequestTimings | None = None

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningText))

    @property
    def content(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ContentText))

    @property
    def calls(self) -> list[Call]:
        texts: dict[int, list[str]] = {}
        for part in self.parts:
            if isinstance(part, CallArguments):
                texts.setdefault(part.index, []).append(part.text)
        openings = [part for part in self.parts if isinstance(part, CallOpening)]
        return [Call(call.id, call.name, "".join(texts.get(call.index, []))) for call in openings]


@dataclass(frozen=True, slots=True)
class AnswerUpdate:
    """New parts of the answer with that index."""

    index: int
    parts: tuple[AnswerPart, ...]
    logprobs: tuple[TokenLogprob, ...]
    """Log-probabilities of the new tokens, if requested, even if they made no part."""
    counts: AnswerCounts
    """Token counts of the answer up to here."""
    end: EndReason | None = None
    """Reason of the answer's end. Only the last update has it."""
    stop_match: str | None = None


class ChatGeneration:
    """Chat in progress."""

    def __init__(self, generation: Generation, chat: PreparedChat) -> None:
        self._generation = generation
        self._readers = [AnswerReader(rules) for rules in chat.rules]
        self._stop_tokens = [rules.stop_tokens for rules in chat.rules]
        self.answers = [ChatAnswer() for _ in chat.rules]

    async def batches(self, quiet_s: float | None = None) -> AsyncGenerator[list[AnswerUpdate]]:
        """Yield batches of updates until every answer has ended.

        An empty batch means that there was no event for `quiet_s` seconds, or that the answers have to wait.

        Raises:
            RingError: an answer failed. All updates before the failure are yielded first.
        """
        async with aclosing(self._generation.batches(quiet_s)) as batches:
            async for batch in batches:
                updates = [self._read(piece) for piece in batch]
                updates = [one for one in updates if one.parts or one.logprobs or one.end is not None]
                if updates or not batch or self._generation.is_silent:
                    yield updates

    def fill_silence(self, events: Sequence[EventT], *, came: bool) -> Sequence[EventT] | QuietReason:
        """Return events, or the reason of a silence that lasts too long."""
        return self._generation.fill_silence(events, came=came)

    def _read(self, piece: ChoiceDelta) -> AnswerUpdate:
        reader, answer, delta = self._readers[piece.index], self.answers[piece.index], piece.delta
        parts, tokens = self._read_pieces(reader, answer, delta)
        if delta.finish_reason is not None:
            # A stop token of the request may come anywhere, as a limit may.
            is_stopped = not self._stop_tokens[piece.index].isdisjoint(delta.token_ids[-1:])
            parts += reader.finish(cut_off=delta.finish_reason == "length" or is_stopped)
        elif reader.ended:
            self._generation.stop(piece.index)
        update = AnswerUpdate(
            piece.index,
            tuple(join_parts(parts)),
            delta.logprobs[:tokens],
            AnswerCounts(
                delta.prompt_tokens,
                answer.completion_tokens + tokens,
                delta.cached_tokens,
                answer.reasoning_tokens,
            ),
            _end(reader, delta.finish_reason),
            reader.stop_match,
        )
        _add(answer, update, delta.timings)
        return update

    def _read_pieces(
        self, reader: AnswerReader, answer: ChatAnswer, delta: Delta
    ) -> tuple[list[AnswerPart], int]:
        """Return the parts and the number of their tokens, up to the answer's end."""
        parts: list[AnswerPart] = []
        read = 0
        for text in delta.pieces:
            if reader.ended:
                break
            read += 1
            was_reasoning = reader.in_reasoning
            parts += reader.push(text)
            answer.reasoning_tokens += read <= len(delta.token_ids) and (was_reasoning or reader.in_reasoning)
        return parts, min(read, len(delta.token_ids))


WrittenT_co = TypeVar("WrittenT_co", bound=Mapping[str, object], covariant=True)


class ChatWriter(Protocol[WrittenT_co]):
    """Writer of a dialect's streams. It writes each stream with `opening`, `update` and `closing`."""

    stream_format: StreamFormat

    def opening(self, answers: Sequence[ChatAnswer]) -> Iterable[WrittenT_co]:
        """Return the events before any token."""
        ...

    def update(self, updates: Sequence[AnswerUpdate], answers: Sequence[ChatAnswer]) -> Iterable[WrittenT_co]:
        """Return the events of the updates. `answers` already contain the updates."""
        ...

    def closing(self, answers: Sequence[ChatAnswer]) -> Iterable[WrittenT_co]:
        """Return the last events, after all answers have ended."""
        ...


def stream_chat(
    engine: Answering,
    chat: PreparedChat,
    writer: ChatWriter[EventT],
    *,
    keep_alive_s: float,
    failure: Callable[[Exception], bytes] | None = None,
) -> JsonStream[EventT]:
    """Stream the answers. Raise an error of the engine that comes before the first byte.

    Args:
        engine: computes the answers.
        chat: the sequences, and the rules for reading their text.
        writer: makes the events.
        keep_alive_s: seconds of silence after which the stream sends a keep-alive.
        failure: encoder of an error that ends the stream; None: the dialect's own.
    """

    async def write(generation: ChatGeneration) -> AsyncGenerator[Iterable[EventT] | QuietReason]:
        yield writer.opening(generation.answers)
        async with aclosing(generation.batches(keep_alive_s)) as batches:
            async for updates in batches:
                events = list(writer.update(updates, generation.answers))
                yield generation.fill_silence(events, came=bool(updates))
        yield writer.closing(generation.answers)

    return JsonStream(lambda: _running_chat(engine, chat), write, writer.stream_format, failure)


def _ignore(_: AnswerUpdate) -> None:
    """Ignore an update, for callers that need whole answers only."""


async def answer_chat(
    request: Request,
    engine: Answering,
    chat: PreparedChat,
    on_update: Callable[[AnswerUpdate], object] = _ignore,
) -> list[ChatAnswer]:
    """Return the answers when all have ended. Stop at once if the client disconnects.

    `on_update` gets every update immediately.
    """

    async def run() -> list[ChatAnswer]:
        async with _running_chat(engine, chat) as generation:
            async for batch in generation.batches():
                for update in batch:
                    on_update(update)
            return generation.answers

    return await while_connected(request.receive, run())


@asynccontextmanager
async def _running_chat(engine: Answering, chat: PreparedChat) -> AsyncGenerator[ChatGeneration]:
    async with Generation(engine, chat.requests, chat.prompt_field, len(chat.requests)) as generation:
        begun = ChatGeneration(generation, chat)
        generation.counted = begun.answers
        yield begun


def _end(reader: AnswerReader, finish_reason: FinishReason | None) -> EndReason | None:
    if finish_reason is None:
        return None
    if finish_reason == "length" and not reader.ended:
        return "length"
    return "tool_calls" if reader.calls and not reader.was_cut_off else "stop"


def _add(answer: ChatAnswer, update: AnswerUpdate, timings: RequestTimings | None) -> None:
    answer.parts += update.parts
    answer.logprobs += update.logprobs
    answer.prompt_tokens = update.counts.prompt_tokens
    answer.cached_tokens = update.counts.cached_tokens
    answer.completion_tokens = update.counts.completion_tokens
    answer.end, answer.stop_match, answer.timings = update.end, update.stop_match, timings
