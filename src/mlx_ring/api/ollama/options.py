"""Ollama's `options`: how tokens are drawn, and what else its own engine could be told."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from mlx_ring.api.body import Body, Refused, needs
from mlx_ring.api.ollama.messages import Format, Think
from mlx_ring.api.ollama.names import KeepAlive
from mlx_ring.api.openai.sampling import (
    Count,
    Penalty,
    SamplingFields,
    Share,
    StopString,
    one_or_many,
    sampling_params,
)
from mlx_ring.api.service import ModelService
from mlx_ring.core.errors import RequestError
from mlx_ring.core.types import SamplingParams

_MOST_STOPS = 64
_ANY_SEED = -1

Stops = Annotated[
    Annotated[StopString, Tag("one")]
    | Annotated[list[StopString], Field(max_length=_MOST_STOPS), Tag("many")],
    Discriminator(
        one_or_many,
        custom_error_type="one_or_many",
        custom_error_message="Input should be a string or a list of strings",
    ),
]


def _off(value: float) -> float:
    """1 switches these filters off."""
    if value != 1:
        raise PydanticCustomError(
            "unsupported", "is not supported: this server has no such filter; leave it out."
        )
    return value


class Options(Body):
    num_predict: Annotated[int, Field(ge=-2)] | None = None
    """Most tokens of the answer; 0 and less: to the end of the context."""
    num_ctx: Count | None = None
    """The model's own context holds; one that is longer is refused."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    """-1: another one each time."""
    stop: Stops | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    """0: no repeat penalty. It is over all tokens otherwise (-1), however many are asked for."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    typical_p: Annotated[float, AfterValidator(_off)] | None = None
    tfs_z: Annotated[float, AfterValidator(_off)] | None = None
    mirostat: Annotated[None, Refused("tokens are not drawn that way here; leave it out.", (0,))] = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    num_keep: int | None = None
    """Of a context that is full, which here ends the answer."""
    penalize_newline: bool | None = None
    num_batch: int | None = None
    """This and what follows say how Ollama would load the model, and nothing of the answer."""
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


_Dropped = Annotated[
    None,
    Refused(
        "what is over the context is refused, and nothing is dropped; leave it out or give false.", (False,)
    ),
]


class AskedFields(Body):
    """What `/api/chat` and `/api/generate` both take."""

    model_config = ConfigDict(json_schema_extra={"dependentSchemas": needs("top_logprobs", of="logprobs")})

    model: str | None = None
    format: Format | None = None
    think: Think | None = None
    options: Options | None = None
    stream: bool | None = None
    """On if nothing is said."""
    keep_alive: KeepAlive | None = None
    """A loaded model stays until its memory is needed, however long is asked for."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncate: _Dropped = None
    shift: _Dropped = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def alternatives(self) -> int | None:
        """Beside each token's own log-probability; None: none are asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None


def read_sampling(
    fields: AskedFields, service: ModelService, default_max_tokens: int | None
) -> SamplingParams:
    """The engine's parameters; what is left open is the model's default.

    Raises:
        RequestError: a longer context is asked for than the model has, or what makes no sense alone.
    """
    given = fields.options or Options()
    if fields.top_logprobs is not None and not fields.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    check_context(given, service)
    drawing = SamplingFields(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        seed=None if given.seed == _ANY_SEED else given.seed,
        repetition_penalty=1.0 if given.repeat_last_n == 0 else given.repeat_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
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
    """Raises `RequestError` for a context that the model has not."""
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
