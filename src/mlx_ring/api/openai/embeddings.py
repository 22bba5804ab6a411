"""`/v1/embeddings`, and the embedding of many texts, which Ollama's routes share.

The engine's capacity limits the texts in progress.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request
from starlette.routing import Router

from mlx_ring.api.context import ApiContext
from mlx_ring.api.dialect import json_bytes
from mlx_ring.api.generation import Generation
from mlx_ring.api.openai import schemas
from mlx_ring.api.openai.completions import TextOrTokens, each
from mlx_ring.api.openai.sampling import known_tokens
from mlx_ring.api.openapi import documented_post
from mlx_ring.api.request_body import Body
from mlx_ring.api.service import Answering, ModelService
from mlx_ring.api.streaming import JsonAnswer, fill_list, while_connected
from mlx_ring.core.errors import Overloaded, RequestError, ServingError
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import SamplingParams
from mlx_ring.models.pooling import Pooling

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
    return known_tokens(text, service, "input")


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


# ---- many texts

_LANES = 16
"""Largest number of texts of one request in progress, so that chats proceed beside thousands of texts."""


@dataclass(frozen=True, slots=True)
class Text:
    """Text to embed."""

    tokens: tuple[int, ...]
    param: str
    """Name of the request's field, for errors."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """One text's vector."""

    vector: NDArray[np.float32]
    tokens: int
    """Number of the text's tokens."""


def require_embeddings(service: ModelService, dimensions: int | None) -> None:
    """Check that the model can make vectors of that many numbers.

    Raises:
        RequestError: the model cannot.
    """
    if service.pooling.refusal:
        raise RequestError(service.pooling.refusal, param="model")
    if dimensions is not None and dimensions > service.hidden_size:
        raise RequestError(
            f"'dimensions' is {dimensions}; this model's embeddings have {service.hidden_size} numbers at most.",
            param="dimensions",
        )


async def embed(
    engine: Answering,
    service: ModelService,
    texts: Sequence[Text],
    *,
    request_id: str,
    dimensions: int | None = None,
) -> list[Embedding]:
    """Return each text's vector, in order. Cancellation stops all texts.

    Args:
        dimensions: number of a vector's first elements to keep; None for all.

    Raises:
        RingError: a vector could not be computed.
    """
    work = _Work(engine, service.pooling, request_id, dimensions, deque(enumerate(texts)))
    try:
        async with asyncio.TaskGroup() as lanes:
            for _ in range(min(_LANES, len(texts))):
                lanes.create_task(work.lane())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return [work.done[place] for place in range(len(texts))]


class _Work:
    """Texts of one request, which several lanes embed."""

    def __init__(
        self,
        engine: Answering,
        pooling: Pooling,
        request_id: str,
        dimensions: int | None,
        texts: deque[tuple[int, Text]],
    ) -> None:
        self._engine = engine
        self._pooling = pooling
        self._request_id = request_id
        self._dimensions = dimensions
        self._left = texts
        self._busy = 0
        self.done: dict[int, Embedding] = {}

    async def lane(self) -> None:
        """Embed one text after another. End if the engine is full and another lane is open."""
        while self._left:
            place, text = self._left.popleft()
            self._busy += 1
            try:
                self.done[place] = await self._one(place, text)
            except Overloaded:
                if self._busy == 1:
                    raise
                self._left.appendleft((place, text))
                return
            finally:
                self._busy -= 1

    async def _one(self, place: int, text: Text) -> Embedding:
        request = GenerateRequest(
            f"{self._request_id}-{place}",
            text.tokens,
            SamplingParams(max_tokens=0),
            pooling=self._pooling.kind,
        )
        async with Generation(self._engine, [request], text.param) as generation:
            (answer,) = await generation.run()
        if answer.pooled is None:
            raise ServingError("The last stage gave no hidden states.")
        vector = finish_vector(answer.pooled, self._dimensions, normalize=self._pooling.normalize)
        return Embedding(vector, answer.prompt_tokens)


async def written(made: Sequence[Embedding], write: Callable[[int, NDArray[np.float32]], bytes]) -> bytes:
    """Join the vectors with commas. Let other tasks run after each of them.

    Args:
        made: the vectors.
        write: writes one vector; takes its index too.
    """
    data: list[bytes] = []
    for place, embedding in enumerate(made):
        data.append(write(place, embedding.vector))
        await asyncio.sleep(0)
    return b",".join(data)


def floats(vector: NDArray[np.float32]) -> bytes:
    """Write a vector's numbers as items of a JSON list. Nine digits distinguish any two float32 numbers."""
    return ",".join(f"{number:.9g}" for number in vector.tolist()).encode()


def finish_vector(pooled: Sequence[float], dimensions: int | None, *, normalize: bool) -> NDArray[np.float32]:
    """Return the first `dimensions` numbers, scaled to length 1 where requested.

    Models of Matryoshka embeddings have the most important numbers first. With other models a cut loses more.

    Raises:
        ServingError: the vector has values that are no numbers.
    """
    vector = np.array(pooled[:dimensions])
    if not np.isfinite(vector).all():
        raise ServingError("The model's hidden states of this text are no finite numbers.")
    length = np.linalg.norm(vector)
    return (vector / length if normalize and length else vector).astype(np.float32)
