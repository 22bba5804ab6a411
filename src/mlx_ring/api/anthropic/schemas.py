"""Types of what Anthropic's routes return, as their writers make it and `/openapi.json` shows it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

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
