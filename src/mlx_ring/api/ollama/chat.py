"""`/api/chat`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Literal

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mlx_ring.api.body import Body
from mlx_ring.api.conversation.answering import answer_chat, stream_chat
from mlx_ring.api.conversation.asked import Conversation, ToolUse
from mlx_ring.api.conversation.prepare import PreparedChat, prepare_chat
from mlx_ring.api.ollama.lines import LineWriter, Stopwatch, chat_words
from mlx_ring.api.ollama.messages import (
    Format,
    Message,
    OfferedTool,
    Think,
    read_format,
    read_think,
    template_messages,
)
from mlx_ring.api.ollama.names import KeepAlive, find_model
from mlx_ring.api.ollama.options import Options, read_options
from mlx_ring.api.ollama.staying import load_or_unload
from mlx_ring.api.openapi import documented
from mlx_ring.api.routes import ApiContext
from mlx_ring.api.service import Answering, ModelService


class ChatRequest(Body):
    model: str | None = None
    messages: Sequence[Message] = ()
    """None: the model is loaded, or with a `keep_alive` of 0 unloaded."""
    tools: list[OfferedTool] | None = None
    format: Format | None = None
    think: Think | None = None
    options: Options | None = None
    stream: bool | None = None
    """On if nothing is said."""
    keep_alive: KeepAlive | None = None
    """A loaded model stays until its memory is needed, however long is asked for."""
    truncate: Literal[False] | None = None
    """What is over the context is refused, and no message is dropped."""
    shift: Literal[False] | None = None


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()

    async def chat(request: Request) -> Response:
        watch = Stopwatch()
        fields = await context.read(request, ChatRequest)
        service = find_model(context, fields.model)
        writer = LineWriter(fields.model or service.model_id, watch, chat_words)
        if not fields.messages:
            return await load_or_unload(context, request, service, fields.keep_alive, writer)
        sampling = read_options(fields.options, service, context.settings.default_max_tokens)
        conversation = _conversation(context, service, fields)
        engine = await context.answering(service)
        watch.loaded()
        prepared = await prepare_chat(
            context, service, conversation, [sampling], request_id=f"ollama-{secrets.token_hex(12)}"
        )
        streams = fields.stream is not False
        return await respond(context, request, engine, prepared, writer, streams=streams)

    documented(router, "/api/chat", chat, ChatRequest)
    return router


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


def _conversation(context: ApiContext, service: ModelService, fields: ChatRequest) -> Conversation:
    return Conversation(
        messages=template_messages(fields.messages),
        tool_use=ToolUse([tool.plain() for tool in fields.tools or ()]),
        format=read_format(fields.format),
        template_kwargs=read_think(context.formats[service.tokenizer], fields.think),
    )
