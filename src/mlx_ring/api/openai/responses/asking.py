"""What `/v1/responses` asks for, in the form that every dialect is read into."""

from __future__ import annotations

from mlx_ring.api.conversation.asked import AnswerFormat, Conversation, Tool, ToolUse
from mlx_ring.api.conversation.turns import join_neighbours
from mlx_ring.api.openai.responses.items import template_messages
from mlx_ring.api.openai.responses.request import (
    AllowedTools,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    ResponsesRequest,
)
from mlx_ring.core.errors import RequestError

Plain = dict[str, object]


def conversation_of(fields: ResponsesRequest) -> Conversation:
    """The chat so far, and what its next answer should be like.

    Raises:
        RequestError: fields that contradict each other; names one of them.
    """
    return Conversation(
        messages=_messages(fields),
        tool_use=_tool_use(fields),
        format=_format(fields),
        template_kwargs=_template_kwargs(fields),
        messages_param="input",
    )


def _messages(fields: ResponsesRequest) -> list[Plain]:
    """Instructions, and what stands in for them at the input's beginning, are one message: some templates take no more."""
    messages: list[Plain] = []
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        messages.append({"role": "user", "content": fields.input})
    else:
        messages += template_messages(fields.input)
    return join_neighbours(messages, ("system",))


def _tool_use(fields: ResponsesRequest) -> ToolUse:
    tools = [
        Tool(tool.name, tool.description, tool.parameters, strict=bool(tool.strict))
        for tool in fields.tools or ()
    ]
    parallel = fields.parallel_tool_calls is not False
    choice = fields.tool_choice or "auto"
    if isinstance(choice, NamedTool):
        return ToolUse(tools, "required", _allowed(tools, choice, "tool_choice.name"), parallel)
    if isinstance(choice, AllowedTools):
        names = [_allowed(tools, named, "tool_choice.tools") for named in choice.tools]
        return ToolUse(tools, choice.mode, frozenset[str]().union(*names), parallel)
    if choice == "required" and not tools:
        raise RequestError("'tool_choice' is 'required', and there are no 'tools'.", param="tool_choice")
    return ToolUse(tools, choice, parallel=parallel)


def _allowed(tools: list[Tool], named: NamedTool, param: str) -> frozenset[str]:
    if named.name not in {tool.name for tool in tools}:
        raise RequestError(f"'{param}' names '{named.name}', which is none of 'tools'.", param=param)
    return frozenset({named.name})


def _format(fields: ResponsesRequest) -> AnswerFormat:
    given = None if fields.text is None else fields.text.format
    if isinstance(given, JsonObjectFormat):
        return AnswerFormat("json_object", param="text.format")
    if isinstance(given, JsonSchemaFormat):
        return AnswerFormat("json_schema", given.schema_, "text.format.schema")
    return AnswerFormat(param="text.format")


def _template_kwargs(fields: ResponsesRequest) -> Plain:
    effort = None if fields.reasoning is None else fields.reasoning.effort
    kwargs: Plain = {} if effort is None else {"reasoning_effort": effort}
    return kwargs | (fields.chat_template_kwargs or {})
