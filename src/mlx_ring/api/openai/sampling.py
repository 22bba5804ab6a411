"""Request fields of sampling parameters and of `response_format`, and their values for the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import Annotated, Any, Literal, cast

from pydantic import Discriminator, Field, StringConstraints, Tag

from mlx_ring.api.chat.request import AnswerFormat
from mlx_ring.api.openapi import JsonObject
from mlx_ring.api.request_body import Body, Unsupported
from mlx_ring.api.service import ModelService
from mlx_ring.api.streaming import draw_bits
from mlx_ring.core.errors import RequestError
from mlx_ring.core.types import Sampling, SamplingParams

_LEAST_TOP_P = 1e-6
"""Engine's value for a request's 0: only the most likely token. The engine's own 0 means "off"."""
_MOST_STOPS = 4
_LONGEST_STOP = 1024
_HIGHEST_BIAS = 100.0
_IDENTIFIER = "^(0|[1-9][0-9]*)$"
ANY_SEED = -1
"""Seed that asks for a random one, as in llama.cpp and Ollama."""


def _one_or_many(value: object) -> str | None:
    """Return the tag of a value in a string-or-list union."""
    return "one" if isinstance(value, str) else "many" if isinstance(value, list) else None


def by_number(message: str) -> Discriminator:
    """Return the choice between the types tagged `one`, of a string, and `many`, of a list; others get the message."""
    return Discriminator(_one_or_many, custom_error_type="one_or_many", custom_error_message=message)


StopString = Annotated[str, StringConstraints(min_length=1, max_length=_LONGEST_STOP)]
OneStop = Annotated[StopString, Tag("one")]
STRINGS = by_number("Input should be a string or a list of strings")
Stop = Annotated[OneStop | Annotated[list[StopString], Field(max_length=_MOST_STOPS), Tag("many")], STRINGS]
MOST_TOKENS = 2**31 - 1
"""Largest number of tokens that a request may name. Any above the context means its end."""
Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
UNLIMITED = -1
"""Limit of tokens that means none, as in llama.cpp and Ollama: an answer may reach the context's end."""
TokenId = Annotated[int, Field(ge=0)]
_MOST_STOP_TOKENS = 1024
Penalty = Annotated[float, Field(ge=-2, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]


Obfuscated = Annotated[None, Unsupported("streams are not padded; leave it out or give false.", (False,))]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """With `include_usage`: also count in every chunk."""
    include_obfuscation: Obfuscated = None


class DrawFields(Body):
    """Sampling parameters that have the same names in every dialect."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """-1 and 0: off."""
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None


class SamplingFields(DrawFields):
    """Fields of every endpoint that answers with text; those of `Sampling` have its names."""

    model: str | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[str, float],
            Field(
                json_schema_extra={
                    "propertyNames": {"pattern": _IDENTIFIER},
                    "additionalProperties": {
                        "type": "number",
                        "minimum": -_HIGHEST_BIAS,
                        "maximum": _HIGHEST_BIAS,
                    },
                }
            ),
        ]
        | None
    ) = None
    """Biases from -100 to 100 by token id."""
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=_MOST_STOP_TOKENS)] | None = None
    """Further tokens that end an answer. Like the model's own they are not part of it."""
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None

    @property
    def names_seed(self) -> bool:
        return self.seed is not None and self.seed != ANY_SEED


class EchoedSampling(JsonObject):
    """Sampling parameters that OpenAI's Responses API repeats in its answer, with the values that apply."""

    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float


def echoed_sampling(sampling: Sampling) -> EchoedSampling:
    """Return the parameters that an answer repeats."""
    return cast("EchoedSampling", {name: getattr(sampling, name) for name in EchoedSampling.__annotations__})


_NAMES = tuple(
    name for each in dataclass_fields(Sampling) if (name := each.name) in SamplingFields.model_fields
)


class AnswerFields(SamplingFields):
    """Fields that OpenAI's two text endpoints share."""

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    """False: a server with a journal does not keep the answer, so that it ends with its connection."""
    cache_prompt: Annotated[
        None,
        Unsupported("every prompt may use the prefix cache; leave it out or give true.", (True,)),
    ] = None

    @property
    def is_kept(self) -> bool:
        """True if a journal keeps the answer, for a client that comes back."""
        return bool(self.stream) and self.store is not False

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        options = self.stream_options
        return self.wants_usage_chunk and options is not None and bool(options.continuous_usage_stats)


def check_stream_options(fields: AnswerFields) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("'stream_options' needs 'stream': true.", param="stream_options")


def sampling_params(
    fields: SamplingFields, service: ModelService, *, max_tokens: int | None, top_logprobs: int | None
) -> SamplingParams:
    """Return the engine's parameters. A parameter that the request omits gets the model's default.

    Args:
        fields: the request.
        service: the model.
        max_tokens: limit of the answer; None: the end of the context.
        top_logprobs: number of alternatives to each token; None: no log-probabilities.
    """
    min_tokens = fields.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(
            f"'min_tokens' is {min_tokens}, above the limit of {max_tokens} tokens.", param="min_tokens"
        )
    values = {name: _given(fields, name, service.default_sampling) for name in _NAMES}
    params = SamplingParams(**values)
    return replace(
        params,
        top_p=max(params.top_p, _LEAST_TOP_P),
        top_k=_top_k(params.top_k, service.vocab_size),
        logit_bias=_logit_bias(fields.logit_bias or {}, service.vocab_size),
        seed=fields.seed if fields.seed is not None and fields.names_seed else draw_bits(63),
        logprobs=top_logprobs is not None,
        top_logprobs=min(top_logprobs or 0, service.vocab_size),
        max_tokens=None if max_tokens is None else min(max_tokens, service.context_length),
        min_tokens=min(min_tokens, service.context_length),
        ignore_eos=bool(fields.ignore_eos),
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        stop_token_ids=known_tokens(fields.stop_token_ids or (), service, "stop_token_ids"),
    )


def known_tokens(tokens: Sequence[int], service: ModelService, param: str) -> tuple[int, ...]:
    """Return a field's tokens. Raise `RequestError` if one is outside the vocabulary."""
    highest = max(tokens, default=0)
    if highest >= service.vocab_size:
        raise RequestError(
            f"'{param}' holds token id {highest}; this model's token ids are 0 to {service.vocab_size - 1}.",
            param=param,
        )
    return tuple(tokens)


def with_derived_seed(params: SamplingParams, choice: int) -> SamplingParams:
    """Return the parameters of one of several choices. The first keeps the seed, so it is the same for every `n`."""
    if choice == 0:
        return params
    digest = hashlib.blake2b(f"{params.seed}/{choice}".encode(), digest_size=8).digest()
    return replace(params, seed=int.from_bytes(digest))


def finish_reason(reason: str | None) -> Literal["stop", "length"] | None:
    """Return OpenAI's name for the end of an answer."""
    return None if reason is None else "length" if reason == "length" else "stop"


def _given(fields: SamplingFields, name: str, default: Sampling) -> Any:
    value: object = getattr(fields, name)
    return getattr(default, name) if value is None else value


def _top_k(value: int, vocab_size: int) -> int:
    """Return 0 for a number that filters nothing: a negative one, or one not below the vocabulary's size."""
    return 0 if value < 0 or value >= vocab_size else value


def _logit_bias(given: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    for name, bias in given.items():
        param = f"logit_bias.{name[:20]}"
        if (
            not name.isascii()
            or not name.isdecimal()
            or int(name[:12]) >= vocab_size
            or str(int(name[:12])) != name
        ):
            raise RequestError(
                f"'logit_bias' names token '{name[:20]}'; this model's token ids are 0 to {vocab_size - 1}.",
                param=param,
            )
        if abs(bias) > _HIGHEST_BIAS:
            raise RequestError(
                f"'logit_bias' of token {name} is {bias:g}; it should be from -100 to 100.", param=param
            )
    return tuple((int(name), bias) for name, bias in given.items())


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class SchemaFields(Body):
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, object] | None, Field(alias="schema")] = None
    """None: any object."""
    strict: bool | None = None
    """Accepted without effect: the schema is always enforced."""


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: SchemaFields


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")]


def read_format(given: ResponseFormat | None) -> AnswerFormat:
    """Return the required format of the answer's text."""
    if isinstance(given, SchemaFormat) and given.json_schema.schema_ is not None:
        return AnswerFormat("json_schema", given.json_schema.schema_, "response_format.json_schema.schema")
    if isinstance(given, SchemaFormat | JsonObjectFormat):
        return AnswerFormat("json_object")
    return AnswerFormat()
