"""What a request of Anthropic's asks for, in the form that every dialect is read into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from mlx_ring.api.anthropic.blocks import (
    AssistantBlock,
    AssistantMessage,
    Message,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserBlock,
    text_of,
)
from mlx_ring.api.anthropic.request import PromptFields, Tool
from mlx_ring.api.conversation import asked
from mlx_ring.api.conversation.asked import AnswerFormat, Conversation, ToolUse
from mlx_ring.api.conversation.format import ChatFormat
from mlx_ring.api.conversation.turns import join_neighbours, template_call
from mlx_ring.api.openai.tools import check_names, choose
from mlx_ring.core.errors import RequestError

_BILLING = "x-anthropic-billing-header:"
"""Claude Code puts a line for Anthropic's books, another in each request, before its system prompt: no part
of the prompt, and with it no beginning would ever be found again."""
_CHOICES: Mapping[str, Literal["none", "auto", "required"]] = {
    "any": "required",
    "none": "none",
    "auto": "auto",
}

Plain = dict[str, object]


def conversation_of(fields: PromptFields, format_: ChatFormat) -> Conversation:
    """The chat so far, and what its next answer should be like.

    Args:
        fields: the request.
        format_: what the model's template knows.

    Raises:
        RequestError: fields that contradict each other; names one of them.
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
    for message in messages:
        if isinstance(message, SystemMessage):
            yield {"role": "system", "content": text_of(message.content)}
        elif isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif isinstance(message, AssistantMessage):
            names |= {block.id: block.name for block in message.content if isinstance(block, ToolUseBlock)}
            yield _assistant(message.content)
        else:
            yield from (_user(block, names) for block in message.content)


def _user(block: UserBlock, names: dict[str, str]) -> Plain:
    if isinstance(block, TextBlock):
        return {"role": "user", "content": block.text}
    return _result(block) | ({"name": names[block.tool_use_id]} if block.tool_use_id in names else {})


def _result(block: ToolResultBlock) -> Plain:
    """Templates know no failed call: the text must say it."""
    text = text_of(block.content)
    return {
        "role": "tool",
        "content": f"Error: {text}" if block.is_error else text,
        "tool_call_id": block.tool_use_id,
    }


def _assistant(blocks: Sequence[AssistantBlock]) -> Plain:
    plain: Plain = {
        "role": "assistant",
        "content": "".join(block.text for block in blocks if isinstance(block, TextBlock)),
    }
    calls = [
        template_call(block.name, block.input, block.id)
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    thought = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    return (
        plain | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thought} if thought else {})
    )


def _continues(messages: Sequence[Message]) -> bool:
    """A last message of the assistant's is the beginning of the answer."""
    last = messages[-1]
    if not isinstance(last, AssistantMessage):
        return False
    if not isinstance(last.content, str) and any(isinstance(block, ToolUseBlock) for block in last.content):
        place = f"messages[{len(messages) - 1}]"
        raise RequestError(
            f"'{place}' calls tools, and nothing follows it; give their results in a message of the user.",
            param=place,
        )
    return True


def _clear_thinking(messages: Sequence[Plain], fields: PromptFields) -> None:
    edits = (fields.context_management.edits if fields.context_management else None) or ()
    kept = [edit.turns for edit in edits if edit.turns is not None]
    if kept:
        thought = [message for message in messages if "reasoning_content" in message]
        for message in thought[: -min(kept)]:
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
                f"'tool_choice.name' goes with the type 'tool', not with '{choice.type}'; leave it out.",
                param="tool_choice.name",
            )
        return choose(use, _CHOICES[choice.type], None, "tool_choice")
    if choice.name is None:
        raise RequestError(
            "'tool_choice.name' is missing: which tool is to be called?", param="tool_choice.name"
        )
    return choose(use, "required", [choice.name], "tool_choice.name")


def _tool(tool: Tool) -> asked.Tool:
    return asked.Tool(tool.name, tool.description, tool.input_schema, strict=bool(tool.strict))


def _format(fields: PromptFields) -> AnswerFormat:
    if fields.output_config is not None and fields.output_config.format is not None:
        return AnswerFormat("json_schema", fields.output_config.format.schema_, "output_config.format.schema")
    if fields.output_format is not None:
        return AnswerFormat("json_schema", fields.output_format.schema_, "output_format.schema")
    return AnswerFormat(param="output_config.format")


def _template_kwargs(fields: PromptFields, format_: ChatFormat) -> Plain:
    """What the template knows of: clients ask for thoughts without knowing which model they ask.

    A client's own word goes before what follows from other fields.
    """
    kwargs: Plain = {}
    thinking, effort = fields.thinking, None if fields.output_config is None else fields.output_config.effort
    if thinking is not None:
        if thinking.type == "disabled" and thinking.budget_tokens is not None:
            raise RequestError(
                "'thinking.budget_tokens' is for thoughts, and 'thinking.type' is 'disabled'; leave it out.",
                param="thinking.budget_tokens",
            )
        kwargs |= dict.fromkeys(("enable_thinking", "thinking"), thinking.type != "disabled")
        kwargs["thinking_budget"] = thinking.budget_tokens
    kwargs["reasoning_effort"] = effort
    known = {name: value for name, value in kwargs.items() if value is not None and format_.knows(name)}
    return known | (fields.chat_template_kwargs or {})
