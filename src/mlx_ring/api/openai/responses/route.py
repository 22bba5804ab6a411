"""`/v1/responses`: the endpoint."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mlx_ring.api.chat.answer import AnswerUpdate, ChatAnswer, answer_chat, stream_chat
from mlx_ring.api.chat.parts import AnswerText
from mlx_ring.api.chat.prepare import prepare_chat
from mlx_ring.api.context import ApiContext
from mlx_ring.api.dialect import Json, event
from mlx_ring.api.errors import error_info
from mlx_ring.api.openai import schemas
from mlx_ring.api.openai.chat import DONE, finite_logprob
from mlx_ring.api.openai.responses.request import ResponsesRequest, conversation_of
from mlx_ring.api.openai.responses.writer import End, ResponseWriter, response_of, usage_of
from mlx_ring.api.openai.sampling import sampling_params
from mlx_ring.api.openai.token_text import TokenTexts
from mlx_ring.api.openapi import documented_post
from mlx_ring.api.streaming import EVENT_STREAM, KEEP_ALIVE
from mlx_ring.core.types import TokenLogprob


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()

    async def responses(request: Request) -> Response:
        fields = await context.read(request, ResponsesRequest)
        service = context.model(fields.model)
        max_tokens = fields.max_output_tokens or context.settings.default_max_tokens
        sampling = sampling_params(
            fields, service, max_tokens=max_tokens, top_logprobs=fields.wanted_logprobs
        )
        conversation = conversation_of(fields, context.formats[service.tokenizer])
        engine = await context.answering(service)
        response_id = f"resp_{secrets.token_hex(16)}"
        chat = await prepare_chat(context, service, conversation, [sampling], request_id=response_id)
        response = response_of(
            fields, sampling, id=response_id, model=service.model_id, created_at=int(time.time())
        )
        writer = ResponseWriter(response, seals_reasoning=fields.seals_reasoning)
        stream = ResponseStream(writer, TokenTexts(service.tokenizer))
        if fields.stream:
            return stream_chat(
                engine, chat, stream, keep_alive_s=context.settings.keep_alive_s, failure=stream.failure
            )
        [answer] = await answer_chat(request, engine, chat, stream.add)
        return JSONResponse(writer.whole(_end(answer), _usage(answer)))

    for path in ("/v1/responses", "/responses"):
        documented_post(router, path, responses, ResponsesRequest, schemas.RESPONSE)
    return router


class ResponseStream:
    """Events of a response as they are sent. Every SDK takes the final `[DONE]` for the end."""

    media_type = EVENT_STREAM
    keep_alive = KEEP_ALIVE

    def __init__(self, writer: ResponseWriter, texts: TokenTexts) -> None:
        self._writer = writer
        self._texts = texts
        self._scored: list[Json] = []
        """Log-probabilities of tokens whose text is still to come."""

    def opening(self, answers: Sequence[ChatAnswer]) -> bytes:
        del answers
        return _sent(self._writer.opening())

    def update(self, updates: Sequence[AnswerUpdate], answers: Sequence[ChatAnswer]) -> bytes:
        del answers
        return b"".join(_sent(self.add(one)) for one in updates)

    def closing(self, answers: Sequence[ChatAnswer]) -> bytes:
        [answer] = answers
        return _sent(self._writer.closing(_end(answer), _usage(answer))) + DONE

    def failure(self, error: Exception) -> bytes:
        return _sent(self._writer.failing(error_info(error)))

    def add(self, update: AnswerUpdate) -> list[Json]:
        """Return the events of an update. Log-probabilities go with the answer's text only."""
        self._scored += [self._token(scored) for scored in update.logprobs]
        events: list[Json] = []
        for part in update.parts:
            scored, self._scored = self._scored, []
            events += self._writer.part(part, scored if isinstance(part, AnswerText) else ())
        return events

    def _token(self, scored: TokenLogprob) -> Json:
        own = self._alone(scored.token, scored.logprob)
        return own | {"top_logprobs": [self._alone(token, logprob) for token, logprob in scored.top]}

    def _alone(self, token: int, logprob: float) -> Json:
        text = self._texts[token]
        return {"token": text.text, "logprob": finite_logprob(logprob), "bytes": list(text.data)}


def _sent(events: Iterable[Json]) -> bytes:
    return b"".join(event(value, str(value["type"])) for value in events)


def _end(answer: ChatAnswer) -> End:
    return "incomplete" if answer.end == "length" else "completed"


def _usage(answer: ChatAnswer) -> Json:
    return usage_of(
        answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens, answer.reasoning_tokens
    )
