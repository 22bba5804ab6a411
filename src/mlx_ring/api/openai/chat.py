"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.routing import Router

from mlx_ring.api.chat.answer import AnswerUpdate, Call, ChatAnswer, answer_chat, stream_chat
from mlx_ring.api.chat.model_format import ChatFormat
from mlx_ring.api.chat.prepare import prepare_chat, with_effort
from mlx_ring.api.chat.request import (
    AnswerPart,
    CallArguments,
    CallOpening,
    ContentText,
    Conversation,
    EndReason,
    ReasoningText,
)
from mlx_ring.api.context import ApiContext
from mlx_ring.api.dialect import event
from mlx_ring.api.generation import AnswerCounts, costs, usage
from mlx_ring.api.openai import schemas
from mlx_ring.api.openai.messages import (
    AnswerStart,
    AnyTool,
    Message,
    ToolChoice,
    read_tool_use,
    template_messages,
)
from mlx_ring.api.openai.sampling import (
    MOST_TOKENS,
    UNLIMITED,
    AnswerFields,
    ResponseFormat,
    check_stream_options,
    read_format,
    sampling_params,
    with_derived_seed,
)
from mlx_ring.api.openai.schemas import TokenTexts
from mlx_ring.api.openapi import documented_post, needs
from mlx_ring.api.request_body import MOST_MESSAGES, Unsupported, convert
from mlx_ring.api.streaming import (
    EVENT_STREAM,
    KEEP_ALIVE,
    RESUMING,
    JsonStream,
    StreamFormat,
    new_id,
    time_created,
)
from mlx_ring.core.environment import package_version
from mlx_ring.core.errors import RequestError
from mlx_ring.core.types import TokenLogprob

DONE = b"data: [DONE]\n\n"
"""Last event of a stream. Every SDK stops reading at it."""
STREAM_FORMAT = StreamFormat(EVENT_STREAM, event, KEEP_ALIVE, lambda: RESUMING, DONE)

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _not_zero(limit: int) -> int:
    if limit == 0:
        raise PydanticCustomError("limit", "should be at least 1, or -1 for no limit")
    return limit


Limit = Annotated[
    int,
    Field(ge=UNLIMITED, le=MOST_TOKENS, json_schema_extra={"not": {"const": 0}}),
    AfterValidator(_not_zero),
]
"""Largest number of an answer's tokens; -1: to the end of the context."""
_Replaced = Annotated[None, Unsupported("it is replaced by 'tools' and 'tool_choice'; send those.")]

_Responses = Annotated[
    None,
    Unsupported("it belongs to the Responses API; send the request to /v1/responses, or 'messages' here."),
]


class ChatRequest(AnswerFields, AnswerStart):
    model_config = ConfigDict(
        json_schema_extra={
            "dependentSchemas": needs("stream_options", of="stream") | needs("top_logprobs", of="logprobs")
        }
    )

    input: _Responses = None
    instructions: _Responses = None
    text: _Responses = None
    max_output_tokens: _Responses = None
    previous_response_id: _Responses = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Limit | None = None
    max_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    response_format: ResponseFormat | None = None
    tools: list[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    modalities: list[Literal["text"]] | None = None
    functions: _Replaced = None
    function_call: _Replaced = None


def routes(context: ApiContext) -> Router:
    router = Router()

    async def chat_completions(
        request: Request,
    ) -> schemas.ChatCompletion | JsonStream[schemas.ChatCompletionChunk]:
        fields = await context.read(request, ChatRequest)
        service, settings = context.model(fields.model), context.settings
        check_stream_options(fields)
        fields.check_start()
        max_tokens = _max_tokens(fields, settings.default_max_tokens)
        sampling = sampling_params(fields, service, max_tokens=max_tokens, top_logprobs=_top_logprobs(fields))
        format_ = context.formats[service.tokenizer]
        conversation = await convert(request, lambda: _conversation(fields, format_))
        engine = await context.answering(service)
        request_id = new_id("chatcmpl-")
        chat = await prepare_chat(
            context,
            service,
            conversation,
            [with_derived_seed(sampling, choice) for choice in range(fields.n or 1)],
            request_id=request_id,
            early_arguments=bool(fields.stream),
        )
        writer = ChatCompletionWriter(
            request_id,
            service.model_id,
            TokenTexts(service.tokenizer) if sampling.logprobs else None,
            usage_chunk=fields.wants_usage_chunk,
            usage_always=fields.wants_usage_always,
            must_call=conversation.tool_use.choice == "required",
        )
        if fields.stream:
            return stream_chat(engine, chat, writer, keep_alive_s=settings.keep_alive_s)
        return writer.whole(await answer_chat(request, engine, chat))

    for path in ("/v1/chat/completions", "/chat/completions"):
        documented_post(router, path, chat_completions, ChatRequest, schemas.CHAT)
    return router


class ChatCompletionWriter:
    """Writer of choices with a message, or of their deltas."""

    stream_format = STREAM_FORMAT

    def __init__(
        self,
        id_: str,
        model: str,
        texts: TokenTexts | None,
        *,
        usage_chunk: bool = False,
        usage_always: bool = False,
        must_call: bool = False,
    ) -> None:
        """Create a writer. Log-probabilities need `texts`. An answer that must call a tool has no content.

        With `usage_always` every chunk of tokens counts them; with `usage_chunk` only a last one does.
        """
        self._opening: schemas.ChatDelta = {"role": "assistant", "refusal": None}
        if not must_call:
            self._opening["content"] = ""
        self._id = id_
        self._origin: schemas.ChatOrigin = {
            "created": time_created(),
            "model": model,
            "service_tier": "default",
            "system_fingerprint": system_fingerprint(),
        }
        self._texts = texts
        self._usage_chunk = usage_chunk
        self._usage_always = usage_always
        self._counts: dict[int, AnswerCounts] = {}
        """Token counts up to the last update, by the answer's index."""
        self._empty_chunk: schemas.ChatCompletionChunk = {
            "id": id_,
            "object": "chat.completion.chunk",
            **self._origin,
            "choices": [],
        }
        if usage_chunk:
            self._empty_chunk["usage"] = None

    def whole(self, answers: Sequence[ChatAnswer]) -> schemas.ChatCompletion:
        return {
            "id": self._id,
            "object": "chat.completion",
            **self._origin,
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            **costs(answers, len(answers)),
        }

    def opening(self, answers: Sequence[ChatAnswer]) -> Iterator[schemas.ChatCompletionChunk]:
        for index in range(len(answers)):
            yield self._chunk(index, self._opening)

    def update(
        self, updates: Sequence[AnswerUpdate], answers: Sequence[ChatAnswer]
    ) -> Iterator[schemas.ChatCompletionChunk]:
        for update in updates:
            if not self._usage_always:
                yield from self._chunks(update)
                continue
            self._counts[update.index] = update.counts
            counts = [self._counts.get(index, AnswerCounts()) for index in range(len(answers))]
            so_far = usage(counts, len(counts))
            for chunk in self._chunks(update):
                yield {**chunk, "usage": so_far}

    def _chunks(self, update: AnswerUpdate) -> Iterator[schemas.ChatCompletionChunk]:
        """Yield the chunks. Log-probabilities go with the first part that their tokens made, else with an empty delta."""
        scored = self._scored(update.logprobs) if update.logprobs else None
        deltas = [_delta(part) for part in update.parts]
        for delta in deltas or (_NO_TEXT if scored else ()):
            yield self._chunk(update.index, delta, scored)
            scored = None
        if update.end is not None:
            yield self._chunk(update.index, {}, end=update.end)

    def closing(self, answers: Sequence[ChatAnswer]) -> Iterator[schemas.ChatCompletionChunk]:
        if self._usage_chunk:
            yield {**self._empty_chunk, **costs(answers, len(answers))}

    def _chunk(
        self,
        index: int,
        delta: schemas.ChatDelta,
        logprobs: schemas.ChatLogprobs | None = None,
        end: EndReason | None = None,
    ) -> schemas.ChatCompletionChunk:
        choice: schemas.ChatChunkChoice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": end,
        }
        return {**self._empty_chunk, "choices": [choice]}

    def _choice(self, index: int, answer: ChatAnswer) -> schemas.ChatChoice:
        return {
            "index": index,
            "message": _message(answer),
            "logprobs": self._scored(answer.logprobs),
            "finish_reason": answer.end,
        }

    def _scored(self, logprobs: Iterable[TokenLogprob]) -> schemas.ChatLogprobs | None:
        if self._texts is None:
            return None
        return {"content": list(map(self._texts.scored, logprobs)), "refusal": None}


def system_fingerprint() -> str:
    """Return the server's version, because the same seed may give another answer with another version."""
    return f"mlx-ring-{package_version('mlx-ring')}"


def _message(answer: ChatAnswer) -> schemas.ChatMessageMade:
    """Return the message. Its content is null if it has only calls."""
    calls = answer.calls
    message: schemas.ChatMessageMade = {
        "role": "assistant",
        "content": answer.content or (None if calls else ""),
        "refusal": None,
        "annotations": [],
        **_reasoning(answer.reasoning),
    }
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(call: Call) -> schemas.ToolCallMade:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _reasoning(text: str) -> schemas.ReasoningMade:
    return {"reasoning": text, "reasoning_content": text} if text else {}


_NO_TEXT: tuple[schemas.ChatDelta, ...] = ({"content": ""},)


def _delta(part: AnswerPart) -> schemas.ChatDelta:
    match part:
        case ContentText(text):
            return {"content": text}
        case ReasoningText(text):
            return {"reasoning": text, "reasoning_content": text}
        case CallOpening(index, id_, name):
            function: schemas.FunctionDelta = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id_, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _conversation(fields: ChatRequest, format_: ChatFormat) -> Conversation:
    return Conversation(
        messages=template_messages(fields.messages),
        tool_use=read_tool_use(fields.tools, fields.tool_choice, parallel=fields.parallel_tool_calls),
        format=read_format(fields.response_format),
        template_kwargs=with_effort(
            format_, fields.chat_template_kwargs, fields.reasoning_effort, param="reasoning_effort"
        ),
        continues=bool(fields.continue_final_message),
        adds_generation_prompt=fields.add_generation_prompt is not False,
    )


def _max_tokens(fields: ChatRequest, default: int | None) -> int | None:
    """Return the limit of tokens. Refuse different values under its old and its new name."""
    new, old = fields.max_completion_tokens, fields.max_tokens
    if new is not None and old is not None and new != old:
        raise RequestError(
            f"'max_tokens' is {old} and 'max_completion_tokens' is {new}; give one of them.",
            param="max_tokens",
        )
    given = old if new is None else new
    return None if given == UNLIMITED else given or default


def _top_logprobs(fields: ChatRequest) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs is not None:
        raise RequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    return None
