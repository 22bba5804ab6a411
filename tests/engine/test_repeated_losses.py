"""Requests that may have caused the loss of workers: they run alone, and are given up."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tests.engine.engines import LIMITS, PLAIN, kv_of, make_request
from tests.engine.successions import Succession, run_to, tokens_of

from mlx_ring.core.engine_stats import BLOCK
from mlx_ring.core.errors import GroupStuck, NodeLost, RepeatedLoss, WorkerLost
from mlx_ring.core.generation import GenerateRequest, RequestStream


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


def test_a_request_that_hangs_its_group_each_time_ends_and_its_backend_is_blamed() -> None:
    async def run() -> Exception | None:
        succession = Succession()
        succession.load()
        (stream,) = succession.submit(make_request(max_tokens=20))
        for _ in range(3):
            succession.proceed(0)
            hung = GroupStuck("MLX's backend ring hangs.")
            succession.lose(hung)
            assert not succession.judge(hung), "the hang counts against the backend"
            succession.load()
        return stream.error

    assert isinstance(asyncio.run(run()), RepeatedLoss)


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


def test_suspects_take_turns_until_each_has_two_more_tokens_and_then_run_together() -> None:
    """Three suspects of 200 tokens, an innocent answer, and a newcomer."""

    async def run() -> None:
        succession = Succession(policy=replace(PLAIN, max_num_seqs=8))
        succession.load()
        lengths = (3, 5, 7)
        suspects = succession.submit(*(long_request(length) for length in lengths))
        for number in range(2):
            await_in_progress(succession, len(suspects))
            succession.lose(killer(number))
            succession.judge(killer(number))
            if number == 0:
                succession.load()
        (innocent,) = succession.submit(long_request(9))
        engine = succession.load()
        (newcomer,) = succession.submit(long_request(11))
        twin = succession.twin
        assert twin is not None
        for stream in suspects:
            stream.take()
        fed: dict[RequestStream, int] = dict.fromkeys((*suspects, innocent, newcomer), 0)
        while not all(fed.values()):
            succession.proceed(0)
            for stream in fed:
                fed[stream] += len(tokens_of(stream.take()))
        assert max(fed[stream] for stream in suspects) <= 20, (
            "no suspect runs to its end before the others begin"
        )
        assert engine.stats().scheduler.running == 5
        ids = [sorted(row.sequence for row in step.rows) for step in twin.sent]
        alone = [step for step in ids if set(step) & {2, 3, 4}]
        # Each suspect is alone at first, and all five run together in the end.
        for suspect in (2, 3, 4):
            assert next(step for step in alone if suspect in step) == [suspect]
        succession.finish()
        assert engine.totals().preemptions == 0

    asyncio.run(run())


def test_a_suspect_without_room_beside_another_takes_its_room_once() -> None:
    """Let the KV of two suspects fit together at first, and one at a time after two losses."""

    async def run() -> None:
        succession = Succession(policy=replace(PLAIN, prefill_chunk=BLOCK), kv=kv_of(8))
        limits = replace(LIMITS, context_length=3 * BLOCK)
        tokens = [1 + place % 200 for place in range(2 * BLOCK - 20)]
        streams: list[RequestStream] = []
        for number in range(2):
            engine = succession.load(limits=limits)
            streams = streams or succession.submit(
                *(replace(long_request(1), prompt_tokens=(first, *tokens)) for first in (201, 202))
            )
            await_in_progress(succession, 2)
            succession.lose(killer(number))
            succession.judge(killer(number))
        succession.kv = kv_of(3)
        engine = succession.load(limits=limits)
        while not streams[1].take():
            assert engine.totals().preemptions <= 1
            assert succession.proceed(0)
        assert len(tokens_of(streams[0].take())) <= 4, "the other one waits"
        succession.finish()
        assert engine.totals().preemptions == 1
        assert [stream.take()[-1].completion_tokens for stream in streams] == [200, 200]

    asyncio.run(run())


def long_request(length: int) -> GenerateRequest:
    return make_request(length, max_tokens=200, ignore_eos=True)


def await_in_progress(succession: Succession, requests: int) -> None:
    """Let the ranks proceed until so many requests are in steps that some rank has not answered."""
    while len(succession.in_progress) < requests:
        succession.proceed(0)


def test_no_request_is_given_up_that_never_ran_alone() -> None:
    """Judge losses of three replicas only after the requests have moved on."""

    async def run() -> None:
        replicas = [Succession() for _ in range(3)]
        for each in replicas:
            each.load()
        streams = replicas[0].submit(make_request(3, max_tokens=20), make_request(5, max_tokens=20))
        await_in_progress(replicas[0], 2)
        for number in range(2):
            replicas[number].lose(killer(number))
            moved = replicas[number].held.take()
            engine = replicas[number + 1].engine
            assert engine is not None
            engine.take_over(moved)
            if number == 0:
                await_in_progress(replicas[1], 2)
        # Both were in progress at both losses, so the third engine runs one of them alone.
        engine = replicas[2].engine
        assert engine is not None
        await_in_progress(replicas[2], 1)
        assert engine.stats().scheduler.running == 1
        replicas[2].lose(killer(2))
        for number, each in enumerate(replicas):
            each.judge(killer(number))
        errors = [type(stream.error) for stream in streams]
        assert errors == [RepeatedLoss, type(None)], "the second one never ran alone"

    asyncio.run(run())


def test_a_loss_of_a_machine_that_is_judged_late_clears_the_requests_again() -> None:
    async def run() -> None:
        first, second = Succession(), Succession()
        first.load()
        engine = second.load()
        first.submit(make_request(3, max_tokens=20), make_request(5, max_tokens=20))
        for each, other in ((first, second), (second, first)):
            await_in_progress(each, 2)
            each.lose()
            moved = each.held.take()
            engine = other.engine or other.load()
            engine.take_over(moved)
        for each in (first, second):
            assert not each.judge(NodeLost("Node b was lost."))
        while engine.stats().scheduler.running < 2:
            first.proceed(0)

    asyncio.run(run())
