"""Writer of Ollama's answers, with a JSON object for each piece."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Generic, Literal, TypeVar, cast

from mlx_ring.api.chat.answer import AnswerUpdate, Call, ChatAnswer
from mlx_ring.api.chat.request import AnswerPart, CallArguments, CallOpening, ContentText, ReasoningText
from mlx_ring.api.dialect import Json, json_bytes
from mlx_ring.api.ollama.schemas import (
    LINES,
    CalledTool,
    OllamaChat,
    OllamaDurations,
    OllamaEnd,
    OllamaGenerated,
    OllamaMessage,
    OllamaOrigin,
    OllamaPiece,
    OllamaText,
)
from mlx_ring.api.openai.schemas import TokenTexts
from mlx_ring.api.streaming import StreamFormat
from mlx_ring.core.types import TokenLogprob

_SECOND_NS = 1_000_000_000

PieceT = TypeVar("PieceT", bound=OllamaPiece)
PieceMaker = Callable[[OllamaOrigin, str, str, Sequence[Call], OllamaEnd], PieceT]
"""Function that makes a piece of content, reasoning and calls. `/api/chat` and `/api/generate` have different ones."""


def json_line(value: Mapping[str, object]) -> bytes:
    """Encode a value as one line of a stream."""
    return json_bytes(value) + b"\n"


class Stopwatch:
    """Duration of a request, and the part of it until the model was loaded."""

    def __init__(self) -> None:
        self._began = self._loaded = time.monotonic_ns()

    def loaded(self) -> None:
        self._loaded = time.monotonic_ns()

    def durations(self) -> OllamaDurations:
        """Return the durations so far, in nanoseconds."""
        return {
            "total_duration": time.monotonic_ns() - self._began,
            "load_duration": self._loaded - self._began,
        }


class LineWriter(Generic[PieceT]):
    """Writer of one answer, streamed or whole. A tool call is sent when it is complete."""

    def __init__(
        self, model: str, watch: Stopwatch, make_piece: PieceMaker[PieceT], texts: TokenTexts | None
    ) -> None:
        """Create a writer. `model` is the request's name of the model; log-probabilities need `texts`."""
        self._model = model
        self._watch = watch
        self._make_piece = make_piece
        self._texts = texts
        self._sent_calls = 0
        # Ollama's streams have no comments: a line without text shows proxies and clients that the answer continues.
        self.stream_format = StreamFormat(LINES, json_line, resuming=lambda: json_line(self._piece()))

    def opening(self, answers: Sequence[ChatAnswer]) -> Iterable[PieceT]:
        del answers
        return ()

    def update(self, updates: Sequence[AnswerUpdate], answers: Sequence[ChatAnswer]) -> Iterator[PieceT]:
        for one in updates:
            yield from self._pieces(one, answers[one.index])

    def closing(self, answers: Sequence[ChatAnswer]) -> Iterable[PieceT]:
        [answer] = answers
        return [self._piece(end=self._end(answer))]

    def whole(self, answer: ChatAnswer) -> PieceT:
        piece = self._piece(answer.content, answer.reasoning, answer.calls, self._end(answer))
        self._add_logprobs(piece, answer.logprobs)
        return piece

    def loaded(self, reason: Literal["load", "unload"]) -> PieceT:
        """Return the answer to a request without a prompt: the model was loaded, or unloaded."""
        return self._piece(end={"done": True, "done_reason": reason})

    def _pieces(self, update: AnswerUpdate, answer: ChatAnswer) -> list[PieceT]:
        """Return the pieces. Log-probabilities go with the first piece of their tokens, else with an empty one."""
        pieces = [piece for part in update.parts for piece in self._part(part, answer)]
        if update.end is not None:
            pieces += self._calls(answer.calls)
        if self._texts is not None and update.logprobs:
            pieces = pieces or [self._piece()]
            self._add_logprobs(pieces[0], update.logprobs)
        return pieces

    def _part(self, part: AnswerPart, answer: ChatAnswer) -> list[PieceT]:
        match part:
            case ContentText():
                return [self._piece(part.text)]
            case ReasoningText():
                return [self._piece(reasoning=part.text)]
            case CallOpening():
                return self._calls(answer.calls[: part.index])
            case CallArguments():
                return []

    def _calls(self, complete: Sequence[Call]) -> list[PieceT]:
        """Return the calls that are not sent yet."""
        fresh, self._sent_calls = complete[self._sent_calls :], max(self._sent_calls, len(complete))
        return [self._piece(calls=fresh)] if fresh else []

    def _add_logprobs(self, piece: PieceT, logprobs: Sequence[TokenLogprob]) -> None:
        if self._texts is not None and logprobs:
            piece["logprobs"] = list(map(self._texts.scored, logprobs))

    def _piece(
        self,
        content: str = "",
        reasoning: str = "",
        calls: Sequence[Call] = (),
        end: OllamaEnd | None = None,
    ) -> PieceT:
        origin: OllamaOrigin = {"model": self._model, "created_at": now()}
        return self._make_piece(origin, content, reasoning, calls, end or {"done": False})

    def _end(self, answer: ChatAnswer) -> OllamaEnd:
        """Return the end of an answer. The time of its first token counts as prefill."""
        timings = answer.timings
        return {
            "done": True,
            "done_reason": "length" if answer.end == "length" else "stop",
            **self._watch.durations(),
            "prompt_eval_count": answer.prompt_tokens,
            "prompt_eval_duration": 0 if timings is None else round(timings.prefill_s * _SECOND_NS),
            "eval_count": answer.completion_tokens,
            "eval_duration": 0 if timings is None else round(timings.decode_s * _SECOND_NS),
        }


def chat_piece(
    origin: OllamaOrigin, content: str, reasoning: str, calls: Sequence[Call], end: OllamaEnd
) -> OllamaChat:
    message: OllamaMessage = {"role": "assistant", "content": content}
    if reasoning:
        message["thinking"] = reasoning
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return {**origin, "message": message, **end}


def generate_piece(
    origin: OllamaOrigin, content: str, reasoning: str, calls: Sequence[Call], end: OllamaEnd
) -> OllamaGenerated:
    del calls
    text: OllamaText = {"response": content}
    if reasoning:
        text["thinking"] = reasoning
    return {**origin, **text, **end}


def now() -> str:
    """Return the present time as Go writes it (RFC 3339)."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _call(call: Call) -> CalledTool:
    return {"id": call.id, "function": {"name": call.name, "arguments": _arguments(call.arguments)}}


def _arguments(text: str) -> Json:
    """Return arguments as an object; an empty one if a limit cut them short, because they are no JSON then."""
    try:
        value: object = json.loads(text or "{}")
    except json.JSONDecodeError:
        return {}
    return cast("Json", value) if isinstance(value, dict) else {}
