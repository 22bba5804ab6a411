"""KV on the ranks' disks: what is saved, what is restored, and when a sequence waits for it."""

# A restore that has sent nothing is given up by hand.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from tests.default_settings import make_policy
from tests.engine.engines import BYTES, Answer, collect, kv_of, make_request
from tests.engine.twin import Reach, TwinExecutor

from mlx_ring.core.engine_stats import CacheStats, Policy
from mlx_ring.core.generation import WayBack, WaysBack
from mlx_ring.core.traces import CLIENT, owner_of
from mlx_ring.core.types import BLOCK_TOKENS, RankId
from mlx_ring.engine.disk_kv import DiskKv
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.prefix_cache import block_digests
from mlx_ring.engine.resumption import KvInMemory
from mlx_ring.engine.sequence import Limits, make_sequence
from mlx_ring.engine.sequence import Sequence as Text
from mlx_ring.engine.ways_back import Offer
from mlx_ring.head.served_model import policy_of
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.settings.config import Settings

LIMITS = Limits(context_length=4096, vocab_size=256, eos=frozenset({0}))
SAVES = make_policy(kv_disk=1 << 30, num_speculative_tokens=0)
Forgets = tuple[dict[str, Any], Reach]
PROMPT = tuple(1 + place * 7 % 250 for place in range(3 * BLOCK_TOKENS + 40))


def make_engine(twin: TwinExecutor, policy: Policy = SAVES, kv: dict[RankId, RankKv] | None = None) -> Engine:
    return Engine(twin, BYTES, LIMITS, instance="demo", epoch=1, policy=policy, kv=kv)


def with_disks_of(twin: TwinExecutor, stages: int) -> TwinExecutor:
    """Return ranks of another split, all with what every rank of `twin` has saved."""
    after = TwinExecutor((1,) * stages)
    after.copy_disks(twin)
    return after


async def ask(engine: Engine, prompt: Sequence[int] = PROMPT, tokens: int = 8) -> Answer:
    request = make_request(max_tokens=tokens, ignore_eos=True)
    return await collect(engine.submit(replace_prompt(request, prompt)))


def replace_prompt(request: Any, prompt: Sequence[int]) -> Any:
    return replace(request, prompt_tokens=tuple(prompt))


async def settled(is_done: Callable[[], bool]) -> None:
    """Let the ranks work until something is true."""
    for _ in range(1000):
        if is_done():
            return
        await asyncio.sleep(0)
    raise AssertionError("It does not happen.")


def saved_blocks(twin: TwinExecutor) -> list[int]:
    return [len(disk) for disk in twin.disks.values()]


def stats_of(engine: Engine) -> CacheStats:
    return engine.stats().cache


def test_digest_names_all_tokens_up_to_the_end_of_its_block() -> None:
    tokens = list(range(1000))
    digests = block_digests(tokens)
    assert len(digests) == len(set(digests)) == 3
    assert block_digests(tokens[:512]) == digests[:2]
    assert block_digests([5, *tokens[1:]])[2] != digests[2]
    assert block_digests(tokens[:255]) == []


@pytest.mark.parametrize("stages", [1, 3])
def test_prompt_is_restored_by_ranks_of_another_split_and_the_answer_is_the_same(stages: int) -> None:
    async def run() -> None:
        twin = TwinExecutor((1, 1))
        engine = make_engine(twin)
        first = await ask(engine)
        await settled(lambda: saved_blocks(twin) == [4, 4])
        assert stats_of(engine).saved_tokens == len(PROMPT) + 7
        after = with_disks_of(twin, stages)
        second_engine = make_engine(after)
        second = await ask(second_engine)
        assert second.token_ids == first.token_ids
        assert (first.last.cached_tokens, second.last.cached_tokens) == (0, len(PROMPT) - 1)
        assert stats_of(second_engine).restored_tokens == len(PROMPT) - 1
        assert sum(len(row.tokens.ids) for step in after.sent for row in step.rows) == 1
        assert not after.has_fetched

    asyncio.run(run())


def known(answer: Answer, prompt: Sequence[int] = PROMPT) -> tuple[int, ...]:
    """Return the tokens whose KV an answer leaves: its last token was never fed."""
    return (*prompt, *answer.token_ids[:-1])


def test_conversation_continues_with_all_tokens_that_were_computed() -> None:
    async def run() -> None:
        twin = TwinExecutor((1, 1))
        engine = make_engine(twin)
        first = await ask(engine)
        await settled(lambda: saved_blocks(twin) == [4, 4])
        following = (*PROMPT, *first.token_ids, 5, 6, 7)
        after = with_disks_of(twin, 3)
        second, undisturbed = await ask(make_engine(after), following), await ask(engine, following)
        assert second.token_ids == undisturbed.token_ids
        assert second.last.cached_tokens == len(known(first))

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer", [8, 300], ids=["short_last_block", "full_block_with_the_end_of_the_prompt"]
)
def test_text_uses_the_tokens_of_a_listed_block_that_it_shares(answer: int) -> None:
    async def run() -> None:
        twin = TwinExecutor((1,))
        await ask(make_engine(twin), tokens=answer)
        await settled(lambda: saved_blocks(twin) == [(len(PROMPT) + answer - 1) // BLOCK_TOKENS + 1])
        after = with_disks_of(twin, 1)
        other = (*PROMPT[:-10], *(251 for _ in range(10)))
        assert (await ask(make_engine(after), other)).last.cached_tokens == len(other) - 10

    asyncio.run(run())


def test_as_many_tokens_of_a_listed_block_are_restored_as_every_rank_has() -> None:
    async def run() -> None:
        twin = TwinExecutor((1, 1))
        first = await ask(make_engine(twin))
        await settled(lambda: saved_blocks(twin) == [4, 4])
        after = with_disks_of(twin, 2)
        for listed in after.listed(RankId(1, 0)).values():
            del listed[30:]
        second = await ask(make_engine(after))
        assert (second.token_ids, second.last.cached_tokens) == (first.token_ids, 3 * BLOCK_TOKENS + 30)
        after.listed(RankId(1, 0)).clear()
        third = await ask(make_engine(with_disks_of(after, 2)))
        assert third.last.cached_tokens == len(PROMPT) - 1  # what the second answer has saved

    asyncio.run(run())


LARGE = {RankId(0, 0): RankKv(1 << 40, 200_000)}
"""Ranks on which a restore of the prompt has five parts."""


def parts(step: step_pb2.Step) -> list[int]:
    return [each.adopt.part for each in step.operations if each.HasField("adopt")]


def test_rows_of_others_go_out_between_the_parts_of_a_restore() -> None:
    async def run() -> None:
        twin = TwinExecutor((1,))
        first = await ask(make_engine(twin))
        await settled(lambda: saved_blocks(twin) == [4])
        after = with_disks_of(twin, 1)
        engine = make_engine(after, kv=LARGE)
        undisturbed = await ask(make_engine(TwinExecutor((1,))), (1, 2, 3), 300)
        other = asyncio.create_task(ask(engine, (1, 2, 3), 300))
        await settled(lambda: any(row.previous for step in after.sent for row in step.rows))
        second = await ask(engine)
        assert not other.done()
        with_parts = [step for step in after.sent if parts(step)]
        assert [parts(step) for step in with_parts] == [[0], [1], [2], [3], [4]]
        assert all(len(step.rows) == 1 and step.rows[0].sequence != 2 for step in with_parts)
        assert (second.token_ids, second.last.cached_tokens) == (first.token_ids, len(PROMPT) - 1)
        assert (await other).token_ids == undisturbed.token_ids

    asyncio.run(run())


def test_requests_that_come_during_a_restore_wait_for_it_or_leave() -> None:
    async def run() -> None:
        twin = TwinExecutor((1,))
        first = await ask(make_engine(twin))
        await settled(lambda: saved_blocks(twin) == [4])
        after = with_disks_of(twin, 1)
        engine = make_engine(after, kv=LARGE)
        leaves = asyncio.create_task(ask(engine))
        await settled(lambda: any(map(parts, after.sent)))
        second = asyncio.create_task(ask(engine))
        await asyncio.sleep(0)
        leaves.cancel()
        assert (await second).token_ids == first.token_ids
        assert sum(len(parts(step)) for step in after.sent) == 5
        assert (await second).last.cached_tokens == len(PROMPT) - 1

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


def test_restore_gives_way_between_its_parts_to_a_sequence_that_runs() -> None:
    async def run() -> None:
        twin = TwinExecutor((1,))
        first = await ask(make_engine(twin))
        await settled(lambda: saved_blocks(twin) == [4])
        after = with_disks_of(twin, 1)
        block_bytes = BLOCK_TOKENS * LARGE[RankId(0, 0)].bytes_per_token
        engine = make_engine(after, kv={RankId(0, 0): RankKv(7 * block_bytes, 200_000)})
        prompt = (9,) * 700
        undisturbed = await ask(make_engine(TwinExecutor((1,))), prompt, 100)
        other = asyncio.create_task(ask(engine, prompt, 100))
        await settled(lambda: engine.stats().scheduler.running == 1)
        held = after.held_fetches = []
        restored = asyncio.create_task(ask(engine))
        for number in (1, 2):
            await settled(lambda number=number: len(held) == number)
            if number == 2:
                # Its last block ends at 768 tokens, and the restore gets the rest of the memory.
                await settled(lambda: any(row.start >= 766 for row in after.sent[-1].rows))
            engine.fetched(*held[number - 1])
        assert (await other).token_ids == undisturbed.token_ids
        assert ((await restored).token_ids, (await restored).last.cached_tokens) == (first.token_ids, 0)
        assert engine.stats().scheduler.num_preemptions == 0
        assert engine.stats().cache.restored_tokens == 0
        assert [parts(step) for step in after.sent if parts(step)] == [[0], [0]], "the last forgets it"
        assert not after.has_fetched

    asyncio.run(run())


def test_restore_that_is_given_up_before_its_first_part_leaves_nothing() -> None:
    async def run() -> None:
        twin = TwinExecutor((1,))
        first = await ask(make_engine(twin))
        await settled(lambda: saved_blocks(twin) == [4])
        after = with_disks_of(twin, 1)
        held = after.held_fetches = []
        engine = make_engine(after, kv=LARGE)
        restored = asyncio.create_task(ask(engine))
        for number in (1, 2):
            await settled(lambda number=number: len(held) == number)
            if number == 2:
                engine.pause()
            engine.fetched(*held[number - 1])
        ways = engine._scheduler.ways
        assert [ways.give_up_restore() for _ in range(2)] == [True, False]
        engine.resume()
        assert ((await restored).token_ids, (await restored).last.cached_tokens) == (first.token_ids, 0)
        assert (engine.stats().scheduler.steps_failed, after.has_fetched) == (0, False)

    asyncio.run(run())


def test_prompt_is_computed_if_a_part_of_its_restore_fails() -> None:
    async def run() -> None:
        twin = TwinExecutor((1,))
        first = await ask(make_engine(twin))
        await settled(lambda: saved_blocks(twin) == [4])

        def fail(step: step_pb2.Step, _stage: int) -> step_pb2.Failure | None:
            if 2 not in parts(step):
                return None
            entry = next(each.adopt.sequence for each in step.operations if each.HasField("adopt"))
            return step_pb2.Failure(kind="StepFailed", message="no memory", sequences=[entry])

        after = TwinExecutor((1,), inject_fault=fail)
        after.copy_disks(twin)
        engine = make_engine(after, kv=LARGE)
        second = await ask(engine)
        assert (second.token_ids, second.last.cached_tokens) == (first.token_ids, 0)
        assert [parts(step) for step in after.sent if parts(step)] == [
            [0],
            [1],
            [2],
            [0],
        ]  # the last forgets it
        assert not after.has_fetched

    asyncio.run(run())


def test_as_much_is_restored_as_every_rank_has() -> None:
    async def run() -> None:
        twin = TwinExecutor((1, 1))
        first = await ask(make_engine(twin))
        await settled(lambda: saved_blocks(twin) == [4, 4])
        after = with_disks_of(twin, 2)
        after.disks[RankId(1, 0)].pop(block_digests(PROMPT)[1])
        second = await ask(make_engine(after))
        assert (second.token_ids, second.last.cached_tokens) == (first.token_ids, BLOCK_TOKENS)

    asyncio.run(run())


def test_ranks_forget_what_they_read_if_another_rank_has_nothing() -> None:
    async def run() -> None:
        twin = TwinExecutor((1, 1))
        first = await ask(make_engine(twin))
        await settled(lambda: saved_blocks(twin) == [4, 4])
        for empty in range(2):
            after = with_disks_of(twin, 2)
            after.disks[RankId(empty, 0)].clear()
            second = await ask(make_engine(after))
            assert (second.token_ids, second.last.cached_tokens) == (first.token_ids, 0)
            assert not after.has_fetched

    asyncio.run(run())


def test_blocks_that_memory_has_are_neither_fetched_nor_saved_again() -> None:
    async def run() -> None:
        twin = TwinExecutor((1,))
        engine = make_engine(twin)
        await ask(engine)
        await settled(lambda: saved_blocks(twin) == [4])
        sent = len(twin.sent)
        await ask(engine, (*PROMPT, 3))
        await settled(lambda: saved_blocks(twin) == [5])  # its own rest
        operations = [each.WhichOneof("operation") for step in twin.sent[sent:] for each in step.operations]
        assert "adopt" not in operations

    asyncio.run(run())


def test_conversation_that_goes_on_saves_its_new_blocks_alone() -> None:
    async def run() -> None:
        twin = TwinExecutor((1,))
        engine = make_engine(twin)
        await ask(engine)
        await settled(lambda: saved_blocks(twin) == [4])
        await ask(engine, (*PROMPT, *range(1, 251)))
        await settled(lambda: saved_blocks(twin) == [6])
        last = [each.save for step in twin.sent for each in step.operations if each.HasField("save")][-1]
        assert (last.first, len(last.blocks.digests)) == (3, 5)

    asyncio.run(run())


@pytest.mark.parametrize(
    "policy",
    [
        make_policy(num_speculative_tokens=0),
        make_policy(kv_disk=1 << 30, prefix_cache=False, num_speculative_tokens=0),
    ],
    ids=["off", "without_prefix_cache"],
)
def test_nothing_is_saved_or_fetched(policy: Policy) -> None:
    async def run() -> None:
        twin = TwinExecutor((1,))
        await ask(make_engine(twin, policy))
        operations = {each.WhichOneof("operation") for step in twin.sent for each in step.operations}
        assert {"save", "adopt"}.isdisjoint(operations)
        assert saved_blocks(twin) == [0]

    asyncio.run(run())


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


def test_prompt_that_finds_no_room_for_what_was_fetched_is_computed() -> None:
    async def run() -> None:
        twin = TwinExecutor((1,))
        first = await ask(make_engine(twin))
        await settled(lambda: saved_blocks(twin) == [4])
        after = with_disks_of(twin, 1)
        engine = make_engine(after, kv={RankId(0, 0): kv_of(6)})
        other = asyncio.create_task(ask(engine, (9,) * 600, 300))
        await settled(lambda: engine.stats().scheduler.running == 1)
        second = await ask(engine)
        await other
        assert second.token_ids == first.token_ids
        assert not after.has_fetched

    asyncio.run(run())


def test_other_requests_run_while_one_waits_for_a_disk() -> None:
    async def run() -> None:
        twin = TwinExecutor((1,))
        held = twin.held_fetches = []
        engine = make_engine(twin)
        slow = asyncio.create_task(ask(engine))
        await settled(lambda: len(held) == 1)
        assert len((await ask(engine, (1, 2, 3))).token_ids) == 8
        assert not slow.done()
        engine.fetched(*held[0])
        assert len((await slow).token_ids) == 8

    asyncio.run(run())


def test_request_that_ends_while_it_waits_leaves_nothing_on_the_ranks() -> None:
    async def run() -> None:
        twin = TwinExecutor((1,))
        await ask(make_engine(twin))
        await settled(lambda: saved_blocks(twin) == [4])
        after = with_disks_of(twin, 1)
        held = after.held_fetches = []
        engine = make_engine(after)
        slow = asyncio.create_task(ask(engine))
        await settled(lambda: len(held) == 1)
        engine.fetched(*held[0])
        await settled(lambda: len(held) == 2)
        slow.cancel()
        await settled(lambda: not after.has_fetched)
        engine.fetched(*held[1])
        assert engine.stats().scheduler.waiting == engine.stats().scheduler.running == 0

    asyncio.run(run())


def make_text(prompt: Sequence[int] = PROMPT) -> Text:
    return make_sequence(1, replace_prompt(make_request(), prompt), LIMITS, 0.0)


def computes(*_: object) -> None:
    """Choose to compute what the disks have."""


@pytest.mark.parametrize(
    ("client", "other"), [("key a", "key b"), ("key a", "10.0.0.1"), ("10.0.0.1", "key a")]
)
def test_key_restores_only_its_own_blocks(client: str, other: str) -> None:
    async def run() -> None:
        CLIENT.set(client)
        twin = TwinExecutor((1,))
        await ask(make_engine(twin))
        await settled(lambda: saved_blocks(twin) == [4])
        for asks, restored in ((other, 0), (client, len(PROMPT) - 1)):
            CLIENT.set(asks)
            again = await ask(make_engine(with_disks_of(twin, 1)))
            assert again.last.cached_tokens == restored

    asyncio.run(run())


def test_ranks_learn_whose_kv_to_keep(tmp_path: Path) -> None:
    keys, unreadable = ("a", "b"), tmp_path / "keys"
    policy = policy_of(Settings(step_deadline_s=0.0, num_speculative_tokens=0, kv_disk=1 << 30, api_key=keys))
    assert policy.kv_owners == {"", owner_of("key a"), owner_of("key b")}
    assert policy_of(Settings(kv_disk=1 << 30)).kv_owners == {""}, "KV of keys that were removed goes"
    assert policy_of(Settings(api_key=keys)).kv_owners == frozenset()
    assert policy_of(Settings(kv_disk=1 << 30, api_key_file=unreadable)).kv_owners == frozenset()

    async def run() -> None:
        twin = TwinExecutor((1, 1))
        assert len((await ask(make_engine(twin, policy))).token_ids) == 8
        assert twin.owners == set(map(bytes.fromhex, policy.kv_owners))

    asyncio.run(run())


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


# ---- disks of other machines, and the turns of reads


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


def counted(blocks: int, more: worker_pb2.PeerBlocks | None = None, id_: int = 1) -> worker_pb2.KvFetched:
    return worker_pb2.KvFetched(id=id_, blocks=blocks, from_peers=more)


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
        disk.take_operations(None, is_prefill=True)
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
    result = disk.answered(RankId(0, 0), counted(0, id_=1), 10.0, computes)
    assert result is not None
    assert result.tokens == ()
    assert disk.take_unsent(10.0) == []
    assert disk.answered(RankId(0, 0), counted(3, id_=2), 10.0, computes) is not None
    assert disk.take_unsent(10.0) == []
    assert not disk.has_unsent


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
