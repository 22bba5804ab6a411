"""`/v1/embeddings`."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request
from starlette.routing import Router

from mlx_ring.api.context import ApiContext
from mlx_ring.api.dialect import json_bytes
from mlx_ring.api.embeddings import Embedding, Text, embed, floats, require_embeddings, written
from mlx_ring.api.openai import schemas
from mlx_ring.api.openai.completions import TextOrTokens, each
from mlx_ring.api.openapi import documented_post
from mlx_ring.api.request_body import Body
from mlx_ring.api.service import ModelService
from mlx_ring.api.streaming import JsonAnswer, fill_list, while_connected
from mlx_ring.core.errors import RequestError

_MOST_TEXTS = 2048
"""OpenAI's."""


class EmbeddingRequest(Body):
    model: str | None = None
    input: TextOrTokens
    encoding_format: Literal["float", "base64"] | None = None
    """`base64` is of little-endian float32."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Number of a vector's first elements to keep; they are normalized to length 1 again."""


def routes(context: ApiContext) -> Router:
    router = Router()

    async def embeddings(request: Request) -> JsonAnswer[schemas.EmbeddingList]:
        fields = await context.read(request, EmbeddingRequest)
        service = context.model(fields.model)
        require_embeddings(service, fields.dimensions)
        given = each(fields.input)
        _check_count(given)
        work = _embed(context, service, given, fields.dimensions)
        made = await while_connected(request.receive, work)
        write = _base64 if fields.encoding_format == "base64" else _floats
        tokens = sum(embedding.tokens for embedding in made)
        answer: schemas.EmbeddingList = {
            "object": "list",
            "data": [],
            "model": service.model_id,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        return JsonAnswer(answer, first_list=await written(made, write))

    for path in ("/v1/embeddings", "/embeddings"):
        documented_post(router, path, embeddings, EmbeddingRequest, schemas.EMBEDDINGS)
    return router


async def _embed(
    context: ApiContext, service: ModelService, given: Sequence[str | list[int]], dimensions: int | None
) -> list[Embedding]:
    engine = await context.answering(service)
    texts = [
        Text(await _tokens(context, service, text), "input" if len(given) == 1 else f"input[{place}]")
        for place, text in enumerate(given)
    ]
    request_id = f"embd-{secrets.token_hex(12)}"
    return await embed(engine, service, texts, request_id=request_id, dimensions=dimensions)


async def _tokens(context: ApiContext, service: ModelService, text: str | list[int]) -> tuple[int, ...]:
    if isinstance(text, str):
        return await context.prompts.encode_whole(service, text, ends_with_eos=service.pooling.ends_with_eos)
    if max(text) >= service.vocab_size:
        raise RequestError(
            f"'input' holds token id {max(text)}; this model's token ids are 0 to {service.vocab_size - 1}.",
            param="input",
        )
    return tuple(text)


def _check_count(given: Sequence[str | list[int]]) -> None:
    if len(given) > _MOST_TEXTS:
        raise RequestError(
            f"'input' has {len(given)} texts; one request may have {_MOST_TEXTS} at most.", param="input"
        )


def _floats(place: int, vector: NDArray[np.float32]) -> bytes:
    item: schemas.EmbeddingMade = {"object": "embedding", "index": place, "embedding": []}
    return fill_list(json_bytes(item), floats(vector))


def _base64(place: int, vector: NDArray[np.float32]) -> bytes:
    encoded = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    item: schemas.EmbeddingMade = {"object": "embedding", "index": place, "embedding": encoded}
    return json_bytes(item)
