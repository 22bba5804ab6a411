"""The items of a conversation as `/v1/responses` has them, and as chat templates read them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from mlx_ring.api.chat.messages import arguments_of, template_call
from mlx_ring.api.openai.sampling import one_or_many
from mlx_ring.api.request_body import Body, show

Plain = dict[str, object]
_SEALED = "mlx-ring:"


class InputText(Body):
    type: Literal["input_text", "text", "summary_text", "reasoning_text"]
    text: str
    prompt_cache_breakpoint: dict[str, object] | None = None
    """Without effect: every beginning is kept."""


class OutputText(Body):
    """As it came in an answer."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[object], Field(max_length=0)] | None = None
    logprobs: list[object] | None = None
    parsed: object = None
    """What an SDK read in it."""


class Refusal(Body):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[InputText | OutputText | Refusal, Field(discriminator="type")]
Content = Annotated[
    Annotated[str, Tag("one")] | Annotated[list[Part], Tag("many")],
    Discriminator(
        one_or_many,
        custom_error_type="one_or_many",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]


class Item(Body):
    """What an answer's own items have besides, and nobody needs again."""

    id: str | None = None
    status: str | None = None
    phase: str | None = None
    caller: dict[str, object] | None = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    parsed_arguments: object = None
    """What an SDK read in them."""


class FunctionCallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    name: str | None = None


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: list[InputText] | None = None
    content: list[InputText] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """What was thought, or a summary of it; empty where another server sealed it."""
        return _text(self.content or ()) or unseal(self.encrypted_content or "") or _text(self.summary or ())


_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _named(value: object) -> object:
    """An item with its type, which messages may leave out, and without the nulls of SDKs."""
    if not isinstance(value, dict):
        return value
    item = {name: given for name, given in cast("Plain", value).items() if given is not None}
    if "role" in item:
        item.setdefault("type", "message")
    if item.get("type") not in _KINDS:
        raise PydanticCustomError(
            "unsupported",
            "is of the type {kind}, which is not supported; this server reads {known}.",
            {"kind": show(item.get("type")), "known": ", ".join(_KINDS)},
        )
    return item


AnyItem = Annotated[
    Annotated[
        MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem, Field(discriminator="type")
    ],
    BeforeValidator(_named),
]


def template_messages(items: Iterable[AnyItem]) -> list[Plain]:
    """As chat templates read them: what is thought, said and called in one turn is one message.

    A thought that was cut off before anything was said is a message of its own.
    """
    messages: list[Plain] = []
    thought = ""
    for item in items:
        if thought and not _is_answer(item):
            messages.append(_thoughtful({"role": "assistant", "content": ""}, thought))
            thought = ""
        match item:
            case ReasoningItem():
                thought = "\n".join(text for text in (thought, item.text) if text)
            case FunctionCallOutputItem():
                messages.append({"role": "tool", "content": _text(item.output), "tool_call_id": item.call_id})
            case FunctionCallItem():
                turn = _turn(messages, thought)
                calls = cast("list[Plain]", turn.setdefault("tool_calls", []))
                calls.append(template_call(item.name, arguments_of(item.arguments), item.call_id))
                thought = ""
            case MessageItem(role="assistant"):
                messages.append(_thoughtful({"role": "assistant", "content": _text(item.content)}, thought))
                thought = ""
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": _text(item.content)})
    if thought:
        messages.append(_thoughtful({"role": "assistant", "content": ""}, thought))
    return messages


def _is_answer(item: AnyItem) -> bool:
    """Whether an item is part of what the assistant said, and not what it was told."""
    if isinstance(item, MessageItem):
        return item.role == "assistant"
    return not isinstance(item, FunctionCallOutputItem)


def _turn(messages: list[Plain], thought: str) -> Plain:
    """The assistant's message that a call belongs to: what it has just said, or one of its own."""
    if not messages or messages[-1]["role"] != "assistant" or thought:
        messages.append(_thoughtful({"role": "assistant", "content": ""}, thought))
    return messages[-1]


def _thoughtful(message: Plain, thought: str) -> Plain:
    return message | ({"reasoning_content": thought} if thought else {})


def _text(content: str | Sequence[InputText | OutputText | Refusal]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def seal(thought: str) -> str:
    """What was thought as the opaque text that clients keep for the next request, where they ask for one."""
    return _SEALED + base64.b64encode(thought.encode()).decode()


def unseal(sealed: str) -> str:
    """What was thought, of our own making; another server's seal cannot be opened."""
    if not sealed.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
