"""What messages consist of, as Anthropic has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from mlx_ring.api.body import Body
from mlx_ring.api.openai.sampling import one_or_many


class Block(Body):
    cache_control: dict[str, object] | None = None
    """Without effect: every beginning is kept, and found again by itself."""


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: Annotated[list[object], Field(max_length=0)] | None = None


def _one_or(blocks: str) -> Discriminator:
    return Discriminator(
        one_or_many,
        custom_error_type="one_or_many",
        custom_error_message=f"Input should be a string or a list of {blocks}",
    )


Text = Annotated[
    Annotated[str, Tag("one")] | Annotated[list[TextBlock], Tag("many")],
    _one_or("text blocks"),
]


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, object]
    caller: dict[str, object] | None = None
    """Who made the call; always the model itself."""
    toolset_name: None = None


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Text = ""
    is_error: bool | None = None
    toolset_name: None = None


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""
    """Of whoever made it; not verified: what the model thought is the client's to tell."""


class RedactedThinkingBlock(Block):
    """Encrypted by another server, so there is nothing in it for this one's model."""

    type: Literal["redacted_thinking"]
    data: str


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")
]


class UserMessage(Body):
    role: Literal["user"]
    content: Annotated[
        Annotated[str, Tag("one")] | Annotated[list[UserBlock], Field(min_length=1), Tag("many")],
        _one_or("blocks"),
    ]


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, Tag("one")] | Annotated[list[AssistantBlock], Tag("many")],
        _one_or("blocks"),
    ]


class SystemMessage(Body):
    role: Literal["system"]
    content: Text


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


def text_of(content: str | Sequence[TextBlock]) -> str:
    """Blocks are paragraphs of their own."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
