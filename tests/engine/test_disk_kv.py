"""KV on the ranks' disks: what is saved, what is restored, and when a sequence waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.default_settings import make_policy
from tests.engine.disks import (
    PROMPT,
    ask,
    ask_and_save,
    make_engine,
    saved_blocks,
    settled,
    stats_of,
    with_disks_of,
)
from tests.engine.engines import Answer, kv_of
from tests.engine.twin import TwinExecutor

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.traces import CLIENT, owner_of
from mlx_ring.core.types import BLOCK_TOKENS, RankId
from mlx_ring.engine.prefix_cache import block_digests
from mlx_ring.head.served_model import policy_of
from mlx_ring.settings.config import Settings


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


@pytest.mark.parametrize("answer", [8, 300])
def test_prompt_that_fills_its_last_block_is_restored_except_for_its_last_token(answer: int) -> None:
    async def run() -> None:
        twin, prompt = TwinExecutor((1,)), PROMPT[: 3 * BLOCK_TOKENS]
        first = await ask(make_engine(twin), prompt, tokens=answer)
        await settled(
            lambda: saved_blocks(twin) == [(len(prompt) + answer - 1) // BLOCK_TOKENS + (answer > 256)]
        )
        second = await ask(make_engine(with_disks_of(twin, 1)), prompt, tokens=answer)
        assert (second.token_ids, second.last.cached_tokens) == (first.token_ids, len(prompt) - 1)

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


def test_prompt_that_finds_no_room_for_what_was_fetched_is_computed() -> None:
    async def run() -> None:
        twin, first = await ask_and_save()
        after = with_disks_of(twin, 1)
        engine = make_engine(after, kv={RankId(0, 0): kv_of(6)})
        other = asyncio.create_task(ask(engine, (9,) * 600, 300))
        await settled(lambda: engine.stats().scheduler.running == 1)
        second = await ask(engine)
        await other
        assert second.token_ids == first.token_ids
        assert not after.has_fetched

    asyncio.run(run())


def test_saved_kv_takes_the_place_of_cached_kv_once_memory_is_full() -> None:
    async def run() -> None:
        twin, first = await ask_and_save()
        after = with_disks_of(twin, 1)
        engine = make_engine(after, kv={RankId(0, 0): kv_of(6)})
        # Its answer ends, and its KV leaves room for two blocks of six.
        await ask(engine, (9,) * 1000)
        second = await ask(engine)
        assert (second.token_ids, second.last.cached_tokens) == (first.token_ids, len(PROMPT) - 1)
        stats = stats_of(engine)
        assert (stats.restored_tokens, stats.evictions) == (len(PROMPT) - 1, 1)

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
