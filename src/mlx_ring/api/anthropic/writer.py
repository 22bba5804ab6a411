"""Anthropic's answers, whole and as events: their types, as `/openapi.json` shows them, and their writer."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from mlx_ring.api.chat.request import AnswerPart, CallArguments, CallOpening, ContentText, ReasoningText
from mlx_ring.api.openapi import JsonObject, RouteDoc
from mlx_ring.api.streaming import EVENT_STREAM

_TAG = "Anthropic"

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


# ---- messages


class OutputDetails(JsonObject):
    thinking_tokens: int


class DeltaUsage(JsonObject):
    """Usage at the end of a stream."""

    input_tokens: int
    """Number of prompt tokens that were not cached."""
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails
    server_tool_use: None


class MessageUsage(DeltaUsage):
    """Usage of a whole message. Fields that only other servers report are null."""

    cache_creation: None
    inference_geo: None
    service_tier: None


class MessageEnd(JsonObject):
    stop_reason: StopReason | None
    """Null in the first event of a stream."""
    stop_sequence: str | None
    """Stop sequence that ended the answer."""
    stop_details: None
    container: None


class TextBlock(JsonObject):
    type: Literal["text"]
    text: str


class ThinkingBlock(JsonObject):
    type: Literal["thinking"]
    thinking: str
    signature: str
    """Text that clients send back. It is not verified."""


class DirectCaller(JsonObject):
    type: Literal["direct"]


class ToolUseBlock(JsonObject):
    type: Literal["tool_use"]
    id: str
    name: str
    input: object
    """Arguments; empty if a limit cut them short."""
    caller: DirectCaller


MessageBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class AnthropicMessage(MessageEnd):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    usage: MessageUsage


# ---- events of a streamed message


class MessageStart(JsonObject):
    type: Literal["message_start"]
    message: AnthropicMessage
    """Message without content."""


class Ping(JsonObject):
    type: Literal["ping"]


class BlockStart(JsonObject):
    type: Literal["content_block_start"]
    index: int
    content_block: MessageBlock
    """Block without text."""


class TextDelta(JsonObject):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(JsonObject):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(JsonObject):
    type: Literal["signature_delta"]
    signature: str


class InputJsonDelta(JsonObject):
    type: Literal["input_json_delta"]
    partial_json: str


Delta = Annotated[TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta, Field(discriminator="type")]


class BlockDelta(JsonObject):
    type: Literal["content_block_delta"]
    index: int
    delta: Delta


class BlockStop(JsonObject):
    type: Literal["content_block_stop"]
    index: int


class MessageDelta(JsonObject):
    type: Literal["message_delta"]
    delta: MessageEnd
    usage: DeltaUsage


class MessageStop(JsonObject):
    type: Literal["message_stop"]


MessageEvent = Annotated[
    MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop,
    Field(discriminator="type"),
]


class CountedTokens(JsonObject):
    input_tokens: int


_CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
MESSAGES = RouteDoc(
    "Answer a chat in Anthropic's format, whole or streamed",
    AnthropicMessage,
    {EVENT_STREAM: MessageEvent},
    _CHAT | {"max_tokens": 64},
    description="Events have the names of their types. An error ends a stream with the event `error`.",
    tag=_TAG,
)
COUNT_TOKENS = RouteDoc(
    "Count the tokens of a chat in Anthropic's format", CountedTokens, example=_CHAT, tag=_TAG
)


# ---- writer


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token counts of a request so far."""

    prompt: int
    cached: int = 0
    """Number of cached prompt tokens. Anthropic counts them apart from the other prompt tokens."""
    completion: int = 0
    thinking: int = 0
    """Number of completion tokens that are reasoning."""

    def usage(self) -> MessageUsage:
        """Return the usage of a whole message."""
        return {**self.delta_usage(), "cache_creation": None, "inference_geo": None, "service_tier": None}

    def delta_usage(self) -> DeltaUsage:
        """Return the usage at the end of a stream."""
        return {
            "input_tokens": self.prompt - self.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
            "output_tokens": self.completion,
            "output_tokens_details": {"thinking_tokens": self.thinking},
            "server_tool_use": None,
        }


@dataclass(frozen=True, slots=True)
class Stop:
    """Reason of an answer's end."""

    reason: StopReason
    sequence: str | None = None
    """Stop sequence that ended the answer."""


class MessageWriter:
    """Converter of one answer's parts to events; it also keeps the whole message."""

    def __init__(self, message_id: str, model: str, *, shows_thinking: bool = True) -> None:
        self._id = message_id
        self._model = model
        self._shows_thinking = shows_thinking
        self._content: list[MessageBlock] = []
        self._open: MessageBlock | None = None
        """Last block, while it is not closed."""
        self._text = ""
        """Text of the last block so far."""

    def opening(self, costs: TokenCounts) -> Iterator[MessageEvent]:
        yield {"type": "message_start", "message": self._message(None, costs)}
        yield {"type": "ping"}

    def part(self, part: AnswerPart) -> Iterator[MessageEvent]:
        match part:
            case ReasoningText():
                yield from self._add_reasoning(part.text)
            case ContentText():
                yield from self._add_text(part.text)
            case CallOpening():
                yield from self._start(_call(part))
            case CallArguments():
                self._text += part.text
                yield self._delta({"type": "input_json_delta", "partial_json": part.text})

    def closing(self, stop: Stop, costs: TokenCounts) -> Iterator[MessageEvent]:
        yield from self._stop()
        yield {"type": "message_delta", "delta": _end(stop), "usage": costs.delta_usage()}
        yield {"type": "message_stop"}

    def whole(self, stop: Stop, costs: TokenCounts) -> AnthropicMessage:
        """Return the message, after its last part."""
        list(self._stop())
        return self._message(stop, costs)

    def _message(self, stop: Stop | None, costs: TokenCounts) -> AnthropicMessage:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._content),
            **_end(stop),
            "usage": costs.usage(),
        }

    def _add_reasoning(self, text: str) -> Iterator[MessageEvent]:
        if self._open is None or self._open["type"] != "thinking":
            yield from self._start({"type": "thinking", "thinking": "", "signature": ""})
        self._text += text
        if self._shows_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _add_text(self, text: str) -> Iterator[MessageEvent]:
        if self._open is None or self._open["type"] != "text":
            yield from self._start({"type": "text", "text": ""})
        self._text += text
        yield self._delta({"type": "text_delta", "text": text})

    def _start(self, block: MessageBlock) -> Iterator[MessageEvent]:
        yield from self._stop()
        self._open, self._text = block, ""
        self._content.append(block)
        yield {
            "type": "content_block_start",
            "index": len(self._content) - 1,
            "content_block": block.copy(),
        }

    def _delta(self, delta: Delta) -> MessageEvent:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _stop(self) -> Iterator[MessageEvent]:
        block, self._open = self._open, None
        if block is None:
            return
        if block["type"] == "text":
            block["text"] = self._text
        elif block["type"] == "tool_use":
            block["input"] = _object(self._text)
        else:
            block["thinking"] = self._text if self._shows_thinking else ""
            block["signature"] = _signature(self._text)
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        yield {"type": "content_block_stop", "index": len(self._content) - 1}


def _end(stop: Stop | None) -> MessageEnd:
    return {
        "stop_reason": None if stop is None else stop.reason,
        "stop_sequence": None if stop is None else stop.sequence,
        "stop_details": None,
        "container": None,
    }


def _call(opening: CallOpening) -> ToolUseBlock:
    identity = opening.id.replace("call_", "toolu_", 1)
    return {
        "type": "tool_use",
        "id": identity,
        "name": opening.name,
        "input": {},
        "caller": {"type": "direct"},
    }


def _signature(reasoning: str) -> str:
    """Return a signature, because clients require one and send it back.

    It identifies its text, and proves nothing.
    """
    return base64.b64encode(hashlib.blake2b(reasoning.encode(), digest_size=24).digest()).decode()


def _object(arguments: str) -> object:
    """Return arguments as an object; an empty one if a limit cut them short, because they are no JSON then."""
    try:
        return json.loads(arguments or "{}")
    except json.JSONDecodeError:
        return {}
