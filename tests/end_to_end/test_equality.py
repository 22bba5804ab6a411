"""However a model's layers are split over stages, its tokens are those of the whole model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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

BUILT_IN = ("demo", "demo-moe")
STAGES, FEWER_STAGES = (1, 2, 3, 5), (2, 3)
"""Numbers of stages. Random models have the architectures of the built-in ones: `--thorough` splits them as often."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose the splits of each model."""
    fewer = STAGES if metafunc.config.getoption("--thorough") else FEWER_STAGES
    splits = [(model, stages) for model in BUILT_IN for stages in STAGES]
    splits += [(model, stages) for model in RANDOM_MODELS for stages in fewer]
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
