"""What `/v1/responses` asks for, in the form that every dialect is read into."""

from __future__ import annotations

from mlx_ring.api.conversation.asked import AnswerFormat, Conversation, Tool, ToolUse
from mlx_ring.api.conversation.format import ChatFormat
from mlx_ring.api.conversation.prepare import with_effort
from mlx_ring.api.conversation.turns import join_neighbours
from mlx_ring.api.openai.formats import JsonObjectFormat
from mlx_ring.api.openai.responses.items import template_messages
from mlx_ring.api.openai.responses.request import (
    AllowedTools,
    JsonSchemaFormat,
    NamedTool,
    ResponsesRequest,
)
from mlx_ring.api.openai.tools import check_names, choose

Plain = dict[str, object]


def conversation_of(fields: ResponsesRequest, format_: ChatFormat) -> Conversation:
    """The chat so far, and what its next answer should be like.

    Args:
        fields: the request.
        format_: what the model's template knows.

    Raises:
        RequestError: fields that contradict each other, or that the template cannot heed; names one of them.
    """
    return Conversation(
        messages=_messages(fields),
        tool_use=_tool_use(fields),
        format=_format(fields),
        template_kwargs=with_effort(
            format_,
            fields.chat_template_kwargs,
            None if fields.reasoning is None else fields.reasoning.effort,
            param="reasoning.effort",
        ),
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
    check_names([tool.name for tool in tools], "tools[{}].name")
    use = ToolUse(tools, parallel=fields.parallel_tool_calls is not False)
    choice = fields.tool_choice
    if isinstance(choice, NamedTool):
        return choose(use, "required", [choice.name], "tool_choice.name")
    if isinstance(choice, AllowedTools):
        return choose(use, choice.mode, [tool.name for tool in choice.tools], "tool_choice.tools")
    return choose(use, choice or "auto", None, "tool_choice")


def _format(fields: ResponsesRequest) -> AnswerFormat:
    given = None if fields.text is None else fields.text.format
    if isinstance(given, JsonObjectFormat):
        return AnswerFormat("json_object", param="text.format")
    if isinstance(given, JsonSchemaFormat):
        return AnswerFormat("json_schema", given.schema_, "text.format.schema")
    return AnswerFormat(param="text.format")
