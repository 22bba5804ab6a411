"""The engine over the twin's ranks: what clients see."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.engines import (
    BYTES,
    EOS,
    LIMITS,
    PLAIN,
    Answer,
    answer_of,
    ask,
    collect,
    make_engine,
    says,
)
from tests.examples import examples

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.errors import (
    Overloaded,
    RequestError,
)
from mlx_ring.core.generation import Delta, GenerateRequest
from mlx_ring.core.types import RankId, SamplingParams, TokenLogprob
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.twin import TwinExecutor, hash_token


def test_an_answer_comes_token_by_token_and_ends_with_its_reason() -> None:
    answer = answer_of(says(b"hello"), ask())
    assert [delta.text for delta in answer.deltas] == ["h", "e", "l", "l", "o", ""]
    assert answer.token_ids == [*b"hello", EOS]
    assert [delta.finish_reason for delta in answer.deltas] == [None] * 5 + ["stop"]
    assert [delta.completion_tokens for delta in answer.deltas] == [1, 2, 3, 4, 5, 6]
    assert {delta.prompt_tokens for delta in answer.deltas} == {3}


def test_an_answer_ends_at_its_most_tokens() -> None:
    answer = answer_of(says(b"hello"), ask(max_tokens=2))
    assert (answer.text, answer.last.finish_reason, answer.last.completion_tokens) == ("he", "length", 2)


def test_an_answer_ends_where_the_context_does() -> None:
    answer = answer_of(says(b"x" * 100), ask())
    assert (answer.last.finish_reason, len(answer.token_ids)) == ("length", 61)


def test_the_models_end_is_passed_over_where_the_client_says_so() -> None:
    answer = answer_of(says(b"a\0b"), ask(ignore_eos=True, max_tokens=3))
    assert (answer.token_ids, answer.last.finish_reason) == ([97, 0, 98], "length")


def test_a_client_can_name_tokens_that_end_the_answer() -> None:
    answer = answer_of(says(b"abc"), ask(stop_token_ids=(ord("b"),)))
    assert (answer.text, answer.token_ids, answer.last.finish_reason) == ("a", [97, 98], "stop")


def test_no_end_comes_before_the_least_number_of_tokens() -> None:
    answer = answer_of(says(b"\0\0\0"), ask(min_tokens=2))
    assert answer.token_ids == [1, 1, EOS]


def test_a_stop_string_over_several_tokens_never_shows() -> None:
    answer = answer_of(says(b"one. END two"), ask(stop=("END",)))
    assert [delta.text for delta in answer.deltas] == ["o", "n", "e", ".", " ", "", "", ""]
    assert (answer.last.finish_reason, answer.last.stop_match) == ("stop", "END")
    assert answer.last.completion_tokens == 8


def test_what_only_began_like_a_stop_string_is_shown_at_the_end() -> None:
    answer = answer_of(says(b"one EN"), ask(stop=("END",)))
    assert (answer.text, answer.last.stop_match) == ("one EN", None)


def test_a_character_of_several_tokens_comes_out_whole() -> None:
    answer = answer_of(says("a🚀".encode()), ask())
    assert [delta.text for delta in answer.deltas] == ["a", "", "", "", "🚀", ""]


def test_each_token_has_its_piece_of_the_text() -> None:
    answer = answer_of(says("aé".encode() + b" EN"), ask(stop=("END",)))
    assert [delta.pieces for delta in answer.deltas] == [("a",), ("",), ("é",), (" ",), ("",), ("",), ("EN",)]


def test_an_answer_that_its_reader_ends_ends_well_and_is_kept() -> None:
    async def run() -> tuple[list[Delta], Engine, TwinExecutor]:
        twin = TwinExecutor((1,), next_token=says(b"x" * 20, prompt=30))
        engine = make_engine(twin, Policy(num_speculative_tokens=0))
        stream = engine.submit(ask(30))
        await anext(stream)
        stream.stop()
        stream.stop()
        return [delta async for delta in stream], engine, twin

    (last,), engine, twin = asyncio.run(run())
    assert (last.finish_reason, last.text, last.token_ids) == ("stop", "", ())
    assert last.timings is not None
    assert engine.stats().finished == {"stop": 1}
    assert any(operation.HasField("park") for step in twin.sent for operation in step.operations)


def test_log_probabilities_come_with_their_tokens_where_asked_for() -> None:
    answer = answer_of(says(b"ab"), ask(logprobs=True, top_logprobs=2))
    assert [len(delta.logprobs) for delta in answer.deltas] == [1, 1, 1]
    assert answer.deltas[0].logprobs == (TokenLogprob(ord("a"), -0.5, ((0, -1.0), (1, -1.0))),)
    assert answer_of(says(b"ab"), ask()).deltas[0].logprobs == ()


def test_a_prompts_log_probabilities_come_with_the_first_delta() -> None:
    answer = answer_of(says(b"ab", prompt=30), ask(prompt=30, prompt_logprobs=0))
    scored = answer.deltas[0].prompt_logprobs
    assert scored is not None
    assert scored[0] is None
    assert [one.token for one in scored[1:] if one is not None] == list(range(66, 95))
    assert [delta.prompt_logprobs for delta in answer.deltas[1:]] == [None, None]


def test_a_prompt_can_be_scored_without_an_answer() -> None:
    answer = answer_of(says(b"ab"), ask(max_tokens=0, prompt_logprobs=1))
    (only,) = answer.deltas
    assert (only.text, only.token_ids, only.finish_reason) == ("", (), "length")
    assert only.prompt_logprobs is not None
    assert len(only.prompt_logprobs) == 3


def test_the_last_delta_tells_where_the_time_went() -> None:
    async def run() -> Answer:
        times = iter(range(1000))
        twin = TwinExecutor((1,), next_token=says(b"abc"))
        policy = replace(PLAIN, max_num_seqs=1)
        engine = Engine(
            twin, BYTES, LIMITS, instance="demo", epoch=1, policy=policy, clock=lambda: float(next(times))
        )
        first, second = engine.submit(ask()), engine.submit(ask())
        await collect(first)
        return await collect(second)

    answer = asyncio.run(run())
    assert [delta.timings for delta in answer.deltas[:-1]] == [None, None, None]
    timings = answer.last.timings
    assert timings is not None
    assert timings.queue_s > 0
    assert timings.prefill_s >= 1.0
    assert timings.decode_s >= 3.0


def test_a_request_that_no_worker_could_take_is_refused_and_leaves_nothing() -> None:
    async def run() -> None:
        twin = TwinExecutor()
        engine = make_engine(twin)
        with pytest.raises(RequestError):
            engine.submit(GenerateRequest("r", (), SamplingParams()))
        assert (twin.sent, engine.stats().scheduler.waiting) == ([], 0)

    asyncio.run(run())


def test_a_full_line_takes_no_more() -> None:
    async def run() -> None:
        twin = TwinExecutor(automatic=False)
        engine = make_engine(twin, replace(PLAIN, max_num_seqs=1, max_queued_requests=2))
        streams = [engine.submit(ask()) for _ in range(3)]
        with pytest.raises(Overloaded) as refused:
            engine.submit(ask())
        assert refused.value.retry_after_s > 0
        await streams[1].aclose()
        engine.submit(ask())

    asyncio.run(run())


def test_requests_that_belong_together_are_taken_as_a_whole_or_not_at_all() -> None:
    async def run() -> None:
        twin = TwinExecutor(automatic=False)
        engine = make_engine(twin, replace(PLAIN, max_num_seqs=2, max_queued_requests=3))
        engine.submit_all(ask(), ask())
        with pytest.raises(Overloaded, match="asks for 4 answers"):
            engine.submit_all(*(ask() for _ in range(4)))
        assert engine.stats().scheduler.waiting == 0
        engine.submit_all(*(ask() for _ in range(3)))
        with pytest.raises(RequestError, match=r"asks for 6 answers.*takes 5 at once") as refused:
            engine.submit_all(*(ask() for _ in range(6)))
        assert refused.value.param == "n"

    asyncio.run(run())


def test_without_a_line_those_are_taken_who_need_not_wait() -> None:
    async def run() -> None:
        engine = make_engine(
            TwinExecutor(automatic=False), replace(PLAIN, max_num_seqs=2, max_queued_requests=0)
        )
        for _ in range(2):
            engine.submit(ask())
        with pytest.raises(Overloaded):
            engine.submit(ask())

    asyncio.run(run())


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=8), st.integers(1, 4))
@examples(0.4)
def test_requests_together_get_what_each_gets_alone(requests: list[tuple[int, int]], stages: int) -> None:
    async def together() -> list[Answer]:
        engine = make_engine(TwinExecutor((1,) * stages), replace(PLAIN, prefill_chunk=4, max_num_seqs=5))
        streams = [engine.submit(ask(prompt, max_tokens=most)) for prompt, most in requests]
        return list(await asyncio.gather(*map(collect, streams)))

    for (prompt, most), answer in zip(requests, asyncio.run(together()), strict=True):
        alone = answer_of(hash_token(256), ask(prompt, max_tokens=most), (1,))
        assert (answer.token_ids, answer.text) == (alone.token_ids, alone.text)


def test_the_engine_counts_tokens_and_keeps_the_last_steps_timings() -> None:
    async def run() -> None:
        twin = TwinExecutor((1, 1), next_token=says(b"abc"))
        engine = make_engine(twin)
        await collect(engine.submit(ask()))
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
def test_a_rank_that_owes_an_answer_past_its_deadline_is_late(deadline: float) -> None:
    async def run() -> None:
        now = 0.0
        twin = TwinExecutor((1, 1), automatic=False)
        policy = replace(PLAIN, step_deadline_s=deadline)
        engine = Engine(twin, BYTES, LIMITS, instance="demo", epoch=1, policy=policy, clock=lambda: now)
        engine.submit(ask())
        now = 21.0
        owed = engine.oldest_unanswered()
        assert owed is not None
        assert (owed.rank, owed.waited_s, owed.is_late) == (RankId(0, 0), 21.0, deadline > 0)
        engine.record_started(RankId(0, 0), owed.step)
        heeded = engine.oldest_unanswered()
        assert heeded is not None
        assert (heeded.waited_s, heeded.is_late) == (0.0, False), "it has taken the step in just now"

    asyncio.run(run())
