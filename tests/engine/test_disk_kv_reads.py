"""Reads from disks: blocks of other machines, and the turns of reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from tests.default_settings import make_policy
from tests.engine.disks import (
    LIMITS,
    PROMPT,
    ask,
    computes,
    make_engine,
    make_text,
    replace_prompt,
    saved_blocks,
    settled,
    stats_of,
    with_disks_of,
)
from tests.engine.engines import make_request
from tests.engine.twin import TwinExecutor

from mlx_ring.core.generation import WayBack, WaysBack
from mlx_ring.core.types import BLOCK_TOKENS, RankId, fetch_ids, is_moved
from mlx_ring.engine.disk_kv import DiskKv
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.resumption import KvInMemory
from mlx_ring.engine.sequence import Sequence as Text
from mlx_ring.engine.sequence import make_sequence
from mlx_ring.engine.ways_back import Offer
from mlx_ring.rpc.protos import worker_pb2


def test_heads_number_fetches_in_their_own_ways() -> None:
    """Keep them apart from those of the epoch before, which ranks may still know, and from those of moves."""
    ids = [next(fetch_ids(epoch, moved=moved)) for epoch in (0, 1, 2) for moved in (False, True)]
    assert (len({*ids}), list(map(is_moved, ids))) == (6, [False, True] * 3)
    disk, text = DiskKv([RankId(0, 0)], epoch=2), make_text()
    disk.want(text, 0)
    assert [each.id for each in disk.take_unsent(0.0)] == [next(fetch_ids(2))]


def test_request_for_blocks_that_was_not_sent_is_withdrawn() -> None:
    disk = DiskKv([RankId(0, 0)])
    text = make_text()
    disk.want(text, 0)
    assert disk.leave(text) == []
    assert (disk.take_unsent(0.0), text.awaits_kv) == ([], 0)
    disk.want(text, 0)
    assert [len(each.blocks.digests) for each in disk.take_unsent(0.0)] == [3]
    assert [each.adopt.fetch for each in disk.leave(text)] == [2]
    assert disk.answered(RankId(0, 0), worker_pb2.KvFetched(id=2, blocks=3), 0.0, computes) is None


def takes(*ways: str) -> Callable[..., tuple[Offer, WayBack]]:
    """Return a choice that checks which ways are offered, and takes the last one."""

    def choose(_: object, offers: Sequence[Offer], now: float) -> tuple[Offer, WayBack]:
        assert tuple(offer.way for offer in offers) == ways
        offer = offers[-1]
        return offer, WaysBack("r", computes, "").begin(offer.way, offer.seconds, now)

    return choose


def from_peers(blocks: int, ends: Sequence[int] = (), **seconds: float) -> worker_pb2.PeerBlocks:
    parts = [
        worker_pb2.PeerPart(node=node, bytes=round(each * 1e8), seconds=each)
        for node, each in seconds.items()
    ]
    return worker_pb2.PeerBlocks(blocks=blocks, ends=ends, parts=parts)


def count(disk: DiskKv, *answers: worker_pb2.KvFetched, choose: Any = computes) -> Any:
    """Let the ranks answer in turn; return the last result."""
    results = [disk.answered(RankId(rank, 0), each, 0.0, choose) for rank, each in enumerate(answers)]
    assert results[:-1] == [None] * (len(answers) - 1)
    return results[-1]


def counted(
    blocks: int, more: worker_pb2.PeerBlocks | None = None, id_: int = 1, read_s: float = 0.0
) -> worker_pb2.KvFetched:
    return worker_pb2.KvFetched(id=id_, blocks=blocks, from_peers=more, read_s=read_s)


def test_smallest_number_of_blocks_with_other_machines_is_offered_and_read_from_there() -> None:
    disk = DiskKv([RankId(stage, 0) for stage in range(3)])
    disk.want(make_text(), 0)
    (wanted,) = disk.take_unsent(0.0)
    assert (wanted.only_looks, wanted.asks_peers) == (True, True)
    offered: list[Offer] = []

    def choose(sequences: object, offers: Sequence[Offer], now: float) -> tuple[Offer, WayBack]:
        offered.extend(offers)
        return takes("disk", "peers")(sequences, offers, now)

    # The first rank needs 0.3 s for three blocks, of which only two are of use.
    answers = counted(1, from_peers(3, a=0.1, b=0.2)), counted(2), counted(1, from_peers(2, a=0.2))
    assert count(disk, *answers, choose=choose) is None
    assert [offer.tokens for offer in offered] == [BLOCK_TOKENS, 2 * BLOCK_TOKENS]
    assert offered[1].link_s == pytest.approx(0.1 * 2 / 3 + 0.2)  # machine `a` sends to two ranks
    assert offered[1].nbytes == pytest.approx(0.2e8 + 0.2e8)
    (wanted,) = disk.take_unsent(0.0)
    assert (len(wanted.blocks.digests), wanted.asks_peers, wanted.within_s) == (2, True, 10.0)
    result = count(disk, counted(2, from_peers(2, a=0.0)), counted(2), counted(2, from_peers(1, a=0.0)))
    assert (len(result.tokens), result.from_peers) == (2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS)


def test_layers_that_forget_are_restored_at_an_end_that_all_ranks_have_with_other_machines() -> None:
    disk = DiskKv([RankId(0, 0), RankId(1, 0)])
    disk.want(make_text(), 0)
    first = worker_pb2.KvFetched(id=1, blocks=1, ends=[1], from_peers=from_peers(3, [1, 2, 3], a=0.1))
    second = worker_pb2.KvFetched(id=1, from_peers=from_peers(2, [2], a=0.1))
    assert count(disk, first, second, choose=takes("peers")) is None
    assert [len(each.blocks.digests) for each in disk.take_unsent(0.0)] == [3, 2]


def test_fault_of_another_machine_is_a_miss_and_the_rest_is_restored() -> None:
    disk = DiskKv([RankId(0, 0), RankId(1, 0)])
    disk.want(make_text(), 0)
    count(disk, counted(0, from_peers(3, a=0.1)), counted(3), choose=takes("peers"))
    disk.take_unsent(0.0)
    result = count(disk, counted(1, from_peers(1, a=0.0)), counted(3))
    assert (len(result.tokens), result.from_peers, result.is_held) == (BLOCK_TOKENS, BLOCK_TOKENS, True)


def test_blocks_of_other_machines_are_saved_here_and_counted() -> None:
    async def run() -> None:
        twin = TwinExecutor((1, 1))
        first = await ask(make_engine(twin))
        await settled(lambda: saved_blocks(twin) == [4, 4])
        after = with_disks_of(twin, 2)
        engine = make_engine(after)
        held = after.held_fetches = []
        answer = asyncio.create_task(ask(engine))
        for is_read in (False, True):
            await settled(lambda: len(held) == 2)
            for rank, fetched in [held.pop(0), held.pop(0)]:
                if rank.stage:
                    # Another machine has what this rank needs.
                    fetched.from_peers.CopyFrom(from_peers(fetched.blocks, a=0.001))
                    fetched.blocks *= is_read
                engine.fetched(rank, fetched)
        after.held_fetches = None
        after.disks[RankId(1, 0)].clear()
        second = await answer
        assert (second.token_ids, second.last.cached_tokens) == (first.token_ids, len(PROMPT) - 1)
        stats = stats_of(engine)
        assert (stats.restored_tokens, stats.peer_tokens) == (len(PROMPT) - 1, 3 * BLOCK_TOKENS)
        await settled(lambda: stats_of(engine).saved_tokens == len(PROMPT) + 7)

    asyncio.run(run())


@pytest.mark.parametrize("tail", [40, 300])
@pytest.mark.parametrize("most", [1, 8])
def test_requests_with_a_beginning_that_is_read_for_another_wait_for_it(tail: int, most: int) -> None:
    async def run() -> None:
        twin, shared = TwinExecutor((1, 1)), PROMPT[: 3 * BLOCK_TOKENS + 10]
        await ask(make_engine(twin), shared)
        await settled(lambda: saved_blocks(twin) == [4, 4])
        policy = make_policy(kv_disk=1 << 30, num_speculative_tokens=0, max_num_seqs=most)
        after = with_disks_of(twin, 1)
        engine = make_engine(after, policy, kv={RankId(0, 0): RankKv(1 << 40, 200_000)})
        prompts = [
            (*shared, *(1 + (place * (11 + 2 * number) + number) % 250 for place in range(tail)))
            for number in range(4)
        ]
        answers = await asyncio.gather(*(ask(engine, prompt) for prompt in prompts))
        assert [answer.last.cached_tokens >= 3 * BLOCK_TOKENS for answer in answers] == [True] * 4
        computed = sum(len(row.tokens.ids) for step in after.sent for row in step.rows)
        assert computed <= 4 * (tail + 10 + 8)
        undisturbed = make_engine(TwinExecutor((1,)), make_policy(num_speculative_tokens=0))
        assert [answer.token_ids for answer in answers] == [
            (await ask(undisturbed, prompt)).token_ids for prompt in prompts
        ]

    asyncio.run(run())


def texts(number: int) -> list[Text]:
    return [
        make_sequence(each, replace_prompt(make_request(), (each, *PROMPT)), LIMITS, 0.0)
        for each in range(1, 1 + number)
    ]


def chosen_reads(disk: DiskKv, number: int) -> list[int]:
    """Let sequences choose the disk; return the ids of the reads that begin at once."""
    reads: list[int] = []
    for each in texts(number):
        disk.want(each, 0)
        (wanted,) = disk.take_unsent(0.0)
        assert disk.answered(RankId(0, 0), counted(3, id_=wanted.id), 0.0, takes("disk")) is None
        reads.extend(read.id for read in disk.take_unsent(0.0))
    return reads


@pytest.mark.parametrize(
    ("token_bytes", "most"), [(1, 4), ((1 << 30) // (6 * BLOCK_TOKENS), 2), (1 << 30, 1)]
)
def test_few_texts_are_read_at_a_time_by_number_and_bytes(token_bytes: int, most: int) -> None:
    disk = DiskKv([RankId(0, 0)], {RankId(0, 0): RankKv(1 << 60, token_bytes)})
    assert chosen_reads(disk, 6) == [1, 2, 3, 4, 5, 6][:most]
    result = disk.answered(RankId(0, 0), counted(3, id_=1), 0.0, computes)
    assert result is not None
    assert disk.restore(result, cast("KvInMemory", RoomyKv())) == []
    # It takes no turn any more, but memory until it is copied.
    is_by_number = token_bytes == 1
    assert [read.id for read in disk.take_unsent(1.0)] == [5] * is_by_number
    while disk.has_operations:
        disk.take_operations(1.0, has_rows=False, is_prefill=True)
    assert [read.id for read in disk.take_unsent(1.0)] == ([] if is_by_number else [1 + most])


class RoomyKv:
    """Memory that has room for every entry."""

    def begin_entry(self, tokens: Sequence[int], *, spare: int | None = None) -> int | None:
        del tokens, spare
        return 1 << 50

    def offer_entry(self, entry: int, tokens: Sequence[int], reached: int) -> None:
        """Keep it."""


def test_texts_that_wait_for_their_turn_are_computed_if_nothing_can_be_read() -> None:
    disk = DiskKv([RankId(0, 0)])
    assert chosen_reads(disk, 6) == [1, 2, 3, 4]
    result = disk.answered(RankId(0, 0), counted(0, id_=1, read_s=10.0), 10.0, computes)
    assert result is not None
    assert result.tokens == ()
    assert disk.take_unsent(10.0) == []
    assert disk.answered(RankId(0, 0), counted(3, id_=2), 10.0, computes) is not None
    assert disk.take_unsent(10.0) == []
    assert not disk.has_unsent


def test_texts_keep_their_turn_if_the_reading_of_another_one_had_not_begun() -> None:
    disk = DiskKv([RankId(0, 0)])
    assert chosen_reads(disk, 6) == [1, 2, 3, 4]
    assert disk.answered(RankId(0, 0), counted(0, id_=1), 10.0, computes) is not None
    assert [read.id for read in disk.take_unsent(10.0)] == [5]


def test_speed_is_that_of_the_reading_and_reads_under_way_are_waited_for() -> None:
    """Read four texts, one after the other; each takes 10 s."""
    measured = {"disk": [10.0 / (3 * BLOCK_TOKENS), 0.0]}
    disk = DiskKv([RankId(0, 0)], measured=measured)
    offered: list[Offer] = []

    def choose(_: object, offers: Sequence[Offer], now: float) -> tuple[Offer, WayBack]:
        offered.extend(offers)
        return takes("disk")(_, offers, now)

    limits: list[float] = []
    *four, fifth, sixth = texts(6)
    for each in four:
        disk.want(each, 0)
        (wanted,) = disk.take_unsent(0.0)
        disk.answered(RankId(0, 0), counted(3, id_=wanted.id), 0.0, choose)
        limits += [read.within_s for read in disk.take_unsent(0.0)]
    assert [offer.seconds for offer in offered] == pytest.approx([10.0, 20.0, 30.0, 40.0])
    assert limits == pytest.approx([40.0] * 4)
    for each, now, seconds in ((fifth, 4.0, 46.0), (sixth, 12.0, 48.0)):
        if each is sixth:
            disk.answered(RankId(0, 0), counted(3, id_=1, read_s=10.0), 10.0, computes)
        disk.want(each, 0)
        (wanted,) = [one for one in disk.take_unsent(now) if one.only_looks]
        disk.answered(RankId(0, 0), counted(3, id_=wanted.id), now, choose)
        assert offered[-1].seconds == pytest.approx(seconds)
    for number in (2, 3, 4):
        disk.answered(RankId(0, 0), counted(3, id_=number, read_s=10.0), 10.0 * number, computes)
    assert measured["disk"][0] * 3 * BLOCK_TOKENS == pytest.approx(10.0)


@pytest.mark.parametrize("has_room", [True, False])
def test_way_back_ends_when_the_tokens_are_restored_or_computed(has_room: bool) -> None:  # noqa: FBT001
    disk, recorded = DiskKv([RankId(0, 0)]), list[tuple[str, float]]()

    def record(way: str, _predicted_s: float | None, taken_s: float) -> None:
        recorded.append((way, taken_s))

    def choose(_: object, offers: Sequence[Offer], now: float) -> tuple[Offer, WayBack]:
        return offers[0], WaysBack("r", record).begin("disk", offers[0].seconds, now)

    text = make_text()
    disk.want(text, 0)
    disk.answered(RankId(0, 0), counted(3), 0.0, choose)
    disk.take_unsent(0.0)
    result = disk.answered(RankId(0, 0), counted(3, read_s=1.0), 1.0, computes)
    assert result is not None
    kv = RoomyKv() if has_room else FullKv()
    operations = disk.restore(result, cast("KvInMemory", kv))
    assert (len(operations), recorded) == (int(not has_room), [])
    if has_room:
        disk.take_operations(2.0, has_rows=False, is_prefill=False)
        assert (recorded, text.back) == ([("disk", 2.0)], None)
    else:
        assert text.back is not None
        text.back.arrive(3.0)
        assert recorded == [("recompute", 3.0)]
    assert not text.awaits_kv


class FullKv(RoomyKv):
    """Memory without room."""

    def begin_entry(self, tokens: Sequence[int], *, spare: int | None = None) -> int | None:
        del tokens, spare


def test_text_that_ends_while_it_waits_for_its_turn_is_not_read() -> None:
    disk = DiskKv([RankId(0, 0)])
    chosen_reads(disk, 4)
    fifth, sixth = texts(6)[4:]
    for each in (fifth, sixth):
        disk.want(each, 0)
        (wanted,) = disk.take_unsent(0.0)
        disk.answered(RankId(0, 0), counted(3, id_=wanted.id), 0.0, takes("disk"))
    disk.leave(fifth)
    assert disk.answered(RankId(0, 0), counted(3, id_=1), 0.0, computes) is not None
    assert [read.id for read in disk.take_unsent(0.0)] == [6]


def test_a_text_does_not_wait_for_a_longer_one_that_cannot_be_cut() -> None:
    disk = DiskKv([RankId(0, 0)], {RankId(0, 0): RankKv(1 << 40, 1, slack=64)})
    tokens = tuple(1 + place * 7 % 250 for place in range(6 * BLOCK_TOKENS + 40))
    longer, shorter = make_text(tokens), make_text(tokens[: 3 * BLOCK_TOKENS + 40])
    for text in (longer, shorter):
        disk.want(text, 0)

    def is_ahead(_: object, offers: Sequence[Offer], __: float) -> tuple[Offer, None]:
        return offers[0], None

    answer = worker_pb2.KvFetched(id=shorter.awaits_kv, blocks=3, ends=[3])
    fetched = disk.answered(RankId(0, 0), answer, 0.0, is_ahead)
    assert fetched is not None
    assert (fetched.tokens, fetched.waiting) == ((), [shorter])
    assert longer.awaits_kv != shorter.awaits_kv
