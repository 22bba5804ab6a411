"""The conversation as Ollama has it, and as chat templates read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from mlx_ring.api.body import Body, Refused
from mlx_ring.api.conversation.asked import AnswerFormat, Tool
from mlx_ring.api.conversation.format import ChatFormat
from mlx_ring.api.conversation.prepare import effort_arguments
from mlx_ring.core.errors import RequestError

Images = Annotated[None, Refused("this server reads text alone; leave it out.", ([],))]


class CalledFunction(Body):
    name: str
    arguments: dict[str, object]
    index: int | None = None
    """As answers have it, which clients send back."""
    description: str | None = None


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class Message(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Images = None


class ToolFunction(Body):
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None


class OfferedTool(Body):
    type: Literal["function"] | None = None
    function: ToolFunction

    def plain(self) -> Tool:
        function = self.function
        return Tool(function.name, function.description, function.parameters)


Format = Literal["", "json"] | dict[str, object]
"""A schema, or any JSON."""
Think = bool | Literal["low", "medium", "high"]


def read_format(given: Format | None) -> AnswerFormat:
    if isinstance(given, dict):
        return AnswerFormat("json_schema", given, param="format")
    return AnswerFormat("json_object" if given else "text", param="format")


_SWITCHES = ("enable_thinking", "thinking")


def read_think(format_: ChatFormat, think: Think | None) -> dict[str, object]:
    """What the model's template calls it; nothing where the template decides.

    Raises:
        RequestError: the model does not think, or cannot be told how much.
    """
    if think is None:
        return {}
    if think is not True:
        return effort_arguments(format_, think or "none", param="think")
    switch = next((name for name in _SWITCHES if format_.knows(name)), None)
    if switch is None and format_.thinking is None:
        raise RequestError("'think' is true, and this model does not think; leave it out.", param="think")
    return {} if switch is None else {switch: True}


def template_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """As chat templates read them."""
    return [_template_message(message) for message in messages]


def _template_message(message: Message) -> dict[str, object]:
    plain: dict[str, object] = {"role": message.role, "content": message.content or ""}
    if message.thinking is not None:
        plain["reasoning_content"] = message.thinking
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_name is not None:
        plain["name"] = message.tool_name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _call(call: ToolCall) -> dict[str, object]:
    named = {} if call.id is None else {"id": call.id}
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {**named, "type": "function", "function": function}
