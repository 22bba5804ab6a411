"""Ollama's API as a dialect, and its routes for chats, generated text and embeddings."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field, Tag
from starlette.requests import Request
from starlette.routing import Router

from mlx_ring.api.chat.answer import answer_chat, stream_chat
from mlx_ring.api.chat.answer_grammars import answer_grammar
from mlx_ring.api.chat.model_format import ChatFormat
from mlx_ring.api.chat.prepare import PreparedChat, prepare_chat
from mlx_ring.api.chat.reader import ReadingRules
from mlx_ring.api.chat.request import Conversation, Tool, ToolUse
from mlx_ring.api.context import ApiContext
from mlx_ring.api.dialect import Dialect, ErrorInfo
from mlx_ring.api.ollama import models
from mlx_ring.api.ollama.request import (
    CommonFields,
    Images,
    KeepAlive,
    Message,
    OfferedTool,
    Options,
    check_context,
    find_model,
    read_format,
    read_sampling,
    read_think,
    template_messages,
    unloads_at_once,
)
from mlx_ring.api.ollama.schemas import (
    CHAT,
    EMBED,
    EMBEDDINGS,
    GENERATE,
    OllamaChat,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaGenerated,
)
from mlx_ring.api.ollama.writer import (
    LineWriter,
    PieceMaker,
    PieceT,
    Stopwatch,
    chat_piece,
    generate_piece,
    json_line,
)
from mlx_ring.api.openai.embeddings import Embedding, Text, embed, floats, require_embeddings, written
from mlx_ring.api.openai.messages import check_names
from mlx_ring.api.openai.sampling import STRINGS
from mlx_ring.api.openai.schemas import TokenTexts
from mlx_ring.api.openapi import JsonObject, documented_post
from mlx_ring.api.ops.models import check_manager
from mlx_ring.api.request_body import MOST_MESSAGES, Body, Unsupported, convert
from mlx_ring.api.service import Answering, ModelService
from mlx_ring.api.streaming import JsonAnswer, JsonStream, note_stream, while_connected
from mlx_ring.core.errors import RequestError
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import SamplingParams


async def load_or_unload(
    context: ApiContext,
    request: Request,
    service: ModelService,
    keep_alive: KeepAlive | None,
    writer: LineWriter[PieceT],
) -> PieceT:
    """Load or unload the model. Answer with one object, which is also a stream of one line."""
    if unloads_at_once(keep_alive):
        check_manager(request, context.settings)
        await context.catalog.unload(service, force=False)
        return writer.loaded("unload")
    await while_connected(request.receive, context.answering(service))
    return writer.loaded("load")


class ChatRequest(CommonFields):
    messages: list[Message] = Field(default_factory=list[Message], max_length=MOST_MESSAGES)
    """Messages. Without any, the model is loaded, or unloaded if `keep_alive` is 0."""
    tools: list[OfferedTool] | None = None

    @property
    def lasts(self) -> bool:
        """True if the work continues when the client leaves."""
        return not self.messages and unloads_at_once(self.keep_alive)


def routes(context: ApiContext) -> Router:
    router = Router()

    async def chat(request: Request) -> OllamaChat | JsonStream[OllamaChat]:
        watch = Stopwatch()
        fields = await context.read(request, ChatRequest)
        service = find_model(context, fields.model)
        writer = line_writer(request, fields, service, watch, chat_piece)
        if not fields.messages:
            return await load_or_unload(context, request, service, fields.keep_alive, writer)
        sampling = read_sampling(fields, service, context.settings.default_max_tokens)
        format_ = context.formats[service.tokenizer]
        conversation = await convert(request, lambda: _conversation(fields, format_))
        engine = await context.answering(service)
        watch.loaded()
        prepared = await prepare_chat(
            context, service, conversation, [sampling], request_id=f"ollama-{secrets.token_hex(12)}"
        )
        return await respond(context, request, engine, prepared, writer, streams=fields.streams)

    documented_post(router, "/api/chat", chat, ChatRequest, CHAT)
    _add_generate(router, context)
    return router


def line_writer(
    request: Request,
    fields: CommonFields,
    service: ModelService,
    watch: Stopwatch,
    make_piece: PieceMaker[PieceT],
) -> LineWriter[PieceT]:
    """Return the writer of an answer, whose stream may begin from now on."""
    texts = TokenTexts(service.tokenizer) if fields.logprobs else None
    writer = LineWriter(fields.model or service.model_id, watch, make_piece, texts)
    if fields.streams and not fields.lasts:
        note_stream(request, writer.stream_format)
    return writer


async def respond(
    context: ApiContext,
    request: Request,
    engine: Answering,
    prepared: PreparedChat,
    writer: LineWriter[PieceT],
    *,
    streams: bool,
) -> PieceT | JsonStream[PieceT]:
    """Return the answer, streamed or whole."""
    if streams:
        return stream_chat(engine, prepared, writer, keep_alive_s=context.settings.keep_alive_s)
    (answer,) = await answer_chat(request, engine, prepared)
    return writer.whole(answer)


def _tools(offered: Sequence[OfferedTool]) -> list[Tool]:
    check_names([tool.function.name for tool in offered], "tools[{}].function.name")
    return [tool.plain() for tool in offered]


def _conversation(fields: ChatRequest, format_: ChatFormat) -> Conversation:
    return Conversation(
        messages=template_messages(fields.messages),
        tool_use=ToolUse(_tools(fields.tools or ())),
        format=read_format(fields.format),
        template_kwargs=read_think(format_, fields.think),
    )


class GenerateFields(CommonFields):
    prompt: str = ""
    """Prompt. If it is empty, the model is loaded, or unloaded if `keep_alive` is 0."""
    system: str | None = None
    raw: bool | None = None
    """True to use the prompt as it is, without the chat template."""
    suffix: Annotated[None, Unsupported("text can only be added at the end; leave it out.", ("",))] = None
    template: Annotated[
        None,
        Unsupported("the model's own chat template is used, or none with 'raw'; leave it out.", ("",)),
    ] = None
    context: Annotated[None, Unsupported("answers have none; send messages to /api/chat.", ([],))] = None
    images: Images = None

    @property
    def lasts(self) -> bool:
        """True if the work continues when the client leaves."""
        return not self.prompt and unloads_at_once(self.keep_alive)


def _add_generate(router: Router, context: ApiContext) -> None:
    async def generate(request: Request) -> OllamaGenerated | JsonStream[OllamaGenerated]:
        watch = Stopwatch()
        fields = await context.read(request, GenerateFields)
        service = find_model(context, fields.model)
        writer = line_writer(request, fields, service, watch, generate_piece)
        if not fields.prompt:
            return await load_or_unload(context, request, service, fields.keep_alive, writer)
        sampling = read_sampling(fields, service, context.settings.default_max_tokens)
        engine = await context.answering(service)
        watch.loaded()
        prepared = await _prepare(context, service, fields, sampling)
        return await respond(context, request, engine, prepared, writer, streams=fields.streams)

    documented_post(router, "/api/generate", generate, GenerateFields, GENERATE)


async def _prepare(
    context: ApiContext, service: ModelService, fields: GenerateFields, sampling: SamplingParams
) -> PreparedChat:
    request_id = f"ollama-{secrets.token_hex(12)}"
    if fields.raw or not service.tokenizer.has_chat_template:
        _check_raw(fields)
        return await _prepare_raw(context, service, fields, sampling, request_id)
    system = [{"role": "system", "content": fields.system}] if fields.system else []
    conversation = Conversation(
        messages=[*system, {"role": "user", "content": fields.prompt}],
        format=read_format(fields.format),
        template_kwargs=read_think(context.formats[service.tokenizer], fields.think),
        messages_param="prompt",
    )
    return await prepare_chat(context, service, conversation, [sampling], request_id=request_id)


async def _prepare_raw(
    context: ApiContext,
    service: ModelService,
    fields: GenerateFields,
    sampling: SamplingParams,
    request_id: str,
) -> PreparedChat:
    """Prepare an answer that consists of text only."""
    plain, asked = ChatFormat(), Conversation(messages=(), format=read_format(fields.format))
    grammar = answer_grammar(plain, asked, thinking_open=False, open_schemas=context.settings.open_schemas)
    await context.grammars.check(grammar, asked)
    tokens = await context.prompts.encode(service, fields.prompt)
    request = GenerateRequest(f"{request_id}-0", tokens, replace(sampling, stop=(), grammar=grammar))
    rules = ReadingRules(plain, stops=sampling.stop)
    return PreparedChat((request,), (rules,), "prompt")


def _check_raw(fields: GenerateFields) -> None:
    """Refuse fields that need a chat template if none is used."""
    given = {"system": fields.system, "think": fields.think}
    for name, value in given.items():
        if value:
            raise RequestError(
                f"'{name}' needs the model's chat template, but the prompt is raw; leave it out.",
                param=name,
            )


class OllamaError(JsonObject):
    error: str
    """One sentence: what happened, with which value, and what to do."""


def _error_body(info: ErrorInfo, _: str) -> OllamaError:
    return {"error": info.message}


_MOST_TEXTS = 2048

Texts = Annotated[
    Annotated[str, Tag("one")] | Annotated[list[str], Field(max_length=_MOST_TEXTS), Tag("many")],
    STRINGS,
]


class EmbedRequest(Body):
    model: str | None = None
    input: Texts
    truncate: bool | None = None
    """True, the default, to truncate texts that are longer than the context."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    options: Options | None = None
    """Options. Only `num_ctx` affects an embedding."""
    keep_alive: KeepAlive | None = None


class EmbeddingsRequest(Body):
    model: str | None = None
    prompt: str
    options: Options | None = None
    keep_alive: KeepAlive | None = None


def embedding_routes(context: ApiContext) -> Router:
    router = Router()

    async def embed_texts(request: Request) -> JsonAnswer[OllamaEmbeddings]:
        watch = Stopwatch()
        fields = await context.read(request, EmbedRequest)
        service = find_model(context, fields.model)
        check_context(fields.options, service)
        texts = [fields.input] if isinstance(fields.input, str) else fields.input
        cuts = fields.truncate is not False
        work = _embed(context, service, texts, watch, dimensions=fields.dimensions, cuts=cuts)
        made = await while_connected(request.receive, work)
        answer: OllamaEmbeddings = {
            "embeddings": [],
            "model": fields.model or service.model_id,
            "prompt_eval_count": sum(embedding.tokens for embedding in made),
            **watch.durations(),
        }
        return JsonAnswer(answer, first_list=await written(made, lambda _, vector: b"[%s]" % floats(vector)))

    async def embed_prompt(request: Request) -> OllamaEmbedding:
        fields = await context.read(request, EmbeddingsRequest)
        service = find_model(context, fields.model)
        check_context(fields.options, service)
        work = _embed(context, service, [fields.prompt], Stopwatch(), dimensions=None, cuts=True)
        (made,) = await while_connected(request.receive, work)
        return {"embedding": made.vector.tolist()}

    documented_post(router, "/api/embed", embed_texts, EmbedRequest, EMBED)
    documented_post(router, "/api/embeddings", embed_prompt, EmbeddingsRequest, EMBEDDINGS)
    return router


async def _embed(
    context: ApiContext,
    service: ModelService,
    given: Sequence[str],
    watch: Stopwatch,
    *,
    dimensions: int | None,
    cuts: bool,
) -> list[Embedding]:
    require_embeddings(service, dimensions)
    engine = await context.answering(service)
    watch.loaded()
    texts = [
        Text(await _tokens(context, service, text, place, cuts=cuts), f"input[{place}]")
        for place, text in enumerate(given)
    ]
    request_id = f"embd-{secrets.token_hex(12)}"
    return await embed(engine, service, texts, request_id=request_id, dimensions=dimensions)


async def _tokens(
    context: ApiContext, service: ModelService, text: str, place: int, *, cuts: bool
) -> tuple[int, ...]:
    ends_with_eos = service.pooling.ends_with_eos
    param = None if cuts else f"input[{place}]"
    tokens = await context.prompts.encode_whole(service, text, ends_with_eos=ends_with_eos, param=param)
    most = service.context_length
    if len(tokens) <= most:
        return tokens
    if not cuts:
        raise RequestError(
            f"'input[{place}]' has {len(tokens)} tokens, but the context has {most}: shorten it, or leave out "
            "'truncate': false.",
            param=f"input[{place}]",
        )
    # A model that requires EOS at the end pools it there.
    ends = tokens[-1] == service.tokenizer.eos_token_id
    return (*tokens[: most - 1], tokens[-1]) if ends else tokens[:most]


OLLAMA: Dialect[ApiContext, OllamaError] = Dialect(
    name="Ollama",
    prefixes=("/api",),
    routes=(routes, embedding_routes, models.routes),
    error_body=_error_body,
    error_schema=OllamaError,
    stream_failure=json_line,
)
