"""Schedule models whose caches cannot be cut anywhere, sequences that are preempted, and quantized KV caches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.default_settings import make_policy
from tests.end_to_end.instance import generate, running_engine
from tests.end_to_end.reference import WholeModel
from tests.end_to_end.scheduled_requests import (
    ALONE,
    ReferenceModel,
    check_concurrent_requests,
    reference_model,
)
from tests.worker.random_models import QWEN3, write_random_model

from mlx_ring.core.engine_stats import Policy

MODELS = ("sliding", "recurrent")
SPLITS = [("sliding", 1, 1), ("recurrent", 3, 3)]
"""Model, number of stages and seed. `--thorough` splits every model in every way."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose the splits."""
    if "model" in metafunc.fixturenames:
        every = [(model, stages, stages) for model in MODELS for stages in (1, 2, 3)]
        splits = every if metafunc.config.getoption("--thorough") else SPLITS
        metafunc.parametrize(("model", "stages", "seed"), splits, indirect=["model"])


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, shared: Path) -> ReferenceModel:
    return reference_model(request.param, shared)


@pytest.mark.timeout(600)
def test_tokens_are_those_of_each_request_alone(
    model: ReferenceModel, stages: int, seed: int, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    check_concurrent_requests(model, stages, (1.0,), seed, tmp_path, record_property)


def test_preempted_sequences_get_the_same_tokens(tmp_path: Path) -> None:
    """Ask mlx-lm, in one pass over an answer, whether each token is the likeliest."""
    folder = write_random_model(tmp_path / "model", QWEN3)
    whole, numbers = WholeModel(folder), random.Random(3)
    prompts = [tuple(numbers.randrange(2, 320) for _ in range(length)) for length in (230, 200, 170, 210)]

    async def run() -> list[list[int]]:
        policy = make_policy(num_speculative_tokens=0)
        async with running_engine(folder, 2, tmp_path, policy=policy, kv_blocks=5) as (engine, _):
            answers = await asyncio.gather(*(generate(engine, prompt, 160) for prompt in prompts))
            assert engine.stats().scheduler.num_preemptions > 0
            return answers

    for prompt, tokens in zip(prompts, asyncio.run(run()), strict=True):
        assert len(tokens) == 160
        assert whole.strays(prompt, tokens) == []


def test_quantized_kv_caches_give_the_same_tokens_batched_cached_and_split(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", {**QWEN3, "head_dim": 64})
    numbers = random.Random(4)
    start = tuple(numbers.randrange(2, 320) for _ in range(60))
    prompts = [(*start, *(numbers.randrange(2, 320) for _ in range(20))) for _ in range(4)]

    async def run(stages: int, policy: Policy) -> list[list[int]]:
        async with running_engine(folder, stages, tmp_path, policy=policy, kv_bits=8) as (engine, _):
            return await asyncio.gather(*(generate(engine, prompt, 40) for prompt in prompts))

    alone = asyncio.run(run(1, ALONE))
    together = asyncio.run(run(2, replace(make_policy(), prefill_chunk=32)))
    assert together == alone
