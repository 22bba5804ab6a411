"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`, and their conversion to the chat request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag
from pydantic_core import PydanticCustomError

from mlx_ring.api.chat.model_format import ChatFormat
from mlx_ring.api.chat.request import (
    AnswerFormat,
    Conversation,
    ToolUse,
    join_neighbours,
    template_call,
    text_of,
)
from mlx_ring.api.chat.request import Tool as ChatTool
from mlx_ring.api.openai.messages import TEXT_ONLY, Parameters, check_names, choose
from mlx_ring.api.openai.sampling import MOST_TOKENS, Count, SamplingFields, StopString, by_number
from mlx_ring.api.request_body import MOST_MESSAGES, Body, Unsupported
from mlx_ring.core.errors import RequestError


class Block(Body):
    cache_control: dict[str, object] | None = None
    """Accepted without effect: the prefix cache finds every shared prefix without marks."""


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: Annotated[list[object], Field(max_length=0)] | None = None


class ToolReferenceBlock(Block):
    """Tool that a client's search for tools found. It is in the request's `tools`."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return f"The tool {self.tool_name} is available."


class ToolReference(Body):
    type: Literal["tool_reference"]
    name: str


class ToolChangeBlock(Block):
    """Tool of the request's `tools` that is offered, or no longer offered, from here on."""

    type: Literal["tool_addition", "tool_removal"]
    tool: ToolReference

    @property
    def text(self) -> str:
        state = "available" if self.type == "tool_addition" else "no longer available"
        return f"The tool {self.tool.name} is {state}."


def _one_or(blocks: str) -> Discriminator:
    return by_number(f"Input should be a string or a list of {blocks}")


Text = Annotated[
    Annotated[str, Tag("one")] | Annotated[list[TextBlock], Tag("many")],
    _one_or("text blocks"),
]
ResultBlock = Annotated[
    Annotated[TextBlock | ToolReferenceBlock, Field(discriminator="type")],
    TEXT_ONLY,
]
SystemBlock = Annotated[TextBlock | ToolChangeBlock, Field(discriminator="type")]


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, object]
    caller: dict[str, object] | None = None
    """Origin of the call: always the model."""
    toolset_name: None = None


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        Annotated[str, Tag("one")] | Annotated[list[ResultBlock], Tag("many")], _one_or("blocks")
    ] = ""
    is_error: bool | None = None
    toolset_name: None = None


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""
    """Signature of the reasoning. It is not verified, because clients may change the reasoning."""


class RedactedThinkingBlock(Block):
    """Reasoning that another server encrypted. This server's model cannot read it."""

    type: Literal["redacted_thinking"]
    data: str


UserBlock = Annotated[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")], TEXT_ONLY]
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
    """Message of the system amid a chat."""

    role: Literal["system"]
    content: Annotated[
        Annotated[str, Tag("one")] | Annotated[list[SystemBlock], Tag("many")], _one_or("blocks")
    ]
    clear_at: Literal["next_user_message", "never"] | None = None
    """`next_user_message`: the message is left out once a later one is the user's."""


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


_MOST_STOPS = 64


def _own_tool(kind: str | None) -> str | None:
    if kind not in (None, "custom"):
        raise PydanticCustomError(
            "unsupported",
            "is '{kind}', a tool of Anthropic's own, which is not supported: give 'name', 'description' and "
            "'input_schema' of a tool that the client runs.",
            {"kind": kind},
        )
    return kind


class Tool(Body):
    type: Annotated[
        str | None, AfterValidator(_own_tool), Field(json_schema_extra={"enum": [None, "custom"]})
    ] = None
    name: Annotated[str, StringConstraints(min_length=1)]
    description: str | None = None
    input_schema: Parameters
    strict: bool | None = None
    cache_control: dict[str, object] | None = None
    eager_input_streaming: bool | None = None
    """Accepted without effect: arguments are always streamed."""
    defer_loading: bool | None = None
    """Accepted without effect: the prompt has every tool, because a later change of the list would change its prefix."""
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Annotated[list[object], Field(max_length=0)] | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Name of the tool if `type` is `tool`."""
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None
    """Display of the reasoning. It is never summarized."""


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, object], Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class KeptTurns(Body):
    type: Literal["thinking_turns", "all"]
    value: Count = 1


class ClearThinking(Body):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | KeptTurns | None = None

    @property
    def turns(self) -> int | None:
        """Number of last turns that keep their reasoning; None: all."""
        if self.keep == "all" or (self.keep is not None and self.keep.type == "all"):
            return None
        return 1 if self.keep is None else self.keep.value


class ContextManagement(Body):
    edits: list[ClearThinking] | None = None


_Stateless = Annotated[
    None, Unsupported("no request continues another one; send the whole conversation as 'messages'.")
]


class PromptFields(Body):
    """Fields that determine the prompt. `metadata` and `service_tier` have no effect and are removed earlier."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: Text | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Former place of `output_config.format`."""
    context_management: ContextManagement | None = None
    cache_control: dict[str, object] | None = None
    speed: Literal["standard"] | None = None
    diagnostics: dict[str, object] | None = None
    """Accepted without effect. `usage` reports the cached tokens."""
    thread: _Stateless = None
    """Stored conversation. It is refused, and SDKs then repeat the request without it."""
    chat_template_kwargs: dict[str, object] | None = None
    """Further variables of the model's chat template. Anthropic's API does not have this field."""


class CountTokensRequest(PromptFields):
    pass


class MessagesRequest(PromptFields, SamplingFields):
    max_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)]
    """Limit of the answer. 0: no answer; the prompt's KV is computed and kept for requests that share its prefix."""
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=_MOST_STOPS)] | None = None
    stream: bool | None = None

    @property
    def is_kept(self) -> bool:
        """True if a journal keeps the answer, for a client that comes back."""
        return bool(self.stream)


_BILLING = "x-anthropic-billing-header:"
"""Start of a billing line that Claude Code puts before its system prompt.

The line is removed. It differs in each request, so with it no two prompts would share a prefix.
"""
_CHOICES: Mapping[str, Literal["none", "auto", "required"]] = {
    "any": "required",
    "none": "none",
    "auto": "auto",
}

Plain = dict[str, object]


def conversation_of(fields: PromptFields, format_: ChatFormat) -> Conversation:
    """Return the chat request of a body.

    Args:
        fields: the request.
        format_: format of the model's answers.

    Raises:
        RequestError: fields contradict each other. The error names one of them.
    """
    messages = [*_system(fields), *_template_messages(fields.messages)]
    _clear_thinking(messages, fields)
    return Conversation(
        messages=join_neighbours(messages, ("system", "user", "assistant")),
        tool_use=_tool_use(fields),
        format=_format(fields),
        template_kwargs=_template_kwargs(fields, format_),
        continues=_continues(fields.messages),
    )


def _system(fields: PromptFields) -> Iterator[Plain]:
    system = fields.system
    if isinstance(system, list):
        system = text_of([block for block in system if not block.text.startswith(_BILLING)])
    if system:
        yield {"role": "system", "content": system}


def _template_messages(messages: Sequence[Message]) -> Iterator[Plain]:
    names: dict[str, str] = {}
    last_user = max((place for place, each in enumerate(messages) if each.role == "user"), default=-1)
    for place, message in enumerate(messages):
        if isinstance(message, SystemMessage):
            if message.clear_at != "next_user_message" or place > last_user:
                yield {"role": "system", "content": text_of(message.content)}
        elif isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif isinstance(message, AssistantMessage):
            names |= {block.id: block.name for block in message.content if isinstance(block, ToolUseBlock)}
            yield _assistant(message.content)
        else:
            # Results come first, as Anthropic requires: templates expect them behind their calls.
            ordered = sorted(message.content, key=lambda block: isinstance(block, TextBlock))
            yield from (_user(block, names) for block in ordered)


def _user(block: UserBlock, names: dict[str, str]) -> Plain:
    if isinstance(block, TextBlock):
        return {"role": "user", "content": block.text}
    return _result(block) | ({"name": names[block.tool_use_id]} if block.tool_use_id in names else {})


def _result(block: ToolResultBlock) -> Plain:
    """Return a tool's result. Templates cannot mark a call as failed, so the text must say it."""
    text = text_of(block.content)
    return {
        "role": "tool",
        "content": f"Error: {text}" if block.is_error else text,
        "tool_call_id": block.tool_use_id,
    }


def _assistant(blocks: Sequence[AssistantBlock]) -> Plain:
    plain: Plain = {
        "role": "assistant",
        "content": text_of(block for block in blocks if isinstance(block, TextBlock)),
    }
    calls = [
        template_call(block.name, block.input, block.id)
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    reasoning = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    return (
        plain
        | ({"tool_calls": calls} if calls else {})
        | ({"reasoning_content": reasoning} if reasoning else {})
    )


def _continues(messages: Sequence[Message]) -> bool:
    """Return True if the last message is the assistant's, so that it starts the answer."""
    last = messages[-1]
    if not isinstance(last, AssistantMessage):
        return False
    if not isinstance(last.content, str) and any(isinstance(block, ToolUseBlock) for block in last.content):
        place = f"messages[{len(messages) - 1}]"
        raise RequestError(
            f"'{place}' calls tools, but no result follows; give the results in a user message.",
            param=place,
        )
    return True


def _clear_thinking(messages: Sequence[Plain], fields: PromptFields) -> None:
    edits = (fields.context_management.edits if fields.context_management else None) or ()
    kept = [edit.turns for edit in edits if edit.turns is not None]
    if kept:
        reasoned = [message for message in messages if "reasoning_content" in message]
        for message in reasoned[: -min(kept)]:
            del message["reasoning_content"]


def _tool_use(fields: PromptFields) -> ToolUse:
    tools = [_tool(tool) for tool in fields.tools or ()]
    check_names([tool.name for tool in tools], "tools[{}].name")
    choice = fields.tool_choice
    if choice is None:
        return ToolUse(tools)
    use = ToolUse(tools, parallel=not choice.disable_parallel_tool_use)
    if choice.type != "tool":
        if choice.name is not None:
            raise RequestError(
                f"'tool_choice.name' requires the type 'tool', but it is '{choice.type}'; leave it out.",
                param="tool_choice.name",
            )
        return choose(use, _CHOICES[choice.type], None, "tool_choice")
    if choice.name is None:
        raise RequestError("'tool_choice.name' is missing; name the tool to call.", param="tool_choice.name")
    return choose(use, "required", [choice.name], "tool_choice.name")


def _tool(tool: Tool) -> ChatTool:
    return ChatTool(tool.name, tool.description, tool.input_schema, strict=bool(tool.strict))


def _format(fields: PromptFields) -> AnswerFormat:
    if fields.output_config is not None and fields.output_config.format is not None:
        return AnswerFormat("json_schema", fields.output_config.format.schema_, "output_config.format.schema")
    if fields.output_format is not None:
        return AnswerFormat("json_schema", fields.output_format.schema_, "output_format.schema")
    return AnswerFormat(param="output_config.format")


def _template_kwargs(fields: PromptFields, format_: ChatFormat) -> Plain:
    """Return the arguments that the template knows. Clients request reasoning without knowing the model.

    The client's own arguments take precedence over those that follow from other fields.
    """
    kwargs: Plain = {}
    thinking, effort = fields.thinking, None if fields.output_config is None else fields.output_config.effort
    if thinking is not None:
        if thinking.type == "disabled" and thinking.budget_tokens is not None:
            raise RequestError(
                "'thinking.budget_tokens' has no effect, because 'thinking.type' is 'disabled'; leave it out.",
                param="thinking.budget_tokens",
            )
        kwargs |= dict.fromkeys(("enable_thinking", "thinking"), thinking.type != "disabled")
        kwargs["thinking_budget"] = thinking.budget_tokens
    kwargs["reasoning_effort"] = effort
    known = {name: value for name, value in kwargs.items() if value is not None and format_.knows(name)}
    return known | (fields.chat_template_kwargs or {})
