"""The engine over the twin's ranks: what clients see, and what workers hold."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_ring.core.errors import (
    NotReady,
    Overloaded,
    ProtocolError,
    RequestError,
    RingError,
    ServingError,
    StepFailed,
    WorkerLost,
)
from mlx_ring.core.types import FinishReason, SamplingParams, TokenLogprob
from mlx_ring.engine.detokenizer import Vocabulary
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.executor import RankId
from mlx_ring.engine.policy import Policy
from mlx_ring.engine.sequence import GenerateRequest, Limits
from mlx_ring.engine.streams import Delta, RequestStream
from mlx_ring.engine.twin import NextToken, Trouble, TwinExecutor, hash_token
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.protos import step_pb2

EOS = 0
BYTES = Vocabulary(lambda tokens: bytes(tokens).decode("utf-8", "replace"), frozenset(), 256)
LIMITS = Limits(context_length=64, vocab_size=256, eos=frozenset({EOS}))


def says(answer: bytes, prompt: int = 3) -> NextToken:
    """A model that gives this answer to a prompt of that many tokens, and then ends."""

    def next_token(history: Sequence[int]) -> int:
        place = len(history) - prompt
        return answer[place] if place < len(answer) else EOS

    return next_token


def ask(prompt: int = 3, *, prompt_logprobs: int | None = None, **sampling: object) -> GenerateRequest:
    tokens = tuple(range(65, 65 + prompt))
    return GenerateRequest("r", tokens, replace(SamplingParams(), **sampling), prompt_logprobs)


PLAIN = Policy(prefix_cache=False, draft_tokens=0)


def make_engine(twin: TwinExecutor, policy: Policy = PLAIN) -> Engine:
    return Engine(twin, BYTES, LIMITS, instance="demo", epoch=1, policy=policy)


@dataclass(frozen=True)
class Answer:
    """All that a stream gave."""

    deltas: tuple[Delta, ...]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def last(self) -> Delta:
        return self.deltas[-1]


async def collect(stream: RequestStream) -> Answer:
    async with stream:
        return Answer(tuple([delta async for delta in stream]))


def answer_of(twin_answer: NextToken, request: GenerateRequest, tp_sizes: tuple[int, ...] = (1, 1)) -> Answer:
    """What one request gets from an engine of its own, which holds nothing afterwards."""

    async def run() -> Answer:
        twin = TwinExecutor(tp_sizes, next_token=twin_answer)
        engine = make_engine(twin)
        answer = await collect(engine.submit(request))
        await twin.idle()
        assert not any(twin.held().values())
        return answer

    return asyncio.run(run())


def manual(tp_sizes: tuple[int, ...] = (1, 1)) -> tuple[Engine, TwinExecutor]:
    """An engine whose ranks go on when the test says so."""
    twin = TwinExecutor(tp_sizes, next_token=hash_token(256), automatic=False)
    return make_engine(twin), twin


def go_on(twin: TwinExecutor) -> None:
    """Every rank executes what it has, and all answers arrive."""
    while twin.runnable():
        for rank in twin.runnable():
            twin.run(rank)
        for rank in twin.answering():
            twin.deliver(rank)


# ---- what a client sees


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
        engine = make_engine(twin, replace(PLAIN, max_num_seqs=1, max_waiting=2))
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
        engine = make_engine(twin, replace(PLAIN, max_num_seqs=2, max_waiting=3))
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
        engine = make_engine(TwinExecutor(automatic=False), replace(PLAIN, max_num_seqs=2, max_waiting=0))
        for _ in range(2):
            engine.submit(ask())
        with pytest.raises(Overloaded):
            engine.submit(ask())

    asyncio.run(run())


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=8), st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_requests_together_get_what_each_gets_alone(requests: list[tuple[int, int]], stages: int) -> None:
    async def together() -> list[Answer]:
        engine = make_engine(TwinExecutor((1,) * stages), replace(PLAIN, prefill_chunk=4, max_num_seqs=5))
        streams = [engine.submit(ask(prompt, max_tokens=most)) for prompt, most in requests]
        return list(await asyncio.gather(*map(collect, streams)))

    for (prompt, most), answer in zip(requests, asyncio.run(together()), strict=True):
        alone = answer_of(hash_token(256), ask(prompt, max_tokens=most), (1,))
        assert (answer.token_ids, answer.text) == (alone.token_ids, alone.text)


# ---- clients that leave


def test_leaving_frees_the_kv_at_once_also_while_a_step_is_in_flight() -> None:
    async def run() -> None:
        engine, twin = manual()
        async with engine.submit(ask()):
            twin.run(RankId(0, 0))
            sent = len(twin.sent)
            assert not any(step.operations for step in twin.sent[1:])
        go_on(twin)
        (step,) = twin.sent[sent:]
        assert [one.free.sequence for one in step.operations] == [1]
        stats = engine.stats()
        assert (stats.scheduler.sequences_held, set(stats.scheduler.kv_bytes.values())) == (0, {0})
        assert (stats.scheduler.running, stats.finished) == (0, {"abort": 1})
        assert not any(twin.held().values())

    asyncio.run(run())


def test_a_reader_that_is_cancelled_leaves() -> None:
    async def run() -> None:
        engine, twin = manual()
        reader = asyncio.create_task(collect(engine.submit(ask())))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        go_on(twin)
        assert not any(twin.held().values())

    asyncio.run(run())


def test_closing_a_stream_twice_or_after_its_end_changes_nothing() -> None:
    async def run() -> None:
        twin = TwinExecutor(next_token=says(b"a"))
        engine = make_engine(twin)
        stream = engine.submit(ask())
        await collect(stream)
        await stream.aclose()
        await stream.aclose()
        assert [delta async for delta in stream] == []
        assert engine.stats().finished == {"stop": 1}

    asyncio.run(run())


# ---- trouble


def fails_first_row(error: RingError, at: int) -> Trouble:
    """The first stage fails step `at` for the sequence of its first row."""

    def trouble(step: step_pb2.Step, stage: int) -> step_pb2.Failure | None:
        if stage == 0 and step.step == at and step.rows:
            return error_to_failure(error, [step.rows[0].sequence])
        return None

    return trouble


def test_a_failed_step_ends_its_request_with_a_typed_error_and_others_go_on() -> None:
    async def run() -> None:
        trouble = fails_first_row(StepFailed("The matrix is singular."), at=4)
        twin = TwinExecutor((1, 1), next_token=says(b"abcd"), trouble=trouble)
        engine = make_engine(twin)
        results = await asyncio.gather(
            *(collect(engine.submit(ask())) for _ in range(3)), return_exceptions=True
        )
        failed = [result for result in results if isinstance(result, BaseException)]
        assert [type(error) for error in failed] == [StepFailed]
        assert str(failed[0]) == "The matrix is singular."
        assert [result.text for result in results if isinstance(result, Answer)] == ["abcd", "abcd"]
        await twin.idle()
        assert not any(twin.held().values())
        assert engine.stats().scheduler.steps_failed == 1
        assert (await collect(engine.submit(ask()))).text == "abcd"

    asyncio.run(run())


def test_what_came_before_an_error_is_still_read() -> None:
    async def run() -> None:
        trouble = fails_first_row(StepFailed("boom"), at=3)
        engine = make_engine(TwinExecutor((1,), next_token=says(b"abcd"), trouble=trouble))
        texts: list[str] = []

        async def read() -> None:
            async with engine.submit(ask()) as stream:
                async for delta in stream:
                    texts.append(delta.text)  # noqa: PERF401 - what came stays when the stream raises

        with pytest.raises(StepFailed):
            await read()
        assert texts == ["a", "b"]

    asyncio.run(run())


def test_a_lost_instance_ends_every_stream_and_takes_no_more() -> None:
    async def run() -> None:
        engine, twin = manual()
        streams = [engine.submit(ask()) for _ in range(3)]
        readers = [asyncio.create_task(collect(stream)) for stream in streams]
        await asyncio.sleep(0)
        twin.lose(WorkerLost("Stage 1 was ended by signal 9."))
        for result in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(result, WorkerLost)
        with pytest.raises(NotReady, match="signal 9"):
            engine.submit(ask())
        stats = engine.stats()
        assert (stats.scheduler.running, stats.scheduler.waiting, stats.finished) == (0, 0, {"error": 3})
        assert engine.oldest_unanswered() is None

    asyncio.run(run())


def test_answers_after_the_loss_are_dropped() -> None:
    async def run() -> None:
        engine, twin = manual((1,))
        stream = engine.submit(ask())
        engine.fail(WorkerLost("gone"))
        sent = len(twin.sent)
        go_on(twin)
        assert len(twin.sent) == sent
        with pytest.raises(WorkerLost):
            await anext(stream)

    asyncio.run(run())


def test_a_rank_that_breaks_the_contract_ends_the_instance() -> None:
    async def run() -> None:
        engine, _ = manual((1,))
        stream = engine.submit(ask())
        engine.answered(step_pb2.StepDone(instance="demo", epoch=1, step=7))
        with pytest.raises(ProtocolError, match="step 7"):
            await anext(stream)

    asyncio.run(run())


def test_a_tokenizer_that_raises_ends_one_request_alone() -> None:
    def decode(tokens: Sequence[int]) -> str:
        if ord("!") in tokens:
            raise OverflowError("no such token")
        return bytes(tokens).decode()

    async def run() -> None:
        def next_token(history: Sequence[int]) -> int:
            return says(b"a!" if history[0] == 65 else b"ab")(history)

        twin = TwinExecutor(next_token=next_token)
        engine = Engine(twin, replace(BYTES, decode=decode), LIMITS, instance="demo", epoch=1)
        bad, good = ask(), GenerateRequest("g", (70, 71, 72), SamplingParams())
        failed, answer = await asyncio.gather(
            collect(engine.submit(bad)), collect(engine.submit(good)), return_exceptions=True
        )
        assert isinstance(failed, ServingError)
        assert isinstance(answer, Answer)
        assert answer.text == "ab"
        await twin.idle()
        assert not any(twin.held().values())

    asyncio.run(run())


def test_closing_ends_every_stream_and_frees_everything() -> None:
    async def run() -> None:
        engine, twin = manual()
        streams = [engine.submit(ask()) for _ in range(2)]
        await engine.close()
        for stream in streams:
            with pytest.raises(NotReady):
                await anext(stream)
        go_on(twin)
        assert not any(twin.held().values())
        with pytest.raises(NotReady):
            engine.submit(ask())

    asyncio.run(run())


@given(st.integers(0, 2**32), st.sampled_from([(1,), (1, 1), (2, 1), (1, 1, 1)]))
@settings(deadline=None, max_examples=60)
def test_whatever_clients_and_workers_do_every_stream_ends_and_nothing_is_held(
    seed: int, tp_sizes: tuple[int, ...]
) -> None:
    random = Random(seed)

    def trouble(step: step_pb2.Step, stage: int) -> step_pb2.Failure | None:
        del step, stage
        return error_to_failure(StepFailed("boom")) if random.random() < 0.02 else None

    async def client(engine: Engine) -> FinishReason:
        request = ask(random.randrange(1, 20), max_tokens=random.randrange(12), stop=("a", "bc"))
        patience = random.randrange(14)
        try:
            async with engine.submit(request) as stream:
                async for delta in stream:
                    patience -= 1
                    if delta.finish_reason is not None:
                        return delta.finish_reason
                    if patience < 0:
                        return "abort"
        except (StepFailed, ProtocolError):
            return "error"
        raise AssertionError("the stream ended without a reason")

    async def run() -> None:
        twin = TwinExecutor(tp_sizes, trouble=trouble)
        engine = make_engine(twin, replace(PLAIN, prefill_chunk=4, max_num_seqs=4))
        ends = await asyncio.gather(*(client(engine) for _ in range(8)))
        await twin.idle()
        assert not any(twin.held().values())
        stats = engine.stats()
        assert sum(stats.finished.values()) == len(ends)
        for reason, seen in Counter(ends).items():
            # Who leaves may leave an answer that had ended unread.
            assert reason == "abort" or stats.finished.get(reason, 0) >= seen
        assert (stats.scheduler.running, stats.scheduler.sequences_held) == (0, 0)

    asyncio.run(run())


# ---- how it stands


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
        engine.heed(RankId(0, 0), owed.step)
        heeded = engine.oldest_unanswered()
        assert heeded is not None
        assert (heeded.waited_s, heeded.is_late) == (0.0, False), "it has taken the step in just now"

    asyncio.run(run())
