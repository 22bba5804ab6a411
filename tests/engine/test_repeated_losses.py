"""Requests that may have caused the loss of workers: they run alone, and are given up."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tests.engine.engines import PLAIN, make_request
from tests.engine.successions import Succession, run_to

from mlx_ring.core.errors import NodeLost, RepeatedLoss, WorkerLost
from mlx_ring.core.generation import RequestStream


def killer(token: int) -> WorkerLost:
    """Return the loss of a worker that died of itself."""
    return WorkerLost(f"Worker 0 of stage 1 died of token {token}.").of_worker()


def test_a_request_that_kills_its_worker_each_time_ends_within_three_losses_and_the_others_finish() -> None:
    poison = make_request(5, max_tokens=20)
    prompt = list(poison.prompt_tokens)

    async def run() -> tuple[list[RequestStream], RequestStream, int]:
        succession = Succession(policy=replace(PLAIN, max_num_seqs=16))
        succession.load()
        lengths = (3, 4, 6, 7, 8, 9, 10, 11)
        others = succession.submit(*(make_request(length, max_tokens=12) for length in lengths))
        (bad,) = succession.submit(poison)
        losses = 0
        while succession.held or succession.engine is None or succession.engine.stats().scheduler.running:
            if succession.engine is None:
                succession.load()
            twin = succession.twin
            assert twin is not None
            opened = {
                operation.open.sequence
                for step in twin.sent
                for operation in step.operations
                if operation.HasField("open") and operation.open.prompt_length == len(prompt)
            }
            if any(row.sequence in opened for step in twin.sent for row in step.rows):
                losses += 1
                succession.lose(killer(losses))
                succession.judge(killer(losses))
            else:
                succession.proceed(0)
        return others, bad, losses

    others, bad, losses = asyncio.run(run())
    assert losses == 3
    assert isinstance(bad.error, RepeatedLoss)
    for stream in others:
        assert stream.take()[-1].completion_tokens == 12


def test_an_innocent_request_runs_with_others_again_after_two_tokens() -> None:
    async def run() -> None:
        succession = Succession()
        succession.load()
        (first,) = succession.submit(make_request(max_tokens=20))
        for number in range(2):
            run_to(succession, first, 1 - number)
            succession.lose(killer(number))
            succession.judge(killer(number))
            succession.load()
        engine = succession.engine
        assert engine is not None
        (second,) = succession.submit(make_request(5, max_tokens=20))
        assert engine.stats().scheduler.running == 1
        run_to(succession, first, 3)
        assert engine.stats().scheduler.running == 2
        succession.finish()
        assert second.take()[-1].finish_reason == "length"
        assert second.error is None

    asyncio.run(run())


def test_the_loss_of_a_machine_makes_no_request_a_suspect() -> None:
    async def run() -> None:
        succession = Succession()
        succession.load()
        (stream,) = succession.submit(make_request(max_tokens=20))
        for _ in range(5):
            succession.proceed(0)
            succession.lose(NodeLost("Node b was lost."))
            assert not succession.judge(NodeLost("Node b was lost."))
            succession.load()
        succession.finish()
        assert stream.take()[-1].finish_reason == "length"

    asyncio.run(run())
