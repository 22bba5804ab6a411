"""`/api/chat`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from mlx_ring.api.conversation.answering import answer_chat, stream_chat
from mlx_ring.api.conversation.asked import Conversation, Tool, ToolUse
from mlx_ring.api.conversation.prepare import PreparedChat, prepare_chat
from mlx_ring.api.ollama import answers as about
from mlx_ring.api.ollama.lines import LineWriter, Stopwatch, Words, chat_words
from mlx_ring.api.ollama.messages import (
    Message,
    OfferedTool,
    read_format,
    read_think,
    template_messages,
)
from mlx_ring.api.ollama.names import find_model
from mlx_ring.api.ollama.options import AskedFields, read_sampling
from mlx_ring.api.ollama.staying import load_or_unload
from mlx_ring.api.openai.token_text import TokenTexts
from mlx_ring.api.openai.tools import check_names
from mlx_ring.api.openapi import documented
from mlx_ring.api.routes import ApiContext
from mlx_ring.api.service import Answering, ModelService


class ChatRequest(AskedFields):
    messages: list[Message] = Field(default_factory=list[Message])
    """None: the model is loaded, or with a `keep_alive` of 0 unloaded."""
    tools: list[OfferedTool] | None = None


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()

    async def chat(request: Request) -> Response:
        watch = Stopwatch()
        fields = await context.read(request, ChatRequest)
        service = find_model(context, fields.model)
        writer = line_writer(fields, service, watch, chat_words)
        if not fields.messages:
            return await load_or_unload(context, request, service, fields.keep_alive, writer)
        sampling = read_sampling(fields, service, context.settings.default_max_tokens)
        conversation = _conversation(context, service, fields)
        engine = await context.answering(service)
        watch.loaded()
        prepared = await prepare_chat(
            context, service, conversation, [sampling], request_id=f"ollama-{secrets.token_hex(12)}"
        )
        return await respond(context, request, engine, prepared, writer, streams=fields.streams)

    documented(router, "/api/chat", chat, ChatRequest, about.CHAT)
    return router


def line_writer(fields: AskedFields, service: ModelService, watch: Stopwatch, words: Words) -> LineWriter:
    texts = TokenTexts(service.tokenizer) if fields.logprobs else None
    return LineWriter(fields.model or service.model_id, watch, words, texts)


async def respond(
    context: ApiContext,
    request: Request,
    engine: Answering,
    prepared: PreparedChat,
    writer: LineWriter,
    *,
    streams: bool,
) -> Response:
    """The one answer, streamed or whole."""
    if streams:
        return stream_chat(engine, prepared, writer, keep_alive_s=context.settings.keep_alive_s)
    (answer,) = await answer_chat(request, engine, prepared)
    return JSONResponse(writer.whole(answer))


def _tools(offered: Sequence[OfferedTool]) -> list[Tool]:
    check_names([tool.function.name for tool in offered], "tools[{}].function.name")
    return [tool.plain() for tool in offered]


def _conversation(context: ApiContext, service: ModelService, fields: ChatRequest) -> Conversation:
    return Conversation(
        messages=template_messages(fields.messages),
        tool_use=ToolUse(_tools(fields.tools or ())),
        format=read_format(fields.format),
        template_kwargs=read_think(context.formats[service.tokenizer], fields.think),
    )
