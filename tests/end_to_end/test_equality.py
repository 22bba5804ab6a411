"""However a model's layers are split over stages, its tokens are those of the whole model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.equality import Agreement
from tests.end_to_end.expected_answers import (
    RANDOM_MODELS,
    Expected,
    agree_on_both,
    check_agreement,
    expected_answers,
)
from tests.end_to_end.instance import running_engine

MODELS, STAGES = ("demo", "demo-moe", *RANDOM_MODELS), (1, 2, 3, 5)
SPLITS = [
    ("demo", 1),
    ("demo", 3),
    ("demo-moe", 5),
    ("random-qwen3", 2),
    ("random-qwen3-moe", 3),
]
"""Splits in which every model and every number of stages occurs. `--thorough` tests all of them."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose the splits of each model."""
    splits = list(product(MODELS, STAGES)) if metafunc.config.getoption("--thorough") else SPLITS
    metafunc.parametrize(("expected", "stages"), splits, indirect=["expected"])


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, shared: Path) -> Expected:
    return expected_answers(request.param, shared, thorough=bool(request.config.getoption("--thorough")))


@pytest.mark.timeout(1200)
def test_tokens_of_stages_equal_those_of_the_whole_model(
    expected: Expected, stages: int, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    async def run() -> dict[str, Agreement]:
        rows = 2 * len(expected.prompts)
        async with running_engine(expected.folder, stages, tmp_path, max_num_seqs=rows) as (engine, _):
            return await agree_on_both(engine, expected)

    record_property("ties of one worker's, against mlx-lm", expected.ties)
    check_agreement(asyncio.run(run()), sum(map(len, expected.greedy)), record_property)
