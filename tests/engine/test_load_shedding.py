"""One client may have the whole queue, until others want a part of it: then all have as much."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.engines import PLAIN, ask, make_engine

from mlx_ring.core.errors import Overloaded, RequestError
from mlx_ring.core.generation import GenerateRequest, RequestStream
from mlx_ring.core.traces import CLIENT
from mlx_ring.core.types import SamplingParams
from mlx_ring.engine.admission import QueuePlace, choose_to_shed
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.router import Router
from mlx_ring.engine.twin import TwinExecutor

NAMES = "abc"


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=30), st.integers(1, 5), st.data())
def test_nobody_is_left_with_less_than_who_comes_and_only_who_waits_goes(
    places: list[tuple[str, bool]], wants: int, data: st.DataObject
) -> None:
    needs = data.draw(st.integers(-2, wants))
    held = [QueuePlace(number, client, may_be_shed) for number, (client, may_be_shed) in enumerate(places)]
    gone = choose_to_shed(held, "a", wants=wants, needs=needs)
    most_else = {name: sum(each.client == name for each in held) for name in NAMES}
    if gone is None:
        own = most_else["a"] + wants
        spare = sum(
            max(0, min(most_else[name] - own, sum(e.may_be_shed for e in held if e.client == name)))
            for name in "bc"
        )
        assert spare < needs
        return
    assert len(gone) == len(set(gone)) == max(0, needs)
    left = Counter(each.client for each in held if each.sequence not in gone) + Counter(a=wants)
    assert all(held[number].may_be_shed for number in gone)
    assert all(left[held[number].client] >= left["a"] for number in gone)


def by(client: str, engine: Engine, *requests: GenerateRequest) -> list[RequestStream]:
    """Of that client."""
    token = CLIENT.set(client)
    try:
        return Router(lambda: [engine]).submit_all(*requests)
    finally:
        CLIENT.reset(token)


def failed(streams: list[RequestStream]) -> list[bool]:
    return [isinstance(stream.error, Overloaded) for stream in streams]


def test_a_client_that_has_the_whole_queue_gives_way_to_another_until_both_have_as_much() -> None:
    async def run() -> None:
        engine = make_engine(
            TwinExecutor(automatic=False), replace(PLAIN, max_num_seqs=2, max_queued_requests=4)
        )
        greedy = [stream for _ in range(6) for stream in by("greedy", engine, ask())]
        with pytest.raises(Overloaded):
            by("greedy", engine, ask())
        assert not any(failed(greedy))
        for _ in range(3):
            by("modest", engine, ask())
        assert failed(greedy) == [False, False, False, True, True, True]
        with pytest.raises(Overloaded):
            by("modest", engine, ask())
        by("third", engine, ask())
        assert engine.stats().scheduler.waiting == 4

    asyncio.run(run())


def test_for_what_the_model_cannot_take_nobody_gives_way() -> None:
    async def run() -> None:
        engine = make_engine(
            TwinExecutor(automatic=False), replace(PLAIN, max_num_seqs=1, max_queued_requests=2)
        )
        greedy = [stream for _ in range(3) for stream in by("greedy", engine, ask())]
        with pytest.raises(RequestError):
            by("modest", engine, GenerateRequest("r", (), SamplingParams()))
        with pytest.raises(Overloaded):
            by("modest", engine, *(ask() for _ in range(2)))
        assert not any(failed(greedy))

    asyncio.run(run())
