"""Engine over the twin's ranks, from its clients' side."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.default_settings import make_policy
from tests.engine.engines import (
    BYTES,
    EOS,
    LIMITS,
    PLAIN,
    Answer,
    answer_of,
    collect,
    make_engine,
    make_manual_engine,
    make_request,
    run_all,
    scripted,
)
from tests.engine.twin import TwinExecutor
from tests.engine.twin_rank import hash_token
from tests.examples import examples

from mlx_ring.core.errors import (
    NodeLost,
    Overloaded,
    RequestError,
)
from mlx_ring.core.generation import Delta, GenerateRequest
from mlx_ring.core.types import RankId, SamplingParams, TokenLogprob
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.live_request import LiveRequest


def test_each_token_is_streamed_and_the_last_delta_has_the_finish_reason() -> None:
    answer = answer_of(scripted(b"hello"), make_request())
    assert [delta.text for delta in answer.deltas] == ["h", "e", "l", "l", "o", ""]
    assert answer.token_ids == [*b"hello", EOS]
    assert [delta.finish_reason for delta in answer.deltas] == [None] * 5 + ["stop"]
    assert [delta.completion_tokens for delta in answer.deltas] == [1, 2, 3, 4, 5, 6]
    assert {delta.prompt_tokens for delta in answer.deltas} == {3}


def test_an_answer_ends_at_max_tokens() -> None:
    answer = answer_of(scripted(b"hello"), make_request(max_tokens=2))
    assert (answer.text, answer.last.finish_reason, answer.last.completion_tokens) == ("he", "length", 2)


def test_an_answer_ends_at_the_context_length() -> None:
    answer = answer_of(scripted(b"x" * 100), make_request())
    assert (answer.last.finish_reason, len(answer.token_ids)) == ("length", 61)


def test_ignore_eos_continues_past_the_end_token() -> None:
    answer = answer_of(scripted(b"a\0b"), make_request(ignore_eos=True, max_tokens=3))
    assert (answer.token_ids, answer.last.finish_reason) == ([97, 0, 98], "length")


def test_stop_token_ids_end_the_answer() -> None:
    answer = answer_of(scripted(b"abc"), make_request(stop_token_ids=(ord("b"),)))
    assert (answer.text, answer.token_ids, answer.last.finish_reason) == ("a", [97, 98], "stop")


def test_no_end_token_is_sampled_before_min_tokens() -> None:
    answer = answer_of(scripted(b"\0\0\0"), make_request(min_tokens=2))
    assert answer.token_ids == [1, 1, EOS]


def test_a_stop_string_over_several_tokens_is_never_shown() -> None:
    answer = answer_of(scripted(b"one. END two"), make_request(stop=("END",)))
    assert [delta.text for delta in answer.deltas] == ["o", "n", "e", ".", " ", "", "", ""]
    assert (answer.last.finish_reason, answer.last.stop_match) == ("stop", "END")
    assert answer.last.completion_tokens == 8


def test_an_unfinished_stop_string_is_shown_at_the_end() -> None:
    answer = answer_of(scripted(b"one EN"), make_request(stop=("END",)))
    assert (answer.text, answer.last.stop_match) == ("one EN", None)


def test_a_character_of_several_tokens_is_streamed_whole() -> None:
    answer = answer_of(scripted("a🚀".encode()), make_request())
    assert [delta.text for delta in answer.deltas] == ["a", "", "", "", "🚀", ""]


def test_each_token_has_its_piece_of_the_text() -> None:
    answer = answer_of(scripted("aé".encode() + b" EN"), make_request(stop=("END",)))
    assert [delta.pieces for delta in answer.deltas] == [("a",), ("",), ("é",), (" ",), ("",), ("",), ("EN",)]


def test_a_stopped_stream_finishes_as_stop_and_its_kv_is_retained() -> None:
    async def run() -> tuple[list[Delta], Engine, TwinExecutor]:
        twin = TwinExecutor((1,), next_token=scripted(b"x" * 20, prompt=30))
        engine = make_engine(twin, make_policy(num_speculative_tokens=0))
        stream = engine.submit(make_request(30))
        await anext(stream)
        stream.stop()
        stream.stop()
        return [delta async for delta in stream], engine, twin

    (last,), engine, twin = asyncio.run(run())
    assert (last.finish_reason, last.text, last.token_ids) == ("stop", "", ())
    assert last.timings is not None
    assert engine.stats().finished == {"stop": 1}
    assert any(operation.HasField("retain") for step in twin.sent for operation in step.operations)


def test_tokens_have_logprobs_only_on_request() -> None:
    answer = answer_of(scripted(b"ab"), make_request(logprobs=True, top_logprobs=2))
    assert [len(delta.logprobs) for delta in answer.deltas] == [1, 1, 1]
    assert answer.deltas[0].logprobs == (TokenLogprob(ord("a"), -0.5, ((0, -1.0), (1, -1.0))),)
    assert answer_of(scripted(b"ab"), make_request()).deltas[0].logprobs == ()


def test_prompt_logprobs_are_in_the_first_delta() -> None:
    answer = answer_of(scripted(b"ab", prompt=30), make_request(prompt=30, prompt_logprobs=0))
    scored = answer.deltas[0].prompt_logprobs
    assert scored is not None
    assert scored[0] is None
    assert [one.token for one in scored[1:] if one is not None] == list(range(66, 95))
    assert [delta.prompt_logprobs for delta in answer.deltas[1:]] == [None, None]


def test_a_prompt_can_be_scored_without_an_answer() -> None:
    answer = answer_of(scripted(b"ab"), make_request(max_tokens=0, prompt_logprobs=1))
    (only,) = answer.deltas
    assert (only.text, only.token_ids, only.finish_reason) == ("", (), "length")
    assert only.prompt_logprobs is not None
    assert len(only.prompt_logprobs) == 3


def test_the_last_delta_has_the_request_timings() -> None:
    async def run() -> Answer:
        times = iter(range(1000))
        twin = TwinExecutor((1,), next_token=scripted(b"abc"))
        policy = replace(PLAIN, max_num_seqs=1)
        engine = Engine(
            twin, BYTES, LIMITS, instance="demo", epoch=1, policy=policy, clock=lambda: float(next(times))
        )
        first, second = engine.submit(make_request()), engine.submit(make_request())
        await collect(first)
        return await collect(second)

    answer = asyncio.run(run())
    assert [delta.timings for delta in answer.deltas[:-1]] == [None, None, None]
    timings = answer.last.timings
    assert timings is not None
    assert timings.queue_s > 0
    assert timings.prefill_s >= 1.0
    assert timings.decode_s >= 3.0


def test_an_invalid_request_is_refused_and_leaves_no_state() -> None:
    async def run() -> None:
        twin = TwinExecutor()
        engine = make_engine(twin)
        with pytest.raises(RequestError):
            engine.submit(GenerateRequest("r", (), SamplingParams()))
        assert (twin.sent, engine.stats().scheduler.waiting) == ([], 0)

    asyncio.run(run())


def test_a_full_queue_refuses_requests_until_one_leaves() -> None:
    async def run() -> None:
        twin = TwinExecutor(automatic=False)
        engine = make_engine(twin, replace(PLAIN, max_num_seqs=1, max_queued_requests=2))
        streams = [engine.submit(make_request()) for _ in range(3)]
        with pytest.raises(Overloaded) as refused:
            engine.submit(make_request())
        assert refused.value.retry_after_s > 0
        await streams[1].aclose()
        engine.submit(make_request())

    asyncio.run(run())


def test_requests_of_one_call_are_admitted_all_or_none() -> None:
    async def run() -> None:
        twin = TwinExecutor(automatic=False)
        engine = make_engine(twin, replace(PLAIN, max_num_seqs=2, max_queued_requests=3))
        engine.submit_all(make_request(), make_request())
        with pytest.raises(Overloaded, match="asks for 4 answers"):
            engine.submit_all(*(make_request() for _ in range(4)))
        assert engine.stats().scheduler.waiting == 0
        engine.submit_all(*(make_request() for _ in range(3)))
        with pytest.raises(RequestError, match=r"asks for 6 answers.*accepts 5 at once") as refused:
            engine.submit_all(*(make_request() for _ in range(6)))
        assert refused.value.param == "n"

    asyncio.run(run())


def test_without_a_queue_only_requests_that_run_at_once_are_admitted() -> None:
    async def run() -> None:
        engine = make_engine(
            TwinExecutor(automatic=False), replace(PLAIN, max_num_seqs=2, max_queued_requests=0)
        )
        for _ in range(2):
            engine.submit(make_request())
        with pytest.raises(Overloaded):
            engine.submit(make_request())

    asyncio.run(run())


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=8), st.integers(1, 4))
@examples(0.4)
def test_concurrent_requests_get_the_answers_that_each_gets_alone(
    requests: list[tuple[int, int]], stages: int
) -> None:
    async def together() -> list[Answer]:
        engine = make_engine(TwinExecutor((1,) * stages), replace(PLAIN, prefill_chunk=4, max_num_seqs=5))
        streams = [engine.submit(make_request(prompt, max_tokens=most)) for prompt, most in requests]
        return list(await asyncio.gather(*map(collect, streams)))

    for (prompt, most), answer in zip(requests, asyncio.run(together()), strict=True):
        alone = answer_of(hash_token(256), make_request(prompt, max_tokens=most), (1,))
        assert (answer.token_ids, answer.text) == (alone.token_ids, alone.text)


def test_the_engine_counts_tokens_and_keeps_the_last_steps_timings() -> None:
    async def run() -> None:
        twin = TwinExecutor((1, 1), next_token=scripted(b"abc"))
        engine = make_engine(twin)
        await collect(engine.submit(make_request()))
        await twin.idle()
        stats = engine.stats()
        assert (stats.prompt_tokens, stats.generated_tokens, stats.finished) == (3, 4, {"stop": 1})
        assert stats.scheduler.steps_sent == stats.scheduler.steps_completed
        recent = [one for one in stats.scheduler.recent if one.rank.stage == 0]
        assert [one.step for one in recent] == list(range(1, stats.scheduler.steps_sent + 1))
        assert [one.tokens for one in recent][:4] == [3, 1, 1, 1]
        assert recent[-1].tokens == 0

    asyncio.run(run())


@pytest.mark.parametrize("deadline", [0.0, 5.0])
def test_a_rank_is_late_only_past_its_step_deadline(deadline: float) -> None:
    async def run() -> None:
        now = 0.0
        twin = TwinExecutor((1, 1), automatic=False)
        policy = replace(PLAIN, step_deadline_s=deadline)
        engine = Engine(twin, BYTES, LIMITS, instance="demo", epoch=1, policy=policy, clock=lambda: now)
        engine.submit(make_request())
        now = 21.0
        owed = engine.oldest_unanswered()
        assert owed is not None
        assert (owed.rank, owed.waited_s, owed.is_late) == (RankId(0, 0), 21.0, deadline > 0)
        engine.record_started(RankId(0, 0), owed.step)
        started = engine.oldest_unanswered()
        assert started is not None
        assert (started.waited_s, started.is_late) == (0.0, False), "it has just started the step"

    asyncio.run(run())


def test_open_requests_are_waiting_reading_or_answering_until_they_end() -> None:
    async def run() -> None:
        twin = TwinExecutor((1,), automatic=False)
        engine = make_engine(
            twin, make_policy(max_num_seqs=2, prefill_chunk=8, prefix_cache=False, num_speculative_tokens=0)
        )
        streams = [engine.submit(make_request(prompt, max_tokens=4)) for prompt in (3, 30, 5)]
        reported = engine.requests()
        assert [request.state for request in reported] == ["answering", "reading", "waiting"]
        assert [request.prompt_tokens for request in reported] == [3, 30, 5]
        assert reported[0].read_tokens == 3
        assert 0 < reported[1].read_tokens < 30
        assert (reported[2].read_tokens, reported[2].tokens) == (0, 0)
        for stream in streams:
            await stream.aclose()
        assert engine.requests() == []

    asyncio.run(run())


def test_a_paused_engine_sends_no_step_until_it_resumes() -> None:
    async def run() -> None:
        engine, twin = make_manual_engine()
        stream = engine.submit(make_request(max_tokens=4))
        engine.pause()
        run_all(twin)
        sent = engine.stats().scheduler.steps_sent
        engine.submit(make_request(max_tokens=1))
        run_all(twin)
        assert engine.stats().scheduler.steps_sent == sent
        engine.resume()
        assert engine.stats().scheduler.steps_sent > sent
        run_all(twin)
        assert (await collect(stream)).last.finish_reason == "length"

    asyncio.run(run())


def test_a_lost_engine_sends_no_step_when_it_resumes() -> None:
    async def run() -> None:
        held: list[LiveRequest] = []
        twin = TwinExecutor((1, 1), next_token=scripted(b"abcd"))
        engine = Engine(
            twin,
            BYTES,
            LIMITS,
            instance="demo",
            epoch=1,
            policy=make_policy(),
            hold=lambda lives, _: held.extend(lives),
        )
        engine.pause()
        engine.submit(make_request())
        engine.lose(NodeLost("It has sent nothing for 3.5 s."))
        engine.resume()
        assert len(held) == 1
        assert engine.stats().scheduler.steps_sent == 0

    asyncio.run(run())
