"""However the layers of a stage are shared by its ranks, the tokens are those of the whole model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.equality import Agreement
from tests.end_to_end.expected_answers import (
    RANDOM_MODELS,
    SEEDED,
    Expected,
    agree_on_both,
    check_agreement,
    expected_answers,
)
from tests.end_to_end.instance import generate, running_engine
from tests.end_to_end.reference import WholeModel
from tests.worker.tensor.models import write_family

from mlx_ring.engine.engine import Engine

pytestmark = pytest.mark.alone(loops=True)
FEW, SHORT, SHORTEST = 8, 16, 8
"""Number of prompts, and of tokens of an answer by two ranks and by four. A rank that waits keeps a processor busy.
With `--thorough`, answers of four ranks have as many tokens as those of two."""
MODELS = ("demo", "demo-moe", *RANDOM_MODELS)
EQUAL, UNEQUAL = (1.0, 1.0), (3.0, 1.0)
ALL_SPLITS = [
    *((model, 1, shares) for model in MODELS for shares in (EQUAL, UNEQUAL)),
    *((model, 2, EQUAL) for model in MODELS),
]
"""Two ranks, and four. Where four ranks share two processors, every rank waits for its turn in each layer."""
SPLITS = [
    ("demo", 1, UNEQUAL),
    ("demo-moe", 1, EQUAL),
    ("random-qwen3", 1, EQUAL),
    ("random-qwen3-moe", 1, UNEQUAL),
    ("demo", 2, EQUAL),
    ("random-qwen3-moe", 2, EQUAL),
]
"""Splits without `--thorough`: dense models and such with experts, each in every way."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose the splits of each model."""
    if "expected" in metafunc.fixturenames:
        splits = ALL_SPLITS if metafunc.config.getoption("--thorough") else SPLITS
        metafunc.parametrize(("expected", "stages", "shares"), splits, indirect=["expected"])


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, shared: Path) -> Expected:
    return expected_answers(request.param, shared, thorough=bool(request.config.getoption("--thorough")))


def tokens_of_ranks(ranks: int, config: pytest.Config) -> int:
    """Return the number of tokens of an answer by so many ranks."""
    return SHORT if ranks < 4 or config.getoption("--thorough") else SHORTEST


@pytest.mark.timeout(1200)
def test_tokens_of_ranks_equal_those_of_the_whole_model(
    expected: Expected,
    stages: int,
    shares: tuple[float, ...],
    tmp_path: Path,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, Any], None],
) -> None:
    count = tokens_of_ranks(stages * len(shares), pytestconfig)
    some = replace(
        expected,
        prompts=expected.prompts[:FEW],
        greedy=[tokens[:count] for tokens in expected.greedy[:FEW]],
        seeded=[tokens[:count] for tokens in expected.seeded[:FEW]],
    )

    async def run() -> dict[str, Agreement]:
        async with running_engine(expected.folder, stages, tmp_path, max_num_seqs=2 * FEW, shares=shares) as (
            engine,
            _,
        ):
            return await agree_on_both(engine, some)

    check_agreement(asyncio.run(run()), FEW * count, record_property)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "bits", "shares"),
    [
        pytest.param("qwen3", 4, (5.0, 3.0), marks=pytest.mark.thorough),
        ("llama", 8, (1.0, 1.0, 1.0, 1.0)),
        ("qwen3_moe", 4, (3.0, 1.0)),
    ],
)
def test_tokens_of_ranks_with_quantized_layers_equal_those_of_the_whole_model(
    family: str,
    bits: int,
    shares: tuple[float, ...],
    tmp_path: Path,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, Any], None],
) -> None:
    """Use models with 8 KV heads: with an output head and with a tied one, dense and with experts."""
    count = tokens_of_ranks(len(shares), pytestconfig)
    folder = tmp_path / "model"
    folder.mkdir()
    write_family(folder, family, bits)
    whole, numbers = WholeModel(folder), random.Random(7)
    prompts = [tuple(numbers.randrange(509) for _ in range(numbers.randint(1, 40))) for _ in range(FEW)]

    async def run(
        shares: tuple[float, ...], use: Callable[[Engine], Awaitable[dict[str, Agreement]]]
    ) -> dict[str, Agreement]:
        async with running_engine(folder, 1, tmp_path, max_num_seqs=2 * FEW, shares=shares) as (engine, _):
            return await use(engine)

    some = Expected(folder, whole, prompts, [whole.greedy(prompt, count) for prompt in prompts], 0, [])

    async def alone(engine: Engine) -> dict[str, Agreement]:
        answers = (generate(engine, prompt, count, SEEDED) for prompt in prompts)
        some.seeded.extend(await asyncio.gather(*answers))
        return {}

    async def shared(engine: Engine) -> dict[str, Agreement]:
        return await agree_on_both(engine, some)

    asyncio.run(run((1.0,), alone))
    check_agreement(asyncio.run(run(shares, shared)), FEW * count, record_property)
