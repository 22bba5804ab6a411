"""Requests under grammars: each waits for its own grammar, and other requests do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
from tests.default_settings import make_policy
from tests.engine.engines import PLAIN, collect, make_engine, make_request, scripted
from tests.engine.twin import TwinExecutor

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.errors import ModelCorrupt, Overloaded, RequestError
from mlx_ring.core.generation import RequestStream
from mlx_ring.core.types import Grammar, RankId
from mlx_ring.engine import executor as executor_module
from mlx_ring.engine.engine import Engine
from mlx_ring.rpc.failures import error_to_failure

DIGITS = Grammar("regex", "[0-9]*", param="response_format")
FIRST, SECOND = RankId(1, 0), RankId(1, 1)
"""Sampling ranks of two stages."""


def waiting_engine(policy: Policy = PLAIN) -> tuple[Engine, TwinExecutor]:
    """Return an engine whose ranks have a grammar only when the test reports it."""
    twin = TwinExecutor((1, 2), next_token=scripted(b"abc"), makes_grammars=False)
    return make_engine(twin, policy), twin


def opened(twin: TwinExecutor) -> list[tuple[int, int]]:
    """Return the sequences that were opened, with their grammars."""
    operations = [operation for step in twin.sent for operation in step.operations]
    return [(each.open.sequence, each.open.grammar) for each in operations if each.HasField("open")]


async def text_of(stream: RequestStream) -> str:
    return (await collect(stream)).text


def test_a_request_waits_until_every_sampling_rank_has_its_grammar() -> None:
    async def run() -> None:
        engine, twin = waiting_engine()
        waits = engine.submit(make_request(grammar=DIGITS))
        assert await text_of(engine.submit(make_request())) == "abc"
        assert opened(twin) == [(2, 0)]
        twin.report_prepared(FIRST, 1)
        await twin.idle()
        assert opened(twin) == [(2, 0)]
        twin.report_prepared(SECOND, 1)
        assert opened(twin) == [(2, 0), (1, 1)]
        assert await text_of(waits) == "abc"
        assert twin.grammars == {}

    asyncio.run(run())


def test_a_grammar_that_a_rank_cannot_compile_is_refused_by_its_field() -> None:
    async def run() -> None:
        engine, twin = waiting_engine()
        streams = engine.submit_all(make_request(grammar=DIGITS), make_request(grammar=DIGITS))
        twin.report_prepared(FIRST, 1)
        twin.report_prepared(SECOND, 1, error_to_failure(RequestError("It is too large.")))
        for stream in streams:
            with pytest.raises(RequestError, match="too large") as caught:
                await collect(stream)
            assert caught.value.param == "response_format"
        assert opened(twin) == []
        assert twin.grammars == {}
        engine.submit(make_request(grammar=DIGITS))
        assert list(twin.grammars) == [2]

    asyncio.run(run())


def test_a_server_error_while_compiling_a_grammar_keeps_its_type() -> None:
    async def run() -> None:
        engine, twin = waiting_engine()
        stream = engine.submit(make_request(grammar=DIGITS))
        twin.report_prepared(FIRST, 1, error_to_failure(ModelCorrupt("There is no tokenizer.")))
        with pytest.raises(ModelCorrupt, match="no tokenizer"):
            await collect(stream)

    asyncio.run(run())


def test_answers_share_a_grammar_until_the_last_one_ends() -> None:
    async def run() -> None:
        engine, twin = waiting_engine()
        streams = engine.submit_all(*[make_request(grammar=DIGITS)] * 3)
        assert list(twin.grammars) == [1]
        await streams[0].aclose()
        assert list(twin.grammars) == [1]
        for rank in (FIRST, SECOND):
            twin.report_prepared(rank, 1)
        late = engine.submit(make_request(grammar=DIGITS))
        assert [await text_of(stream) for stream in (*streams[1:], late)] == ["abc"] * 3
        assert {grammar for _, grammar in opened(twin)} == {1}
        assert twin.grammars == {}

    asyncio.run(run())


def test_an_aborted_request_drops_its_grammar() -> None:
    async def run() -> None:
        engine, twin = waiting_engine()
        stream = engine.submit(make_request(grammar=DIGITS))
        await stream.aclose()
        assert twin.grammars == {}
        twin.report_prepared(FIRST, 1)
        twin.report_prepared(SECOND, 1)
        assert twin.sent == []

    asyncio.run(run())


def test_a_grammar_that_failed_during_an_answer_is_compiled_again() -> None:
    async def run() -> None:
        twin = TwinExecutor(
            (1,),
            next_token=scripted(b"abc"),
            inject_fault=lambda step, _stage: (
                error_to_failure(RequestError("No more."), [1])
                if any(row.previous for row in step.rows)
                else None
            ),
        )
        engine = make_engine(twin)
        failing, other = engine.submit_all(
            make_request(grammar=DIGITS), make_request(grammar=DIGITS, max_tokens=1)
        )
        with pytest.raises(RequestError, match="No more"):
            await collect(failing)
        await collect(other)
        fresh = engine.submit(make_request(grammar=DIGITS, max_tokens=1))
        assert list(twin.grammars) == [2]
        await collect(fresh)

    asyncio.run(run())


def test_a_late_grammar_is_dropped_and_its_request_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "GRAMMAR_WITHIN_S", 0.0)

    async def run() -> None:
        engine, twin = waiting_engine()
        with pytest.raises(Overloaded, match="was not ready"):
            await collect(engine.submit(make_request(grammar=DIGITS)))
        assert twin.grammars == {}

    asyncio.run(run())


def test_the_time_of_a_grammar_begins_when_those_before_it_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Take over three answers; the ranks compile the first schema at the end of its time, and the second one never."""
    timers: list[tuple[float, Callable[[], None]]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def call_later(delay_s: float, callback: Callable[..., None], *args: object) -> None:
            timers.append((delay_s, partial(callback, *args)))

        monkeypatch.setattr(loop, "call_later", call_later)
        engine, twin = waiting_engine()
        grammars = [Grammar("regex", text) for text in "abc"]
        first, second, third = engine.submit_all(*(make_request(grammar=each) for each in grammars))
        assert len(twin.grammars) == 3
        assert [delay_s for delay_s, _ in timers] == [30.0], "only the first one is being compiled"
        for rank in (FIRST, SECOND):
            assert len(timers) == 1
            twin.report_prepared(rank, 1)
        assert len(timers) == 2
        timers[0][1]()
        assert (first.error, second.error) == (None, None), "the first one was ready in time"
        timers[1][1]()
        assert isinstance(second.error, Overloaded)
        assert len(timers) == 3
        twin.report_prepared(SECOND, 3)
        twin.report_prepared(FIRST, 3)
        timers[2][1]()
        await twin.idle()
        assert (first.error, third.error) == (None, None)
        assert len(timers) == 3

    asyncio.run(run())


def test_a_request_that_waits_for_its_grammar_takes_no_queue_place() -> None:
    async def run() -> None:
        engine, _ = waiting_engine(
            make_policy(prefix_cache=False, num_speculative_tokens=0, max_num_seqs=2, max_queued_requests=0)
        )
        engine.submit(make_request(grammar=DIGITS))
        assert await text_of(engine.submit(make_request())) == "abc"
        engine.submit(make_request(grammar=DIGITS))
        with pytest.raises(Overloaded):
            engine.submit(make_request())

    asyncio.run(run())
