"""Writer of Anthropic's answers, whole and as events."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from mlx_ring.api.anthropic.schemas import (
    AnthropicMessage,
    Delta,
    DeltaUsage,
    MessageBlock,
    MessageEnd,
    MessageEvent,
    MessageUsage,
    StopReason,
    ToolUseBlock,
)
from mlx_ring.api.chat.request import AnswerPart, CallArguments, CallOpening, ContentText, ReasoningText


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
