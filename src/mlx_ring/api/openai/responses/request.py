"""Body of `/v1/responses`: its items and fields, and their conversion to the chat request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from mlx_ring.api.chat.model_format import ChatFormat
from mlx_ring.api.chat.prepare import with_effort
from mlx_ring.api.chat.request import (
    AnswerFormat,
    Conversation,
    Tool,
    ToolUse,
    arguments_of,
    join_neighbours,
    template_call,
    text_of,
)
from mlx_ring.api.openai.messages import (
    TEXT_ONLY,
    FunctionName,
    Parameters,
    RefusalPart,
    check_names,
    choose,
)
from mlx_ring.api.openai.responses.schemas import Included
from mlx_ring.api.openai.responses.writer import unseal
from mlx_ring.api.openai.sampling import (
    Count,
    JsonObjectFormat,
    Obfuscated,
    SamplingFields,
    TextFormat,
    by_number,
)
from mlx_ring.api.request_body import MOST_MESSAGES, Body, Unsupported, show

Plain = dict[str, object]


class InputText(Body):
    type: Literal["input_text", "text", "summary_text", "reasoning_text"]
    text: str
    prompt_cache_breakpoint: dict[str, object] | None = None
    """Accepted without effect: the prefix cache keeps every prefix."""


class OutputText(Body):
    """Text in the form of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[object], Field(max_length=0)] | None = None
    logprobs: list[object] | None = None
    parsed: object = None
    """Value that an SDK parsed from the text."""


ContentPart = Annotated[
    Annotated[InputText | OutputText | RefusalPart, Field(discriminator="type")], TEXT_ONLY
]
ItemContent = Annotated[
    Annotated[str, Tag("one")] | Annotated[list[ContentPart], Tag("many")],
    by_number("Input should be a string or a list of text parts"),
]


class Item(Body):
    """Fields of an answer's own items, which have no meaning in a request."""

    id: str | None = None
    status: str | None = None
    phase: str | None = None
    caller: dict[str, object] | None = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    parsed_arguments: object = None
    """Value that an SDK parsed from the arguments."""


class FunctionCallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: ItemContent
    name: str | None = None


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: list[InputText] | None = None
    content: list[InputText] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """Reasoning or its summary. Empty if another server sealed it."""
        return (
            text_of(self.content or ()) or unseal(self.encrypted_content or "") or text_of(self.summary or ())
        )


_KINDS = ("message", "function_call", "function_call_output", "reasoning")
_READ = f"this server reads {', '.join(_KINDS)}"
_INSTEAD = {"item_reference": "send the item itself, as clients do whose requests have 'store': false"}


def _named(value: object) -> object:
    """Return an item with its type, which messages may omit, and without the nulls of SDKs."""
    if not isinstance(value, dict):
        return value
    item = {name: given for name, given in cast("Plain", value).items() if given is not None}
    if "role" in item:
        item.setdefault("type", "message")
    if item.get("type") not in _KINDS:
        raise PydanticCustomError(
            "unsupported",
            "is of the type {kind}, which is not supported; {instead}.",
            {"kind": show(item.get("type")), "instead": _INSTEAD.get(str(item.get("type")), _READ)},
        )
    return item


AnyItem = Annotated[
    Annotated[
        MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem, Field(discriminator="type")
    ],
    BeforeValidator(_named),
]


def template_messages(items: Iterable[AnyItem]) -> list[Plain]:
    """Return the items as chat templates read them: reasoning, text and calls of one turn are one message.

    Reasoning that was cut off before any text is a message of its own.
    """
    messages: list[Plain] = []
    pieces: list[str] = []
    for item in items:
        if isinstance(item, ReasoningItem):
            pieces += filter(None, [item.text])
            continue
        reasoning, pieces = "\n".join(pieces), []
        if reasoning and not _is_answer(item):
            messages.append(_with_reasoning({"role": "assistant", "content": ""}, reasoning))
        match item:
            case FunctionCallOutputItem():
                messages.append(
                    {"role": "tool", "content": text_of(item.output), "tool_call_id": item.call_id}
                )
            case FunctionCallItem():
                turn = _turn(messages, reasoning)
                calls = cast("list[Plain]", turn.setdefault("tool_calls", []))
                calls.append(
                    template_call(
                        offered_name(item.name, item.namespace), arguments_of(item.arguments), item.call_id
                    )
                )
            case MessageItem(role="assistant"):
                messages.append(
                    _with_reasoning({"role": "assistant", "content": text_of(item.content)}, reasoning)
                )
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": text_of(item.content)})
    if pieces:
        messages.append(_with_reasoning({"role": "assistant", "content": ""}, "\n".join(pieces)))
    return messages


def _is_answer(item: AnyItem) -> bool:
    """Return True if an item belongs to the assistant's turn."""
    if isinstance(item, MessageItem):
        return item.role == "assistant"
    return not isinstance(item, FunctionCallOutputItem)


def _turn(messages: list[Plain], reasoning: str) -> Plain:
    """Return the assistant's message that a call belongs to: the last one, or a new one."""
    if not messages or messages[-1]["role"] != "assistant" or reasoning:
        messages.append(_with_reasoning({"role": "assistant", "content": ""}, reasoning))
    return messages[-1]


def _with_reasoning(message: Plain, reasoning: str) -> Plain:
    return message | ({"reasoning_content": reasoning} if reasoning else {})


_Stateless = Annotated[
    None, Unsupported("no request continues another one; send the whole conversation as 'input'.")
]
_Prompt = Annotated[
    None, Unsupported("prompts are not kept here; send its text as 'instructions' and 'input'.")
]


_WEB_SEARCH = ("web_search", "web_search_preview")
_TOOLS = ("function", "namespace", *_WEB_SEARCH)


def _known_tool(value: object) -> object:
    kind = cast("Plain", value).get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in _TOOLS:
        raise PydanticCustomError(
            "unsupported",
            "is '{kind}', which is not supported: give 'function', or a 'namespace' of functions.",
            {"kind": kind},
        )
    return cast("object", value)


class FunctionTool(Body):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    output_schema: dict[str, object] | None = None
    """Schema of the function's result. Accepted without effect."""


class NamespaceTool(Body):
    """Functions under one name, such as those of Codex's agents. Calls of them name both."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(min_length=1)]


class WebSearchTool(Body):
    """Search that OpenAI's server would do. It is left out: agents offer it beside tools of their own."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["web_search", "web_search_preview"]


AnyTool = Annotated[
    Annotated[FunctionTool | NamespaceTool | WebSearchTool, Field(discriminator="type")],
    BeforeValidator(_known_tool),
]


def offered_name(name: str, namespace: str | None) -> str:
    """Return the name by which a model calls a function."""
    return f"{namespace}__{name}" if namespace else name


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
    """Accepted without effect, as in chats."""


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    """Summary of the reasoning. Only `auto` is accepted, because the answer contains the whole reasoning."""
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
        Annotated[str, Tag("one")]
        | Annotated[list[AnyItem], Field(min_length=1, max_length=MOST_MESSAGES), Tag("many")],
        by_number("Input should be a string or a list of items"),
    ]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    """Limit of calls of the server's own tools. The server has none."""
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Included] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["disabled"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, object] | None = None
    background: bool | None = None
    """True: compute the answer whether or not the client waits for it. Needs a server with `--journal`."""
    store: bool | None = None
    """False: a server with a journal does not keep the answer."""
    previous_response_id: _Stateless = None
    conversation: _Stateless = None
    prompt: _Prompt = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    """Without effect, as the four fields above. The answer repeats them."""
    client_metadata: dict[str, object] | None = None
    """Accepted without effect: Codex sends it."""

    @property
    def is_kept(self) -> bool:
        """True if a journal keeps the answer, for a client that comes back."""
        return self.store is not False

    @property
    def wanted_logprobs(self) -> int | None:
        """Number of alternatives to each token; None: no log-probabilities."""
        if self.top_logprobs or "message.output_text.logprobs" in (self.include or ()):
            return self.top_logprobs or 0
        return None

    @property
    def seals_reasoning(self) -> bool:
        return "reasoning.encrypted_content" in (self.include or ())

    @property
    def functions(self) -> Iterator[tuple[FunctionTool, str | None]]:
        """Functions that the model may call, each with its namespace."""
        for tool in self.tools or ():
            match tool:
                case FunctionTool():
                    yield tool, None
                case NamespaceTool():
                    yield from ((function, tool.name) for function in tool.tools)
                case WebSearchTool():
                    pass

    @property
    def namespaces(self) -> Mapping[str, tuple[str, str]]:
        """Name and namespace of each function in one, by the name that the model calls."""
        return {
            offered_name(tool.name, namespace): (tool.name, namespace)
            for tool, namespace in self.functions
            if namespace
        }


def conversation_of(fields: ResponsesRequest, format_: ChatFormat) -> Conversation:
    """Return the chat request of a body.

    Args:
        fields: the request.
        format_: format of the model's answers.

    Raises:
        RequestError: fields contradict each other, or the template does not know one. The error names a field.
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
    """Return the messages with instructions and leading system messages joined, because some templates accept only one."""
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
        Tool(offered_name(tool.name, namespace), tool.description, tool.parameters, strict=bool(tool.strict))
        for tool, namespace in fields.functions
    ]
    # The number of a function in a namespace is not that of a tool.
    check_names([tool.name for tool in tools], "tools" if fields.namespaces else "tools[{}].name")
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
