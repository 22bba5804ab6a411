"""Saves of KV on the ranks' disks: what is counted before, in which order, and what is saved again."""

from __future__ import annotations

import asyncio

from tests.engine.disks import PROMPT, ask, computes, make_engine, saved_blocks, settled, with_disks_of
from tests.engine.twin import TwinExecutor

from mlx_ring.core.types import BLOCK_TOKENS, RankId
from mlx_ring.engine.disk_kv import DiskKv
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.rpc.protos import step_pb2, worker_pb2


def say_count(disk: DiskKv, **blocks_by_rank: int) -> list[worker_pb2.FetchKv]:
    """Answer the count for the next text to save, by ranks such as `r1_0`; return what was sent."""
    sent = disk.take_unsent(0.0)
    (count,) = (each for each in sent if each.for_save)
    for name, blocks in blocks_by_rank.items():
        stage, place = map(int, name[1:].split("_"))
        answer = worker_pb2.KvFetched(id=count.id, blocks=blocks)
        assert disk.answered(RankId(stage, place), answer, 0.0, computes) is None
    return sent


def saved(operations: list[step_pb2.CacheOperation]) -> list[tuple[int, int]]:
    return [(each.save.first, len(each.save.blocks.digests)) for each in operations]


def test_saves_wait_between_steps_with_rows_and_not_between_others() -> None:
    disk = DiskKv([RankId(0, 0)], {RankId(0, 0): RankKv(1 << 40, 200_000)})
    disk.keep(5, tuple(range(6 * BLOCK_TOKENS)), 5 * BLOCK_TOKENS)
    assert (disk.has_saves, disk.take_saves(10.0)) == (False, [])
    say_count(disk, r0_0=0)
    assert saved(disk.take_saves(10.0)) == [(0, 1)]
    assert saved(disk.take_saves(10.25)) == []  # 256 tokens of 200 kB take 0.256 s at 200 MB/s
    assert saved(disk.take_saves(10.26)) == [(1, 2)]
    assert saved(disk.take_saves(None)) == [(2, 4)]
    assert disk.has_saves
    assert saved(disk.take_saves(None)) == [(4, 6)]
    assert (disk.has_saves, disk.take_saves(None)) == (False, [])
    assert disk.saved_tokens == 6 * BLOCK_TOKENS
    disk.keep(6, tuple(range(7 * BLOCK_TOKENS)), 7 * BLOCK_TOKENS)
    say_count(disk, r0_0=6)
    assert disk.forget(6) == []
    assert (disk.has_saves, disk.take_saves(None)) == (False, [])


def test_texts_are_counted_in_turn_and_saved_from_what_every_rank_has() -> None:
    disk = DiskKv([RankId(0, 0), RankId(1, 0)])
    for number in (5, 6, 7):
        disk.keep(number, tuple(range(number, number + 4 * BLOCK_TOKENS)), BLOCK_TOKENS)
    assert len(say_count(disk, r0_0=4)) == 1
    assert not disk.has_saves  # the other rank has not answered
    disk.answered(RankId(1, 0), worker_pb2.KvFetched(id=1, blocks=3), 0.0, computes)
    assert saved(disk.take_saves(None)) == [(3, 4)]
    # Every rank has all of the second one, and the third one is freed while it is counted.
    say_count(disk, r0_0=4, r1_0=4)
    # Only the lists of its blocks, of which ranks may have removed some.
    assert saved(disk.take_saves(None)) == [(4, 4)]
    assert not disk.has_saves
    (count,) = disk.take_unsent(0.0)
    disk.forget(7)
    for stage in (0, 1):
        disk.answered(RankId(stage, 0), worker_pb2.KvFetched(id=count.id), 0.0, computes)
    assert (disk.has_saves, disk.has_unsent, disk.saved_tokens) == (False, False, BLOCK_TOKENS)


def test_blocks_that_a_rank_has_lost_are_saved_again_with_the_next_answer() -> None:
    async def run() -> None:
        twin = TwinExecutor((1, 1))
        engine = make_engine(twin)
        first = await ask(engine)
        await settled(lambda: saved_blocks(twin) == [4, 4])
        for digest in list(twin.disks[RankId(1, 0)])[:2]:
            del twin.disks[RankId(1, 0)][digest]
        following = (*PROMPT, *first.token_ids, 5, 6, 7)
        await ask(engine, following)
        await settled(lambda: saved_blocks(twin) == [5, 5])
        restored = await ask(make_engine(with_disks_of(twin, 1)), following)
        assert restored.last.cached_tokens == len(following) - 1

    asyncio.run(run())
