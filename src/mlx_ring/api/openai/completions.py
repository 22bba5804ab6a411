"""`/v1/completions`, and what other routes without a chat share with it."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, cast

from pydantic import ConfigDict, Discriminator, Field, Tag
from starlette.requests import Request
from starlette.routing import Router

from mlx_ring.api.context import ApiContext
from mlx_ring.api.generation import Answer, AnswerCounts, Generation, costs, usage
from mlx_ring.api.openai import schemas
from mlx_ring.api.openai.chat import STREAM_FORMAT, system_fingerprint
from mlx_ring.api.openai.sampling import (
    MOST_TOKENS,
    UNLIMITED,
    AnswerFields,
    TokenId,
    check_stream_options,
    finish_reason,
    known_tokens,
    sampling_params,
    with_derived_seed,
)
from mlx_ring.api.openai.schemas import TokenText, TokenTexts, finite_logprob
from mlx_ring.api.openapi import documented_post, needs
from mlx_ring.api.request_body import Unsupported
from mlx_ring.api.service import Answering, Tokenizer
from mlx_ring.api.streaming import JsonStream, QuietReason, new_id, time_created, while_connected
from mlx_ring.core.errors import RequestError
from mlx_ring.core.generation import ChoiceDelta, Delta, GenerateRequest
from mlx_ring.core.types import FinishReason, SamplingParams, TokenLogprob

Tokens = Annotated[list[TokenId], Field(min_length=1)]


def _kind(value: object) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = cast("list[object]", value)[0] if value else 0
    return "texts" if isinstance(first, str) else "ids" if isinstance(first, list) else "tokens"


TextOrTokens = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1), Tag("texts")]
    | Annotated[Tokens, Tag("tokens")]
    | Annotated[list[Tokens], Field(min_length=1), Tag("ids")],
    Discriminator(
        _kind,
        custom_error_type="text_or_tokens",
        custom_error_message="Input should be a string, a list of strings, token ids or a list of such lists",
    ),
]


def each(given: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    """Return each text or token list of a prompt."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [cast("list[int]", given)]
    return cast("list[str | list[int]]", given)


_DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""
_MOST_ANSWERS = 128
"""Largest number of answers to one request: prompts times `n`."""


class CompletionRequest(AnswerFields):
    model_config = ConfigDict(json_schema_extra={"dependentSchemas": needs("stream_options", of="stream")})

    prompt: TextOrTokens
    max_tokens: Annotated[int, Field(ge=UNLIMITED, le=MOST_TOKENS)] | None = None
    """0: no answer; with `echo` the prompt alone. -1: to the end of the context."""
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Accepted only if equal to `n`, because the server does not select the best answers."""
    suffix: Annotated[None, Unsupported("text can only be added at the end; leave it out.", ("",))] = None


def routes(context: ApiContext) -> Router:
    router = Router()

    async def completions(
        request: Request,
    ) -> schemas.Completion | JsonStream[schemas.CompletionChunk]:
        fields = await context.read(request, CompletionRequest)
        service = context.model(fields.model)
        check_stream_options(fields)
        _check_counts(fields)
        sampling = sampling_params(
            fields, service, max_tokens=_max_tokens(fields), top_logprobs=fields.logprobs
        )
        given = [
            prompt if isinstance(prompt, str) else known_tokens(prompt, service, "prompt")
            for prompt in each(fields.prompt)
        ]
        engine = await context.answering(service)
        prompts = [
            await context.prompts.encode(service, prompt) if isinstance(prompt, str) else prompt
            for prompt in given
        ]
        task = Task(
            id=new_id("cmpl-"),
            model=service.model_id,
            prompts=prompts,
            sampling=[with_derived_seed(sampling, choice) for choice in range(fields.n or 1)],
            prompt_field="prompt",
            prompts_share_seeds=fields.names_seed,
            prompt_logprobs=fields.logprobs if fields.echo else None,
        )
        writer = CompletionWriter(service.tokenizer, fields, prompts)
        if fields.stream:
            return stream_completion(
                engine,
                task,
                writer,
                usage_chunk=fields.wants_usage_chunk,
                usage_always=fields.wants_usage_always,
                keep_alive_s=context.settings.keep_alive_s,
            )
        return await answer_whole(request, engine, task, writer)

    for path in ("/v1/completions", "/completions"):
        documented_post(router, path, completions, CompletionRequest, schemas.COMPLETION)
    return router


class CompletionWriter:
    """Writer of choices with text. With `echo` they start with the prompt's text and its log-probabilities."""

    def __init__(
        self, tokenizer: Tokenizer, fields: CompletionRequest, prompts: Sequence[tuple[int, ...]]
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)
        self._logprobs = fields.logprobs is not None
        self._prompts = [tokens for tokens in prompts for _ in range(fields.n or 1)]
        self._echoes = [
            self._echo(prompt) if fields.echo else ""
            for prompt in each(fields.prompt)
            for _ in range(fields.n or 1)
        ]
        self._positions = [_Position(echo) for echo in self._echoes]

    def opening(self, index: int) -> schemas.CompletionChoice | None:
        """Return the echo. It is sent at once, or with the first delta if it has log-probabilities."""
        echo = self._echoes[index]
        return None if not echo or self._logprobs else _choice(index, echo)

    def piece(self, index: int, delta: Delta) -> schemas.CompletionChoice | None:
        """Return the addition of this delta, or None."""
        scored = self._scored(index, delta.prompt_logprobs, delta.logprobs)
        text = delta.text if delta.prompt_logprobs is None else self._echoes[index] + delta.text
        if not text and (scored is None or not scored["tokens"]):
            return None
        return _choice(index, text, scored)

    def closing(self, index: int, delta: Delta) -> schemas.CompletionChoice:
        return _choice(index, "", end=delta.finish_reason)

    def whole(self, index: int, answer: Answer) -> schemas.CompletionChoice:
        scored = self._scored(index, answer.prompt_logprobs, answer.logprobs)
        return _choice(index, self._echoes[index] + answer.text, scored, answer.finish_reason)

    def _echo(self, prompt: str | Sequence[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(
            list(prompt), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _scored(
        self,
        index: int,
        prompt: Sequence[TokenLogprob | None] | None,
        answer: Sequence[TokenLogprob],
    ) -> schemas.CompletionLogprobs | None:
        if not self._logprobs:
            return None
        pairs = list(zip(self._prompts[index], prompt or (), strict=False))
        pairs += [(scored.token, scored) for scored in answer]
        names = [self._texts[token].name for token, _ in pairs]
        position = self._positions[index]
        return {
            "text_offset": [position.pass_token(self._texts[token]) for token, _ in pairs],
            "tokens": names,
            "token_logprobs": [
                None if scored is None else finite_logprob(scored.logprob) for _, scored in pairs
            ],
            "top_logprobs": [None if scored is None else self._top(scored) for _, scored in pairs],
        }

    def _top(self, scored: TokenLogprob) -> dict[str, float]:
        """Return the most likely tokens and the sampled one."""
        likely = (*scored.top, (scored.token, scored.logprob))
        return {self._texts[token].name: finite_logprob(logprob) for token, logprob in likely}


class _Position:
    """Offsets of a choice's scored tokens in its text. A character counts with its last byte."""

    def __init__(self, echo: str) -> None:
        """Start at the echo. It may lack the space that SentencePiece adds before the first word."""
        self._echo = echo
        self._offset = 0
        self._drops_space = bool(echo) and echo[0] != " "
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")

    def pass_token(self, token: TokenText) -> int:
        """Return the offset of the token's start, in characters."""
        offset = self._offset
        if token.special:
            # A special token is in the text only if the prompt has it, not if the tokenizer or the model adds it.
            self._offset += len(token.text) if self._echo.startswith(token.text, offset) else 0
        else:
            dropped = self._drops_space and token.data.startswith(b" ")
            self._offset += len(self._decoder.decode(token.data)) - dropped
            self._drops_space = False
        return offset


def _choice(
    index: int,
    text: str,
    logprobs: schemas.CompletionLogprobs | None = None,
    end: FinishReason | None = None,
) -> schemas.CompletionChoice:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason(end)}


def _max_tokens(fields: CompletionRequest) -> int | None:
    if fields.max_tokens is None:
        return _DEFAULT_MAX_TOKENS
    return None if fields.max_tokens == UNLIMITED else fields.max_tokens


def _check_counts(fields: CompletionRequest) -> None:
    n = fields.n or 1
    if fields.best_of is not None and fields.best_of != n:
        raise RequestError(
            f"'best_of' is {fields.best_of} and 'n' is {n}: choosing among answers is not supported.",
            param="best_of",
        )
    answers = n * len(each(fields.prompt))
    if answers > _MOST_ANSWERS:
        raise RequestError(
            f"'prompt' and 'n' ask for {answers} answers; one request may have {_MOST_ANSWERS} at most.",
            param="prompt",
        )


@dataclass(frozen=True, slots=True)
class Task:
    """Work of one HTTP request."""

    id: str
    model: str
    prompts: Sequence[tuple[int, ...]]
    sampling: Sequence[SamplingParams]
    """Sampling parameters of the answers to each prompt."""
    prompt_field: str
    """Name of the request's field with the prompt, for errors."""
    prompts_share_seeds: bool = True
    """True if equal prompts get equal answers, because the request names the seed."""
    prompt_logprobs: int | None = None
    created: int = field(default_factory=time_created)

    def generation(self, engine: Answering) -> Generation:
        """Return the answers in the order of their prompts."""
        pairs = [
            (prompt, params)
            for place, prompt in enumerate(self.prompts)
            for params in self._sampling_of(place)
        ]
        requests = [
            GenerateRequest(f"{self.id}-{index}", prompt, params, self.prompt_logprobs, continues_text=True)
            for index, (prompt, params) in enumerate(pairs)
        ]
        return Generation(engine, requests, self.prompt_field, len(self.sampling))

    def _sampling_of(self, place: int) -> Sequence[SamplingParams]:
        """Return the sampling parameters of the prompt at this place of the request."""
        if place == 0 or self.prompts_share_seeds:
            return self.sampling
        first = place * len(self.sampling)
        # The first parameters have the request's own seed, from which those of all others are derived.
        return [with_derived_seed(self.sampling[0], first + choice) for choice in range(len(self.sampling))]

    @property
    def origin(self) -> schemas.Origin:
        return {
            "created": self.created,
            "model": self.model,
            "system_fingerprint": system_fingerprint(),
        }


async def answer_whole(
    request: Request, engine: Answering, task: Task, writer: CompletionWriter
) -> schemas.Completion:
    """Return all choices in one body when all have ended. Stop at once if the client disconnects."""
    answers = await while_connected(request.receive, run_task(engine, task))
    return {
        "id": task.id,
        "object": "text_completion",
        **task.origin,
        "choices": [writer.whole(index, answer) for index, answer in enumerate(answers)],
        **costs(answers, len(task.sampling)),
    }


async def run_task(engine: Answering, task: Task) -> list[Answer]:
    """Return all answers. Cancellation stops them."""
    async with task.generation(engine) as generation:
        return await generation.run()


def stream_completion(
    engine: Answering,
    task: Task,
    writer: CompletionWriter,
    *,
    usage_chunk: bool,
    usage_always: bool,
    keep_alive_s: float,
) -> JsonStream[schemas.CompletionChunk]:
    """Stream the choices, with an event for each new piece of one."""
    empty: schemas.CompletionChunk = {
        "id": task.id,
        "object": "text_completion",
        **task.origin,
        "choices": [],
    }
    if usage_chunk:
        empty["usage"] = None

    def chunks(
        choices: Iterable[schemas.CompletionChoice | None], counts: Sequence[AnswerCounts] = ()
    ) -> Iterator[schemas.CompletionChunk]:
        origin = empty.copy()
        if usage_always and counts:
            origin["usage"] = usage(counts, len(task.sampling))
        return ({**origin, "choices": [choice]} for choice in choices if choice is not None)

    async def batches(
        generation: Generation,
    ) -> AsyncGenerator[Iterable[schemas.CompletionChunk] | QuietReason]:
        yield chunks(map(writer.opening, range(len(generation.answers))))
        counts = [AnswerCounts()] * len(generation.answers)
        async with aclosing(generation.batches(keep_alive_s)) as pieces:
            async for batch in pieces:
                events: list[schemas.CompletionChunk] = []
                for piece in batch:
                    delta = piece.delta
                    counts[piece.index] = AnswerCounts(
                        delta.prompt_tokens, delta.completion_tokens, delta.cached_tokens
                    )
                    events += chunks(_choices(writer, piece), counts)
                yield generation.fill_silence(events, came=bool(batch))
        if usage_chunk:
            yield [{**empty, **costs(generation.answers, len(task.sampling))}]

    return JsonStream(lambda: task.generation(engine), batches, STREAM_FORMAT)


def _choices(writer: CompletionWriter, piece: ChoiceDelta) -> Iterator[schemas.CompletionChoice | None]:
    yield writer.piece(piece.index, piece.delta)
    if piece.delta.finish_reason is not None:
        yield writer.closing(piece.index, piece.delta)
