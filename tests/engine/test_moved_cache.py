"""Cached KV moves from one engine to another, and conversations continue there without being computed again."""

# Predictions and objections are tested alone.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from tests.engine.engines import LIMITS, answer_of, hash_token, kv_of, make_request
from tests.engine.moving import CACHING, LARGE, adopted, engine_of, instances_that_move_kv, move_all
from tests.engine.successions import Succession, check_nothing_is_left, run_to, tokens_of
from tests.engine.twin_rank import KV_BYTES_PER_TOKEN

from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import SamplingParams
from mlx_ring.engine import moved_kv, rows
from mlx_ring.engine.moved_kv import KvMoves
from mlx_ring.engine.takeover import move_requests

pytestmark = pytest.mark.usefixtures("moves_in_small_parts")


def starting_with(token: int, tokens: int, **sampling: Any) -> GenerateRequest:
    """Return a request that shares no beginning with those of other first tokens."""
    request = make_request(tokens, **sampling)
    return replace(request, prompt_tokens=(token, *request.prompt_tokens[1:]))


ENDED = [starting_with(200, 40, max_tokens=4), starting_with(201, 24, max_tokens=4)]


def answer_to(request: GenerateRequest) -> list[int]:
    return answer_of(hash_token(256), request).token_ids


def continued(request: GenerateRequest) -> GenerateRequest:
    """Return the next turn of a conversation."""
    return replace(request, prompt_tokens=(*request.prompt_tokens, *answer_to(request), 65, 66))


def answer_all(
    succession: Succession, requests: Iterable[GenerateRequest]
) -> tuple[list[list[int]], list[int]]:
    """Answer requests one after the other; return their tokens, and how many of each prompt came from the cache."""
    answers: list[list[int]] = []
    cached: list[int] = []
    for request in requests:
        (stream,) = succession.submit(request)
        succession.finish()
        deltas = stream.take()
        answers.append(tokens_of(deltas))
        cached.append(deltas[-1].cached_tokens)
    return answers, cached


async def bring_kept(source: Succession, target: Succession) -> None:
    moves = engine_of(source).moves
    await engine_of(target).moves.bring_kept(moves.origin, moves.texts)


def first_tokens(succession: Succession) -> list[int]:
    """Return the first token of each text in the prefix cache, the last used one first."""
    return [tokens[0] for _, tokens, _ in engine_of(succession)._scheduler.kv.cache.texts()]


def test_ended_conversations_move_too_and_continue_without_being_computed() -> None:
    running, next_turns = starting_with(202, 30, max_tokens=20), [*map(continued, ENDED)]

    async def run() -> tuple[list[int], list[list[int]], list[int], Succession]:
        source, target = instances_that_move_kv(tp_sizes=(1, 1, 1))
        answer_all(source, ENDED)
        (stream,) = source.submit(running)
        deltas = run_to(source, stream, 3)
        assert await move_all(source, target) == 1
        target.finish()
        tokens = tokens_of([*deltas, *stream.take()])
        return tokens, *answer_all(target, next_turns), target

    tokens, answers, cached, target = asyncio.run(run())
    assert tokens == answer_to(running)
    assert answers == [*map(answer_to, next_turns)]
    # The last token of an answer is not computed.
    assert cached == [43, 27]
    check_nothing_is_left(target)


@pytest.mark.parametrize(("blocks", "cached"), [(1, [0, 27]), (4, [43, 27])])
def test_ended_conversations_that_were_used_last_move_as_far_as_there_is_room(
    blocks: int, cached: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    kv, next_turns = kv_of(blocks), [*map(continued, reversed(ENDED))]

    async def run() -> tuple[list[list[int]], list[int], Succession]:
        source, target = Succession(policy=CACHING), Succession(policy=CACHING, kv=kv)
        source.moves_kv = target.moves_kv = True
        source.load()
        target.load()
        answer_all(source, ENDED)
        assert await move_all(source, target) == 0
        assert not engine_of(target).stats().cache.evictions
        return *answer_all(target, next_turns), target

    with caplog.at_level(logging.INFO):
        answers, found, target = asyncio.run(run())
    assert answers == [*map(answer_to, next_turns)]
    assert found == [*reversed(cached)]
    assert "was not moved" not in caplog.text
    check_nothing_is_left(target)


@pytest.mark.parametrize(("files", "expected"), [("a-1", 24), ("a-2", 0)])
def test_a_conversation_whose_answer_stayed_moves_after_its_end_unless_the_files_were_replaced(
    files: str, expected: int
) -> None:
    request = starting_with(200, 20, max_tokens=4)
    (next_turn,) = map(continued, [request])

    # It may become longer than the context there.
    stays = replace(request.sampling, max_tokens=12, stop_token_ids=tuple(answer_to(request)[-1:]))

    async def run() -> tuple[list[list[int]], list[int]]:
        source, target = Succession(policy=CACHING), Succession(policy=CACHING)
        source.moves_kv = target.moves_kv = True
        source.load(limits=replace(LIMITS, model="a-1"))
        target.load(limits=replace(LIMITS.within(30), model=files))
        source.submit(replace(request, sampling=stays))
        assert await move_all(source, target) == 0
        return answer_all(target, [next_turn])

    answers, cached = asyncio.run(run())
    assert answers == [answer_to(next_turn)]
    assert cached == [expected]


def test_a_long_text_comes_in_pieces_and_these_are_copied_in_parts_between_which_answers_continue() -> None:
    running = starting_with(202, 8, max_tokens=40)

    async def run() -> tuple[list[int], list[tuple[int, ...]], Succession]:
        source, target = instances_that_move_kv(kv_of(40))
        answer_all(source, ENDED[:1])
        (stream,) = target.submit(running)
        deltas = run_to(target, stream, 3)
        assert await move_all(source, target) == 0
        assert target.twin is not None
        steps = [
            (operation.adopt.start, operation.adopt.part, len(step.rows))
            for step in target.twin.sent
            for operation in step.operations
            if operation.HasField("adopt")
        ]
        target.finish()
        return tokens_of([*deltas, *stream.take()]), [tuple(parts) for *parts, rows in steps if rows], target

    tokens, parts, target = asyncio.run(run())
    assert tokens == answer_to(running)
    # 43 tokens, of which 20 are read at a time, and 8 go with a step. With the first ones goes memory for all.
    assert parts == [*((0, part) for part in range(6)), (14, 0), (14, 1), (28, 0), (28, 1)]
    check_nothing_is_left(target)


def at_second_piece(patch: pytest.MonkeyPatch, do: Callable[[Any], None]) -> None:
    """Call a function with the text that arrives, once its third piece is asked for and before the second one is copied."""
    take, texts = KvMoves._take_parts, list[Any]()

    async def take_parts(self: KvMoves, text: Any, fetch: Any) -> str:
        texts.append(text)
        if len(texts) == 2:
            do(text)
        return await take(self, text, fetch)

    patch.setattr(KvMoves, "_take_parts", take_parts)


@pytest.mark.parametrize("is_running", [False, True])
def test_pieces_that_have_arrived_are_kept_if_the_others_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, *, is_running: bool
) -> None:
    request = starting_with(200, 40, max_tokens=20)
    next_turn = continued(request)

    async def run() -> tuple[list[list[int]], int]:
        source, target = instances_that_move_kv(kv_of(40))
        (stream,) = source.submit(request)
        before = run_to(source, stream, 4)
        if not is_running:
            source.finish()

        def fail(_: object) -> None:
            assert target.twin is not None
            target.twin.fails_moves = "the connection broke"

        at_second_piece(monkeypatch, fail)
        assert await move_all(source, target) == int(is_running)
        target.finish()
        assert target.twin is not None
        assert not target.twin.has_fetched
        moved = engine_of(target).stats().cache.moved_tokens
        answers, _ = answer_all(target, [next_turn])
        check_nothing_is_left(target)
        return [tokens_of([*before, *stream.take()]), *answers], moved

    answers, moved = asyncio.run(run())
    assert answers == [answer_to(request), answer_to(next_turn)]
    # Two of three pieces: 44 tokens have been computed, or in the end 59.
    assert moved == (29 if is_running else 39)


def test_no_more_pieces_of_an_ended_conversation_are_read_once_the_time_for_it_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (next_turn,) = map(continued, ENDED[:1])
    # Five pieces.
    monkeypatch.setattr(moved_kv, "_PIECE_BYTES", 10 * KV_BYTES_PER_TOKEN)

    def end_time(text: Any) -> None:
        text.end_s = -1.0

    async def run() -> tuple[list[list[int]], list[int]]:
        source, target = instances_that_move_kv(kv_of(40))
        answer_all(source, ENDED[:1])
        at_second_piece(monkeypatch, end_time)
        await move_all(source, target)
        return answer_all(target, [next_turn])

    with caplog.at_level(logging.INFO):
        answers, cached = asyncio.run(run())
    assert answers == [answer_to(next_turn)]
    assert cached == [25]
    assert "was not moved: the time for it is over" in caplog.text


@pytest.mark.parametrize("is_late", [False, True])
def test_account_has_all_tokens_that_ranks_keep_of_a_text_whose_move_is_given_up(
    monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    """Give up once the last part of the second piece is sent, before or after the ranks have executed it."""
    long = starting_with(200, 100, max_tokens=4)
    monkeypatch.setattr(rows, "_PART_BYTES", 1 << 20)
    monkeypatch.setattr(moved_kv, "_PIECE_BYTES", 40 * KV_BYTES_PER_TOKEN)

    async def run() -> None:
        source, target = instances_that_move_kv(kv_of(40), LARGE)
        answer_all(source, [long])
        moving = asyncio.create_task(move_requests(engine_of(source), engine_of(target)))
        while len(adopted(target)) < 2:
            target.proceed(0)
            source.proceed(0)
            await asyncio.sleep(0)
        while is_late and target.proceed(0):
            pass
        moving.cancel()
        await asyncio.wait((moving,))
        target.finish()
        assert target.twin is not None
        (held,) = target.twin.tokens(target.twin.ranks[0]).values()
        ((_, tokens, _),) = engine_of(target)._scheduler.kv.cache.texts()
        assert [*tokens] == held
        assert not target.twin.has_fetched
        check_nothing_is_left(target)

    asyncio.run(run())


def test_later_pieces_do_not_wait_for_steps_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> int:
        source, target = instances_that_move_kv(kv_of(40))
        answer_all(source, ENDED[:1])
        taken = list[Any]()
        take = KvMoves._take_parts

        async def take_parts(self: KvMoves, text: Any, fetch: Any) -> str:
            if not taken:
                source.submit(starting_with(203, 8, max_tokens=4))
            taken.append(fetch)
            return await take(self, text, fetch)

        monkeypatch.setattr(KvMoves, "_take_parts", take_parts)
        moving = asyncio.create_task(bring_kept(source, target))
        for _ in range(500):
            target.proceed(0)
            await asyncio.sleep(0)
        moved = engine_of(target).stats().cache.moved_tokens
        moving.cancel()
        await asyncio.wait((moving,))
        return moved

    assert asyncio.run(run()) == 43


def large(token: int, tokens: int, **sampling: Any) -> GenerateRequest:
    """Return a request with a prompt of any length."""
    prompt = (token, *(65 + place % 150 for place in range(tokens - 1)))
    return replace(make_request(1, **sampling), prompt_tokens=prompt)


async def answer_alone(request: GenerateRequest) -> list[int]:
    """Return the answer to a request of any length."""
    alone = Succession(policy=CACHING)
    alone.load(limits=LARGE)
    return answer_all(alone, [request])[0][0]


@pytest.mark.parametrize("shares", [False, True])
def test_a_request_does_not_wait_for_the_room_of_an_ended_conversation_that_still_moves(
    monkeypatch: pytest.MonkeyPatch, *, shares: bool
) -> None:
    """Submit a request when the second of three pieces is read, also one that continues a cached text."""
    long, first = large(200, 600, max_tokens=1), large(203, 200, max_tokens=1)
    other = large(203 if shares else 204, 700, max_tokens=4)
    monkeypatch.setattr(moved_kv, "_PIECE_BYTES", 250 * KV_BYTES_PER_TOKEN)
    result, asked = KvMoves._result, list[int]()

    async def run() -> int:
        source, target = instances_that_move_kv(kv_of(5), LARGE)
        answer = await answer_alone(other)
        answer_all(source, [long])
        answer_all(target, [first])
        streams: list[Any] = []

        async def result_after_a_request(self: KvMoves, *given: Any) -> str:
            asked.append(1)
            if len(asked) == 2:
                streams.extend(target.submit(other))
                target.finish()
                assert tokens_of(streams[0].take()) == answer
            return await result(self, *given)

        monkeypatch.setattr(KvMoves, "_result", result_after_a_request)
        await move_all(source, target)
        target.finish()
        assert target.twin is not None
        assert not target.twin.has_fetched
        assert not engine_of(target).stats().scheduler.num_preemptions
        moved = engine_of(target).stats().cache.moved_tokens
        assert answer_all(target, [long])[0] == [await answer_alone(long)]
        check_nothing_is_left(target)
        return moved

    moved = asyncio.run(run())
    assert len(asked) == 2
    # All of it is freed if it could replace the text that the request continues.
    assert moved == (0 if shares else 200)


def test_no_request_is_preempted_for_an_ended_conversation_that_still_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = large(203, 200, max_tokens=80)
    monkeypatch.setattr(moved_kv, "_PIECE_BYTES", 250 * KV_BYTES_PER_TOKEN)
    monkeypatch.setattr(rows, "_PART_BYTES", 1 << 20)

    async def run() -> int:
        source, target = instances_that_move_kv(kv_of(4), LARGE)
        answer_all(source, [large(200, 600, max_tokens=1)])
        (stream,) = target.submit(running)
        deltas = run_to(target, stream, 1)

        def continue_answer(_: object) -> None:
            for _ in range(600):
                target.proceed(0)

        at_second_piece(monkeypatch, continue_answer)
        await move_all(source, target)
        target.finish()
        assert not engine_of(target).stats().scheduler.num_preemptions
        moved = engine_of(target).stats().cache.moved_tokens
        check_nothing_is_left(target)
        assert tokens_of([*deltas, *stream.take()]) == await answer_alone(running)
        return moved

    assert asyncio.run(run()) == 200


def test_the_first_to_be_evicted_is_the_conversation_that_was_not_used_for_longest() -> None:
    async def run() -> list[int]:
        source, target = instances_that_move_kv()
        own = starting_with(203, 20, max_tokens=4)
        answer_all(target, [own])
        answer_all(source, ENDED)
        await move_all(source, target)
        return first_tokens(target)

    assert asyncio.run(run()) == [203, 201, 200]


def test_an_ended_conversation_evicts_nothing_if_others_take_the_room_while_it_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, meanwhile = starting_with(204, 20, max_tokens=4), starting_with(205, 20, max_tokens=4)
    result = KvMoves._result

    async def run() -> None:
        source, target = Succession(policy=CACHING), Succession(policy=CACHING, kv=kv_of(2))
        source.moves_kv = target.moves_kv = True
        source.load()
        target.load()

        async def result_after_another_request(self: KvMoves, *given: Any) -> str:
            answer_all(target, [meanwhile])
            return await result(self, *given)

        monkeypatch.setattr(KvMoves, "_result", result_after_another_request)
        answer_all(source, ENDED[:1])
        answer_all(target, [before])
        await move_all(source, target)
        assert not engine_of(target).stats().cache.evictions
        assert first_tokens(target) == [205, 204]
        target.finish()
        assert target.twin is not None
        assert not target.twin.has_fetched
        check_nothing_is_left(target)

    asyncio.run(run())


def test_the_others_move_too_if_conversations_are_continued_before_they_have_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = [starting_with(200 + number, 20, max_tokens=1) for number in range(5)]
    result, continued_first = KvMoves._result, many[:1:-1]

    async def run() -> list[int]:
        source, target = instances_that_move_kv()

        async def result_after_the_next_turn(self: KvMoves, *given: Any) -> str:
            answer_all(target, continued_first[:1])
            del continued_first[:1]
            return await result(self, *given)

        monkeypatch.setattr(KvMoves, "_result", result_after_the_next_turn)
        answer_all(source, many)
        await move_all(source, target)
        return first_tokens(target)

    assert asyncio.run(run()) == [202, 203, 204, 201, 200]


def test_a_moved_conversation_takes_the_place_of_the_beginning_that_was_used_later() -> None:
    (long, _), other = ENDED, starting_with(203, 20, max_tokens=4)
    beginning = replace(long, prompt_tokens=long.prompt_tokens[:20], sampling=SamplingParams(max_tokens=1))

    async def run() -> None:
        source, target = instances_that_move_kv()
        answer_all(target, [other, beginning])
        answer_all(source, [long])
        await move_all(source, target)
        assert engine_of(target).stats().cache.moved_tokens == 23
        assert first_tokens(target) == [200, 203]
        check_nothing_is_left(target)

    asyncio.run(run())


def test_ended_conversations_that_cannot_move_are_computed(caplog: pytest.LogCaptureFixture) -> None:
    many = [starting_with(200 + number, 20, max_tokens=1) for number in range(5)]
    next_turns = [*map(continued, many)]

    async def run() -> tuple[list[list[int]], list[int], Succession]:
        source, target = instances_that_move_kv()
        assert target.twin is not None
        target.twin.fails_moves = "the connection broke"
        answer_all(source, many)
        assert await move_all(source, target) == 0
        assert not target.twin.has_fetched
        return *answer_all(target, next_turns), target

    with caplog.at_level(logging.INFO):
        answers, cached, target = asyncio.run(run())
    assert answers == [*map(answer_to, next_turns)]
    assert not any(cached)
    # Others would fail as well, while the machines wait.
    assert caplog.text.count("of an ended sequence was not moved: the connection broke") == 3
    check_nothing_is_left(target)
