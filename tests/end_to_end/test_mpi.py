"""Workers joined by Open MPI: tokens equal to the whole model's, listening on loopback only, a killed worker."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.end_to_end.equality import Agreement, compare
from tests.end_to_end.instance import generate, running_engine
from tests.end_to_end.reference import WholeModel
from tests.interrupted import complete, interrupt
from tests.open_mpi import use_open_mpi
from tests.processes import listening_addresses, run_cli, serving

from mlx_ring.engine.engine import Engine
from mlx_ring.models.model_source import find_model

pytestmark = pytest.mark.machines

PROMPTS, TOKENS = 4, 16


@dataclass(frozen=True)
class Expected:
    """A model and mlx-lm's answers to some prompts."""

    folder: Path
    whole: WholeModel
    answers: dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def expected() -> Expected:
    folder, numbers = find_model("demo-moe").folder.path, random.Random(7)
    whole = WholeModel(folder)
    prompts = [tuple(numbers.randrange(3000) for _ in range(numbers.randint(1, 60))) for _ in range(PROMPTS)]
    return Expected(folder, whole, {prompt: whole.greedy(prompt, TOKENS) for prompt in prompts})


@pytest.mark.parametrize(
    ("stages", "shares", "link"),
    [
        pytest.param(1, (1.0, 1.0), "grpc", marks=pytest.mark.thorough),
        (1, (3.0, 1.0), "grpc"),
        (2, (1.0,), "mpi"),
    ],
)
def test_tokens_equal_those_of_the_whole_model(
    stages: int,
    shares: tuple[float, ...],
    link: str,
    expected: Expected,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_open_mpi(monkeypatch)

    async def agreement(engine: Engine, prompt: tuple[int, ...], answer: list[int]) -> Agreement:
        async def continue_after(before: tuple[int, ...], count: int) -> list[int]:
            return await generate(engine, before, count)

        return await compare(prompt, answer, continue_after, expected.whole.gap)

    async def run() -> list[Agreement]:
        async with running_engine(
            expected.folder, stages, tmp_path, shares=shares, link=link, backend="mpi"
        ) as (engine, _):
            return await asyncio.gather(*(agreement(engine, *each) for each in expected.answers.items()))

    assert sum(asyncio.run(run()), start=Agreement()).tokens == TOKENS * PROMPTS


def test_group_listens_on_loopback_only_and_answers_continue_after_a_rank_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_open_mpi(monkeypatch)
    with serving("demo", "--tp", "2", "--backend", "mpi", folder=tmp_path) as server:
        (instance,) = server.status()["instances"]
        assert instance["stages"][0]["group"] == {"backend": "mpi", "why": "asked for"}
        before = [server.child("mlx_ring.worker", "--rank", str(rank)) for rank in (0, 1)]
        launcher = server.child("mlx_ring.agent.mpi")
        assert {
            address for process in (*before, launcher) for address, _ in listening_addresses(process)
        } <= {"127.0.0.1"}
        expected = complete(server.http)
        assert interrupt(server.http, before[1].kill).text == expected
        assert not psutil.wait_procs([*before, launcher], timeout=30)[1]
        assert server.stop() == 0
        assert server.all_ended()


def test_mpi_backend_without_open_mpi_is_refused_with_the_package_to_install(tmp_path: Path) -> None:
    hidden = {"MLX_MPI_LIBNAME": "libnone.so"}
    done = run_cli(
        "serve", "demo", "--port", "0", "--tp", "2", "--backend", "mpi", folder=tmp_path, environment=hidden
    )
    assert done.returncode != 0
    error = done.stderr.splitlines()[-1]
    assert "--backend mpi: MLX's backend mpi is not available on" in error
    assert "apt install libopenmpi3" in error
    assert "ring would be" in error
