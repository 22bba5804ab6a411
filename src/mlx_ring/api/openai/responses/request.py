"""The body of `/v1/responses`.

What `/v1/responses` asks for, in the form that every dialect is read into.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from mlx_ring.api.chat.messages import join_neighbours
from mlx_ring.api.chat.model_format import ChatFormat
from mlx_ring.api.chat.prepare import with_effort
from mlx_ring.api.chat.request import AnswerFormat, Conversation, Tool, ToolUse
from mlx_ring.api.openai.responses.items import AnyItem, template_messages
from mlx_ring.api.openai.sampling import (
    Count,
    JsonObjectFormat,
    Obfuscated,
    SamplingFields,
    TextFormat,
    one_or_many,
)
from mlx_ring.api.openai.tools import FunctionName, Parameters, check_names, choose
from mlx_ring.api.request_body import Body, Refused

_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"


_Stateless = Annotated[None, Refused("answers are not kept here; send the whole conversation as 'input'.")]
_Waited = Annotated[None, Refused("answers are given while the client waits; leave it out.", (False,))]
_Prompt = Annotated[
    None, Refused("prompts are not kept here; send what it says as 'instructions' and 'input'.")
]


def _own_tool(kind: str) -> str:
    if kind != "function":
        raise PydanticCustomError(
            "unsupported",
            "is '{kind}', a tool that the server would run; this one runs none: only 'function' is supported.",
            {"kind": kind},
        )
    return kind


class FunctionTool(Body):
    type: Annotated[str, AfterValidator(_own_tool), Field(json_schema_extra={"const": "function"})]
    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class NamedTool(Body):
    type: Literal["function"]
    name: str


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    name: str
    schema_: Annotated[dict[str, object], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextConfig(Body):
    format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Without effect, as in chats."""


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    """All that was thought is in the answer, which is more than a summary; one of a given length is not made."""
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class StreamOptions(Body):
    include_obfuscation: Obfuscated = None


ToolChoiceWord = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    Annotated[ToolChoiceWord, Tag("one")]
    | Annotated[Annotated[NamedTool | AllowedTools, Field(discriminator="type")], Tag("many")],
    Discriminator(lambda value: "one" if isinstance(value, str) else "many"),
]


class ResponsesRequest(SamplingFields):
    input: Annotated[
        Annotated[str, Tag("one")] | Annotated[list[AnyItem], Field(min_length=1), Tag("many")],
        Discriminator(
            one_or_many,
            custom_error_type="one_or_many",
            custom_error_message="Input should be a string or a list of items",
        ),
    ]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    """Of tools that a server runs: this one runs none, and so keeps to any number."""
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["disabled"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, object] | None = None
    previous_response_id: _Stateless = None
    conversation: _Stateless = None
    background: _Waited = None
    prompt: _Prompt = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    """These, and `store`, are without effect; the answer repeats them."""

    @property
    def wanted_logprobs(self) -> int | None:
        """How many alternatives beside each token's own; None: no log-probabilities."""
        if self.top_logprobs or _LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        return None

    @property
    def seals_reasoning(self) -> bool:
        return _SEALED in (self.include or ())


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
