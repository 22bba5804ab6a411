"""`/api/embed`, and its predecessor `/api/embeddings`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, Tag
from starlette.requests import Request
from starlette.routing import Router

from mlx_ring.api.context import ApiContext
from mlx_ring.api.ollama.request import KeepAlive, Options, check_context, find_model
from mlx_ring.api.ollama.schemas import EMBED, EMBEDDINGS, OllamaEmbedding, OllamaEmbeddings
from mlx_ring.api.ollama.writer import Stopwatch
from mlx_ring.api.openai.embeddings import Embedding, Text, embed, floats, require_embeddings, written
from mlx_ring.api.openai.sampling import STRINGS
from mlx_ring.api.openapi import documented_post
from mlx_ring.api.request_body import Body
from mlx_ring.api.service import ModelService
from mlx_ring.api.streaming import JsonAnswer, while_connected
from mlx_ring.core.errors import RequestError

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


def routes(context: ApiContext) -> Router:
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
