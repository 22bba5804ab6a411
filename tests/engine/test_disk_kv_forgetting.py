"""KV on disk of layers that forget: windows and states."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.default_settings import make_policy
from tests.engine.disks import (
    PROMPT,
    ask,
    computes,
    make_engine,
    make_text,
    replace_prompt,
    saved_blocks,
    settled,
    stats_of,
)
from tests.engine.engines import collect, kv_of, make_request
from tests.engine.twin import TwinExecutor
from tests.engine.twin_rank import Reach

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.generation import WayBack, WaysBack
from mlx_ring.core.types import BLOCK_TOKENS, RankId
from mlx_ring.engine.disk_kv import DiskKv
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.prefix_cache import block_digests
from mlx_ring.engine.ways_back import Offer
from mlx_ring.rpc.protos import worker_pb2

Forgets = tuple[dict[str, Any], Reach]


SLACK = 64


RECURRENT: Forgets = ({"recurrent": True}, lambda present, _reached, length: length == present)


SLIDING: Forgets = (
    {"slack": SLACK, "exact_length": 200},
    lambda _present, reached, length: reached <= 200 or length >= reached - SLACK,
)


def forgetful(stages: int, forgets: Forgets) -> tuple[TwinExecutor, dict[RankId, RankKv]]:
    """Return ranks whose layers forget, and what they report of it."""
    traits, reach = forgets
    twin = TwinExecutor((1,) * stages, reach=reach)
    return twin, {rank: kv_of(60, **traits) for rank in twin.ranks}


def copy_disks(source: TwinExecutor, target: TwinExecutor) -> None:
    (disk,), (ends,) = source.disks.values(), source.ends.values()
    for rank in target.ranks:
        target.disks[rank].update(disk)
        target.ends[rank].update(ends)


@pytest.mark.parametrize(
    ("forgets", "restored"),
    [(RECURRENT, [768, 768]), (SLIDING, [768, 1024])],
    ids=["recurrent", "sliding"],
)
def test_text_of_a_model_that_forgets_is_restored_at_the_ends_where_it_was_saved(
    forgets: Forgets, restored: list[int]
) -> None:
    async def run() -> None:
        twin, kv = forgetful(1, forgets)
        first = await ask(make_engine(twin, kv=kv), tokens=300)
        blocks = restored[1] // BLOCK_TOKENS
        await settled(lambda: saved_blocks(twin)[0] >= blocks and len(twin.ends[RankId(0, 0)]) == blocks - 2)
        longer = (*PROMPT, *first.token_ids, 7)
        for prompt, tokens in ((PROMPT, restored[0]), (longer, restored[1])):
            after, kv = forgetful(2, forgets)
            copy_disks(twin, after)
            again = await ask(make_engine(after, kv=kv), prompt)
            computed = await ask(make_engine(*forgetful_apart(forgets)), prompt)
            assert (again.last.cached_tokens, again.token_ids) == (tokens, computed.token_ids)

    asyncio.run(run())


def forgetful_apart(forgets: Forgets) -> tuple[TwinExecutor, Policy, dict[RankId, RankKv]]:
    twin, kv = forgetful(1, forgets)
    return twin, make_policy(num_speculative_tokens=0), kv


@pytest.mark.parametrize("forgets", [RECURRENT, SLIDING], ids=["recurrent", "sliding"])
def test_beginning_that_two_prompts_share_is_saved_at_its_last_end(forgets: Forgets) -> None:
    async def run() -> None:
        twin, kv = forgetful(1, forgets)
        engine = make_engine(twin, kv=kv)
        shared = PROMPT[: BLOCK_TOKENS + 100]
        for other in (5, 6):
            await ask(engine, (*shared, *(other,) * 600))
        await settled(lambda: block_digests(shared)[0] in twin.ends[RankId(0, 0)])
        await settled(lambda: saved_blocks(twin)[0] >= 5)
        after, kv = forgetful(1, forgets)
        copy_disks(twin, after)
        assert (await ask(make_engine(after, kv=kv), (*shared, 9))).last.cached_tokens == BLOCK_TOKENS

    asyncio.run(run())


def test_ranks_restore_at_the_last_end_that_all_of_them_have() -> None:
    async def run() -> None:
        twin, kv = forgetful(1, RECURRENT)
        engine = make_engine(twin, kv=kv)
        first = await ask(engine)
        await ask(engine, (*PROMPT, *(3,) * 300))
        await settled(lambda: saved_blocks(twin)[0] == 4 and len(twin.ends[RankId(0, 0)]) == 2)
        for missing in range(2):
            after, kv = forgetful(2, RECURRENT)
            copy_disks(twin, after)
            after.ends[RankId(missing, 0)].discard(block_digests((*PROMPT, *(3,) * 300))[3])
            again = await ask(make_engine(after, kv=kv), (*PROMPT, *(3,) * 300))
            assert again.last.cached_tokens == 3 * BLOCK_TOKENS
        after, kv = forgetful(2, RECURRENT)
        copy_disks(twin, after)
        after.ends[RankId(0, 0)].clear()
        again = await ask(make_engine(after, kv=kv))
        assert (again.last.cached_tokens, again.token_ids) == (0, first.token_ids)

    asyncio.run(run())


def test_rank_that_reads_less_than_it_has_counted_ends_a_restore_of_layers_that_forget() -> None:
    disk = DiskKv([RankId(0, 0), RankId(1, 0)])
    disk.want(make_text(), 0)
    taken = WaysBack("r", computes, "").begin("disk", None, 0.0)

    def reads(_: object, offers: Sequence[Offer], __: float) -> tuple[Offer, WayBack]:
        return offers[0], taken

    nowhere: list[int] = []
    for rank, ends in ((0, [1, 3]), (1, nowhere)):
        counted = worker_pb2.KvFetched(id=1, blocks=3, ends=ends)
        assert disk.answered(RankId(rank, 0), counted, 0.0, reads) is None
    assert [len(each.blocks.digests) for each in disk.take_unsent(0.0)] == [3, 3]
    assert disk.answered(RankId(0, 0), worker_pb2.KvFetched(id=1, blocks=3, ends=[3]), 0.0, computes) is None
    result = disk.answered(RankId(1, 0), worker_pb2.KvFetched(id=1, blocks=2), 0.0, computes)
    assert result is not None
    assert (result.tokens, result.is_held) == ((), True)


@pytest.mark.parametrize("forgets", [RECURRENT, SLIDING], ids=["recurrent", "sliding"])
def test_ends_that_a_rank_has_lost_are_saved_again(forgets: Forgets) -> None:
    async def run() -> None:
        twin, kv = forgetful(1, forgets)
        engine = make_engine(twin, kv=kv)
        await ask(engine, tokens=300)
        end = block_digests(PROMPT)[-1]
        await settled(lambda: end in twin.ends[RankId(0, 0)])
        twin.ends[RankId(0, 0)].clear()
        # Memory has no KV with which this one could begin.
        await ask(engine, (*PROMPT[:770], *(9,) * 40))
        assert end in twin.ends[RankId(0, 0)]

    asyncio.run(run())


@pytest.mark.parametrize("forgets", [RECURRENT, SLIDING], ids=["recurrent", "sliding"])
def test_snapshot_takes_the_place_of_cached_kv_once_memory_is_full(forgets: Forgets) -> None:
    async def run() -> None:
        traits, reach = forgets
        twin = TwinExecutor((1,), reach=reach)
        engine = make_engine(twin, make_policy(num_speculative_tokens=0), {RankId(0, 0): kv_of(13, **traits)})
        for number in range(2, 8):
            prompt = tuple(1 + place * (5 + 2 * number) % 250 for place in range(600))
            await ask(engine, prompt, 300)
            again = await ask(engine, (*prompt, 7, 7, 7), 2)
            assert again.last.cached_tokens == len(prompt)
            assert (stats_of(engine).evictions > 0) == (number > 2)

    asyncio.run(run())


def test_prompt_of_answers_that_are_requested_together_is_computed_once() -> None:
    async def run() -> None:
        traits, reach = RECURRENT
        twin = TwinExecutor((1,), reach=reach)
        engine = make_engine(twin, make_policy(num_speculative_tokens=0), {RankId(0, 0): kv_of(60, **traits)})
        request = replace_prompt(make_request(max_tokens=2, ignore_eos=True), PROMPT)
        answers = await asyncio.gather(*map(collect, engine.submit_all(*[request] * 4)))
        assert len({tuple(answer.token_ids) for answer in answers}) == 1
        computed = sum(len(row.tokens.ids) for step in twin.sent for row in step.rows)
        assert computed == len(PROMPT) + 3

    asyncio.run(run())
