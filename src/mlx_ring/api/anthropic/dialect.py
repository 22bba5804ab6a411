"""Anthropic's API as a dialect: routes, and the form of errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NotRequired

from starlette.requests import Request
from starlette.routing import Router

from mlx_ring.api.anthropic.request import CountTokensRequest, MessagesRequest, conversation_of
from mlx_ring.api.anthropic.writer import (
    COUNT_TOKENS,
    MESSAGES,
    AnthropicMessage,
    CountedTokens,
    MessageEvent,
    MessageWriter,
    Ping,
    Stop,
    TokenCounts,
)
from mlx_ring.api.chat.answer import AnswerUpdate, ChatAnswer, answer_chat, stream_chat
from mlx_ring.api.chat.prepare import encode_conversation, prepare_chat
from mlx_ring.api.context import ApiContext
from mlx_ring.api.dialect import Dialect, ErrorInfo, ErrorNumbers, event, named_event
from mlx_ring.api.openai.sampling import sampling_params
from mlx_ring.api.openapi import JsonObject, documented_post
from mlx_ring.api.request_body import convert
from mlx_ring.api.service import ModelService
from mlx_ring.api.streaming import EVENT_STREAM, JsonStream, StreamFormat, new_id
from mlx_ring.core.types import SamplingParams

MESSAGES_PATHS = ("/v1/messages", "/messages")


def routes(context: ApiContext) -> Router:
    router = Router()

    async def messages(request: Request) -> AnthropicMessage | JsonStream[MessageEvent]:
        fields = await context.read(request, MessagesRequest)
        service = context.model(fields.model)
        sampling = _sampling(fields, service)
        format_ = context.formats[service.tokenizer]
        conversation = await convert(request, lambda: conversation_of(fields, format_))
        engine = await context.answering(service)
        message_id = new_id("msg_")
        chat = await prepare_chat(
            context,
            service,
            conversation,
            [sampling],
            request_id=message_id,
            early_arguments=any(tool.eager_input_streaming for tool in fields.tools or ()),
        )
        writer = MessageWriter(message_id, service.model_id, shows_thinking=_shows_thinking(fields))
        if fields.stream:
            stream = MessageStream(writer, sampling, TokenCounts(chat.prompt_tokens))
            return stream_chat(engine, chat, stream, keep_alive_s=context.settings.keep_alive_s)
        [answer] = await answer_chat(request, engine, chat)
        for part in answer.parts:
            list(writer.part(part))
        return writer.whole(_stop(answer, sampling), _costs(answer))

    async def count_tokens(request: Request) -> CountedTokens:
        fields = await context.read(request, CountTokensRequest)
        service = context.model(fields.model)
        format_ = context.formats[service.tokenizer]
        conversation = await convert(request, lambda: conversation_of(fields, format_))
        prompt = await encode_conversation(context, service, conversation)
        return {"input_tokens": len(prompt)}

    for path in MESSAGES_PATHS:
        documented_post(router, path, messages, MessagesRequest, MESSAGES)
        documented_post(router, f"{path}/count_tokens", count_tokens, CountTokensRequest, COUNT_TOKENS)
    return router


_PING: Ping = {"type": "ping"}
_PINGED = named_event(_PING)


class MessageStream:
    """Events of a message. Anthropic's ping keeps the stream alive."""

    stream_format = StreamFormat(EVENT_STREAM, named_event, _PINGED, lambda: _PINGED)

    def __init__(self, writer: MessageWriter, sampling: SamplingParams, costs: TokenCounts) -> None:
        """Create a stream. `costs` are the costs known before the answer."""
        self._writer = writer
        self._sampling = sampling
        self._costs = costs

    def opening(self, answers: Sequence[ChatAnswer]) -> Iterator[MessageEvent]:
        del answers
        return self._writer.opening(self._costs)

    def update(
        self, updates: Sequence[AnswerUpdate], answers: Sequence[ChatAnswer]
    ) -> Iterator[MessageEvent]:
        del answers
        for one in updates:
            for part in one.parts:
                yield from self._writer.part(part)

    def closing(self, answers: Sequence[ChatAnswer]) -> Iterator[MessageEvent]:
        [answer] = answers
        return self._writer.closing(_stop(answer, self._sampling), _costs(answer))


def _sampling(fields: MessagesRequest, service: ModelService) -> SamplingParams:
    params = sampling_params(fields, service, max_tokens=fields.max_tokens, top_logprobs=None)
    return replace(params, stop=(*params.stop, *(fields.stop_sequences or ())))


def _shows_thinking(fields: MessagesRequest) -> bool:
    return fields.thinking is None or fields.thinking.display != "omitted"


def _stop(answer: ChatAnswer, sampling: SamplingParams) -> Stop:
    match answer.end:
        case "tool_calls":
            return Stop("tool_use")
        case "length" if sampling.max_tokens is None or answer.completion_tokens < sampling.max_tokens:
            return Stop("model_context_window_exceeded")
        case "length":
            return Stop("max_tokens")
        case _ if answer.stop_match is not None:
            return Stop("stop_sequence", answer.stop_match)
        case _:
            return Stop("end_turn")


def _costs(answer: ChatAnswer) -> TokenCounts:
    return TokenCounts(
        answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens, answer.reasoning_tokens
    )


_SERVER_ERROR = 500
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class ErrorDetails(JsonObject):
    error_code: str


_DETAILS: Mapping[str, ErrorDetails] = {"thread": {"error_code": "thread_unsupported_request"}}
"""Details of an error by refused field. They make the SDK repeat the request without the field."""


class AnthropicErrorFields(JsonObject, ErrorNumbers):
    type: str
    message: str
    details: NotRequired[ErrorDetails]


class AnthropicError(JsonObject):
    type: Literal["error"]
    error: AnthropicErrorFields
    request_id: str


def _error_body(info: ErrorInfo, request_id: str) -> AnthropicError:
    fields: AnthropicErrorFields = {"type": _error_type(info), "message": _message(info)}
    details = _DETAILS.get(info.param or "")
    if details is not None:
        fields["details"] = details
    return {"type": "error", "error": {**fields, **info.more}, "request_id": request_id}


def _message(info: ErrorInfo) -> str:
    """Return the message. A prompt that is too long has Anthropic's words, at which clients compact the chat."""
    if "n_prompt_tokens" not in info.more or "n_ctx" not in info.more:
        return info.message
    numbers = f"{info.more['n_prompt_tokens']} tokens > {info.more['n_ctx']} maximum"
    return f"prompt is too long: {numbers}. {info.message}"


def _error_type(info: ErrorInfo) -> str:
    if info.status >= _SERVER_ERROR:
        return "overloaded_error" if info.passes else "api_error"
    return _ERROR_TYPES.get(info.status, "invalid_request_error")


def _stream_failure(body: AnthropicError) -> bytes:
    return event(body, "error")


ANTHROPIC: Dialect[ApiContext, AnthropicError] = Dialect(
    name="Anthropic",
    prefixes=MESSAGES_PATHS,
    routes=(routes,),
    error_body=_error_body,
    error_schema=AnthropicError,
    stream_failure=_stream_failure,
    request_id_header="request-id",
    shared_prefixes=("/v1/models", "/models", "/v1/files"),
    client_header="anthropic-version",
)
