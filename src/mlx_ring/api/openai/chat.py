"""`/v1/chat/completions`."""

from __future__ import annotations

import secrets
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from mlx_ring.api.body import Body
from mlx_ring.api.generation import Answer
from mlx_ring.api.openai.answering import AnswerStream, Json, Task, answer_whole
from mlx_ring.api.openai.messages import Message, template_messages
from mlx_ring.api.openai.sampling import (
    AnswerFields,
    Count,
    check_stream_options,
    finish_reason,
    sampling_params,
    with_derived_seed,
)
from mlx_ring.api.openai.token_text import TokenTexts
from mlx_ring.api.openapi import documented
from mlx_ring.api.routes import ApiContext
from mlx_ring.core.errors import RequestError
from mlx_ring.core.types import TokenLogprob
from mlx_ring.engine.streams import Delta

_NO_LOGPROB = -9999.0
"""OpenAI's number for a token that cannot be; JSON has no infinity."""


def _refuse_tools(tools: list[object]) -> list[object]:
    if tools:
        raise PydanticCustomError(
            "unsupported", "is not supported: this server calls no tools; leave it out."
        )
    return tools


class TextFormat(Body):
    type: Literal["text"]


class ChatRequest(AnswerFields):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    response_format: TextFormat | None = None
    tools: Annotated[list[object], AfterValidator(_refuse_tools)] | None = None
    tool_choice: Literal["none", "auto"] | None = None


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()

    async def chat_completions(request: Request) -> Response:
        fields = await context.read(request, ChatRequest)
        service, settings = context.model(fields.model), context.settings
        check_stream_options(fields)
        max_tokens = _max_tokens(fields, settings.default_max_tokens)
        sampling = sampling_params(fields, service, max_tokens=max_tokens, top_logprobs=_top_logprobs(fields))
        engine = await context.answering(service)
        prompt = await context.prompts.encode_chat(
            service.tokenizer, template_messages(fields.messages), fields.chat_template_kwargs or {}
        )
        task = Task(
            id=f"chatcmpl-{secrets.token_hex(12)}",
            model=service.model_id,
            object="chat.completion",
            chunk_object="chat.completion.chunk",
            prompts=[prompt],
            sampling=[with_derived_seed(sampling, choice) for choice in range(fields.n or 1)],
            prompt_field="messages",
        )
        writer = ChatWriter(TokenTexts(service.tokenizer), logprobs=sampling.logprobs)
        if fields.stream:
            return AnswerStream(
                engine,
                task,
                writer,
                usage_chunk=fields.wants_usage_chunk,
                keep_alive_s=settings.keep_alive_s,
            )
        return await answer_whole(request, engine, task, writer)

    for path in ("/v1/chat/completions", "/chat/completions"):
        documented(router, path, chat_completions, ChatRequest)
    return router


class ChatWriter:
    """Choices with a message, or the deltas of one."""

    def __init__(self, texts: TokenTexts, *, logprobs: bool) -> None:
        self._texts = texts
        self._logprobs = logprobs

    def opening(self, index: int) -> Json:
        return _chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def piece(self, index: int, delta: Delta) -> Json | None:
        if not delta.text and not delta.logprobs:
            return None
        return _chunk(index, {"content": delta.text}, self._scored(delta.logprobs))

    def closing(self, index: int, delta: Delta) -> Json:
        return _chunk(index, {}) | {"finish_reason": finish_reason(delta.finish_reason)}

    def whole(self, index: int, answer: Answer) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._scored(answer.logprobs),
            "finish_reason": finish_reason(answer.finish_reason),
        }

    def _scored(self, logprobs: tuple[TokenLogprob, ...] | list[TokenLogprob]) -> Json | None:
        if not self._logprobs:
            return None
        content: list[Json] = [
            self._token(scored.token, scored.logprob)
            | {"top_logprobs": [self._token(token, logprob) for token, logprob in scored.top]}
            for scored in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> Json:
        text = self._texts[token]
        return {"token": text.text, "logprob": finite_logprob(logprob), "bytes": list(text.data)}


def finite_logprob(logprob: float) -> float:
    return max(_NO_LOGPROB, logprob)


def _chunk(index: int, delta: Json, logprobs: Json | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _max_tokens(fields: ChatRequest, default: int | None) -> int | None:
    """The old name and the new one mean the same; two different numbers are a mistake."""
    new, old = fields.max_completion_tokens, fields.max_tokens
    if new is not None and old is not None and new != old:
        raise RequestError(
            f"'max_tokens' is {old} and 'max_completion_tokens' is {new}; give one of them.",
            param="max_tokens",
        )
    return new or old or default


def _top_logprobs(fields: ChatRequest) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs is not None:
        raise RequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    return None
