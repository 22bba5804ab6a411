"""`/api/generate`."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Request
from starlette.responses import Response

from mlx_ring.api.body import Refused
from mlx_ring.api.conversation.asked import Conversation
from mlx_ring.api.conversation.format import ChatFormat
from mlx_ring.api.conversation.grammars import answer_grammar
from mlx_ring.api.conversation.prepare import PreparedChat, prepare_chat
from mlx_ring.api.conversation.reader import ReadingRules
from mlx_ring.api.ollama import answers as about
from mlx_ring.api.ollama.chat import line_writer, respond
from mlx_ring.api.ollama.lines import Stopwatch, generate_words
from mlx_ring.api.ollama.messages import Images, read_format, read_think
from mlx_ring.api.ollama.names import find_model
from mlx_ring.api.ollama.options import AskedFields, read_sampling
from mlx_ring.api.ollama.staying import load_or_unload
from mlx_ring.api.openapi import documented
from mlx_ring.api.routes import ApiContext
from mlx_ring.api.service import ModelService
from mlx_ring.core.errors import RequestError
from mlx_ring.core.types import SamplingParams
from mlx_ring.engine.sequence import GenerateRequest


class GenerateFields(AskedFields):
    prompt: str = ""
    """Empty: the model is loaded, or with a `keep_alive` of 0 unloaded."""
    system: str | None = None
    raw: bool | None = None
    """The prompt goes to the model as it is, without its chat template."""
    suffix: Annotated[None, Refused("a text is gone on with at its end alone; leave it out.", ("",))] = None
    template: Annotated[
        None,
        Refused("the model's own chat template is used, and 'raw' goes without; leave it out.", ("",)),
    ] = None
    context: Annotated[None, Refused("no answer gives one; /api/chat takes messages.", ([],))] = None
    images: Images = None


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter()

    async def generate(request: Request) -> Response:
        watch = Stopwatch()
        fields = await context.read(request, GenerateFields)
        service = find_model(context, fields.model)
        writer = line_writer(fields, service, watch, generate_words)
        if not fields.prompt:
            return await load_or_unload(context, request, service, fields.keep_alive, writer)
        sampling = read_sampling(fields, service, context.settings.default_max_tokens)
        engine = await context.answering(service)
        watch.loaded()
        prepared = await _prepare(context, service, fields, sampling)
        return await respond(context, request, engine, prepared, writer, streams=fields.streams)

    documented(router, "/api/generate", generate, GenerateFields, about.GENERATE)
    return router


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
    """Of an answer that is text alone, whatever it looks like."""
    plain, asked = ChatFormat(), Conversation(messages=(), format=read_format(fields.format))
    grammar = answer_grammar(plain, asked, thinking_open=False)
    await context.grammars.check(grammar, asked)
    tokens = await context.prompts.encode(service, fields.prompt)
    request = GenerateRequest(f"{request_id}-0", tokens, replace(sampling, stop=(), grammar=grammar))
    rules = ReadingRules(plain, stops=sampling.stop)
    return PreparedChat((request,), (rules,), "prompt")


def _check_raw(fields: GenerateFields) -> None:
    """What only a chat template has a place for is refused where none is used."""
    given = {"system": fields.system, "think": fields.think}
    for name, value in given.items():
        if value:
            raise RequestError(
                f"'{name}' needs the model's chat template, which a raw prompt goes without; leave it out.",
                param=name,
            )
