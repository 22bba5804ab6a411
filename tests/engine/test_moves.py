"""Requests move from one engine to another while both serve, and no answer changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.default_settings import make_policy
from tests.engine.engines import LIMITS, answer_of, drafting_at_no_cost, hash_token, kv_of, make_request
from tests.engine.successions import LOSS, Succession, check_nothing_is_left, run_to, tokens_of
from tests.engine.test_resume import SMALL_KV, Disturbed, Wanted, wanted_requests
from tests.examples import examples

from mlx_ring.core.errors import NotReady
from mlx_ring.engine import takeover
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.takeover import move_requests
from mlx_ring.rpc.protos import step_pb2


@pytest.fixture(autouse=True, scope="module")
def _looks_at_once() -> Generator[None]:  # pyright: ignore[reportUnusedFunction] - a fixture
    """Let moves look for the last answers at each turn, so that a random case is the same each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(takeover, "_LOOK_S", 0.0)
        yield


CACHING = make_policy(num_speculative_tokens=0, prefill_chunk=8)


def engine_of(succession: Succession) -> Engine:
    assert succession.engine is not None
    return succession.engine


def rows_of(succession: Succession) -> list[tuple[int, int]]:
    """Return the start and the number of tokens of every row."""
    assert succession.twin is not None
    return [(row.start, len(row.tokens.ids)) for step in succession.twin.sent for row in step.rows]


@examples(0.6)
@given(
    wanted=st.lists(wanted_requests, min_size=1, max_size=5),
    random=st.randoms(use_true_random=False),
    before=st.sampled_from([0, 20, 100]),
    stages=st.integers(1, 3),
    drafts=st.sampled_from([0, 4]),
    kv=st.sampled_from([None, SMALL_KV]),
    cached=st.booleans(),
    moves_kv=st.booleans(),
)
def test_a_move_at_any_step_changes_no_answer(
    wanted: list[Wanted],
    random: Random,
    before: int,
    stages: int,
    drafts: int,
    kv: RankKv | None,
    *,
    cached: bool,
    moves_kv: bool,
) -> None:
    policy = make_policy(max_num_seqs=3, prefill_chunk=8, num_speculative_tokens=drafts, prefix_cache=cached)

    async def run() -> tuple[Disturbed, Succession]:
        disturbed = Disturbed(policy, kv)
        source, target = disturbed.succession, Disturbed(policy, kv).succession
        source.moves_kv = target.moves_kv = moves_kv
        source.load()
        target.load(tp_sizes=(1,) * stages)
        for request in wanted:
            disturbed.submit(request)
        for _ in range(before):
            source.proceed(random.randrange(1000))
        moving = asyncio.create_task(move_requests(engine_of(source), engine_of(target)))
        while not moving.done() or source.has_requests or target.has_requests:
            choice = random.randrange(1000)
            ran = [succession.proceed(choice) for succession in random.sample((source, target), 2)]
            await asyncio.sleep(0)
            disturbed.take()
            is_over = not (source.has_requests or target.has_requests)
            assert any(ran) or is_over or not moving.done(), "a request starves"
        await moving
        assert not engine_of(source).lives
        source.finish()
        target.finish()
        return disturbed, target

    wanted = [each for each in wanted if each.requests[0].prompt_tokens[0] == 65]
    with drafting_at_no_cost():
        disturbed, target = asyncio.run(run())
    disturbed.check()
    check_nothing_is_left(target)


def test_known_tokens_are_computed_before_the_request_moves() -> None:
    """Check that the answer continues meanwhile, and that less than a chunk is left to compute after the move."""
    request = make_request(40, max_tokens=30)

    async def run() -> tuple[list[int], list[tuple[int, int]], int, Succession]:
        source, target = Succession(policy=CACHING), Succession(policy=CACHING)
        source.load()
        target.load()
        (stream,) = source.submit(request)
        deltas = run_to(source, stream, 3)
        moving = asyncio.create_task(move_requests(engine_of(source), engine_of(target)))
        while not moving.done():
            target.proceed(0)
            source.proceed(0)
            await asyncio.sleep(0)
        deltas += stream.take()
        at_move, rows_before = len(tokens_of(deltas)), len(rows_of(target))
        assert await moving == 1
        target.finish()
        deltas += stream.take()
        rest = rows_of(target)[: rows_before + 2]
        assert (target.meter.finished, target.meter.prompt_tokens) == ({"length": 1}, 0)
        assert not source.meter.finished
        return tokens_of(deltas), rest, at_move, target

    tokens, rows, at_move, target = asyncio.run(run())
    assert tokens == answer_of(hash_token(256), request).token_ids
    assert at_move > 3
    largest = max(start + count for start, count in rows)
    assert largest >= 40 + at_move - 1
    again = [count for start, count in rows if start >= 43]
    assert sum(again) <= 16
    assert engine_of(target).stats().finished == {"length": 1}


def test_request_stays_if_the_other_instance_is_lost_meanwhile() -> None:
    request = make_request(20, max_tokens=12)

    async def run() -> list[int]:
        source, target = Succession(policy=CACHING), Succession(policy=CACHING)
        source.load()
        target.load()
        (stream,) = source.submit(request)
        deltas = run_to(source, stream, 2)
        moving = asyncio.create_task(move_requests(engine_of(source), engine_of(target)))
        await asyncio.sleep(0)
        target.lose(LOSS)
        with pytest.raises(NotReady):
            await moving
        assert not len(target.held)
        source.finish()
        return tokens_of([*deltas, *stream.take()])

    assert asyncio.run(run()) == answer_of(hash_token(256), request).token_ids


def test_request_that_does_not_fit_the_other_context_stays_until_its_end() -> None:
    async def run() -> tuple[int, int]:
        source, target = Succession(policy=CACHING), Succession(policy=CACHING)
        source.load()
        target.load(limits=LIMITS.within(30))
        source.submit(make_request(20, max_tokens=12), make_request(4, max_tokens=12))
        moving = asyncio.create_task(move_requests(engine_of(source), engine_of(target)))
        while not moving.done():
            target.proceed(0)
            source.proceed(0)
            await asyncio.sleep(0)
        target.finish()
        return source.meter.finished["length"], target.meter.finished["length"]

    assert asyncio.run(run()) == (1, 1)


def adopted(succession: Succession) -> list[step_pb2.Adopt]:
    """Return the operations that take over KV from another instance."""
    assert succession.twin is not None
    operations = [operation for step in succession.twin.sent for operation in step.operations]
    return [each.adopt for each in operations if each.HasField("adopt") and each.adopt.length]


def test_kv_moves_once_and_only_what_follows_is_computed() -> None:
    """Move two requests with a common beginning to an instance with another cut."""
    first = make_request(40, max_tokens=20)
    second = replace(first, prompt_tokens=(*first.prompt_tokens[:20], *range(20)))

    async def run() -> tuple[list[list[int]], Succession]:
        source, target = Succession(policy=CACHING), Succession(policy=CACHING)
        source.moves_kv = target.moves_kv = True
        source.load()
        target.load(tp_sizes=(1, 1, 1))
        streams = source.submit(first, second)
        deltas = [run_to(source, streams[0], 3), [*streams[1].take()]]
        moving = asyncio.create_task(move_requests(engine_of(source), engine_of(target)))
        while not moving.done():
            target.proceed(0)
            source.proceed(0)
            await asyncio.sleep(0)
        assert await moving == 2
        starts = [adopt.start for adopt in adopted(target)]
        assert starts[:2] == [0, 20]
        moved = sum(adopt.length - adopt.start for adopt in adopted(target))
        assert engine_of(target).stats().cache.moved_tokens == moved
        assert sum(target.meter.way_taken_s["move"].counts) == len(starts)
        target.finish()
        source.finish()
        return [tokens_of([*of, *stream.take()]) for of, stream in zip(deltas, streams, strict=True)], target

    tokens, target = asyncio.run(run())
    assert tokens == [answer_of(hash_token(256), each).token_ids for each in (first, second)]
    check_nothing_is_left(target)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("the connection broke", "because it was not moved: the connection broke"),
        ("", "because the model has recurrent layers"),
    ],
)
def test_kv_that_cannot_move_is_computed_and_the_log_says_why(
    problem: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    request = make_request(40, max_tokens=20)
    kv = None if problem else kv_of(40, recurrent=True)

    async def run() -> tuple[list[int], Succession]:
        source, target = Succession(policy=CACHING, kv=kv), Succession(policy=CACHING, kv=kv)
        source.moves_kv = target.moves_kv = True
        source.load()
        target.load()
        assert target.twin is not None
        target.twin.fails_moves = problem
        (stream,) = source.submit(request)
        deltas = run_to(source, stream, 3)
        moving = asyncio.create_task(move_requests(engine_of(source), engine_of(target)))
        while not moving.done():
            target.proceed(0)
            source.proceed(0)
            await asyncio.sleep(0)
        assert await moving == 1
        assert not engine_of(target).stats().cache.moved_tokens
        assert any(start + count >= 40 for start, count in rows_of(target))
        target.finish()
        source.finish()
        assert not target.twin.has_fetched
        return tokens_of([*deltas, *stream.take()]), target

    with caplog.at_level(logging.INFO):
        tokens, target = asyncio.run(run())
    assert tokens == answer_of(hash_token(256), request).token_ids
    assert reason in caplog.text
    check_nothing_is_left(target)
