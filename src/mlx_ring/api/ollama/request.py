"""Bodies of Ollama's API: messages, options and names of models, and their conversion to the chat request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from mlx_ring.api.chat.model_format import ChatFormat
from mlx_ring.api.chat.prepare import effort_arguments
from mlx_ring.api.chat.request import AnswerFormat, Tool, arguments_of, template_call, text_of
from mlx_ring.api.context import ApiContext
from mlx_ring.api.openai.messages import MessageContent
from mlx_ring.api.openai.sampling import (
    MOST_TOKENS,
    STRINGS,
    Count,
    DrawFields,
    OneStop,
    SamplingFields,
    StopString,
    sampling_params,
)
from mlx_ring.api.openapi import needs
from mlx_ring.api.request_body import Body, Unsupported
from mlx_ring.api.service import ModelService
from mlx_ring.core.errors import RequestError, UnknownModel
from mlx_ring.core.types import SamplingParams

Images = Annotated[None, Unsupported("only text is supported; leave it out.", ([],))]


class CalledFunction(Body):
    name: str
    arguments: Annotated[
        Annotated[str, Tag("text")] | Annotated[dict[str, object], Tag("object")],
        Discriminator(lambda value: "text" if isinstance(value, str) else "object"),
    ]
    """An object; also its JSON, as clients of OpenAI's API send it."""
    index: int | None = None
    """Index of the call, which is part of an answer that the client sends back."""
    description: str | None = None


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class Message(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: MessageContent | None = None
    """Text; also text parts, as clients of OpenAI's API send them."""
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    name: str | None = None
    """Former name of `tool_name`."""
    tool_call_id: str | None = None
    images: Images = None


class ToolFunction(Body):
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None


class OfferedTool(Body):
    type: Literal["function"] | None = None
    function: ToolFunction

    def plain(self) -> Tool:
        function = self.function
        return Tool(function.name, function.description, function.parameters)


Format = Literal["", "json"] | dict[str, object]
"""A schema, or any JSON."""
Effort = Literal["low", "medium", "high"]


def _switch_or_effort(given: object) -> str | None:
    return "switch" if isinstance(given, bool) else "effort" if given in get_args(Effort) else None


Think = Annotated[
    Annotated[bool, Tag("switch")] | Annotated[Effort, Tag("effort")],
    Discriminator(
        _switch_or_effort,
        custom_error_type="switch_or_effort",
        custom_error_message="Input should be true, false, 'low', 'medium' or 'high'",
    ),
]


def read_format(given: Format | None) -> AnswerFormat:
    if isinstance(given, dict):
        return AnswerFormat("json_schema", given, param="format")
    return AnswerFormat("json_object" if given else "text", param="format")


_SWITCHES = ("enable_thinking", "thinking")


def read_think(format_: ChatFormat, think: Think | None) -> dict[str, object]:
    """Return the template arguments for `think`; none if the template decides.

    Raises:
        RequestError: the model has no reasoning, or no such reasoning effort.
    """
    if think is None:
        return {}
    if think is not True:
        return effort_arguments(format_, think or "none", param="think")
    switch = next((name for name in _SWITCHES if format_.knows(name)), None)
    if switch is None and not format_.reasons:
        raise RequestError("'think' is true, but this model has no reasoning; leave it out.", param="think")
    return {} if switch is None else {switch: True}


def template_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Return the messages as chat templates read them."""
    return [_template_message(message) for message in messages]


def _template_message(message: Message) -> dict[str, object]:
    plain: dict[str, object] = {"role": message.role, "content": text_of(message.content or "")}
    if message.thinking is not None:
        plain["reasoning_content"] = message.thinking
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    if (name := message.tool_name or message.name) is not None:
        plain["name"] = name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _call(call: ToolCall) -> dict[str, object]:
    given = call.function.arguments
    return template_call(
        call.function.name, arguments_of(given) if isinstance(given, str) else given, call.id
    )


LATEST = ":latest"
_NO_TIME = re.compile(r"[-+]?0+(\.0*)?(ns|us|µs|ms|s|m|h)?")
_DURATION = r"^[-+]?(0|(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h))+)$"


def _duration(text: str) -> str:
    if re.match(_DURATION, text) is None:
        raise PydanticCustomError(
            "unsupported", "is not a duration; write it like '5m' or '1h30m', or as a number of seconds."
        )
    return text


Duration = Annotated[str, AfterValidator(_duration), Field(json_schema_extra={"pattern": _DURATION})]
"""Durations in Go's format: `5m`, `1h30m`, `-1s`."""
KeepAlive = Duration | int | float


def find_model(context: ApiContext, name: str | None) -> ModelService:
    """Return the model of a name. The tag that Ollama adds to names is optional.

    Raises:
        UnknownModel: no model has this name.
    """
    try:
        return context.model(name)
    except UnknownModel:
        if name is None or not name.endswith(LATEST):
            raise
        return context.model(name.removesuffix(LATEST))


def unloads_at_once(keep_alive: KeepAlive | None) -> bool:
    """Return True if `keep_alive` is zero, which unloads the model in a request without a prompt."""
    if isinstance(keep_alive, str):
        return _NO_TIME.fullmatch(keep_alive) is not None
    return keep_alive is not None and keep_alive == 0


_MOST_STOPS = 64
OPTION_NAMES = {"repetition_penalty": "repeat_penalty"}
"""Sampling parameters whose names differ in Ollama."""

Stops = Annotated[OneStop | Annotated[list[StopString], Field(max_length=_MOST_STOPS), Tag("many")], STRINGS]


def _off(value: float) -> float:
    """Accept only 1, the value that disables these filters."""
    if value != 1:
        raise PydanticCustomError("unsupported", "is not supported; leave it out.")
    return value


def _plain_types(annotation: object) -> set[object]:
    """Return the types that a type consists of."""
    parts = get_args(annotation)
    return set[object]().union(*map(_plain_types, parts)) if parts else {annotation}


class Options(DrawFields):
    """Ollama's options. A `seed` of -1 means a random one."""

    num_predict: Annotated[int, Field(ge=-2, le=MOST_TOKENS)] | None = None
    """Largest number of tokens of the answer; 0 or less: to the end of the context."""
    num_ctx: Count | None = None
    """Requested context length. A longer one than the model's is refused; a shorter one is without effect."""
    stop: Stops | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    """0: no repeat penalty. With any other value the penalty covers all tokens, as with -1."""
    typical_p: Annotated[float, AfterValidator(_off)] | None = None
    tfs_z: Annotated[float, AfterValidator(_off)] | None = None
    mirostat: Annotated[None, Unsupported("this way of sampling is not supported; leave it out.", (0,))] = (
        None
    )
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    num_keep: int | None = None
    """Accepted without effect, because a full context ends the answer."""
    penalize_newline: bool | None = None
    num_batch: int | None = None
    """Accepted without effect, like the fields below: they configure how Ollama loads a model."""
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _take_whole_floats(cls, value: object) -> object:
        """Accept 4096.0 for 4096, as Ollama does: some languages and forms have only one kind of number."""
        if not isinstance(value, dict):
            return value
        options = cast("dict[str, object]", value)
        return {
            name: int(given)
            if name in _INTEGERS and isinstance(given, float) and given.is_integer()
            else given
            for name, given in options.items()
        }


_INTEGERS = frozenset(
    name for name, field in Options.model_fields.items() if int in _plain_types(field.annotation)
)
"""Names of the options that are whole numbers."""

_Dropped = Annotated[
    None,
    Unsupported(
        "a prompt beyond the context is refused, never shortened; leave it out or give false.", (False,)
    ),
]


class CommonFields(Body):
    """Fields that `/api/chat` and `/api/generate` share."""

    model_config = ConfigDict(json_schema_extra={"dependentSchemas": needs("top_logprobs", of="logprobs")})

    model: str | None = None
    format: Format | None = None
    think: Think | None = None
    options: Options | None = None
    stream: bool | None = None
    """True by default."""
    keep_alive: KeepAlive | None = None
    """Only 0 has an effect, in a request without a prompt. A loaded model stays until its memory is needed."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncate: _Dropped = None
    shift: _Dropped = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def lasts(self) -> bool:
        """True if the work continues when the client leaves."""
        return False

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives to each token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


def read_sampling(
    fields: CommonFields, service: ModelService, default_max_tokens: int | None
) -> SamplingParams:
    """Return the engine's parameters. A parameter that the request omits gets the model's default.

    Raises:
        RequestError: the context exceeds the model's, or a field lacks another one that it needs.
    """
    given = fields.options or Options()
    if fields.top_logprobs is not None and not fields.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    check_context(given, service)
    values: dict[str, Any] = {name: getattr(given, name) for name in DrawFields.model_fields}
    drawing = SamplingFields(
        **values, repetition_penalty=1.0 if given.repeat_last_n == 0 else given.repeat_penalty
    )
    params = sampling_params(
        drawing,
        service,
        max_tokens=_max_tokens(given.num_predict, default_max_tokens),
        top_logprobs=fields.alternatives,
    )
    stop = (given.stop,) if isinstance(given.stop, str) else tuple(given.stop or ())
    return replace(params, stop=stop)


def check_context(options: Options | None, service: ModelService) -> None:
    """Raise `RequestError` for a context longer than the model's."""
    asked = None if options is None else options.num_ctx
    if asked is not None and asked > service.context_length:
        raise RequestError(
            f"'options.num_ctx' is {asked}; this model's context is {service.context_length} tokens here.",
            param="options.num_ctx",
        )


def _max_tokens(num_predict: int | None, default: int | None) -> int | None:
    if num_predict is None:
        return default
    return num_predict if num_predict > 0 else None
