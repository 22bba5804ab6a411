"""A chat in the common form of all dialects: the request, which chat templates read, and the parts of its answer."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, cast

from mlx_ring.api.request_body import parse_json
from mlx_ring.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class Tool:
    """Function that the client can run."""

    name: str
    description: str | None = None
    parameters: Mapping[str, object] | None = None
    """JSON schema of its arguments, an object; None if it takes none."""
    strict: bool = False
    """True to enforce the schema, because no call is better than one with invalid arguments."""

    def for_template(self) -> dict[str, object]:
        """Return the tool as chat templates read it, in the form of OpenAI's chat."""
        function: dict[str, object] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters or {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools, and the tool choice."""

    tools: Sequence[Tool] = ()
    """All tools that the prompt lists."""
    choice: Literal["none", "auto", "required"] = "auto"
    allowed: frozenset[str] | None = None
    """Names of the callable tools; None: all. One name with `required` forces a call of that tool."""
    parallel: bool = True
    """True if one answer may contain several calls."""

    @property
    def callable_tools(self) -> list[Tool]:
        """Tools that this answer may call."""
        if self.choice == "none":
            return []
        return [tool for tool in self.tools if self.allowed is None or tool.name in self.allowed]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Required format of the answer's text."""

    kind: Literal["text", "json_object", "json_schema"] = "text"
    schema: Mapping[str, object] = field(default_factory=dict[str, object])
    """Schema of a `json_schema`."""
    param: str = "response_format"
    """Name of the request's field, for errors."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat so far, and the requirements on its next answer."""

    messages: Sequence[Mapping[str, object]]
    """Messages in the form of chat templates, with roles system, user, assistant and tool.

    `content` is a string, `tool_calls` have objects as arguments, and reasoning is in `reasoning_content`.
    """
    tool_use: ToolUse = field(default_factory=ToolUse)
    format: AnswerFormat = field(default_factory=AnswerFormat)
    template_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])
    """Further arguments of the template, such as `enable_thinking`."""
    continues: bool = False
    """True if the last message is the start of the answer."""
    adds_generation_prompt: bool = True
    """True if the template writes the start of an answer after the last message. It does not where that continues."""
    messages_param: str = "messages"
    """Name of the field with the messages, for errors."""
    kwargs_param: str = "chat_template_kwargs"


class _TextPart(Protocol):
    @property
    def text(self) -> str: ...


def text_of(content: str | Iterable[_TextPart]) -> str:
    """Return the text of a message. Parts are separate texts: each begins on a line of its own, as in vLLM."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def join_neighbours(
    messages: Iterable[Mapping[str, object]], roles: Collection[str]
) -> list[dict[str, object]]:
    """Join adjacent messages of the same role, if it is one of these, each as a paragraph."""
    joined: list[dict[str, object]] = []
    for role, group in itertools.groupby(messages, key=lambda message: message["role"]):
        adjacent = list(group)
        joined += [_together(adjacent)] if role in roles else map(dict, adjacent)
    return joined


def _together(messages: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return one message that contains all of these, in time linear in their lengths."""
    both = {name: value for message in messages for name, value in message.items()}
    for name in ("content", "reasoning_content"):
        texts = [message[name] for message in messages if name in message]
        if len(texts) > 1:
            both[name] = _text(texts, "\n")
    if calls := [call for message in messages for call in _calls(message)]:
        both["tool_calls"] = calls
    return both


def _text(texts: Iterable[object], between: str) -> str:
    return between.join(str(text) for text in texts if text)


def _calls(message: Mapping[str, object]) -> list[object]:
    return cast("list[object]", message.get("tool_calls", []))


def with_reasoning(
    messages: Iterable[Mapping[str, object]], *, calls_have_one_text: bool
) -> list[dict[str, object]]:
    """Add reasoning under the names that templates use: `reasoning` (Gemma) and `thinking` (gpt-oss, LFM).

    With `calls_have_one_text`, reasoning and content beside calls become one reasoning text, as in gpt-oss's template.
    """
    return [_with_reasoning(message, calls_have_one_text=calls_have_one_text) for message in messages]


def _with_reasoning(message: Mapping[str, object], *, calls_have_one_text: bool) -> dict[str, object]:
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return dict(message)
    named = {**message}
    if calls_have_one_text and "tool_calls" in message and message["content"]:
        reasoning = _text((reasoning, message["content"]), "\n")
        named["content"] = ""
    return named | dict.fromkeys(_REASONING_FIELDS, reasoning)


def in_order_of_calls(messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Sort the results of tools in the order of their calls.

    Clients send results in any order, with ids. Most templates show no ids, so a model reads the first result as that of the
    first call.
    """
    ordered: list[Mapping[str, object]] = []
    places = dict[object, int]()
    for is_result, group in itertools.groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_result and places:
            ordered += _in_order(group, places)
        else:
            ordered += group
        if not is_result:
            places = _places(ordered[-1])
    return ordered


def _in_order(
    results: Iterable[Mapping[str, object]], places: Mapping[object, int]
) -> list[Mapping[str, object]]:
    return sorted(results, key=lambda result: places.get(result.get("tool_call_id"), len(places)))


def _places(message: Mapping[str, object]) -> dict[object, int]:
    """Return the positions of a message's calls by their ids."""
    calls = cast("list[Mapping[str, object]]", _calls(message))
    return {call["id"]: place for place, call in enumerate(calls) if "id" in call}


_END = re.compile(r"<\|(?:end|return|call)\|>|<\|start\|>(?:assistant)?")
_HEADER = re.compile(
    r"(?P<to>to=[\w.-]+ *)?<\|channel\|>(?P<channel>\w*)(?P<rest>[^\n]{0,200}?)<\|message\|>"
)
_RECIPIENT = re.compile(r"to=(?:functions\.)?(?P<name>[\w-]+)")


def without_channels(message: Mapping[str, object]) -> dict[str, object]:
    """Return a message whose text is an answer of gpt-oss as its tokens spell it, with its parts in their own fields.

    Clients send back what servers without a reader of this format answered, and gpt-oss's template refuses it.
    Text that does not begin with a header only writes about them.
    """
    cleaned = dict(message)
    reasoning, content = (str(message.get(name) or "") for name in ("reasoning_content", "content"))
    begun = (reasoning or content).lstrip().startswith(("<|channel|>", "<|start|>"))
    if message["role"] != "assistant" or not begun or not _HEADER.search(reasoning + content):
        return cleaned
    texts: dict[str, list[str]] = {"analysis": [], "final": []}
    calls = _calls(message)
    written: list[object] = []
    for channel, recipient, text in _channels(content):
        if recipient:
            written.append(template_call(recipient, arguments_of(text), None))
        else:
            texts["analysis" if channel == "analysis" else "final"].append(text)
    cleaned["content"] = _text(texts["final"], "\n")
    if calls or written:
        cleaned["tool_calls"] = calls or written
    if said := _text((text for *_, text in _channels(reasoning)), "\n") or _text(texts["analysis"], "\n"):
        cleaned["reasoning_content"] = said
    return cleaned


def _channels(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the channel, the called function and the text of each message in an answer of gpt-oss."""
    for piece in _END.split(text):
        headers = list(_HEADER.finditer(piece))
        before = piece[: headers[0].start()] if headers else piece
        if said := before.strip():
            yield "final", "", said
        ends = (*(header.start() for header in headers[1:]), len(piece))
        for header, end in zip(headers, ends, strict=False):
            found = _RECIPIENT.search(f"{header['to'] or ''}{header['rest']}")
            yield header["channel"], "" if found is None else found["name"], piece[header.end() : end].strip()


def for_template(conversation: Conversation, *, calls_have_one_text: bool) -> Conversation:
    """Return the conversation with its messages as templates expect them."""
    ordered = in_order_of_calls(conversation.messages)
    if calls_have_one_text:
        ordered = [without_channels(message) for message in ordered]
    return replace(conversation, messages=with_reasoning(ordered, calls_have_one_text=calls_have_one_text))


def template_call(name: str, arguments: object, call_id: str | None) -> dict[str, object]:
    """Return a tool call as templates read it, without an id if the dialect has none."""
    named = {} if call_id is None else {"id": call_id}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_of(text: str) -> object:
    """Return the arguments as an object, or as the model's text if that is no JSON object.

    Clients send an empty text or `null` for a call without arguments.
    """
    try:
        value = parse_json(text.encode()) if text.strip() else None
    except RequestError:
        return text
    return cast("dict[str, object]", value or {}) if value is None or isinstance(value, dict) else text


# ---- what strict templates accept

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
"""Ids that Mistral's templates require."""


def simpler_forms(messages: Sequence[Mapping[str, object]]) -> Iterator[Sequence[Mapping[str, object]]]:
    """Yield the messages in forms for a template that rejects them, the one with the fewest changes first.

    Clients do not know the model. They send system messages amid a chat, adjacent messages of one role, ids of any kind,
    and arguments that were cut off. Each form keeps the order of texts. How it changes a message depends on no later one,
    except that neighbours may be joined. A cached prefix of an earlier request matches up to the first message that the
    template got in another form then, at most.
    """
    plain = list(_with_simple_calls(messages))
    leading = list(itertools.takewhile(lambda message: message["role"] == "system", plain))
    simple = (plain, _without_system(plain, kept=len(leading)), _without_system(plain, kept=0))
    written = map(_with_text_arguments, simple if any(map(_calls, messages)) else ())
    last = list(map(dict, messages))
    for form in itertools.chain(simple, written):
        if form != last:
            yield form
        last = form


def _without_system(messages: Sequence[Mapping[str, object]], *, kept: int) -> list[dict[str, object]]:
    """Return the messages with the system's as the user's, except the first `kept`, and with neighbours joined."""
    turned = (
        {**message, "role": "user"} if place >= kept and message["role"] == "system" else message
        for place, message in enumerate(messages)
    )
    return join_neighbours(turned, ("system", "user", "assistant"))


def _with_simple_calls(messages: Iterable[Mapping[str, object]]) -> Iterator[dict[str, object]]:
    """Yield the messages with objects as arguments, and with ids of nine letters and digits for all calls."""
    waiting = deque[str]()
    for place, message in enumerate(messages):
        changed = dict(message)
        if calls := cast("Sequence[Mapping[str, object]]", _calls(message)):
            simple = [_simple_call(call, f"{place}/{number}") for number, call in enumerate(calls)]
            changed["tool_calls"] = simple
            waiting = deque(str(call["id"]) for call in simple)
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            following = waiting.popleft() if waiting else str(place)
            changed["tool_call_id"] = _short_id(following if given is None else str(given))
        yield changed


def _with_text_arguments(messages: Iterable[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return the messages with JSON as arguments, which DeepSeek's templates join with other text."""
    written: list[dict[str, object]] = []
    for message in messages:
        calls = [dict(call) for call in cast("Sequence[Mapping[str, object]]", _calls(message) or ())]
        for call in calls:
            function = cast("Mapping[str, object]", call["function"])
            text = json.dumps(function["arguments"], ensure_ascii=False)
            call["function"] = {**function, "arguments": text}
        written.append({**message, "tool_calls": calls} if calls else dict(message))
    return written


def _simple_call(call: Mapping[str, object], place: str) -> dict[str, object]:
    function = cast("Mapping[str, object]", call["function"])
    arguments = function["arguments"]
    if not isinstance(arguments, Mapping):
        function = {**function, "arguments": {"arguments": arguments}}
    return {**call, "id": _short_id(str(call.get("id", place))), "function": function}


def _short_id(given: str) -> str:
    if _SHORT_ID.fullmatch(given):
        return given
    return hashlib.blake2b(given.encode(errors="backslashreplace")).hexdigest()[:9]


# ---- its answer

EndReason = Literal["stop", "length", "tool_calls"]
"""Reason of an answer's end: the model or a stop string ended it, its limit, or tool calls."""


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpening:
    """Start of a tool call. It has the whole name. The arguments follow before any other part."""

    index: int
    """Number of the call in the answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Piece of a call's arguments. All pieces joined are one JSON object."""

    index: int
    text: str


AnswerPart = ReasoningText | ContentText | CallOpening | CallArguments


# ---- schemas of arguments

_MOST_DEPTH = 16
"""Limit of references and choices within each other that are followed in a schema."""
_KINDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("null", "none"), "null"),
    (("int", "uint", "long", "short", "unsigned"), "integer"),
    (("num", "float", "double"), "number"),
    (("bool", "binary"), "boolean"),
    (("obj", "dict", "map"), "object"),
    (("arr", "list", "tuple"), "array"),
    (("str", "text", "varchar", "char", "enum"), "string"),
)
"""Starts of names of types, in JSON Schema and elsewhere."""
_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (object, "null"),
)


def kinds_of(
    schema: object, root: Mapping[str, object], visited: set[str] | None = None, depth: int = 0
) -> set[str]:
    """Return the types of JSON that a schema allows; none if it does not say.

    `visited` are the references that were followed already, whose types need not be found again.
    """
    visited = set() if visited is None else visited
    if not isinstance(schema, dict) or depth > _MOST_DEPTH:
        return set()
    given = cast("dict[str, object]", schema)
    reference = given.get("$ref")
    if isinstance(reference, str):
        referred = None if reference in visited else _referred(reference, root)
        visited.add(reference)
        return kinds_of(referred, root, visited, depth + 1)
    named = given.get("type")
    if named is not None:
        names = cast("list[object]", named) if isinstance(named, list) else [named]
        return {kind for name in names for starts, kind in _KINDS if str(name).lower().startswith(starts)}
    if "const" in given or isinstance(given.get("enum"), list):
        values = [given["const"]] if "const" in given else cast("list[object]", given["enum"])
        return {next(kind for type_, kind in _TYPES if isinstance(value, type_)) for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := given.get(key), list):
            each = [kinds_of(option, root, visited, depth + 1) for option in cast("list[object]", options)]
            return set[str]().union(*each)
    return {"object"} if "properties" in given else {"array"} if "items" in given else set()


def _referred(place: str, root: Mapping[str, object]) -> object:
    found: Any = root
    for step in place.removeprefix("#/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        found = cast("dict[str, object]", found).get(name) if isinstance(found, dict) else None
    return found


def properties_of(tool: Tool | None) -> Mapping[str, object]:
    properties = ((tool and tool.parameters) or {}).get("properties")
    return cast("dict[str, object]", properties) if isinstance(properties, dict) else {}


def required_of(tool: Tool) -> list[object]:
    required = (tool.parameters or {}).get("required")
    return cast("list[object]", required) if isinstance(required, list) else []
