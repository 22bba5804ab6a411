"""However a model is split, its tokens are those of the whole: real processes, greedy and seeded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
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


@pytest.fixture(scope="module", params=["demo", "demo-moe", *RANDOM_MODELS])
def expected(request: pytest.FixtureRequest, shared: Path) -> Expected:
    name = cast("str", request.param)
    how_many, tokens = THOROUGH if request.config.getoption("--thorough") else USUAL
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
    """What `Expected` has beside model and prompts."""
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
    """How many of the tokens are not the likeliest, and nearly so; farther behind none may be."""
    logits = whole.every_logits((*prompt, *tokens))[len(prompt) - 1 : -1]
    chosen = mx.take_along_axis(logits, mx.array(tokens)[:, None], axis=1)
    behind = mx.max(logits, axis=1, keepdims=True) - chosen
    assert cast("float", mx.max(behind).item()) <= TIE
    return cast("int", mx.sum(behind > 0).item())


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_tokens_equal_the_whole_models_however_it_is_split(
    expected: Expected, stages: int, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    async def run() -> dict[str, Agreement]:
        rows = 2 * len(expected.prompts)
        async with running_engine(expected.folder, stages, tmp_path, max_num_seqs=rows) as (engine, _):
            return await _agree_on_both(engine, expected)

    record_property("ties of one worker's, against mlx-lm", expected.ties)
    _hold(asyncio.run(run()), sum(map(len, expected.greedy)), record_property)


@pytest.mark.alone
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("stages", "shares"), [(1, (1.0, 1.0)), (1, (3.0, 1.0)), (2, (1.0, 1.0))])
def test_tokens_equal_the_whole_models_however_its_layers_are_shared(
    expected: Expected,
    stages: int,
    shares: tuple[float, ...],
    tmp_path: Path,
    record_property: Callable[[str, Any], None],
) -> None:
    """Of fewer prompts: ranks that wait for each other keep a processor busy each, and tests have few."""
    some = replace(
        expected,
        prompts=expected.prompts[:FEW],
        greedy=[tokens[:SHORT] for tokens in expected.greedy[:FEW]],
        seeded=[tokens[:SHORT] for tokens in expected.seeded[:FEW]],
    )

    async def run() -> dict[str, Agreement]:
        async with running_engine(expected.folder, stages, tmp_path, max_num_seqs=2 * FEW, shares=shares) as (
            engine,
            _,
        ):
            return await _agree_on_both(engine, some)

    _hold(asyncio.run(run()), FEW * SHORT, record_property)


@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "bits", "shares"),
    [
        ("qwen3", 4, (5.0, 3.0)),
        ("llama", 8, (1.0, 1.0, 1.0, 1.0)),
        ("qwen3_moe", 4, (3.0, 1.0)),
    ],
)
def test_tokens_equal_the_whole_models_however_quantized_layers_are_shared(
    family: str,
    bits: int,
    shares: tuple[float, ...],
    tmp_path: Path,
    record_property: Callable[[str, Any], None],
) -> None:
    """Of 8 KV heads, with a head of its own and with a tied one, dense and with experts."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_family(folder, family, bits)
    whole, numbers = WholeModel(folder), random.Random(7)
    prompts = [tuple(numbers.randrange(509) for _ in range(numbers.randint(1, 40))) for _ in range(FEW)]

    async def ask(
        shares: tuple[float, ...], use: Callable[[Engine], Awaitable[dict[str, Agreement]]]
    ) -> dict[str, Agreement]:
        async with running_engine(folder, 1, tmp_path, max_num_seqs=2 * FEW, shares=shares) as (engine, _):
            return await use(engine)

    some = Expected(folder, whole, prompts, [whole.greedy(prompt, SHORT) for prompt in prompts], 0, [])

    async def alone(engine: Engine) -> dict[str, Agreement]:
        answers = (generate(engine, prompt, SHORT, SEEDED) for prompt in prompts)
        some.seeded.extend(await asyncio.gather(*answers))
        return {}

    async def shared(engine: Engine) -> dict[str, Agreement]:
        return await _agree_on_both(engine, some)

    asyncio.run(ask((1.0,), alone))
    _hold(asyncio.run(ask(shares, shared)), FEW * SHORT, record_property)


def _hold(found: dict[str, Agreement], tokens: int, record_property: Callable[[str, Any], None]) -> None:
    for kind, agreement in found.items():
        print(f"{kind}: {agreement}")  # noqa: T201 - how often tokens tie is part of the result
        record_property(kind, str(agreement))
        assert agreement.tokens == tokens


async def _agree_on_both(engine: Engine, expected: Expected) -> dict[str, Agreement]:
    """Greedy and seeded answers share steps: each step costs ranks a wait for each other."""
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
