"""Messages and tools of OpenAI's chat API, and their conversion to the chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, StringConstraints, Tag
from pydantic_core import PydanticCustomError

from mlx_ring.api.chat.request import Tool, ToolUse, arguments_of, template_call, text_of
from mlx_ring.api.openai.sampling import by_number
from mlx_ring.api.request_body import Body, show
from mlx_ring.core.errors import RequestError

_NO_TEXT = {
    **dict.fromkeys(("image_url", "image", "input_image"), "an image"),
    **dict.fromkeys(("file", "input_file", "container_upload"), "a file"),
    "input_audio": "a recording",
    "video_url": "a video",
    "document": "a document",
}
"""Kinds of parts without text, in any API."""


class Cached(Body):
    """Marks of prompt caching. They are accepted without effect, because the prefix cache keeps every prefix."""

    prompt_cache_breakpoint: dict[str, object] | None = None
    cache_control: dict[str, object] | None = None
    """Anthropic's mark, which clients with several providers send to all of them."""


class TextPart(Cached):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """Part of an answer that was a refusal."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _refuse_other_media(part: object) -> object:
    if not isinstance(part, dict):
        return part
    fields = cast("dict[str, object]", part)
    kind = fields.get("type")
    source = fields.get("source")
    if (
        kind == "document"
        and isinstance(source, dict)
        and cast("dict[str, object]", source).get("type") == "text"
    ):
        raise PydanticCustomError("unsupported", "is a document; send its text as a text block.")
    if isinstance(kind, str) and kind in _NO_TEXT:
        raise PydanticCustomError(
            "unsupported",
            "is {what} ('{kind}'), and only text is supported; leave it out.",
            {"what": _NO_TEXT[kind], "kind": kind},
        )
    return fields


TEXT_ONLY = BeforeValidator(_refuse_other_media)
"""Check of a message's part, whose error says what the part is if it has no text."""
ContentPart = Annotated[Annotated[TextPart | RefusalPart, Field(discriminator="type")], TEXT_ONLY]
MessageContent = Annotated[
    Annotated[str, Tag("one")] | Annotated[list[ContentPart], Field(min_length=1), Tag("many")],
    by_number("Input should be a string or a list of text parts"),
]


class FunctionCall(Body):
    name: str
    arguments: str
    parsed_arguments: object = None
    """Value that an SDK parsed from the arguments."""


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """Clients that join the pieces of a stream send it back."""


class InstructionMessage(Cached):
    role: Literal["system", "developer"]
    content: MessageContent
    name: str | None = None


class UserMessage(Cached):
    role: Literal["user"]
    content: MessageContent
    name: str | None = None


class ReasoningDetail(Body):
    """Piece of reasoning from another provider. One without text is encrypted, and has no effect."""

    model_config = ConfigDict(extra="ignore")

    text: str | None = None
    thinking: str | None = None
    summary: str | None = None


class AssistantMessage(Cached):
    """Message of the assistant, possibly an answer as SDKs dump it, nulls included."""

    role: Literal["assistant"]
    content: MessageContent | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    reasoning_details: list[ReasoningDetail] | None = None
    thinking_blocks: list[ReasoningDetail] | None = None
    """Reasoning in other providers' forms, read if the fields above are missing."""
    provider_specific_fields: dict[str, object] | None = None
    """Accepted without effect. Gateways add it to answers."""
    annotations: Annotated[list[object], Field(max_length=0)] | None = None
    audio: None = None
    parsed: object = None
    """Value that an SDK parsed from the content."""


class ToolMessage(Cached):
    role: Literal["tool"]
    content: MessageContent
    tool_call_id: str
    name: str | None = None


class FunctionMessage(Body):
    role: Literal["function"]
    content: MessageContent
    name: str


Message = Annotated[
    InstructionMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage,
    Field(discriminator="role"),
]


def template_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Return the messages as chat templates read them.

    Text is a string, arguments of calls are objects, and the roles are the four that templates know.
    """
    return [_template_message(index, message) for index, message in enumerate(messages)]


def _template_message(index: int, message: Message) -> dict[str, object]:
    if isinstance(message, AssistantMessage):
        return _assistant(index, message)
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    plain: dict[str, object] = {"role": role, "content": text_of(message.content)}
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _assistant(index: int, message: AssistantMessage) -> dict[str, object]:
    content = message.refusal if message.content is None else text_of(message.content)
    functions: list[tuple[FunctionCall, str | None]] = [
        (call.function, call.id) for call in message.tool_calls or ()
    ]
    if message.function_call is not None:
        functions.append((message.function_call, None))
    calls = [template_call(call.name, arguments_of(call.arguments), call_id) for call, call_id in functions]
    reasoning = _reasoning(message)
    pieces = message.reasoning_details or message.thinking_blocks
    if content is None and not calls and reasoning is None and not pieces:
        raise RequestError(
            f"'messages[{index}].content' is missing; an assistant message has content or tool calls.",
            param=f"messages[{index}].content",
        )
    plain: dict[str, object] = {"role": "assistant", "content": content or ""}
    if calls:
        plain["tool_calls"] = calls
    if message.name is not None:
        plain["name"] = message.name
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    return plain


def _reasoning(message: AssistantMessage) -> str | None:
    given = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if given is not None:
        return given
    return _text_of_pieces(message.reasoning_details) or _text_of_pieces(message.thinking_blocks) or None


def _text_of_pieces(pieces: Sequence[ReasoningDetail] | None) -> str:
    return "\n".join(filter(None, (each.text or each.thinking or each.summary for each in pieces or ())))


FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def check_parameters(schema: dict[str, object] | None) -> dict[str, object] | None:
    """Return a schema of type object. A tool with no schema or an empty one takes no arguments."""
    if not schema:
        return schema
    kind = schema.get("type", "object")
    if kind != "object":
        raise PydanticCustomError(
            "schema", "should be a JSON schema of type 'object', not {kind}", {"kind": show(kind)}
        )
    return {"type": "object", **schema}


Parameters = Annotated[
    dict[str, object],
    AfterValidator(check_parameters),
    Field(json_schema_extra={"properties": {"type": {"const": "object"}}}),
]


class FunctionFields(Cached):
    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


def _function_type(kind: object) -> object:
    if isinstance(kind, str) and kind != "function":
        raise PydanticCustomError(
            "unsupported",
            "is {kind}, which is not supported: give 'function', whose arguments are JSON.",
            {"kind": show(kind)},
        )
    return kind


_FunctionType = Annotated[Literal["function"], BeforeValidator(_function_type)]


class FunctionTool(Cached):
    type: _FunctionType
    function: FunctionFields


class FlatFunctionTool(FunctionFields):
    """Function as the Responses API describes it, which Cursor also sends to chats."""

    type: _FunctionType

    @property
    def function(self) -> FunctionFields:
        return self


def _is_flat(value: object) -> bool:
    return isinstance(value, dict) and "name" in value and "function" not in value


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("nested")] | Annotated[FlatFunctionTool, Tag("flat")],
    Discriminator(
        lambda value: "flat" if _is_flat(value) or isinstance(value, FlatFunctionTool) else "nested"
    ),
]


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class FlatNamedTool(NamedFunction):
    """Named function as the Responses API writes it."""

    type: Literal["function"]


_AnyNamedTool = Annotated[
    Annotated[NamedTool, Tag("nested")] | Annotated[FlatNamedTool, Tag("flat")],
    Discriminator(lambda value: "flat" if _is_flat(value) or isinstance(value, FlatNamedTool) else "nested"),
]


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_AnyNamedTool], Field(min_length=1)]


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "word"
    if isinstance(value, NamedTool | AllowedChoice):
        return value.type
    if isinstance(value, FlatNamedTool):
        return "flat"
    kind = cast("dict[str, object]", value).get("type") if isinstance(value, dict) else None
    if kind == "function" and _is_flat(cast("object", value)):
        return "flat"
    return kind if kind in ("function", "allowed_tools") else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[FlatNamedTool, Tag("flat")]
    | Annotated[AllowedChoice, Tag("allowed_tools")],
    Discriminator(
        _choice_kind,
        custom_error_type="tool_choice",
        custom_error_message="Input should be 'none', 'auto', 'required', or an object of type 'function' or 'allowed_tools'",
    ),
]


class AnswerStart(Body):
    """Fields that say how a chat's answer starts."""

    add_generation_prompt: bool | None = None
    """With messages: add the start of an answer; true by default, unless the last message is continued."""
    continue_final_message: bool | None = None
    """With messages: the last one is the start of the answer."""

    def check_start(self) -> None:
        """Raise `RequestError` where an answer should both begin and be continued."""
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "'add_generation_prompt' begins an answer, and 'continue_final_message' continues one; "
                "leave out one of them.",
                param="add_generation_prompt",
            )


def read_tool_use(
    tools: Sequence[AnyTool] | None, choice: ToolChoice | None, *, parallel: bool | None
) -> ToolUse:
    """Return the tools and the tool choice.

    Raises:
        RequestError: two tools have the same name, or the choice names no tool.
    """
    read = [
        Tool(given.name, given.description, given.parameters, bool(given.strict))
        for given in (tool.function for tool in tools or ())
    ]
    check_names([tool.name for tool in read], "tools[{}].function.name")
    asked = ToolUse(tools=read, parallel=parallel is not False)
    if choice is None or isinstance(choice, str):
        return choose(asked, choice or "auto", None, "tool_choice")
    if isinstance(choice, FlatNamedTool):
        return choose(asked, "required", [choice.name], "tool_choice.name")
    if isinstance(choice, NamedTool):
        return choose(asked, "required", [choice.function.name], "tool_choice.function.name")
    allowed = choice.allowed_tools
    names = [tool.name if isinstance(tool, FlatNamedTool) else tool.function.name for tool in allowed.tools]
    return choose(asked, allowed.mode, names, "tool_choice.allowed_tools.tools")


def check_names(names: Sequence[str], place: str) -> None:
    """Refuse two tools of the same name. `place` is the path of a name, with `{}` for the tool's number."""
    known = set[str]()
    for number, name in enumerate(names):
        if name in known:
            raise RequestError(
                f"Two tools have the name '{name}'; give each tool another name.", param=place.format(number)
            )
        known.add(name)


def choose(
    use: ToolUse, choice: Literal["none", "auto", "required"], names: Sequence[str] | None, param: str
) -> ToolUse:
    """Return the tools with the tool choice. `names` are the callable tools; None: all.

    Raises:
        RequestError: the choice names an unknown tool, or there is no tool to call.
    """
    known = {tool.name for tool in use.tools}
    for name in names or ():
        if name not in known:
            there = ", ".join(f"'{tool}'" for tool in sorted(known)) or "none"
            raise RequestError(f"'{param}' names '{name}'; of 'tools' there is {there}.", param=param)
    if choice == "required" and not known:
        raise RequestError(f"'{param}' requires a call, but there are no 'tools' to call.", param=param)
    allowed = None if names is None else frozenset(names)
    return ToolUse(use.tools, choice, allowed, use.parallel)
