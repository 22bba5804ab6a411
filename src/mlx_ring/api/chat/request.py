"""The chat request: the one form that every dialect is read into, and that chat templates read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from mlx_ring.api.request_body import parse_json
from mlx_ring.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the client would run."""

    name: str
    description: str | None = None
    parameters: Mapping[str, object] | None = None
    """JSON schema of its arguments, an object; None: it takes none."""
    strict: bool = False
    """True where invalid arguments are worse than none: the schema is then enforced."""

    def for_template(self) -> dict[str, object]:
        """Return the tool as chat templates read it, in the form of OpenAI's chat."""
        function: dict[str, object] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters or {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools, and what the answer may or must do with them."""

    tools: Sequence[Tool] = ()
    """All tools that the prompt lists."""
    choice: Literal["none", "auto", "required"] = "auto"
    allowed: frozenset[str] | None = None
    """Names of those that may be called; None: any. One name and `required`: that tool it must be."""
    parallel: bool = True
    """True where one answer may hold several calls."""

    @property
    def callable_tools(self) -> list[Tool]:
        """Those that this answer may call."""
        if self.choice == "none":
            return []
        return [tool for tool in self.tools if self.allowed is None or tool.name in self.allowed]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Format that the answer's text must have."""

    kind: Literal["text", "json_object", "json_schema"] = "text"
    schema: Mapping[str, object] = field(default_factory=dict[str, object])
    """Schema of a `json_schema`."""
    param: str = "response_format"
    """Name of the request's field, for errors."""


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
    """True where the last message is the beginning of the answer."""
    messages_param: str = "messages"
    """Name of the field with the messages, for errors."""
    kwargs_param: str = "chat_template_kwargs"


_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def join_neighbours(
    messages: Iterable[Mapping[str, object]], roles: Collection[str]
) -> list[dict[str, object]]:
    """Join neighbouring messages that have the same one of these roles, a paragraph each."""
    joined: list[dict[str, object]] = []
    for message in messages:
        if joined and message["role"] in roles and joined[-1]["role"] == message["role"]:
            joined[-1] = _together(joined[-1], message)
        else:
            joined.append(dict(message))
    return joined


def _together(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, object]:
    both = {**first, **second, "content": _text(first["content"], second["content"], "\n")}
    calls = [*_calls(first), *_calls(second)]
    if calls:
        both["tool_calls"] = calls
    if "reasoning_content" in first and "reasoning_content" in second:
        both["reasoning_content"] = _text(first["reasoning_content"], second["reasoning_content"], "\n")
    return both


def _text(first: object, second: object, between: str) -> str:
    return between.join(str(text) for text in (first, second) if text)


def _calls(message: Mapping[str, object]) -> list[object]:
    return cast("list[object]", message.get("tool_calls", []))


def with_reasoning(
    messages: Iterable[Mapping[str, object]], *, calls_have_one_text: bool
) -> list[dict[str, object]]:
    """Add reasoning under the names that templates use: `reasoning` (Gemma) and `thinking` (gpt-oss, LFM).

    Where `calls_have_one_text`, reasoning and content beside calls become one reasoning text, as in gpt-oss's template.
    """
    return [_with_reasoning(message, calls_have_one_text=calls_have_one_text) for message in messages]


def _with_reasoning(message: Mapping[str, object], *, calls_have_one_text: bool) -> dict[str, object]:
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return dict(message)
    named = {**message}
    if calls_have_one_text and "tool_calls" in message and message["content"]:
        reasoning = _text(reasoning, message["content"], "\n")
        named["content"] = ""
    return named | dict.fromkeys(_REASONING_FIELDS, reasoning)


def in_order_of_calls(messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Sort the results of tools into the order of the calls before them.

    Clients send results as they complete and tell them apart by ids. Most templates show no ids, so a model takes the first
    result for that of the first call.
    """
    ordered: list[Mapping[str, object]] = []
    begin, places = 0, dict[object, int]()
    for message in messages:
        ordered.append(message)
        if message["role"] != "tool":
            begin, places = len(ordered), _places(message)
        elif places:
            ordered[begin:] = sorted(
                ordered[begin:], key=lambda result: places.get(result.get("tool_call_id"), len(places))
            )
    return ordered


def _places(message: Mapping[str, object]) -> dict[object, int]:
    """Return the positions of a message's calls by their ids."""
    calls = cast("list[Mapping[str, object]]", _calls(message))
    return {call["id"]: place for place, call in enumerate(calls) if "id" in call}


def template_call(name: str, arguments: object, call_id: str | None) -> dict[str, object]:
    """Return a tool call as templates read it, without an id where the dialect has none."""
    named = {} if call_id is None else {"id": call_id}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_of(text: str) -> object:
    """Return the arguments as an object, or as the text that the model wrote where it is no JSON object."""
    try:
        value = parse_json(text.encode())
    except RequestError:
        return text
    return cast("dict[str, object]", value) if isinstance(value, dict) else text
