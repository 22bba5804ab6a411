"""An engine whose KV memory is made smaller and larger while it serves."""

from __future__ import annotations

import asyncio

import pytest

from mlx_ring.core.engine_stats import BLOCK, Policy
from mlx_ring.core.errors import ContextExceeded
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import RankId, SamplingParams
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.sequence import Limits
from mlx_ring.engine.streams import Vocabulary
from mlx_ring.engine.twin import TwinExecutor

TOKEN = 10
"""Bytes of KV."""
PLACE = RankId(0, 0)


def blocks(count: int) -> int:
    return count * BLOCK * TOKEN


class Served:
    """An engine over one rank, with room for twelve blocks at first."""

    def __init__(self, policy: Policy = Policy(num_speculative_tokens=0)) -> None:  # noqa: B008 - frozen
        self.twin = TwinExecutor([1])
        vocabulary = Vocabulary(lambda tokens: bytes(tokens).decode("latin-1"), frozenset(), 256)
        limits = Limits(context_length=8 * BLOCK, vocab_size=256, eos=frozenset({0}))
        kv = {PLACE: RankKv(limit_bytes=blocks(12), bytes_per_token=TOKEN)}
        self.engine = Engine(self.twin, vocabulary, limits, instance="i", epoch=1, policy=policy, kv=kv)

    async def answer(self, prompt: int, answer: int, first: int = 1) -> list[int]:
        tokens = tuple((first + place) % 255 + 1 for place in range(prompt))
        sampling = SamplingParams(seed=1, temperature=0.0, max_tokens=answer, ignore_eos=True)
        stream = self.engine.submit(GenerateRequest("r", tokens, sampling))
        return [token async for delta in stream for token in delta.token_ids]

    @property
    def used(self) -> int:
        return self.engine.stats().cache.ranks[PLACE].used_bytes


def test_what_is_kept_makes_way_and_the_ranks_are_told() -> None:
    async def run() -> None:
        served = Served()
        for first in range(3):
            await served.answer(BLOCK, 8, first * 50)
        assert served.engine.stats().cache.entries == 3
        served.engine.limit_kv({PLACE: blocks(3)})
        assert served.engine.stats().cache.entries == 1
        assert served.twin.kv_limits == {PLACE: blocks(3)}
        await served.answer(4, 4, 200)
        assert served.used <= blocks(3)

    asyncio.run(run())


def test_requests_under_way_end_as_they_would_have() -> None:
    async def run() -> None:
        alone = [await Served().answer(BLOCK, 40, first) for first in (0, 50, 100, 150)]
        served = Served()
        tasks = [asyncio.create_task(served.answer(BLOCK, 40, first)) for first in (0, 50, 100, 150)]
        for _ in range(20):
            await asyncio.sleep(0)
        served.engine.limit_kv({PLACE: blocks(2)})
        assert await asyncio.gather(*tasks) == alone

    asyncio.run(run())


def test_the_context_follows_but_not_below_what_is_being_answered() -> None:
    async def run() -> None:
        served = Served()
        assert served.engine.context_length == 8 * BLOCK
        task = asyncio.create_task(served.answer(4 * BLOCK, 8))
        await asyncio.sleep(0)
        served.engine.limit_kv({PLACE: blocks(1)})
        assert served.engine.context_length == 5 * BLOCK
        assert len(await task) == 8
        served.engine.limit_kv({PLACE: blocks(1)})
        assert served.engine.context_length == BLOCK
        with pytest.raises(ContextExceeded):
            await served.answer(2 * BLOCK, 1)
        served.engine.limit_kv({PLACE: blocks(12)})
        assert served.engine.context_length == 8 * BLOCK

    asyncio.run(run())


def test_a_context_that_changes_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        caplog.set_level("INFO")
        served = Served()
        served.engine.limit_kv({PLACE: blocks(12)})
        assert caplog.records == []
        served.engine.limit_kv({PLACE: blocks(3)})
        served.engine.limit_kv({PLACE: blocks(12)})
        shorter, longer = caplog.records
        assert (shorter.levelname, longer.levelname) == ("WARNING", "INFO")
        assert "The context of i is 768 tokens from now on, and was 2048" in shorter.getMessage()

    asyncio.run(run())


def test_an_engine_tells_what_a_prompt_would_cost() -> None:
    async def run() -> None:
        served = Served()
        tokens = tuple((1 + place) % 255 + 1 for place in range(BLOCK))
        fresh = served.engine.load_for([tokens])
        assert (fresh.shared_tokens, fresh.sequences, fresh.tokens_to_read) == (0, 0, 0)
        await served.answer(BLOCK, 8)
        assert served.engine.load_for([tokens]).shared_tokens >= BLOCK - 1
        assert served.engine.load_for([tokens[:20], (9,) * 30]).shared_tokens == 19

    asyncio.run(run())


def test_what_a_long_request_held_up_is_given_back_when_it_ends() -> None:
    async def run() -> None:
        served = Served()
        task = asyncio.create_task(served.answer(4 * BLOCK, 8))
        await asyncio.sleep(0)
        served.engine.limit_kv({PLACE: blocks(2)})
        assert served.engine.stats().cache.ranks[PLACE].limit_bytes == blocks(5)
        await task
        assert served.engine.stats().cache.ranks[PLACE].limit_bytes == blocks(2)
        assert served.twin.kv_limits == {PLACE: blocks(2)}

    asyncio.run(run())
