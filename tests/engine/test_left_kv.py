"""KV of the stages that ranks had before they changed to another split."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from tests.default_settings import make_policy
from tests.engine.moving import LARGE, adopted, rows_of
from tests.engine.successions import LOSS, Succession, check_nothing_is_left, run_to, tokens_of
from tests.engine.test_moved_cache import ENDED, answer_all, answer_to, continued, first_tokens, starting_with
from tests.engine.twin import TwinExecutor
from tests.engine.twin_rank import KV_BYTES_PER_TOKEN

from mlx_ring.core.generation import GenerateRequest, RequestStream
from mlx_ring.core.types import RankId
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.left_kv import LeftKvMoves
from mlx_ring.rpc.protos import worker_pb2

pytestmark = pytest.mark.usefixtures("moves_in_small_parts")

RUNNING = starting_with(202, 30, max_tokens=20)
ANSWER = answer_to(RUNNING)
NEXT = [*map(continued, ENDED)]
NEXT_ANSWERS = [*map(answer_to, NEXT)]


def instance(
    kv: RankKv | None = None, clock: Callable[[], float] = time.monotonic, **policy: Any
) -> Succession:
    """Return a loaded instance of two stages, whose KV moves."""
    chosen = make_policy(num_speculative_tokens=0, prefill_chunk=8, **policy)
    succession = Succession(policy=chosen, kv=kv, clock=clock)
    succession.moves_kv = True
    succession.load(limits=LARGE)
    return succession


def held_before(succession: Succession) -> int:
    """Return the sequences that some rank still holds of its stage before."""
    assert succession.twin is not None
    assert succession.twin.left is not None
    return sum(map(len, succession.twin.left.held().values()))


def begin(succession: Succession, request: GenerateRequest, tokens: int) -> tuple[RequestStream, list[int]]:
    """Begin an answer, and return its stream and so many of its tokens."""
    (stream,) = succession.submit(request)
    return stream, tokens_of(run_to(succession, stream, tokens))


def test_answers_and_conversations_continue_without_being_computed_again() -> None:
    async def run() -> None:
        succession = instance()
        answer_all(succession, ENDED)
        stream, before = begin(succession, RUNNING, 3)
        moving = await succession.change_stages((1, 1, 1), limits=LARGE)
        before += tokens_of(stream.take())
        await succession.during(moving.bring_rest())
        succession.finish()
        assert [*before, *tokens_of(stream.take())] == ANSWER
        # The last delivered token is drawn again, and what follows is new.
        assert min(start for start, _ in rows_of(succession)) == 30 + len(before) - 2
        answers, cached = answer_all(succession, NEXT)
        assert answers == NEXT_ANSWERS
        assert cached == [43, 27]
        assert held_before(succession) == 0
        check_nothing_is_left(succession)

    asyncio.run(run())


def test_ranks_read_their_own_kv_without_a_message() -> None:
    async def run() -> set[tuple[int, str, int, int]]:
        succession = instance()
        stream, _ = begin(succession, RUNNING, 3)
        found = set[tuple[int, str, int, int]]()
        fetch = TwinExecutor.fetch_kv

        def watch(twin: Any, wanted: Any) -> None:
            found.update(
                (each.stage, each.address, each.first_layer, each.end_layer) for each in wanted.sources
            )
            fetch(twin, wanted)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TwinExecutor, "fetch_kv", watch)
            await succession.change_stages((1, 1, 1), limits=LARGE)
        succession.finish()
        assert stream.take()
        return found

    # Machines 0 and 1 had the layers [0, 6) and [6, 12), and have [0, 4) and [4, 8) now.
    assert asyncio.run(run()) == {(0, "", 0, 4), (1, "0/0", 4, 6), (1, "", 6, 8), (2, "1/0", 8, 12)}


@pytest.mark.parametrize("why", ["a rank lost its KV", "the prefix cache is off", "the ranks cannot read it"])
def test_everything_is_computed_again_if_kv_cannot_move(why: str) -> None:
    async def run() -> None:
        succession = instance(prefix_cache=why != "the prefix cache is off")
        answer_all(succession, ENDED)
        stream, before = begin(succession, RUNNING, 3)
        keeping = frozenset({RankId(0, 0)}) if why == "a rank lost its KV" else None
        with pytest.MonkeyPatch.context() as patch:
            if why == "the ranks cannot read it":
                patch.setattr(TwinExecutor, "keep_left", _free_all)
            moving = await succession.change_stages((1, 1, 1), limits=LARGE, keeping=keeping)
            await succession.during(moving.bring_rest())
        succession.finish()
        assert [*before, *tokens_of(stream.take())] == ANSWER
        assert min(start for start, _ in rows_of(succession)) == 0
        assert held_before(succession) == 0
        assert adopted(succession) == []
        answers, cached = answer_all(succession, NEXT)
        assert answers == NEXT_ANSWERS
        assert cached == [0, 0]

    asyncio.run(run())


def _free_all(twin: Any, _sequences: Any) -> None:
    for rank in twin.left._ranks.values():
        rank.held.clear()


def answers_to(requests: Iterable[GenerateRequest]) -> list[list[int]]:
    """Return the answers of an instance that is never lost."""

    async def run() -> list[list[int]]:
        return answer_all(instance(), requests)[0]

    return asyncio.run(run())


def next_turn(request: GenerateRequest) -> GenerateRequest:
    (answer,) = answers_to([request])
    return replace(request, prompt_tokens=(*request.prompt_tokens, *answer, 65, 66))


def long_text(first: int, tokens: int) -> GenerateRequest:
    request = starting_with(first, 2, max_tokens=4)
    return replace(request, prompt_tokens=(first, *(65 + number % 40 for number in range(tokens - 1))))


LONG = [long_text(number, 600) for number in range(203, 207)]
FOUR_TEXTS = RankKv(4 * 768 * KV_BYTES_PER_TOKEN, KV_BYTES_PER_TOKEN)
"""Memory that holds four of them, with no room for a further one."""


def test_what_was_used_longest_ago_is_given_up_where_memory_is_short() -> None:
    turns = [next_turn(LONG[3]), next_turn(LONG[0])]
    expected = answers_to(turns)

    async def run() -> None:
        succession = instance(FOUR_TEXTS)
        answer_all(succession, LONG)
        assert first_tokens(succession) == [206, 205, 204, 203]
        moving = await succession.change_stages((1, 1, 1), limits=LARGE)
        await succession.during(moving.bring_rest())
        assert first_tokens(succession) == [206, 205, 204]
        assert held_before(succession) == 0
        answers, cached = answer_all(succession, turns)
        assert answers == expected
        assert cached == [603, 0]
        check_nothing_is_left(succession)

    asyncio.run(run())


def test_text_that_does_not_fit_beside_itself_is_given_up_and_not_others() -> None:
    async def run() -> None:
        succession = instance(FOUR_TEXTS)
        answer_all(succession, [LONG[0], long_text(210, 1700)])
        assert first_tokens(succession) == [210, 203]
        moving = await succession.change_stages((1, 1, 1), limits=LARGE)
        await succession.during(moving.bring_rest())
        assert first_tokens(succession) == [203]
        assert held_before(succession) == 0
        check_nothing_is_left(succession)

    asyncio.run(run())


def test_request_gets_the_memory_of_what_is_left_at_once() -> None:
    large, turn = long_text(210, 1800), next_turn(LONG[3])
    answer, expected = answers_to([large, turn])

    async def run() -> None:
        succession = instance(FOUR_TEXTS)
        answer_all(succession, LONG)
        moving = await succession.change_stages((1, 1, 1), limits=LARGE)
        assert held_before(succession) > 0
        (stream,) = succession.submit(large)
        succession.finish()
        assert tokens_of(stream.take()) == answer
        await succession.during(moving.bring_rest())
        answers, _ = answer_all(succession, [turn])
        assert answers == [expected]
        assert held_before(succession) == 0
        check_nothing_is_left(succession)

    asyncio.run(run())


def test_request_that_has_ended_meanwhile_is_not_moved() -> None:
    other = starting_with(203, 30, max_tokens=20)

    async def run() -> None:
        succession = instance()
        stream, before = begin(succession, RUNNING, 3)
        ended, _ = begin(succession, other, 3)
        bring = LeftKvMoves.bring_running

        async def leave_first(moving: LeftKvMoves) -> None:
            await ended.aclose()
            await bring(moving)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LeftKvMoves, "bring_running", leave_first)
            await succession.change_stages((1, 1, 1), limits=LARGE)
        assert len({adopt.sequence for adopt in adopted(succession)}) == 1
        succession.finish()
        assert [*before, *tokens_of(stream.take())] == ANSWER

    asyncio.run(run())


def test_request_that_another_replica_took_over_and_lost_gets_no_kv_of_a_sequence_with_its_number() -> None:
    async def run() -> None:
        succession = instance()
        stream, before = begin(succession, RUNNING, 3)
        begin(succession, starting_with(203, 60, max_tokens=20), 3)
        before += tokens_of(stream.take())
        other = instance()
        answer_all(other, ENDED[:1])
        bring = LeftKvMoves.bring_running

        async def take_over_first(moving: LeftKvMoves) -> None:
            lives = succession.held.take()
            assert other.engine is not None
            # Its number there is that of the other request here.
            other.engine.take_over(lives[:1])
            before.extend(tokens_of(run_to(other, stream, 2)))
            other.lose()
            succession.held.hold([*other.held.take(), *lives[1:]], LOSS)
            await bring(moving)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LeftKvMoves, "bring_running", take_over_first)
            await succession.change_stages((1, 1, 1), limits=LARGE)
        assert len({adopt.sequence for adopt in adopted(succession)}) == 1
        succession.finish()
        assert [*before, *tokens_of(stream.take())] == ANSWER

    asyncio.run(run())


def test_answer_that_does_not_fit_beside_its_own_kv_is_computed_again() -> None:
    request = replace(long_text(210, 1700), sampling=RUNNING.sampling)
    (answer,) = answers_to([request])

    async def run() -> None:
        succession = instance(FOUR_TEXTS)
        stream, before = begin(succession, request, 3)
        await succession.change_stages((1, 1, 1), limits=LARGE)
        # The ranks have freed it, and could copy nothing.
        assert held_before(succession) == 0
        assert adopted(succession) == []
        succession.finish()
        assert [*before, *tokens_of(stream.take())] == answer
        check_nothing_is_left(succession)

    asyncio.run(run())


def test_requests_wait_for_one_failed_move_and_not_for_each() -> None:
    requests = [starting_with(first, 30, max_tokens=20) for first in (202, 203, 204, 205)]
    ends = [answer_to(request)[-3:] for request in requests]
    now = 0.0
    tried, fetch = list[int](), TwinExecutor.fetch_kv

    def fail(twin: TwinExecutor, wanted: worker_pb2.FetchKv) -> None:
        """Fail after a long time."""
        nonlocal now
        if wanted.sources:
            tried.append(wanted.id)
            now, twin.fails_moves = now + 15.0, "the other machine does not answer"
        fetch(twin, wanted)

    async def run() -> None:
        succession = instance(clock=lambda: now)
        streams = [begin(succession, request, 3)[0] for request in requests]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TwinExecutor, "fetch_kv", fail)
            await succession.change_stages((1, 1, 1), limits=LARGE)
        assert len(tried) == 1
        assert held_before(succession) == 0
        succession.finish()
        assert [tokens_of(stream.take())[-3:] for stream in streams] == ends

    asyncio.run(run())


def test_request_that_needs_all_of_its_tokens_computed_is_not_moved() -> None:
    request = replace(RUNNING, prompt_logprobs=0)
    assert request.computes_all

    async def run() -> None:
        succession = instance()
        begin(succession, request, 3)
        await succession.change_stages((1, 1, 1), limits=LARGE)
        assert adopted(succession) == []
        assert held_before(succession) == 0

    asyncio.run(run())
