"""What a client asks of a chat, in the one form that every dialect is read into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the client would run."""

    name: str
    description: str | None = None
    parameters: Mapping[str, object] | None = None
    """JSON schema of its arguments, an object; None: it takes none."""
    strict: bool = False
    """Whether arguments that do not hold to the schema are worse than none: they are then enforced."""

    def for_template(self) -> dict[str, object]:
        """As chat templates read it, which is as OpenAI's chat has it."""
        function: dict[str, object] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters or {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools, and what the answer may or must do with them."""

    tools: Sequence[Tool] = ()
    """All that the model is told of."""
    choice: Literal["none", "auto", "required"] = "auto"
    allowed: frozenset[str] | None = None
    """Names of those that may be called; None: any. One name and `required`: that tool it must be."""
    parallel: bool = True
    """Whether one answer may hold several calls."""

    @property
    def callable_tools(self) -> list[Tool]:
        """Those that this answer may call."""
        if self.choice == "none":
            return []
        return [tool for tool in self.tools if self.allowed is None or tool.name in self.allowed]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What the answer's text must be."""

    kind: Literal["text", "json_object", "json_schema"] = "text"
    schema: Mapping[str, object] = field(default_factory=dict[str, object])
    """Of a `json_schema`."""
    param: str = "response_format"
    """What the request calls it, for errors."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat so far, and what its next answer should be like."""

    messages: Sequence[Mapping[str, object]]
    """As chat templates read them: roles system, user, assistant and tool; `content` a string;
    `tool_calls` with arguments as objects; `reasoning_content`."""
    tool_use: ToolUse = field(default_factory=ToolUse)
    format: AnswerFormat = field(default_factory=AnswerFormat)
    template_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])
    """More of what the template knows, such as `enable_thinking`."""
    continues: bool = False
    """Whether the last message is the beginning of the answer, which goes on from there."""
    messages_param: str = "messages"
    """What the request calls the messages, for errors."""
    kwargs_param: str = "chat_template_kwargs"
