"""Embeddings from real processes: equal to the pooled hidden states of mlx-lm, however the model is split."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model  # pyright: ignore[reportUnknownVariableType] - configurations are bare dicts
from numpy.typing import NDArray
from tests.default_settings import make_policy
from tests.end_to_end.instance import running_engine
from tests.worker.tensor.models import write_family

from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import PoolingKind, SamplingParams
from mlx_ring.engine.engine import Engine

CHUNKED = make_policy(max_num_seqs=4, prefill_chunk=32)
KINDS: tuple[PoolingKind, ...] = get_args(PoolingKind)


def prompts() -> list[tuple[int, ...]]:
    """Return prompts of many lengths, two of which share a prefix."""
    numbers = random.Random(11)
    tokens = [tuple(numbers.randrange(509) for _ in range(length)) for length in (1, 7, 32, 33, 150)]
    return [*tokens, (*tokens[-1][:100], 5, 6, 7)]


def expected(folder: Path, kind: PoolingKind) -> list[NDArray[np.float32]]:
    model: Any = load_model(folder)[0]
    model.set_dtype(mx.float32)
    pooled: list[NDArray[np.float32]] = []
    for tokens in prompts():
        states = np.array(model.model(mx.array([tokens]))[0])
        pooled.append({"last": states[-1], "mean": states.mean(axis=0), "cls": states[0]}[kind])
    return pooled


async def embed(engine: Engine, kind: PoolingKind) -> list[tuple[float, ...]]:
    async def one(index: int, tokens: Sequence[int]) -> tuple[float, ...]:
        request = GenerateRequest(str(index), tuple(tokens), SamplingParams(max_tokens=0), pooling=kind)
        async with engine.submit(request) as stream:
            (delta,) = [delta async for delta in stream]
        assert delta.pooled is not None
        return delta.pooled

    return await asyncio.gather(*(one(index, tokens) for index, tokens in enumerate(prompts())))


@pytest.mark.parametrize(
    ("stages", "shares"),
    [pytest.param(1, (1.0,), marks=pytest.mark.thorough), (2, (1.0,)), (1, (1.0, 1.0))],
    ids=["one stage", "two stages", "two ranks"],
)
def test_embeddings_equal_pooled_hidden_states_of_the_whole_model(
    stages: int, shares: tuple[float, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_family(folder, "qwen3", None)

    async def run() -> None:
        async with running_engine(folder, stages, tmp_path, policy=CHUNKED, shares=shares) as (engine, _):
            for kind in KINDS:
                # A request that generates text shares their steps.
                generating = engine.submit(GenerateRequest("d", prompts()[1], SamplingParams(max_tokens=12)))
                vectors = await embed(engine, kind)
                assert len([delta async for delta in generating]) > 1
                for vector, reference in zip(vectors, expected(folder, kind), strict=True):
                    np.testing.assert_allclose(vector, reference, rtol=0, atol=2e-5 * np.abs(reference).max())

    asyncio.run(run())
