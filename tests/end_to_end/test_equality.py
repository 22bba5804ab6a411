"""However a model's layers are split over stages, its tokens are those of the whole model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
<<<<<<< HEAD
from tests.end_to_end.equality import TIE, Agreement, ScoreGap, compare
from tests.end_to_end.instance import generate, running_engine
from tests.end_to_end.reference import WholeModel
from tests.once import once
from tests.worker.random_models import QWEN3, QWEN3_MOE, write_random_model
from tests.worker.tensor.models import write_family

from mlx_ring.core.types import SamplingParams
from mlx_ring.engine.engine import Engine
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.models.model_source import find_model
from mlx_ring.worker.sampler.draw import gumbel, keys

THOROUGH, USUAL = (50, 128), (16, 48)
"""Prompts and tokens of each, with `--thorough` and without."""
FEW, SHORT = 10, 40
"""Of prompts and tokens, where ranks share layers."""
GENERATED = 10
"""Prompts whose answers mlx-lm generates. The other answers one worker gives, and mlx-lm says of each token that it is the likeliest:
one pass over an answer instead of one for each of its tokens."""
GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=1234)
RANDOM_MODELS = {"random-qwen3": QWEN3, "random-qwen3-moe": QWEN3_MOE}


@dataclass(frozen=True)
class Expected:
    """A model, prompts for it, and the tokens that must come."""

    folder: Path
    whole: WholeModel
    prompts: list[tuple[int, ...]]
    greedy: list[list[int]]
    """mlx-lm's."""
    ties: int
    """Tokens among these that another one ties with."""
    seeded: list[list[int]]
    """Our own with one worker."""

    def seeded_gap(self, before: Sequence[int], first: int, second: int) -> float:
        """How far apart two tokens' scores are: logits over temperature, and the position's noise."""
        logits = self.whole.logits(before)[mx.array([first, second])] / SEEDED.temperature
        noise = gumbel(keys([(SEEDED.seed, len(before))])[:, :2], mx.array([[first, second]]))[0]
        scores = logits + noise
        return abs(cast("float", (scores[0] - scores[1]).item()))


async def _all(
    engine: Engine, prompts: Sequence[tuple[int, ...]], count: int, sampling: SamplingParams
) -> list[list[int]]:
    return await asyncio.gather(*(generate(engine, prompt, count, sampling) for prompt in prompts))
=======
from tests.end_to_end.equality import Agreement
from tests.end_to_end.expected_answers import (
    RANDOM_MODELS,
    Expected,
    agree_on_both,
    check_agreement,
    expected_answers,
)
from tests.end_to_end.instance import running_engine
>>>>>>> origin/main


@pytest.fixture(scope="module", params=["demo", "demo-moe", *RANDOM_MODELS])
def expected(request: pytest.FixtureRequest, shared: Path) -> Expected:
    return expected_answers(request.param, shared, thorough=request.config.getoption("--thorough"))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_tokens_of_stages_equal_those_of_the_whole_model(
    expected: Expected, stages: int, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    async def run() -> dict[str, Agreement]:
        rows = 2 * len(expected.prompts)
        async with running_engine(expected.folder, stages, tmp_path, max_num_seqs=rows) as (engine, _):
            return await agree_on_both(engine, expected)

    record_property("ties of one worker's, against mlx-lm", expected.ties)
    check_agreement(asyncio.run(run()), sum(map(len, expected.greedy)), record_property)
