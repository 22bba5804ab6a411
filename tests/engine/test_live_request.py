"""Load shedding: a client may fill the queue alone, and shares it equally once others need a part."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.engines import PLAIN, make_engine, make_request
from tests.engine.twin import TwinExecutor

from mlx_ring.core.errors import Overloaded, RequestError
from mlx_ring.core.generation import GenerateRequest, RequestStream
from mlx_ring.core.traces import CLIENT
from mlx_ring.core.types import SamplingParams
from mlx_ring.engine.admission import choose_to_shed
from mlx_ring.engine.engine import Engine
from mlx_ring.head.router import Router

NAMES = "abc"


@dataclass(frozen=True)
class Place:
    """Place of one request."""

    number: int
    client: str
    may_be_shed: bool


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=30), st.integers(1, 5), st.data())
def test_only_waiting_requests_of_clients_with_more_are_shed(
    places: list[tuple[str, bool]], wants: int, data: st.DataObject
) -> None:
    needs = data.draw(st.integers(-2, wants))
    queue = [Place(number, client, may_be_shed) for number, (client, may_be_shed) in enumerate(places)]
    shed = choose_to_shed(queue, "a", wants=wants, needs=needs)
    counts = {name: sum(each.client == name for each in queue) for name in NAMES}
    if shed is None:
        own = counts["a"] + wants
        spare = sum(
            max(0, min(counts[name] - own, sum(e.may_be_shed for e in queue if e.client == name)))
            for name in "bc"
        )
        assert spare < needs
        return
    assert len(shed) == len(set(shed)) == max(0, needs)
    left = Counter(each.client for each in queue if each not in shed) + Counter(a=wants)
    assert all(each.may_be_shed and left[each.client] >= left["a"] for each in shed)


def submit_as(client: str, engine: Engine, *requests: GenerateRequest) -> list[RequestStream]:
    """Submit the requests as this client."""
    token = CLIENT.set(client)
    try:
        return Router(lambda: [engine]).submit_all(*requests)
    finally:
        CLIENT.reset(token)


def failed(streams: list[RequestStream]) -> list[bool]:
    return [isinstance(stream.error, Overloaded) for stream in streams]


def test_a_full_queue_is_shared_equally_between_two_clients() -> None:
    async def run() -> None:
        engine = make_engine(
            TwinExecutor(automatic=False), replace(PLAIN, max_num_seqs=2, max_queued_requests=4)
        )
        greedy = [stream for _ in range(6) for stream in submit_as("greedy", engine, make_request())]
        with pytest.raises(Overloaded):
            submit_as("greedy", engine, make_request())
        assert not any(failed(greedy))
        for _ in range(3):
            submit_as("modest", engine, make_request())
        assert failed(greedy) == [False, False, False, True, True, True]
        with pytest.raises(Overloaded):
            submit_as("modest", engine, make_request())
        submit_as("third", engine, make_request())
        assert engine.stats().scheduler.waiting == 4

    asyncio.run(run())


def test_no_request_is_shed_for_one_that_is_refused_anyway() -> None:
    async def run() -> None:
        engine = make_engine(
            TwinExecutor(automatic=False), replace(PLAIN, max_num_seqs=1, max_queued_requests=2)
        )
        greedy = [stream for _ in range(3) for stream in submit_as("greedy", engine, make_request())]
        with pytest.raises(RequestError):
            submit_as("modest", engine, GenerateRequest("r", (), SamplingParams()))
        with pytest.raises(Overloaded):
            submit_as("modest", engine, *(make_request() for _ in range(2)))
        assert not any(failed(greedy))

    asyncio.run(run())
