"""Requests that an engine schedules together, and the tokens that each must get: those that it gets alone.

Tests of every model and split use them, with real workers. Requests share prefixes, arrive in any order, are cancelled,
and have too little KV memory.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from tests.default_settings import make_policy
from tests.end_to_end.equality import Agreement, compare
from tests.end_to_end.instance import generate, request, running_engine
from tests.end_to_end.reference import WholeModel
from tests.once import once
from tests.worker.kv.small_models import CONFIGURATIONS
from tests.worker.random_models import QWEN3, write_random_model

from mlx_ring.core.types import SamplingParams
from mlx_ring.engine.engine import Engine
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.models.model_source import find_model
from mlx_ring.worker.sampler.draw import gumbel, keys

GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=77, presence_penalty=0.3)
ALONE = make_policy(max_num_seqs=1, steps_ahead=1, prefix_cache=False, num_speculative_tokens=0)
_CLIENTS = 6
_CONFIGURATIONS: dict[str, dict[str, Any] | None] = {
    "demo": None,
    "qwen3": QWEN3,
    "sliding": {**CONFIGURATIONS["gemma3_text"], "model_type": "gemma3_text", "eos_token_id": 1},
    "recurrent": {**CONFIGURATIONS["qwen3_next"], "model_type": "qwen3_next", "eos_token_id": 1},
}
"""Configuration of each model; None for one of the package."""


@dataclass(frozen=True)
class Case:
    """A request and the tokens that must come."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    expected: list[int]
    cancelled_after: int | None
    """Number of tokens after which the client cancels; None: it takes all."""


@dataclass(frozen=True)
class ReferenceModel:
    """Model, and its requests with their answers."""

    folder: Path
    whole: WholeModel
    cases: list[Case]

    def gap(self, case: Case, before: Sequence[int], first: int, second: int) -> float:
        """Return the distance of two tokens' scores. With a seed, each has the noise of its position."""
        if case.sampling is GREEDY:
            return self.whole.gap(before, first, second)
        logits = self.whole.logits(before)[mx.array([first, second])] / SEEDED.temperature
        noise = gumbel(keys([(SEEDED.seed, len(before))])[:, :2], mx.array([[first, second]]))[0]
        scores = logits + noise
        return abs(cast("float", (scores[0] - scores[1]).item()))


def _prompts(vocabulary: int, numbers: random.Random) -> list[tuple[int, ...]]:
    """Return prompts of many lengths. Some share a prefix, and one is a prefix of another."""
    starts = [tuple(numbers.randrange(2, vocabulary) for _ in range(length)) for length in (90, 150, 40)]
    prompts = [
        (
            *numbers.choice(starts),
            *(numbers.randrange(2, vocabulary) for _ in range(numbers.randrange(1, 60))),
        )
        for _ in range(9)
    ]
    return [*prompts, prompts[0], prompts[1][:100], (5,)]


def reference_model(name: str, shared: Path) -> ReferenceModel:
    """Return the model with its requests. A run of the tests finds the answers once."""
    config, made = _CONFIGURATIONS[name], shared / f"scheduling-{name}"
    folder = made / "model" if config else find_model(name).folder.path
    numbers = random.Random(11)

    def answer() -> dict[str, Any]:
        if config:
            write_random_model(folder, config)
        requests = _requests(folder)
        answers = asyncio.run(_answers_alone(folder, requests, made))
        # The next prompt of a conversation holds the prompt and the answer before.
        turns = [
            (*prompt, *tokens, 7, 8, 9)
            for (prompt, _, _), tokens in [*zip(requests, answers, strict=True)][:4:2]
        ]
        whole = WholeModel(folder)
        return {"answers": answers, "turns": [(turn, whole.greedy(turn, 20)) for turn in turns]}

    found = once(made, answer)
    cases = [
        Case(prompt, sampling, tokens, numbers.randrange(10) if numbers.random() < 0.2 else None)
        for (prompt, sampling, _), tokens in zip(_requests(folder), found["answers"], strict=True)
    ]
    cases += [Case(tuple(turn), GREEDY, tokens, None) for turn, tokens in found["turns"]]
    return ReferenceModel(folder, WholeModel(folder), cases)


def _requests(folder: Path) -> list[tuple[tuple[int, ...], SamplingParams, int]]:
    """Return prompts with their sampling and number of tokens, greedy and seeded."""
    numbers = random.Random(11)
    prompts = _prompts(read_model_folder(folder).vocab_size, numbers)
    return [
        (prompt, sampling, numbers.randrange(10, 28)) for prompt in prompts for sampling in (GREEDY, SEEDED)
    ]


async def _answers_alone(
    folder: Path, requests: Sequence[tuple[tuple[int, ...], SamplingParams, int]], logs: Path
) -> list[list[int]]:
    async with running_engine(folder, 1, logs, policy=ALONE) as (engine, _):
        return [await generate(engine, prompt, count, sampling) for prompt, sampling, count in requests]


def check_concurrent_requests(
    model: ReferenceModel,
    stages: int,
    shares: tuple[float, ...],
    seed: int,
    tmp_path: Path,
    record_property: Callable[[str, Any], None],
) -> None:
    """Run the requests at once, in any order, with caching, drafts, cancellations and too little memory."""
    numbers = random.Random(seed)
    policy = make_policy(
        max_num_seqs=numbers.randint(3, _CLIENTS),
        prefill_chunk=numbers.choice([16, 48, 512]),
        steps_ahead=numbers.randint(2, 3),
        num_speculative_tokens=numbers.randint(2, 8),
    )

    async def run() -> Agreement:
        async with running_engine(
            model.folder, stages, tmp_path, policy=policy, kv_blocks=9, shares=shares
        ) as (engine, _):
            order = list(model.cases)
            numbers.shuffle(order)
            queue = iter(order)

            async def client() -> Agreement:
                return sum([await _compare(engine, model, case) for case in queue], start=Agreement())

            agreement = sum(await asyncio.gather(*(client() for _ in range(_CLIENTS))), start=Agreement())
            stats = engine.stats()
            assert stats.cache.hits > 0, "nothing was reused"
            assert stats.scheduler.steps_failed == 0
            assert all(use.used_bytes <= use.limit_bytes for use in stats.cache.ranks.values())
            record_property("hits", stats.cache.hits)
            record_property("accepted drafts", stats.scheduler.accepted_tokens)
            return agreement

    agreement = asyncio.run(run())
    print(agreement)  # noqa: T201 - how often tokens tie is part of the result
    record_property("agreement", str(agreement))


async def _compare(engine: Engine, model: ReferenceModel, case: Case) -> Agreement:
    if case.cancelled_after is not None:
        return await _cancel(engine, case)

    async def again(before: tuple[int, ...], count: int) -> list[int]:
        return await generate(engine, before, count, _continued(case, before))

    def gap(before: Sequence[int], first: int, second: int) -> float:
        return model.gap(case, before, first, second)

    return await compare(case.prompt, case.expected, again, gap)


def _continued(case: Case, before: tuple[int, ...]) -> SamplingParams:
    # A penalty counts tokens of the answer. An answer that is continued as a prompt has none.
    assert len(before) == len(case.prompt) or not case.sampling.presence_penalty, (
        "a tie among penalized tokens"
    )
    return case.sampling


async def _cancel(engine: Engine, case: Case) -> Agreement:
    """Cancel the request in the middle, and compare the tokens that came until then."""
    seen: list[int] = []
    async with engine.submit(request(case.prompt, len(case.expected), case.sampling)) as stream:
        async for delta in stream:
            seen += delta.token_ids
            if len(seen) > (case.cancelled_after or 0):
                break
    assert seen == case.expected[: len(seen)]
    return Agreement(len(seen))
