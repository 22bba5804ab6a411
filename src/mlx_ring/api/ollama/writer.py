"""Writer of Ollama's answers, a JSON object a piece, and their types for `/openapi.json`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Literal, NotRequired, cast

from mlx_ring.api.chat.answer import AnswerUpdate, Call, ChatAnswer
from mlx_ring.api.chat.parts import AnswerPart, AnswerText, CallArguments, CallOpening, ReasoningText
from mlx_ring.api.dialect import Json, json_bytes
from mlx_ring.api.openai.chat import finite_logprob
from mlx_ring.api.openai.token_text import TokenTexts
from mlx_ring.api.openapi import JsonObject, RouteDoc
from mlx_ring.core.types import TokenLogprob

_SECOND_NS = 1_000_000_000

PieceFields = Callable[[str, str, Sequence[Call]], Json]
"""Writer of content, reasoning and calls, in which `/api/chat` and `/api/generate` differ."""


class Stopwatch:
    """One request's time, and what of it went by until the model was loaded."""

    def __init__(self) -> None:
        self._began = self._loaded = time.monotonic_ns()

    def loaded(self) -> None:
        self._loaded = time.monotonic_ns()

    def durations(self) -> Json:
        """Return the durations so far, in nanoseconds."""
        return {
            "total_duration": time.monotonic_ns() - self._began,
            "load_duration": self._loaded - self._began,
        }


class LineWriter:
    """Writes one answer, streamed or whole. A call of a tool goes out when it is all there."""

    media_type = "application/x-ndjson"
    keep_alive = b""

    def __init__(
        self, model: str, watch: Stopwatch, piece_fields: PieceFields, texts: TokenTexts | None
    ) -> None:
        """Take `model` as the request names it, and `texts` where log-probabilities are requested."""
        self._model = model
        self._watch = watch
        self._piece_fields = piece_fields
        self._texts = texts
        self._sent_calls = 0

    def opening(self, answers: Sequence[ChatAnswer]) -> bytes:
        del answers
        return b""

    def update(self, updates: Sequence[AnswerUpdate], answers: Sequence[ChatAnswer]) -> bytes:
        return b"".join(line for one in updates for line in self._lines(one, answers[one.index]))

    def closing(self, answers: Sequence[ChatAnswer]) -> bytes:
        return json_line(self._last(answers[0], "", "", ()))

    def whole(self, answer: ChatAnswer) -> Json:
        last = self._last(answer, answer.content, answer.reasoning, answer.calls)
        return last | self._scored(answer.logprobs)

    def loaded(self, reason: str) -> Json:
        """Return the answer to a request without a prompt: the model was loaded, or unloaded."""
        return self._piece("", "", ()) | {"done": True, "done_reason": reason}

    def _lines(self, update: AnswerUpdate, answer: ChatAnswer) -> Iterator[bytes]:
        """Tokens' log-probabilities come with the first piece that they made, or with an empty one."""
        pieces = [piece for part in update.parts for piece in self._part(part, answer)]
        if update.end is not None:
            pieces += self._calls(answer.calls)
        scored = self._scored(update.logprobs)
        if scored:
            first, *rest = pieces or [self._piece("", "", ())]
            pieces = [first | scored, *rest]
        return map(json_line, pieces)

    def _part(self, part: AnswerPart, answer: ChatAnswer) -> list[Json]:
        match part:
            case AnswerText():
                return [self._piece(part.text, "", ())]
            case ReasoningText():
                return [self._piece("", part.text, ())]
            case CallOpening():
                return self._calls(answer.calls[: part.index])
            case CallArguments():
                return []

    def _calls(self, complete: Sequence[Call]) -> list[Json]:
        """Return the calls that were not sent yet."""
        fresh, self._sent_calls = complete[self._sent_calls :], max(self._sent_calls, len(complete))
        return [self._piece("", "", fresh)] if fresh else []

    def _scored(self, logprobs: Sequence[TokenLogprob]) -> Json:
        if self._texts is None or not logprobs:
            return {}
        tokens = [
            _token(self._texts, scored.token, scored.logprob)
            | {"top_logprobs": [_token(self._texts, token, logprob) for token, logprob in scored.top]}
            for scored in logprobs
        ]
        return {"logprobs": tokens}

    def _piece(self, content: str, reasoning: str, calls: Sequence[Call]) -> Json:
        piece: Json = {"model": self._model, "created_at": now()}
        return piece | self._piece_fields(content, reasoning, calls) | {"done": False}

    def _last(self, answer: ChatAnswer, content: str, reasoning: str, calls: Sequence[Call]) -> Json:
        ended: Json = {"done": True, "done_reason": "length" if answer.end == "length" else "stop"}
        return self._piece(content, reasoning, calls) | ended | self._watch.durations() | _evaluations(answer)


def chat_fields(content: str, reasoning: str, calls: Sequence[Call]) -> Json:
    message: Json = {"role": "assistant", "content": content}
    if reasoning:
        message["thinking"] = reasoning
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return {"message": message}


def generate_fields(content: str, reasoning: str, calls: Sequence[Call]) -> Json:
    del calls
    fields: Json = {"response": content}
    return fields | {"thinking": reasoning} if reasoning else fields


def now() -> str:
    """RFC 3339, as Go writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _token(texts: TokenTexts, token: int, logprob: float) -> Json:
    text = texts[token]
    return {"token": text.text, "logprob": finite_logprob(logprob), "bytes": list(text.data)}


def _call(call: Call) -> Json:
    return {"id": call.id, "function": {"name": call.name, "arguments": _arguments(call.arguments)}}


def _arguments(text: str) -> Json:
    """Return arguments as an object; those that a limit cut short are no JSON, and come out empty."""
    try:
        value: object = json.loads(text or "{}")
    except json.JSONDecodeError:
        return {}
    return cast("Json", value) if isinstance(value, dict) else {}


def _evaluations(answer: ChatAnswer) -> Json:
    """Return numbers of tokens and their durations. The first token of an answer belongs to its prompt's time."""
    timings = answer.timings
    return {
        "prompt_eval_count": answer.prompt_tokens,
        "prompt_eval_duration": 0 if timings is None else round(timings.prefill_s * _SECOND_NS),
        "eval_count": answer.completion_tokens,
        "eval_duration": 0 if timings is None else round(timings.decode_s * _SECOND_NS),
    }


def json_line(value: Json) -> bytes:
    """Encode a value as one line of a stream."""
    return json_bytes(value) + b"\n"


_LINES = "application/x-ndjson"
_TAG = "Ollama"


class _Piece(JsonObject):
    """Durations are nanoseconds; they and the counts come with the last piece."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load", "unload"] | None]
    total_duration: NotRequired[int | None]
    load_duration: NotRequired[int | None]
    prompt_eval_count: NotRequired[int | None]
    prompt_eval_duration: NotRequired[int | None]
    eval_count: NotRequired[int | None]
    eval_duration: NotRequired[int | None]


class CalledTool(JsonObject):
    id: str
    function: dict[str, object]
    """`name`, and `arguments` as an object."""


class OllamaMessage(JsonObject):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str | None]
    tool_calls: NotRequired[list[CalledTool] | None]


class OllamaChat(_Piece):
    message: OllamaMessage


class OllamaGenerated(_Piece):
    response: str
    thinking: NotRequired[str | None]


class OllamaEmbeddings(JsonObject):
    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int
    total_duration: int
    load_duration: int


class OllamaEmbedding(JsonObject):
    embedding: list[float]


class OllamaModel(JsonObject):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: dict[str, object]


class OllamaModels(JsonObject):
    models: list[OllamaModel]


class OllamaRunningModel(OllamaModel):
    """A loaded model. Its memory is freed when others need it, never after a time."""

    size_vram: int
    expires_at: str
    context_length: int


class OllamaRunningModels(JsonObject):
    models: list[OllamaRunningModel]


class OllamaShown(JsonObject):
    details: dict[str, object]
    model_info: dict[str, object]
    capabilities: list[str]
    parameters: str
    modified_at: str


class OllamaVersion(JsonObject):
    version: str
    """Version of Ollama whose API this is."""
    mlx_ring: str
    """Version of this server."""


class OllamaStatus(JsonObject):
    status: Literal["success"]


CHAT = RouteDoc(
    "A chat answer, streamed unless `stream` is false",
    OllamaChat,
    {_LINES: OllamaChat},
    {"messages": [{"role": "user", "content": "Hello"}], "stream": False, "options": {"num_predict": 64}},
    more_statuses=(409,),
    tag=_TAG,
)
GENERATE = RouteDoc(
    "An answer to a prompt, streamed unless `stream` is false",
    OllamaGenerated,
    {_LINES: OllamaGenerated},
    {"prompt": "Hello", "stream": False, "options": {"num_predict": 64}},
    more_statuses=(409,),
    tag=_TAG,
)
EMBED = RouteDoc("Vectors of texts", OllamaEmbeddings, example={"input": ["one text", "another"]}, tag=_TAG)
EMBEDDINGS = RouteDoc("A text's vector", OllamaEmbedding, example={"prompt": "one text"}, tag=_TAG)
TAGS = RouteDoc("The models that are served", OllamaModels, tag=_TAG)
RUNNING = RouteDoc("The models that are loaded", OllamaRunningModels, tag=_TAG)
SHOW = RouteDoc("Description of a model and its capabilities", OllamaShown, example={}, tag=_TAG)
VERSION = RouteDoc("Which version of Ollama's API this is", OllamaVersion, tag=_TAG)
PULL = RouteDoc(
    "Whether a model is served: nothing is fetched",
    OllamaStatus,
    {_LINES: OllamaStatus},
    example={},
    tag=_TAG,
)
