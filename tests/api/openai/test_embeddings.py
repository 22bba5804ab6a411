"""`/v1/embeddings`: the twin's hidden state of a token is the token, its position, and 1."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.api.clients import Api, refusal
from tests.api.twins import BOS, EOS, TwinService
from tests.default_settings import make_policy

from mlx_ring.api.openai.embeddings import Embedding, written
from mlx_ring.core.types import PoolingKind


def service_with(kind: PoolingKind, *, normalize: bool = False, **changes: bool) -> TwinService:
    service = TwinService(policy=make_policy(max_num_seqs=2, max_queued_requests=2, prefill_chunk=4))
    service.pooling = replace(service.pooling, kind=kind, normalize=normalize, **changes)
    return service


def embed(api: Api, texts: object, **fields: object) -> list[list[float]]:
    response = api.post("/v1/embeddings", {"input": texts} | fields)
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [(each["object"], each["index"]) for each in data] == [
        ("embedding", index) for index in range(len(data))
    ]
    return [each["embedding"] for each in data]


def unit(vector: Sequence[float]) -> list[float]:
    return list(np.array(vector) / np.linalg.norm(vector))


@pytest.mark.parametrize(
    ("kind", "vector"),
    [("last", [70.0, 5.0, 1.0]), ("mean", [67.5, 2.5, 1.0]), ("cls", [65.0, 0.0, 1.0])],
)
def test_each_pooling_kind_spans_prefill_chunks(kind: PoolingKind, vector: list[float]) -> None:
    assert embed(Api(service_with(kind)), list(range(65, 71))) == [vector]


@pytest.mark.parametrize(
    ("texts", "vectors"),
    [
        ("AB", [[66, 2, 1]]),
        (["AB", "C"], [[66, 2, 1], [67, 1, 1]]),
        ([65, 66], [[66, 1, 1]]),
        ([[65], [66, 67]], [[65, 0, 1], [67, 1, 1]]),
        ("", [[BOS, 0, 1]]),
    ],
)
def test_each_form_of_input_is_embedded_in_order(texts: object, vectors: list[list[float]]) -> None:
    assert embed(Api(service_with("last")), texts) == vectors


def test_more_texts_than_max_num_seqs_are_embedded() -> None:
    api = Api(service_with("last"))
    assert embed(api, [[65, token] for token in range(100)]) == [[token, 1, 1] for token in range(100)]
    assert api.service.sequences_held == 0, "no sequence is cached for an embedded text"


def test_vectors_have_unit_length_also_when_shortened(api: Api) -> None:
    assert embed(api, "A") == [pytest.approx(unit([65, 1, 1]))]
    assert embed(api, "A", dimensions=2) == [pytest.approx(unit([65, 1]))]


def test_base64_encodes_the_same_numbers_as_little_endian_float32(api: Api) -> None:
    (plain,) = embed(api, "Hello.")
    (encoded,) = embed(api, "Hello.", encoding_format="base64")
    assert isinstance(encoded, str)
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == np.array(plain, np.float32).tolist()


def test_other_tasks_run_after_each_written_vector() -> None:
    order: list[str] = []

    def write(place: int, vector: NDArray[np.float32]) -> bytes:
        order.append("vector")
        return b"%d" % (place + len(vector))

    async def other() -> None:
        for _ in range(3):
            order.append("other")
            await asyncio.sleep(0)

    async def both() -> None:
        embeddings = [Embedding(np.zeros(1, np.float32), 1)] * 3
        data, _ = await asyncio.gather(written(embeddings, write), other())
        assert data == b"1,2,3"

    asyncio.run(both())
    assert order == ["vector", "other"] * 3


def test_usage_counts_the_tokens_of_every_text(api: Api) -> None:
    body = api.post("/embeddings", {"input": ["A", "BC"], "model": "twin"}).json()
    assert (body["object"], body["model"]) == ("list", "org/twin")
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}


def test_text_ends_with_eos_where_the_model_needs_it() -> None:
    api = Api(service_with("last", ends_with_eos=True))
    assert embed(api, "AB") == [[EOS, 3, 1]]
    assert embed(api, [65, 66]) == [[66, 1, 1]], "token ids get no EOS"


@pytest.mark.parametrize(("kind", "hits"), [("last", 1), ("mean", 0)])
def test_prefix_cache_serves_last_token_pooling_but_not_mean(kind: PoolingKind, hits: int) -> None:
    text = "One text that shares a prefix of more than sixteen tokens with another."
    api = Api(service_with(kind))
    api.complete(prompt=text, max_tokens=1)
    assert embed(api, text) == embed(Api(service_with(kind)), text)
    assert api.service.engine.stats().cache.hits == hits
    assert api.service.sequences_held == 1, "the cached sequence of the completion stays"


def test_model_that_cannot_embed_gives_the_reason() -> None:
    service = TwinService()
    service.pooling = replace(service.pooling, refusal="It has a Dense module.")
    assert refusal(Api(service).post("/v1/embeddings", {"input": "A"})) == ("model", "It has a Dense module.")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": list[int]()}, "input"),
        ({"input": [list[int]()]}, "input[0]"),
        ({"input": 3}, "input"),
        ({"input": [320]}, "input"),
        ({"input": ["A", "x" * 4100]}, "input[1]"),
        ({"input": ["A"] * 2049}, "input"),
        ({"dimensions": 4}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"input_type": "query"}, "input_type"),
    ],
)
def test_invalid_field_is_named(api: Api, fields: dict[str, object], named: str) -> None:
    param, message = refusal(api.post("/v1/embeddings", {"input": "A"} | fields))
    assert param == named
    assert message
