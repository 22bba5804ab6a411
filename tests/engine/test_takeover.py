"""Requests that wait for another instance: their order, their limits of time, and what statistics count."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.engine.engines import LIMITS, PLAIN, make_request
from tests.engine.successions import Succession, lose_and_load, run_to

from mlx_ring.core.errors import DeadlineExceeded, NotReady, Overloaded, RequestError, ServingError


def test_a_client_that_leaves_during_the_pause_is_not_replayed() -> None:
    async def run() -> None:
        succession = Succession()
        succession.load()
        ended, stays = succession.submit(make_request(max_tokens=20), make_request(5, max_tokens=20))
        run_to(succession, stays, 4)
        succession.lose()
        await ended.aclose()
        succession.load()
        succession.finish()
        assert succession.twin is not None
        assert {row.sequence for step in succession.twin.sent for row in step.rows} == {1}
        assert succession.meter.finished == {"abort": 1, "length": 1}

    asyncio.run(run())


def test_a_new_request_waits_for_the_next_instance_behind_the_interrupted_ones() -> None:
    async def run() -> None:
        succession = Succession(policy=replace(PLAIN, max_num_seqs=1))
        succession.load()
        (first,) = succession.submit(make_request(max_tokens=20))
        run_to(succession, first, 3)
        succession.lose()
        (second,) = succession.submit(make_request(7, max_tokens=2))
        assert [request.state for request in succession.held.requests()] == ["paused", "waiting"]
        succession.load()
        succession.finish()
        assert succession.twin is not None
        assert next(row.sequence for step in succession.twin.sent for row in step.rows) == 1
        assert second.take()[-1].finish_reason == "length"

    asyncio.run(run())


def test_the_queue_is_bounded_during_the_pause() -> None:
    async def run() -> None:
        succession = Succession(policy=replace(PLAIN, max_num_seqs=1, max_queued_requests=1))
        succession.submit(make_request(), make_request())
        with pytest.raises(Overloaded):
            succession.submit(make_request())
        with pytest.raises(RequestError):
            succession.submit(*[make_request()] * 3)

    asyncio.run(run())


def test_a_request_that_waits_too_long_ends_with_the_loss() -> None:
    async def run() -> None:
        succession = Succession(within_s=0.01)
        succession.load()
        (stream,) = succession.submit(make_request())
        run_to(succession, stream, 2)
        succession.lose()
        with pytest.raises(
            NotReady,
            match=r"died\. The model was not loaded again, or the answer not continued, within 0.01 s",
        ):
            [delta async for delta in stream]
        assert not len(succession.held)
        assert succession.meter.failed == {"NotReady": 1}

    asyncio.run(run())


def test_the_time_limit_of_a_request_counts_the_pause() -> None:
    async def run() -> None:
        succession = Succession(policy=replace(PLAIN, request_timeout_s=0.01))
        succession.load()
        (stream,) = succession.submit(make_request())
        run_to(succession, stream, 2)
        succession.lose()
        with pytest.raises(DeadlineExceeded, match="2 tokens were generated"):
            [delta async for delta in stream]

    asyncio.run(run())


def test_requests_of_two_lost_instances_keep_their_order() -> None:
    async def run() -> None:
        first, second = Succession(), Succession()
        second.held = first.held
        first.load()
        second.load()
        older, newer = first.submit(make_request())[0], second.submit(make_request(5))[0]
        run_to(first, older, 1)
        run_to(second, newer, 1)
        first.lose()
        first.submit(make_request(7))
        second.lose()
        assert [live.sequence.prompt_length for live in first.held.take()] == [3, 5, 7]

    asyncio.run(run())


def test_a_reader_that_needs_no_more_ends_a_held_answer() -> None:
    async def run() -> None:
        succession = Succession()
        succession.load()
        (stream,) = succession.submit(make_request(max_tokens=20))
        run_to(succession, stream, 2)
        succession.lose()
        assert stream.is_paused
        stream.stop()
        assert not stream.is_paused
        assert stream.take()[-1].finish_reason == "stop"
        assert not succession.held.take()

    asyncio.run(run())


def test_the_wait_of_an_answer_counts_from_the_first_loss_without_a_new_token() -> None:
    async def run() -> None:
        now = [100.0]
        succession = Succession(clock=lambda: now[0])
        succession.load()
        (stream,) = succession.submit(make_request(max_tokens=20))
        run_to(succession, stream, 2)
        (live,) = lose_and_load(succession)
        for _ in range(3):
            assert live.stalled_since == 100.0
            now[0] += 200.0
            succession.proceed(0)
            assert lose_and_load(succession) == [live]
        assert stream.is_paused
        run_to(succession, stream, 1)
        assert (live.stalled_since, stream.is_paused, stream.was_resumed) == (None, False, True)

    asyncio.run(run())


def test_an_answer_that_stalls_for_too_long_ends_although_the_model_was_loaded_meanwhile() -> None:
    async def run() -> None:
        now = [100.0]
        succession = Succession(clock=lambda: now[0])
        succession.load()
        (stream,) = succession.submit(make_request(max_tokens=20))
        run_to(succession, stream, 2)
        for _ in range(2):
            succession.lose()
            succession.load()
            succession.proceed(0)
            now[0] += 400.0
        succession.lose()
        with pytest.raises(NotReady, match=r"or the answer not continued, within 300 s"):
            [delta async for delta in stream]
        assert not stream.was_resumed, "it never continued"

    asyncio.run(run())


def test_a_new_request_shows_that_it_waits_for_an_engine_and_is_not_resumed() -> None:
    async def run() -> None:
        succession = Succession()
        (stream,) = succession.submit(make_request(max_tokens=3))
        assert stream.is_paused
        succession.load()
        assert not stream.is_paused
        succession.finish()
        assert not stream.was_resumed

    asyncio.run(run())


def test_a_pause_counts_neither_as_time_between_tokens_nor_as_time_of_decoding() -> None:
    async def run() -> None:
        now = [0.0]
        succession = Succession(clock=lambda: now[0])
        succession.load()
        (stream,) = succession.submit(make_request(max_tokens=4, ignore_eos=True))
        run_to(succession, stream, 2)
        succession.lose()
        now[0] += 500.0
        succession.finish()
        timings = stream.take()[-1].timings
        assert timings is not None
        assert timings.decode_s == 0.0
        assert succession.meter.between_tokens_s.total == 0.0

    asyncio.run(run())


def test_interrupted_requests_that_end_before_they_continue_are_counted_as_given_up() -> None:
    """Fail one request that another replica took over, one that it has continued, and one that was never interrupted."""

    async def run() -> None:
        first, second = Succession(), Succession()
        first.load()
        engine = second.load()
        streams = first.submit(*(make_request(length, max_tokens=20) for length in (3, 5)))
        run_to(first, streams[1], 2)
        first.lose()
        lives = first.held.take()
        engine.take_over(lives[1:])
        streams[1].take()
        run_to(second, streams[1], 1)
        engine.take_over(lives[:1])
        engine.submit(make_request(7, max_tokens=20))
        engine.fail(NotReady("The model is unloaded."))
        assert second.meter.failed == {"NotReady": 3}
        assert second.meter.given_up == {"NotReady": 1}

    asyncio.run(run())


def test_requests_that_are_given_up_are_counted_by_their_error() -> None:
    async def run() -> None:
        succession = Succession()
        succession.load()
        ended, *_ = succession.submit(*(make_request(length, max_tokens=20) for length in (3, 5, 50)))
        succession.lose()
        await ended.aclose()
        succession.load(limits=replace(LIMITS, context_length=20))
        succession.lose()
        succession.held.fail(NotReady("The model is unloaded."))
        assert succession.meter.given_up == {"ContextExceeded": 1, "NotReady": 1}

    asyncio.run(run())


def test_answer_is_not_continued_by_other_weights_than_those_that_began_it() -> None:
    async def run() -> None:
        succession = Succession()
        succession.load(limits=replace(LIMITS, model="a-1"))
        begun, stays = succession.submit(make_request(max_tokens=20), make_request(5, max_tokens=20))
        run_to(succession, begun, 3)
        await stays.aclose()
        succession.lose()
        (waits,) = succession.submit(make_request(7, max_tokens=2))
        # Its files were replaced while the first instance served.
        succession.load(limits=replace(LIMITS, model="a-2"))
        succession.finish()
        assert isinstance(begun.error, ServingError)
        assert "replaced while it was in progress (digest a-1, now a-2)" in str(begun.error)
        assert waits.take()[-1].finish_reason == "length"

    asyncio.run(run())


def test_answer_that_an_earlier_process_began_waits_for_its_own_weights() -> None:
    async def run() -> None:
        succession = Succession()
        begun = replace(make_request(max_tokens=9), answered=(1, 2), model="a-1")
        fresh = replace(make_request(5, max_tokens=2), model="a-1")
        held, unbegun = succession.held.submit_all(begun), succession.held.submit_all(fresh)
        engine = succession.load(limits=replace(LIMITS, model="a-2"))
        succession.finish()
        assert "(digest a-1, now a-2)" in str(held[0].error)
        assert unbegun[0].model == "a-2"
        assert unbegun[0].take()[-1].finish_reason == "length"
        with pytest.raises(ServingError, match="digest a-1, now a-2"):
            engine.submit(begun)

    asyncio.run(run())
