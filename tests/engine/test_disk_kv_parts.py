"""Restores in several parts: what happens between two of them."""

# A restore that has sent nothing is given up by hand.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio

from tests.engine.disks import PROMPT, ask, ask_and_save, make_engine, settled, with_disks_of
from tests.engine.twin import TwinExecutor

from mlx_ring.core.types import BLOCK_TOKENS, RankId
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.rpc.protos import step_pb2

LARGE = {RankId(0, 0): RankKv(1 << 40, 200_000)}
"""Ranks on which a restore of the prompt has five parts."""


def parts(step: step_pb2.Step) -> list[int]:
    return [each.adopt.part for each in step.operations if each.HasField("adopt")]


def test_rows_of_others_go_out_between_the_parts_of_a_restore() -> None:
    async def run() -> None:
        twin, first = await ask_and_save()
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
        twin, first = await ask_and_save()
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


def test_restore_gives_way_between_its_parts_to_a_sequence_that_runs() -> None:
    async def run() -> None:
        twin, first = await ask_and_save()
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
        twin, first = await ask_and_save()
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
        twin, first = await ask_and_save()

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
