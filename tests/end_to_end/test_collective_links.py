"""Stages linked by MLX's collectives give the tokens of the whole model."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest
from tests.default_settings import make_policy
from tests.end_to_end.equality import Agreement, compare
from tests.end_to_end.instance import generate, request, running_agent, running_engine, start_workers
from tests.end_to_end.reference import WholeModel
from tests.end_to_end.test_collective_failures import check_recoveries

from mlx_ring.core.errors import NotReady
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.executor import GrpcExecutor, RankAddress
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.models.model_source import find_model
from mlx_ring.rpc.hello import make_hello

pytestmark = pytest.mark.alone(loops=True)
KINDS = ("ring", "allreduce")
TOKENS = 16
LENGTHS = (1, 7, 20, 33, 70)
Answers = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def folder() -> Path:
    return find_model("demo-moe").folder.path


@pytest.fixture(scope="module")
def whole(folder: Path) -> WholeModel:
    return WholeModel(folder)


@pytest.fixture(scope="module")
def answers(whole: WholeModel) -> Answers:
    """Return prompts and mlx-lm's answers. The last prompt repeats itself, so that draft tokens are proposed."""
    numbers = random.Random(11)
    prompts = [tuple(numbers.randrange(3000) for _ in range(length)) for length in LENGTHS]
    prompts.append(prompts[2] * 4)
    return {prompt: whole.greedy(prompt, TOKENS) for prompt in prompts}


@pytest.mark.parametrize("link", KINDS)
def test_tokens_of_two_stages_of_a_mixture_of_experts_are_those_of_mlx_lm(
    link: str, folder: Path, whole: WholeModel, answers: Answers, tmp_path: Path
) -> None:
    """Run several requests at once, with prompts in chunks and draft tokens, while other clients cancel."""

    async def compared(engine: Engine, prompt: tuple[int, ...]) -> Agreement:
        async def again(before: tuple[int, ...], count: int) -> list[int]:
            return await generate(engine, before, count)

        return await compare(prompt, answers[prompt], again, whole.gap)

    async def cancelled(engine: Engine, prompt: tuple[int, ...]) -> None:
        seen: list[int] = []
        async with engine.submit(request(prompt, TOKENS)) as stream:
            async for delta in stream:
                seen += delta.token_ids
                if len(seen) >= 5:
                    break
        assert seen == answers[prompt][: len(seen)]

    async def run() -> None:
        policy = make_policy(max_num_seqs=5, prefill_chunk=16)
        async with running_engine(folder, 2, tmp_path, policy=policy, link=link) as (engine, _):
            cancelling = asyncio.gather(*(cancelled(engine, prompt) for prompt in answers))
            agreements = await asyncio.gather(*(compared(engine, prompt) for prompt in answers))
            await cancelling
            assert sum(agreements, start=Agreement()).tokens == TOKENS * len(answers)
            stats = engine.stats().scheduler
            assert stats.steps_failed == 0
            assert stats.accepted_tokens > 0, "no draft token was accepted"

    asyncio.run(run())


def test_tokens_of_three_stages_over_the_ring_are_those_of_mlx_lm(
    folder: Path, whole: WholeModel, answers: Answers, tmp_path: Path
) -> None:
    async def run() -> list[list[int]]:
        async with running_engine(folder, 3, tmp_path, link="ring") as (engine, _):
            return await asyncio.gather(*(generate(engine, prompt, TOKENS) for prompt in answers))

    for (prompt, expected), got in zip(answers.items(), asyncio.run(run()), strict=True):
        strays = [] if got == expected else whole.strays(prompt, got)
        assert strays == []


def test_workers_in_a_collective_accept_one_head_only(folder: Path, tmp_path: Path) -> None:
    model = read_model_folder(folder)

    async def run() -> None:
        async with running_agent(tmp_path) as (_, address):
            workers = await start_workers(address, model, 2, link="ring")
            ranks = [RankAddress(rank, where) for rank, (where, _) in workers.items()]
            hellos = [
                make_hello(model_digest=model.digest, plan_digest="2 stages", fencing_id=fencing_id)
                for fencing_id in (1, 2)
            ]
            first = await GrpcExecutor.connect(ranks, hellos[0])
            try:
                with pytest.raises(NotReady, match="serve one head"):
                    await GrpcExecutor.connect(ranks, hellos[1])
            finally:
                await first.close()

    asyncio.run(run())


@pytest.mark.alone
@pytest.mark.faults
def test_answer_continues_after_a_worker_is_stopped(tmp_path: Path) -> None:
    # On a busy machine any step could take longer than this deadline.
    check_recoveries(tmp_path, "ring", (0,), signal.SIGSTOP, "--step-deadline-s", "3")
