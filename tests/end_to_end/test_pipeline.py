"""Real workers of two stages: overlap of their steps, release of KV memory, lost workers and refused starts."""

from __future__ import annotations

import asyncio
import os
import signal
from itertools import product
from pathlib import Path

import pytest
from tests.default_settings import make_policy
from tests.end_to_end.instance import generate, request, running_agent, running_engine, start_workers
from tests.worker.random_models import QWEN3, write_random_model

from mlx_ring.core.engine_stats import StepTiming
from mlx_ring.core.errors import ModelCorrupt, NotReady, PlanError, WorkerLost
from mlx_ring.core.generation import RequestStream
from mlx_ring.core.types import RankId
from mlx_ring.engine.engine import Engine
from mlx_ring.models.model_folder import read_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("qwen3"), QWEN3)


def _overlap(one: StepTiming, other: StepTiming) -> bool:
    return one.started_us < other.finished_us and other.started_us < one.finished_us


def test_two_sequences_keep_both_stages_computing_at_once(folder: Path, tmp_path: Path) -> None:
    async def run() -> tuple[StepTiming, ...]:
        async with running_engine(folder, 2, tmp_path) as (engine, _):
            await asyncio.gather(*(generate(engine, [first, 2, 3], 60) for first in (4, 5)))
            return engine.stats().scheduler.recent

    recent = asyncio.run(run())
    first, last = (
        [timing for timing in recent if timing.rank == RankId(stage, 0) and timing.rows] for stage in (0, 1)
    )
    # A step starts before it waits for its link. Only its computation counts.
    computing = [timing for timing in last if timing.link_wait_us < timing.compute_us]
    overlaps = [
        (one.step, other.step)
        for one, other in product(first, computing)
        if one.step != other.step and _overlap(one, other)
    ]
    assert overlaps


def test_all_kv_memory_is_released_when_requests_end(folder: Path, tmp_path: Path) -> None:
    async def run() -> dict[RankId, int]:
        policy = make_policy(prefix_cache=False)
        async with running_engine(folder, 2, tmp_path, policy=policy) as (engine, _):
            await asyncio.gather(*(generate(engine, [first, 2, 3], 20) for first in range(1, 7)))
            await _wait_until_released(engine)
            return dict(engine.stats().scheduler.kv_bytes)

    assert asyncio.run(run()) == {RankId(0, 0): 0, RankId(1, 0): 0}


async def _wait_until_released(engine: Engine) -> None:
    async with asyncio.timeout(30):
        while engine.stats().scheduler.sequences_held:  # noqa: ASYNC110 - the engine signals no release
            await asyncio.sleep(0)


async def _drain(stream: RequestStream) -> None:
    async for _ in stream:
        pass


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_streams_of_a_killed_worker_end_with_worker_lost(folder: Path, tmp_path: Path, victim: int) -> None:
    async def run() -> None:
        async with running_engine(folder, 2, tmp_path) as (engine, pids):
            streams = [engine.submit(request([first, 2, 3], 4000)) for first in (4, 5)]
            for stream in streams:
                await anext(stream)
            os.kill(pids[victim], signal.SIGKILL)
            for stream in streams:
                with pytest.raises(WorkerLost, match=r"[Ss]tage"):
                    async with asyncio.timeout(30):
                        await _drain(stream)
            with pytest.raises(NotReady, match="cannot answer"):
                await generate(engine, [1], 1)

    asyncio.run(run())


def test_truncated_weights_fail_the_start_with_one_sentence(tmp_path: Path) -> None:
    broken = write_random_model(tmp_path / "model", QWEN3)
    weights = broken / "model.safetensors"
    folder = read_model_folder(broken)
    weights.write_bytes(weights.read_bytes()[:-100])

    async def run() -> None:
        async with running_agent(tmp_path / "logs") as (_, address):
            with pytest.raises(ModelCorrupt, match="truncated"):
                await start_workers(address, folder, 2)

    asyncio.run(run())


def test_more_stages_than_layers_are_refused_before_any_start(folder: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with running_engine(folder, 6, tmp_path):
            pass

    with pytest.raises(PlanError, match="6 stages were requested, but the model has 5 layers"):
        asyncio.run(run())
