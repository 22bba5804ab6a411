"""Change of an engine's KV limit while it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from tests.default_settings import make_policy
from tests.engine.twin import TwinExecutor
from tests.eventually import run_tasks_until

from mlx_ring.core.engine_stats import BLOCK, Policy
from mlx_ring.core.errors import ContextExceeded
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import RankId, SamplingParams
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.sequence import Limits
from mlx_ring.engine.streams import Vocabulary

TOKEN = 10
"""Bytes of KV per token."""
PLACE = RankId(0, 0)


def blocks(count: int) -> int:
    return count * BLOCK * TOKEN


class LimitedEngine:
    """Engine over the ranks of one stage; by default one, with an initial limit of twelve blocks."""

    def __init__(
        self,
        policy: Policy = make_policy(num_speculative_tokens=0),  # noqa: B008 - frozen
        kv: Mapping[RankId, RankKv] | None = None,
    ) -> None:
        kv = kv or {PLACE: RankKv(limit_bytes=blocks(12), bytes_per_token=TOKEN)}
        self.twin = TwinExecutor([len(kv)])
        vocabulary = Vocabulary(lambda tokens: bytes(tokens).decode("latin-1"), frozenset(), 256)
        limits = Limits(context_length=8 * BLOCK, vocab_size=256, eos=frozenset({0}))
        self.engine = Engine(self.twin, vocabulary, limits, instance="i", epoch=1, policy=policy, kv=kv)

    async def answer(self, prompt: int, answer: int, first: int = 1) -> list[int]:
        tokens = tuple((first + place) % 255 + 1 for place in range(prompt))
        sampling = SamplingParams(seed=1, temperature=0.0, max_tokens=answer, ignore_eos=True)
        stream = self.engine.submit(GenerateRequest("r", tokens, sampling))
        return [token async for delta in stream for token in delta.token_ids]

    @property
    def used(self) -> int:
        return self.engine.stats().cache.ranks[PLACE].used_bytes


def test_lowering_the_limit_evicts_cached_prefixes_and_reaches_the_ranks() -> None:
    async def run() -> None:
        limited = LimitedEngine()
        for first in range(3):
            await limited.answer(BLOCK, 8, first * 50)
        assert limited.engine.stats().cache.entries == 3
        limited.engine.limit_kv({PLACE: blocks(3)})
        assert limited.engine.stats().cache.entries == 1
        assert limited.twin.kv_limits == {PLACE: blocks(3)}
        await limited.answer(4, 4, 200)
        assert limited.used <= blocks(3)

    asyncio.run(run())


def test_a_lower_limit_leaves_running_answers_unchanged() -> None:
    async def run() -> None:
        alone = [await LimitedEngine().answer(BLOCK, 40, first) for first in (0, 50, 100, 150)]
        limited = LimitedEngine()
        tasks = [asyncio.create_task(limited.answer(BLOCK, 40, first)) for first in (0, 50, 100, 150)]
        await run_tasks_until(lambda: limited.engine.stats().scheduler.running == len(tasks))
        limited.engine.limit_kv({PLACE: blocks(2)})
        assert await asyncio.gather(*tasks) == alone

    asyncio.run(run())


def test_the_context_follows_the_limit_but_keeps_room_for_running_requests() -> None:
    async def run() -> None:
        limited = LimitedEngine()
        assert limited.engine.context_length == 8 * BLOCK
        task = asyncio.create_task(limited.answer(4 * BLOCK, 8))
        await asyncio.sleep(0)
        limited.engine.limit_kv({PLACE: blocks(1)})
        assert limited.engine.context_length == 5 * BLOCK
        assert len(await task) == 8
        limited.engine.limit_kv({PLACE: blocks(1)})
        assert limited.engine.context_length == BLOCK
        with pytest.raises(ContextExceeded):
            await limited.answer(2 * BLOCK, 1)
        limited.engine.limit_kv({PLACE: blocks(12)})
        assert limited.engine.context_length == 8 * BLOCK

    asyncio.run(run())


def test_a_changed_context_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        caplog.set_level("INFO")
        limited = LimitedEngine()
        limited.engine.limit_kv({PLACE: blocks(12)})
        assert caplog.records == []
        limited.engine.limit_kv({PLACE: blocks(3)})
        limited.engine.limit_kv({PLACE: blocks(12)})
        shorter, longer = caplog.records
        assert (shorter.levelname, longer.levelname) == ("WARNING", "INFO")
        assert "The context of i changes to 768 tokens from 2048" in shorter.getMessage()

    asyncio.run(run())


def test_load_for_reports_the_cached_tokens_of_a_prompt() -> None:
    async def run() -> None:
        limited = LimitedEngine()
        tokens = tuple((1 + place) % 255 + 1 for place in range(BLOCK))
        fresh = limited.engine.load_for([tokens])
        assert (fresh.shared_tokens, fresh.sequences, fresh.tokens_to_read) == (0, 0, 0)
        await limited.answer(BLOCK, 8)
        assert limited.engine.load_for([tokens]).shared_tokens >= BLOCK - 1
        assert limited.engine.load_for([tokens[:20], (9,) * 30]).shared_tokens == 19

    asyncio.run(run())


def test_a_lower_limit_applies_once_a_longer_request_has_ended() -> None:
    async def run() -> None:
        limited = LimitedEngine()
        task = asyncio.create_task(limited.answer(4 * BLOCK, 8))
        await asyncio.sleep(0)
        limited.engine.limit_kv({PLACE: blocks(2)})
        assert limited.engine.stats().cache.ranks[PLACE].limit_bytes == blocks(5)
        await task
        assert limited.engine.stats().cache.ranks[PLACE].limit_bytes == blocks(2)
        assert limited.twin.kv_limits == {PLACE: blocks(2)}

    asyncio.run(run())


def test_ranks_that_share_layers_get_limits_in_proportion_to_their_parts() -> None:
    async def run() -> None:
        limited = LimitedEngine(
            kv={RankId(0, 0): RankKv(blocks(12), TOKEN), RankId(0, 1): RankKv(blocks(12), 3 * TOKEN)}
        )
        assert limited.twin.kv_limits == {RankId(0, 0): blocks(4), RankId(0, 1): blocks(12)}
        limited.engine.limit_kv({RankId(0, 0): blocks(3), RankId(0, 1): blocks(27)})
        assert limited.twin.kv_limits == {RankId(0, 0): blocks(3), RankId(0, 1): blocks(9)}

    asyncio.run(run())
