"""Greedy and seeded answers that an instance must give, and their comparison, in tests that split a model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from tests.end_to_end.equality import TIE, Agreement, ScoreGap, compare
from tests.end_to_end.instance import generate, running_engine
from tests.end_to_end.reference import WholeModel
from tests.once import once
from tests.worker.random_models import QWEN3, QWEN3_MOE, write_random_model

from mlx_ring.core.types import SamplingParams
from mlx_ring.engine.engine import Engine
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.models.model_source import find_model
from mlx_ring.worker.sampler.draw import gumbel, keys

THOROUGH, USUAL = (50, 128), (12, 24)
"""Numbers of prompts and of tokens of each answer, with `--thorough` and without."""
GENERATED = 2
"""Number of prompts whose answers mlx-lm generates. One worker gives the other answers, and mlx-lm confirms that each of
their tokens is the likeliest. That takes one pass over an answer instead of one for each of its tokens."""
GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=1234)
RANDOM_MODELS = {"random-qwen3": QWEN3, "random-qwen3-moe": QWEN3_MOE}


@dataclass(frozen=True)
class Expected:
    """Model, prompts for it, and the tokens that must come."""

    folder: Path
    whole: WholeModel
    prompts: list[tuple[int, ...]]
    greedy: list[list[int]]
    """Answers of mlx-lm."""
    ties: int
    """Number of these tokens that tie with another one."""
    seeded: list[list[int]]
    """Answers of one worker."""

    def seeded_gap(self, before: Sequence[int], first: int, second: int) -> float:
        """Return the distance of two tokens' scores: logits over temperature, plus the position's noise."""
        logits = self.whole.logits(before)[mx.array([first, second])] / SEEDED.temperature
        noise = gumbel(keys([(SEEDED.seed, len(before))])[:, :2], mx.array([[first, second]]))[0]
        scores = logits + noise
        return abs(cast("float", (scores[0] - scores[1]).item()))


async def _all(
    engine: Engine, prompts: Sequence[tuple[int, ...]], count: int, sampling: SamplingParams
) -> list[list[int]]:
    return await asyncio.gather(*(generate(engine, prompt, count, sampling) for prompt in prompts))


def expected_answers(name: str, shared: Path, *, thorough: bool) -> Expected:
    """Return the prompts of a model and what it must answer. A run of the tests finds the answers out once."""
    how_many, tokens = THOROUGH if thorough else USUAL
    made = shared / f"equality-{name}"
    folder = made / "model" if name in RANDOM_MODELS else find_model(name).folder.path

    def answer() -> dict[str, Any]:
        if name in RANDOM_MODELS:
            write_random_model(folder, RANDOM_MODELS[name])
        return _answers(folder, _prompts(folder, how_many), tokens, made)

    answers = once(made, answer)
    return Expected(folder, WholeModel(folder), _prompts(folder, how_many), **answers)


def _prompts(folder: Path, how_many: int) -> list[tuple[int, ...]]:
    numbers, vocabulary = random.Random(5), read_model_folder(folder).vocab_size
    return [
        tuple(numbers.randrange(vocabulary) for _ in range(numbers.randint(1, 40))) for _ in range(how_many)
    ]


def _answers(folder: Path, prompts: list[tuple[int, ...]], tokens: int, logs: Path) -> dict[str, Any]:
    """Return the answers for `Expected`."""
    whole = WholeModel(folder)

    async def one_worker() -> list[list[list[int]]]:
        async with running_engine(folder, 1, logs, max_num_seqs=2 * len(prompts)) as (engine, _):
            return await asyncio.gather(*(_all(engine, prompts, tokens, kind) for kind in (GREEDY, SEEDED)))

    greedy, seeded = asyncio.run(one_worker())
    assert {len(answer) for answer in greedy} == {tokens}
    ties = sum(_ties(whole, prompt, answer) for prompt, answer in zip(prompts, greedy, strict=True))
    greedy[:GENERATED] = [whole.greedy(prompt, tokens) for prompt in prompts[:GENERATED]]
    return {"greedy": greedy, "ties": ties, "seeded": seeded}


def _ties(whole: WholeModel, prompt: tuple[int, ...], tokens: list[int]) -> int:
    """Return how many of the tokens tie with a likelier one. Fail where one lies farther behind."""
    logits = whole.every_logits((*prompt, *tokens))[len(prompt) - 1 : -1]
    chosen = mx.take_along_axis(logits, mx.array(tokens)[:, None], axis=1)
    behind = mx.max(logits, axis=1, keepdims=True) - chosen
    assert cast("float", mx.max(behind).item()) <= TIE
    return cast("int", mx.sum(behind > 0).item())


def check_agreement(
    found: dict[str, Agreement], tokens: int, record_property: Callable[[str, Any], None]
) -> None:
    """Fail unless so many tokens were compared of each kind."""
    for kind, agreement in found.items():
        print(f"{kind}: {agreement}")  # noqa: T201 - how often tokens tie is part of the result
        record_property(kind, str(agreement))
        assert agreement.tokens == tokens


async def agree_on_both(engine: Engine, expected: Expected) -> dict[str, Agreement]:
    """Compare greedy and seeded answers in the same steps, because ranks wait for each other in each step."""
    greedy, seeded = await asyncio.gather(_agree(engine, expected, GREEDY), _agree(engine, expected, SEEDED))
    return {"greedy, against mlx-lm": greedy, "seeded, against one worker": seeded}


async def _agree(engine: Engine, expected: Expected, sampling: SamplingParams) -> Agreement:
    is_greedy = sampling is GREEDY
    reference = expected.greedy if is_greedy else expected.seeded
    gap: ScoreGap = expected.whole.gap if is_greedy else expected.seeded_gap

    def again(before: tuple[int, ...], count: int) -> Awaitable[list[int]]:
        return generate(engine, before, count, sampling)

    found = await asyncio.gather(
        *(
            compare(prompt, tokens, again, gap)
            for prompt, tokens in zip(expected.prompts, reference, strict=True)
        )
    )
    return sum(found, start=Agreement())
