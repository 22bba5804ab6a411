"""What Anthropic's routes answer, as schemas for `/openapi.json`."""

from __future__ import annotations

from typing import Literal

from mlx_ring.api.openapi import About, Told
from mlx_ring.api.streaming import EVENT_STREAM

_TAG = "Anthropic"


class MessageUsage(Told):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | None = None


class MessageBlock(Told):
    type: Literal["text", "thinking", "tool_use"]


class AnthropicMessage(Told):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(Told):
    type: str
    """`message_start`, `content_block_start`, `content_block_delta`, `content_block_stop`, `message_delta`,
    `message_stop`, `ping`, or `error`."""


class CountedTokens(Told):
    input_tokens: int


_ASKED = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
MESSAGES = About(
    "A chat answer as Anthropic has it, whole or streamed",
    AnthropicMessage,
    {EVENT_STREAM: MessageEvent},
    _ASKED | {"max_tokens": 64},
    tag=_TAG,
)
COUNT_TOKENS = About("How many tokens a conversation is", CountedTokens, example=_ASKED, tag=_TAG)
