"""Stages linked by MLX's collectives: the tokens of the whole model, and a worker that is killed."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from pathlib import Path

import pytest
from tests.end_to_end.equality import Agreement, compare
from tests.end_to_end.instance import generate, request, running_agent, running_engine, start_workers
from tests.end_to_end.reference import WholeModel
from tests.processes import run_cli, serving

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.errors import NotReady
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.executor import GrpcExecutor, RankAddress
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.models.model_source import find_model
from mlx_ring.rpc.hello import make_hello

pytestmark = pytest.mark.alone
KINDS = ("ring", "allreduce")
TOKENS = 48
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
    """mlx-lm's; the last prompt repeats itself, so that drafts are made."""
    numbers = random.Random(11)
    prompts = [tuple(numbers.randrange(3000) for _ in range(length)) for length in LENGTHS]
    prompts.append(prompts[2] * 4)
    return {prompt: whole.greedy(prompt, TOKENS) for prompt in prompts}


@pytest.mark.parametrize("link", KINDS)
def test_a_mixture_of_experts_over_two_stages_says_what_mlx_lm_says(
    link: str, folder: Path, whole: WholeModel, answers: Answers, tmp_path: Path
) -> None:
    """Several requests at once, their prompts in chunks, with drafts, while other clients leave in the middle."""

    async def held(engine: Engine, prompt: tuple[int, ...]) -> Agreement:
        async def again(before: tuple[int, ...], count: int) -> list[int]:
            return await generate(engine, before, count)

        return await compare(prompt, answers[prompt], again, whole.gap)

    async def left(engine: Engine, prompt: tuple[int, ...]) -> None:
        seen: list[int] = []
        async with engine.submit(request(prompt, TOKENS)) as stream:
            async for delta in stream:
                seen += delta.token_ids
                if len(seen) >= 5:
                    break
        assert seen == answers[prompt][: len(seen)]

    async def run() -> None:
        policy = Policy(max_num_seqs=5, prefill_chunk=16)
        async with running_engine(folder, 2, tmp_path, policy=policy, link=link) as (engine, _):
            leaving = asyncio.gather(*(left(engine, prompt) for prompt in answers))
            agreements = await asyncio.gather(*(held(engine, prompt) for prompt in answers))
            await leaving
            assert sum(agreements, start=Agreement()).tokens == TOKENS * len(answers)
            stats = engine.stats().scheduler
            assert stats.steps_failed == 0
            assert stats.accepted_tokens > 0, "nothing was guessed"

    asyncio.run(run())


def test_a_stage_between_others_takes_and_gives_over_the_ring(
    folder: Path, whole: WholeModel, answers: Answers, tmp_path: Path
) -> None:
    async def run() -> list[list[int]]:
        async with running_engine(folder, 3, tmp_path, link="ring") as (engine, _):
            return await asyncio.gather(*(generate(engine, prompt, TOKENS) for prompt in answers))

    for (prompt, expected), got in zip(answers.items(), asyncio.run(run()), strict=True):
        strays = [] if got == expected else whole.strays(prompt, got)
        assert strays == []


def test_workers_in_a_collective_take_steps_from_one_head_only(folder: Path, tmp_path: Path) -> None:
    model = read_model_folder(folder)

    async def run() -> None:
        async with running_agent(tmp_path) as (_, address):
            workers = await start_workers(address, model, 2, link="ring")
            ranks = [RankAddress(rank, where) for rank, (where, _) in workers.items()]
            greetings = [
                make_hello(model_digest=model.digest, plan_digest="2 stages", fencing_id=fencing_id)
                for fencing_id in (1, 2)
            ]
            first = await GrpcExecutor.connect(ranks, greetings[0])
            try:
                with pytest.raises(NotReady, match="serve one head"):
                    await GrpcExecutor.connect(ranks, greetings[1])
            finally:
                await first.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("link", "victim", "trouble", "code"),
    [
        ("ring", "0", signal.SIGKILL, "worker_lost"),
        ("ring", "1", signal.SIGKILL, "worker_lost"),
        ("allreduce", "1", signal.SIGKILL, "worker_lost"),
        ("ring", "0", signal.SIGSTOP, "worker_stuck"),
    ],
)
def test_a_stage_that_ends_or_hangs_ends_the_answer_and_all_comes_back(
    link: str, victim: str, trouble: signal.Signals, code: str, tmp_path: Path
) -> None:
    flags = ("--stages", "2", "--link", link, "--step-deadline-s", "3")
    with serving("demo-moe", *flags, folder=tmp_path) as server:
        body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            events = stream.iter_lines()
            next(events)
            worker = server.child("mlx_ring.worker", "--stage", victim)
            worker.send_signal(trouble)
            last = [line for line in events if line.startswith("data: {")][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == code, error
        server.wait_for_health(200)
        short = {"prompt": "Once", "max_tokens": 8}
        assert server.http.post("/v1/completions", json=short).status_code == 200
        assert server.stop() == 0
        assert server.all_ended()


def test_a_backend_that_the_machine_has_not_is_refused_with_one_sentence(tmp_path: Path) -> None:
    done = run_cli("serve", "demo-moe", "--port", "0", "--stages", "2", "--link", "jaccl", folder=tmp_path)
    assert done.returncode != 0
    said = done.stderr.splitlines()[-1]
    assert "--link jaccl: MLX's backend jaccl is not available on " in said
    assert said.endswith("ring would be available.")
