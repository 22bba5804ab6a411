"""Requests under grammars: they wait for theirs, and nobody else does."""

from __future__ import annotations

import asyncio

import pytest
from tests.engine.engines import PLAIN, ask, collect, make_engine, says

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.errors import ModelCorrupt, Overloaded, RequestError
from mlx_ring.core.generation import RequestStream
from mlx_ring.core.types import Grammar, RankId
from mlx_ring.engine import engine as engine_module
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.twin import TwinExecutor
from mlx_ring.rpc.failures import error_to_failure

DIGITS = Grammar("regex", "[0-9]*", param="response_format")
FIRST, SECOND = RankId(1, 0), RankId(1, 1)
"""The ranks that draw, of two stages."""


def waiting_engine(policy: Policy = PLAIN) -> tuple[Engine, TwinExecutor]:
    """An engine whose ranks make a grammar when the test says so."""
    twin = TwinExecutor((1, 2), next_token=says(b"abc"), makes_grammars=False)
    return make_engine(twin, policy), twin


def opened(twin: TwinExecutor) -> list[tuple[int, int]]:
    """Sequences that were opened, with their grammars."""
    operations = [operation for step in twin.sent for operation in step.operations]
    return [(each.open.sequence, each.open.grammar) for each in operations if each.HasField("open")]


async def text_of(stream: RequestStream) -> str:
    return (await collect(stream)).text


def test_a_request_waits_for_its_grammar_on_every_rank_that_draws_and_others_pass() -> None:
    async def run() -> None:
        engine, twin = waiting_engine()
        waits = engine.submit(ask(grammar=DIGITS))
        assert await text_of(engine.submit(ask())) == "abc"
        assert opened(twin) == [(2, 0)]
        twin.tell_prepared(FIRST, 1)
        await twin.idle()
        assert opened(twin) == [(2, 0)]
        twin.tell_prepared(SECOND, 1)
        assert opened(twin) == [(2, 0), (1, 1)]
        assert await text_of(waits) == "abc"
        assert twin.grammars == {}

    asyncio.run(run())


def test_a_rank_that_cannot_make_a_grammar_refuses_it_for_all_and_names_the_field() -> None:
    async def run() -> None:
        engine, twin = waiting_engine()
        streams = engine.submit_all(ask(grammar=DIGITS), ask(grammar=DIGITS))
        twin.tell_prepared(FIRST, 1)
        twin.tell_prepared(SECOND, 1, error_to_failure(RequestError("It is too large.")))
        for stream in streams:
            with pytest.raises(RequestError, match="too large") as caught:
                await collect(stream)
            assert caught.value.param == "response_format"
        assert opened(twin) == []
        assert twin.grammars == {}
        engine.submit(ask(grammar=DIGITS))
        assert list(twin.grammars) == [2]

    asyncio.run(run())


def test_trouble_that_is_no_request_s_fault_names_no_field() -> None:
    async def run() -> None:
        engine, twin = waiting_engine()
        stream = engine.submit(ask(grammar=DIGITS))
        twin.tell_prepared(FIRST, 1, error_to_failure(ModelCorrupt("There is no tokenizer.")))
        with pytest.raises(ModelCorrupt, match="no tokenizer"):
            await collect(stream)

    asyncio.run(run())


def test_answers_share_a_grammar_until_the_last_of_them_has_ended() -> None:
    async def run() -> None:
        engine, twin = waiting_engine()
        streams = engine.submit_all(*[ask(grammar=DIGITS)] * 3)
        assert list(twin.grammars) == [1]
        await streams[0].aclose()
        assert list(twin.grammars) == [1]
        for rank in (FIRST, SECOND):
            twin.tell_prepared(rank, 1)
        late = engine.submit(ask(grammar=DIGITS))
        assert [await text_of(stream) for stream in (*streams[1:], late)] == ["abc"] * 3
        assert {grammar for _, grammar in opened(twin)} == {1}
        assert twin.grammars == {}

    asyncio.run(run())


def test_a_client_that_leaves_takes_its_grammar_along() -> None:
    async def run() -> None:
        engine, twin = waiting_engine()
        stream = engine.submit(ask(grammar=DIGITS))
        await stream.aclose()
        assert twin.grammars == {}
        twin.tell_prepared(FIRST, 1)
        twin.tell_prepared(SECOND, 1)
        assert twin.sent == []

    asyncio.run(run())


def test_who_comes_behind_a_grammar_that_failed_in_mid_answer_gets_a_fresh_one() -> None:
    async def run() -> None:
        twin = TwinExecutor(
            (1,),
            next_token=says(b"abc"),
            trouble=lambda step, _stage: (
                error_to_failure(RequestError("No more."), [1])
                if any(row.previous for row in step.rows)
                else None
            ),
        )
        engine = make_engine(twin)
        failing, other = engine.submit_all(ask(grammar=DIGITS), ask(grammar=DIGITS, max_tokens=1))
        with pytest.raises(RequestError, match="No more"):
            await collect(failing)
        await collect(other)
        fresh = engine.submit(ask(grammar=DIGITS, max_tokens=1))
        assert list(twin.grammars) == [2]
        await collect(fresh)

    asyncio.run(run())


def test_a_grammar_that_is_not_there_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_GRAMMAR_WITHIN_S", 0.0)

    async def run() -> None:
        engine, twin = waiting_engine()
        with pytest.raises(Overloaded, match="was not ready"):
            await collect(engine.submit(ask(grammar=DIGITS)))
        assert twin.grammars == {}

    asyncio.run(run())


def test_a_request_that_awaits_its_grammar_takes_no_place_in_the_line_while_there_is_room() -> None:
    async def run() -> None:
        engine, _ = waiting_engine(
            Policy(prefix_cache=False, num_speculative_tokens=0, max_num_seqs=2, max_queued_requests=0)
        )
        engine.submit(ask(grammar=DIGITS))
        assert await text_of(engine.submit(ask())) == "abc"
        engine.submit(ask(grammar=DIGITS))
        with pytest.raises(Overloaded):
            engine.submit(ask())

    asyncio.run(run())
