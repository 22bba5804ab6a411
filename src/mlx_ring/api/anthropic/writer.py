"""Writer of Anthropic's answers, whole and as events, and their types for `/openapi.json`."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NotRequired, cast

from mlx_ring.api.chat.parts import AnswerPart, AnswerText, CallArguments, CallOpening, ReasoningText
from mlx_ring.api.dialect import Json
from mlx_ring.api.openapi import JsonObject, RouteDoc
from mlx_ring.api.streaming import EVENT_STREAM


@dataclass(frozen=True, slots=True)
class Costs:
    """Tokens of a request, so far."""

    prompt: int
    cached: int = 0
    """Number of the prompt's cached tokens; Anthropic counts them apart from the rest of it."""
    completion: int = 0
    thinking: int = 0
    """Number of the completion's tokens that are reasoning."""

    def usage(self) -> Json:
        """Return the usage of a whole message; what only other servers report is null."""
        nothing = dict.fromkeys(("cache_creation", "inference_geo", "service_tier"))
        return self.delta_usage() | nothing

    def delta_usage(self) -> Json:
        """Return the usage at the end of a stream."""
        return {
            "input_tokens": self.prompt - self.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
            "output_tokens": self.completion,
            "output_tokens_details": {"thinking_tokens": self.thinking},
            "server_tool_use": None,
        }


def _ended(reason: str | None, sequence: str | None) -> Json:
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None, "container": None}


@dataclass(frozen=True, slots=True)
class Stop:
    """Why an answer ended."""

    reason: str
    sequence: str | None = None
    """The one of the request's that ended it."""

    def fields(self) -> Json:
        return _ended(self.reason, self.sequence)


class MessageWriter:
    """Takes one answer's parts in their order; of each it makes events, and keeps what they add up to."""

    def __init__(self, message_id: str, model: str, *, shows_thinking: bool = True) -> None:
        self._id = message_id
        self._model = model
        self._shows_thinking = shows_thinking
        self._content: list[Json] = []
        self._open: str | None = None
        """The kind of the last block, while it is not closed."""
        self._text = ""
        """Text of the last block so far."""

    def opening(self, costs: Costs) -> Iterator[Json]:
        start = self._message() | _ended(None, None) | {"usage": costs.usage()}
        yield {"type": "message_start", "message": start}
        yield PING

    def part(self, part: AnswerPart) -> Iterator[Json]:
        match part:
            case ReasoningText():
                yield from self._add_reasoning(part.text)
            case AnswerText():
                yield from self._add_text(part.text)
            case CallOpening():
                yield from self._start(_call(part))
            case CallArguments():
                self._text += part.text
                yield self._delta({"type": "input_json_delta", "partial_json": part.text})

    def closing(self, stop: Stop, costs: Costs) -> Iterator[Json]:
        yield from self._stop()
        yield {"type": "message_delta", "delta": stop.fields(), "usage": costs.delta_usage()}
        yield {"type": "message_stop"}

    def whole(self, stop: Stop, costs: Costs) -> Json:
        """Return the message, after its last part."""
        list(self._stop())
        return self._message() | stop.fields() | {"usage": costs.usage()}

    def _message(self) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._content),
        }

    def _add_reasoning(self, text: str) -> Iterator[Json]:
        if self._open != "thinking":
            yield from self._start({"type": "thinking", "thinking": "", "signature": ""})
        self._text += text
        if self._shows_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _add_text(self, text: str) -> Iterator[Json]:
        if self._open != "text":
            yield from self._start({"type": "text", "text": "", "citations": None})
        self._text += text
        yield self._delta({"type": "text_delta", "text": text})

    def _start(self, block: Json) -> Iterator[Json]:
        yield from self._stop()
        self._open, self._text = cast("str", block["type"]), ""
        self._content.append(dict(block))
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": block}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _stop(self) -> Iterator[Json]:
        kind, self._open = self._open, None
        if kind is None:
            return
        block = self._content[-1]
        if kind == "text":
            block["text"] = self._text
        elif kind == "tool_use":
            block["input"] = _object(self._text)
        else:
            block |= {
                "thinking": self._text if self._shows_thinking else "",
                "signature": _signature(self._text),
            }
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        yield {"type": "content_block_stop", "index": len(self._content) - 1}


PING: Json = {"type": "ping"}


def _call(opening: CallOpening) -> Json:
    identity = opening.id.replace("call_", "toolu_", 1)
    return {
        "type": "tool_use",
        "id": identity,
        "name": opening.name,
        "input": {},
        "caller": {"type": "direct"},
    }


def _signature(reasoning: str) -> str:
    """Return a signature, because clients want one and send it back.

    It names the text that it belongs to, and proves nothing.
    """
    return base64.b64encode(hashlib.blake2b(reasoning.encode(), digest_size=24).digest()).decode()


def _object(arguments: str) -> object:
    """Return arguments as an object; those that a limit cut short are no JSON, and come out empty."""
    try:
        return json.loads(arguments or "{}")
    except json.JSONDecodeError:
        return {}


_TAG = "Anthropic"


class MessageUsage(JsonObject):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: NotRequired[int | None]


class MessageBlock(JsonObject):
    type: Literal["text", "thinking", "tool_use"]


class AnthropicMessage(JsonObject):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(JsonObject):
    type: str
    """`message_start`, `content_block_start`, `content_block_delta`, `content_block_stop`, `message_delta`,
    `message_stop`, `ping`, or `error`."""


class CountedTokens(JsonObject):
    input_tokens: int


_ASKED = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
MESSAGES = RouteDoc(
    "A chat answer as Anthropic has it, whole or streamed",
    AnthropicMessage,
    {EVENT_STREAM: MessageEvent},
    _ASKED | {"max_tokens": 64},
    tag=_TAG,
)
COUNT_TOKENS = RouteDoc("How many tokens a conversation is", CountedTokens, example=_ASKED, tag=_TAG)
