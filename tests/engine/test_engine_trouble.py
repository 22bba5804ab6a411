"""The engine over the twin's ranks: clients that leave, ranks that fail, and what workers hold then."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.engines import (
    BYTES,
    LIMITS,
    PLAIN,
    Answer,
    ask,
    collect,
    go_on,
    make_engine,
    manual,
    says,
)
from tests.examples import examples

from mlx_ring.core.errors import (
    NotReady,
    ProtocolError,
    RingError,
    ServingError,
    StepFailed,
    WorkerLost,
)
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import FinishReason, RankId, SamplingParams
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.twin import Trouble, TwinExecutor
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.protos import step_pb2

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
@examples(0.6)
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
