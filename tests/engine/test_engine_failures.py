"""Engine over the twin's ranks with aborted requests and failing ranks; no rank keeps KV of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.default_settings import make_policy
from tests.engine.engines import (
    BYTES,
    LIMITS,
    PLAIN,
    Answer,
    collect,
    make_engine,
    make_manual_engine,
    make_request,
    run_all,
    scripted,
)
from tests.engine.twin import FaultInjector, TwinExecutor
from tests.eventually import run_tasks_until
from tests.examples import examples

from mlx_ring.core.errors import (
    LinkLost,
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
from mlx_ring.engine.live_request import LiveRequest
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.protos import step_pb2

# ---- aborted requests


def test_closing_a_stream_frees_its_kv_even_while_a_step_is_in_flight() -> None:
    async def run() -> None:
        engine, twin = make_manual_engine()
        async with engine.submit(make_request()):
            twin.run(RankId(0, 0))
            sent = len(twin.sent)
            assert not any(step.operations for step in twin.sent[1:])
        run_all(twin)
        (step,) = twin.sent[sent:]
        assert [one.free.sequence for one in step.operations] == [1]
        stats = engine.stats()
        assert (stats.scheduler.sequences_held, set(stats.scheduler.kv_bytes.values())) == (0, {0})
        assert (stats.scheduler.running, stats.finished) == (0, {"abort": 1})
        assert not any(twin.held().values())

    asyncio.run(run())


def test_cancelling_a_reader_aborts_its_request() -> None:
    async def run() -> None:
        engine, twin = make_manual_engine()
        reader = asyncio.create_task(collect(engine.submit(make_request())))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        run_all(twin)
        assert not any(twin.held().values())

    asyncio.run(run())


def test_closing_a_stream_twice_or_after_its_end_changes_nothing() -> None:
    async def run() -> None:
        twin = TwinExecutor(next_token=scripted(b"a"))
        engine = make_engine(twin)
        stream = engine.submit(make_request())
        await collect(stream)
        await stream.aclose()
        await stream.aclose()
        assert [delta async for delta in stream] == []
        assert engine.stats().finished == {"stop": 1}

    asyncio.run(run())


# ---- failures


def fail_first_row(error: RingError, at: int) -> FaultInjector:
    """Return a fault of the first stage in step `at`, for the sequence of the step's first row."""

    def inject_fault(step: step_pb2.Step, stage: int) -> step_pb2.Failure | None:
        if stage == 0 and step.step == at and step.rows:
            return error_to_failure(error, [step.rows[0].sequence])
        return None

    return inject_fault


def test_a_failed_step_ends_only_its_request_with_a_typed_error() -> None:
    async def run() -> None:
        inject_fault = fail_first_row(StepFailed("The matrix is singular."), at=4)
        twin = TwinExecutor((1, 1), next_token=scripted(b"abcd"), inject_fault=inject_fault)
        engine = make_engine(twin)
        results = await asyncio.gather(
            *(collect(engine.submit(make_request())) for _ in range(3)), return_exceptions=True
        )
        failed = [result for result in results if isinstance(result, BaseException)]
        assert [type(error) for error in failed] == [StepFailed]
        assert str(failed[0]) == "The matrix is singular."
        assert [result.text for result in results if isinstance(result, Answer)] == ["abcd", "abcd"]
        await twin.idle()
        assert not any(twin.held().values())
        assert engine.stats().scheduler.steps_failed == 1
        assert (await collect(engine.submit(make_request()))).text == "abcd"

    asyncio.run(run())


def test_a_step_over_a_broken_link_ends_the_instance_at_once() -> None:
    async def run() -> None:
        loss = LinkLost("The link broke.").between("mini-1", "mini-2")
        held: list[LiveRequest] = []

        def inject_fault(step: step_pb2.Step, stage: int) -> step_pb2.Failure | None:
            return error_to_failure(loss) if (step.step, stage) == (4, 1) else None

        twin = TwinExecutor((1, 1), next_token=scripted(b"abcd"), inject_fault=inject_fault)
        engine = Engine(
            twin,
            BYTES,
            LIMITS,
            instance="demo",
            epoch=1,
            policy=make_policy(),
            hold=lambda lives, _: held.extend(lives),
        )
        streams = [engine.submit(make_request()) for _ in range(2)]
        await run_tasks_until(lambda: engine.error is not None)
        assert isinstance(engine.error, LinkLost)
        assert engine.error.ends == loss.ends
        assert engine.error.place == (1, 0)
        assert [live.stream for live in held] == streams

    asyncio.run(run())


@pytest.mark.parametrize(("failed_steps", "ends"), [((8, 10, 12), True), ((8, 45, 85, 125), False)])
def test_a_request_ends_at_the_third_failed_step_without_progress(
    failed_steps: Sequence[int], *, ends: bool
) -> None:
    answer = b"x" * 150

    def inject_fault(step: step_pb2.Step, stage: int) -> step_pb2.Failure | None:
        is_faulty = stage == 0 and step.step in failed_steps and step.rows
        return error_to_failure(StepFailed("boom")) if is_faulty else None

    async def run() -> list[object]:
        twin = TwinExecutor((1, 1), next_token=scripted(answer), inject_fault=inject_fault)
        limits = replace(LIMITS, context_length=200)
        policy = replace(PLAIN, steps_ahead=1)
        engine = Engine(twin, BYTES, limits, instance="demo", epoch=1, policy=policy)
        results = await asyncio.gather(
            collect(engine.submit(make_request(max_tokens=150))), return_exceptions=True
        )
        assert engine.stats().scheduler.steps_failed == len(failed_steps)
        return list(results)

    (result,) = asyncio.run(run())
    assert isinstance(result, StepFailed) if ends else isinstance(result, Answer)
    assert ends or getattr(result, "text", "") == answer.decode()


def test_deltas_before_an_error_are_still_read() -> None:
    async def run() -> None:
        inject_fault = fail_first_row(StepFailed("boom"), at=3)
        engine = make_engine(TwinExecutor((1,), next_token=scripted(b"abcd"), inject_fault=inject_fault))
        texts: list[str] = []

        async def read() -> None:
            async with engine.submit(make_request()) as stream:
                async for delta in stream:
                    texts.append(delta.text)  # noqa: PERF401 - what came stays when the stream raises

        with pytest.raises(StepFailed):
            await read()
        assert texts == ["a", "b"]

    asyncio.run(run())


def test_a_lost_instance_ends_every_stream_and_refuses_requests() -> None:
    async def run() -> None:
        engine, twin = make_manual_engine()
        streams = [engine.submit(make_request()) for _ in range(3)]
        readers = [asyncio.create_task(collect(stream)) for stream in streams]
        await asyncio.sleep(0)
        twin.lose(WorkerLost("Stage 1 was ended by signal 9."))
        for result in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(result, WorkerLost)
        with pytest.raises(NotReady, match="signal 9"):
            engine.submit(make_request())
        stats = engine.stats()
        assert (stats.scheduler.running, stats.scheduler.waiting, stats.finished) == (0, 0, {"error": 3})
        assert engine.oldest_unanswered() is None

    asyncio.run(run())


def test_step_answers_after_a_loss_are_dropped() -> None:
    async def run() -> None:
        engine, twin = make_manual_engine((1,))
        stream = engine.submit(make_request())
        engine.fail(WorkerLost("lost"))
        sent = len(twin.sent)
        run_all(twin)
        assert len(twin.sent) == sent
        with pytest.raises(WorkerLost):
            await anext(stream)

    asyncio.run(run())


def test_a_protocol_violation_by_a_rank_ends_the_instance() -> None:
    async def run() -> None:
        engine, _ = make_manual_engine((1,))
        stream = engine.submit(make_request())
        engine.answered(step_pb2.StepDone(instance="demo", epoch=1, step=7))
        with pytest.raises(ProtocolError, match="step 7"):
            await anext(stream)

    asyncio.run(run())


def test_a_tokenizer_error_ends_only_its_request() -> None:
    def decode(tokens: Sequence[int]) -> str:
        if ord("!") in tokens:
            raise OverflowError("no such token")
        return bytes(tokens).decode()

    async def run() -> None:
        def next_token(history: Sequence[int]) -> int:
            return scripted(b"a!" if history[0] == 65 else b"ab")(history)

        twin = TwinExecutor(next_token=next_token)
        engine = Engine(
            twin, replace(BYTES, decode=decode), LIMITS, instance="demo", epoch=1, policy=make_policy()
        )
        bad, good = make_request(), GenerateRequest("g", (70, 71, 72), SamplingParams())
        failed, answer = await asyncio.gather(
            collect(engine.submit(bad)), collect(engine.submit(good)), return_exceptions=True
        )
        assert isinstance(failed, ServingError)
        assert isinstance(answer, Answer)
        assert answer.text == "ab"
        await twin.idle()
        assert not any(twin.held().values())

    asyncio.run(run())


def test_closing_the_engine_ends_every_stream_and_frees_all_kv() -> None:
    async def run() -> None:
        engine, twin = make_manual_engine()
        streams = [engine.submit(make_request()) for _ in range(2)]
        await engine.close()
        for stream in streams:
            with pytest.raises(NotReady):
                await anext(stream)
        run_all(twin)
        assert not any(twin.held().values())
        with pytest.raises(NotReady):
            engine.submit(make_request())

    asyncio.run(run())


@given(st.integers(0, 2**32), st.sampled_from([(1,), (1, 1), (2, 1), (1, 1, 1)]))
@examples(0.6)
def test_every_stream_ends_and_frees_its_kv_despite_aborts_and_failures(
    seed: int, tp_sizes: tuple[int, ...]
) -> None:
    random = Random(seed)

    def inject_fault(step: step_pb2.Step, stage: int) -> step_pb2.Failure | None:
        del step, stage
        return error_to_failure(StepFailed("boom")) if random.random() < 0.02 else None

    async def client(engine: Engine) -> FinishReason:
        request = make_request(random.randrange(1, 20), max_tokens=random.randrange(12), stop=("a", "bc"))
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
        twin = TwinExecutor(tp_sizes, inject_fault=inject_fault)
        engine = make_engine(twin, replace(PLAIN, prefill_chunk=4, max_num_seqs=4))
        ends = await asyncio.gather(*(client(engine) for _ in range(8)))
        await twin.idle()
        assert not any(twin.held().values())
        stats = engine.stats()
        assert sum(stats.finished.values()) == len(ends)
        for reason, seen in Counter(ends).items():
            # A client that aborts may not have read the end of its answer.
            assert reason == "abort" or stats.finished.get(reason, 0) >= seen
        assert (stats.scheduler.running, stats.scheduler.sequences_held) == (0, 0)

    asyncio.run(run())
