"""Requests that may have caused the loss of workers: which ones they are, how they run alone, and how they are given up."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

from tests.engine.engines import LIMITS, PLAIN, kv_of, make_request
from tests.engine.successions import LOSS, Succession, lose_and_load, run_to, tokens_of

from mlx_ring.core.engine_stats import BLOCK
from mlx_ring.core.errors import GroupStuck, NodeLost, RepeatedLoss, WorkerLost
from mlx_ring.core.generation import GenerateRequest, RequestStream
from mlx_ring.core.types import Grammar, RankId


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
        while succession.has_requests:
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


def test_the_loss_of_a_machine_does_not_move_the_length_that_clears_a_request() -> None:
    """Lose a worker, then a machine after one more token, then a worker after another one."""

    async def run() -> int:
        succession = Succession()
        succession.load()
        (stream,) = succession.submit(make_request(max_tokens=20))
        for loss in (killer(0), NodeLost("Node b was lost."), killer(1)):
            run_to(succession, stream, 1)
            succession.lose(loss)
            succession.judge(loss)
            succession.load()
        (live,) = lose_and_load(succession)
        return live.losses - 1  # The last loss is not judged.

    assert asyncio.run(run()) == 1


def test_a_loss_that_is_judged_late_clears_a_request_of_no_later_one() -> None:
    """Lose a machine, and the replica that took over after progress; judge the machine's loss at the end."""

    async def run() -> None:
        first, second = Succession(), Succession()
        first.load()
        engine = second.load()
        (stream,) = first.submit(make_request(max_tokens=20))
        await_in_progress(first, 1)
        first.lose()
        engine.take_over(first.held.take())
        run_to(second, stream, 4)
        second.lose(killer(0))
        assert not second.judge(killer(0))
        assert not first.judge(NodeLost("Node b was lost."))
        assert [live.losses for live in second.held.take()] == [1]

    asyncio.run(run())


# ---- schemas

POISON, DIGITS = Grammar("regex", "poison"), Grammar("regex", "[0-9]*")
FIRST, LAST = RankId(0, 0), RankId(1, 0)
"""Ranks of two stages."""


def test_a_schema_that_kills_the_worker_that_compiles_it_ends_within_three_losses_and_the_others_finish() -> (
    None
):
    async def run() -> tuple[list[RequestStream], RequestStream, int]:
        succession = Succession(policy=replace(PLAIN, max_num_seqs=16))
        grammars = (None, DIGITS) * 4
        others = succession.submit(
            *(make_request(3 + number, max_tokens=12, grammar=each) for number, each in enumerate(grammars))
        )
        (bad,) = succession.submit(make_request(20, max_tokens=12, grammar=POISON))
        losses = 0
        while succession.has_requests and losses < 9:
            if succession.engine is None:
                succession.load()
            if succession.compiling(LAST)[:1] == [POISON.text]:
                losses += 1
                succession.lose(killer(losses))
                succession.judge(killer(losses), {LAST: math.inf})
            else:
                succession.proceed(0)
        return others, bad, losses

    others, bad, losses = asyncio.run(run())
    assert losses == 3
    assert isinstance(bad.error, RepeatedLoss)
    for stream in others:
        assert stream.take()[-1].completion_tokens == 12


def test_the_schema_of_a_suspect_is_compiled_while_nothing_else_is_in_progress() -> None:
    async def run() -> None:
        succession = Succession(policy=replace(PLAIN, max_num_seqs=8))
        (suspect,) = succession.submit(make_request(20, max_tokens=20, grammar=POISON))
        for number in range(2):
            succession.load()
            assert succession.compiling(LAST) == [POISON.text]
            succession.lose(killer(number))
            succession.judge(killer(number))
        (before,) = succession.submit(make_request(3, max_tokens=40, ignore_eos=True, grammar=DIGITS))
        engine = succession.load()
        (newcomer,) = succession.submit(make_request(5, max_tokens=20, grammar=Grammar("regex", "later")))
        assert succession.compiling(LAST) == [DIGITS.text], "those in line before the suspect come first"
        while succession.compiling(LAST) != [POISON.text]:
            succession.proceed(0)
        assert len(tokens_of(before.take())) > 0
        assert not succession.in_progress
        scheduler = engine.stats().scheduler
        assert (scheduler.running, scheduler.waiting) == (1, 2)
        succession.proceed(0)
        assert succession.in_progress == {2}, "now it runs, still alone"
        run_to(succession, suspect, 2)
        assert succession.compiling(LAST) == ["later"]
        succession.finish()
        assert all(stream.take()[-1].finish_reason for stream in (suspect, before, newcomer))

    asyncio.run(run())


def test_a_client_that_leaves_while_its_schema_is_compiled_alone_lets_the_others_continue() -> None:
    async def run() -> None:
        succession = Succession()
        (suspect,) = succession.submit(make_request(20, max_tokens=20, grammar=POISON))
        for number in range(2):
            succession.load()
            succession.lose(killer(number))
            succession.judge(killer(number))
        succession.load()
        (other,) = succession.submit(make_request(5, max_tokens=20, grammar=DIGITS))
        assert succession.compiling(LAST) == [POISON.text]
        await suspect.aclose()
        assert succession.compiling(LAST) == [DIGITS.text]
        succession.finish()
        assert other.take()[-1].finish_reason == "length"

    asyncio.run(run())


# ---- what a lost rank may have begun


def test_a_request_whose_steps_the_lost_rank_has_answered_is_no_suspect() -> None:
    """Lose stage 0 at a chunk of one prompt, while the next stage has the other prompt."""

    async def run() -> None:
        succession = Succession(policy=replace(PLAIN, prefill_chunk=8))
        innocent, guilty = succession.submit(
            make_request(8, max_tokens=4), make_request(30, max_tokens=4, ignore_eos=True)
        )
        for number in range(2):
            succession.load()
            assert succession.twin is not None
            succession.twin.run(FIRST)
            succession.twin.deliver(FIRST)
            assert succession.in_progress == {1, 2}
            succession.lose(killer(number))
            assert succession.judge(killer(number), {FIRST: math.inf}) == (number > 0)
        lives = succession.held.take()
        assert {live.sequence.prompt_length: live.losses for live in lives} == {8: 0, 30: 2}
        succession.held.hold(lives, killer(2))
        succession.load()
        await_in_progress_of(succession, 2)
        succession.lose(killer(2))
        succession.judge(killer(2), {FIRST: math.inf})
        succession.finish()
        assert isinstance(guilty.error, RepeatedLoss)
        assert innocent.take()[-1].finish_reason == "length"

    asyncio.run(run())


def await_in_progress_of(succession: Succession, sequence: int) -> None:
    """Let the ranks proceed until a sequence is in a step that some rank has not answered."""
    while sequence not in succession.in_progress:
        succession.proceed(0)


def test_a_request_whose_steps_a_stuck_rank_has_not_begun_is_no_suspect() -> None:
    async def run() -> dict[int, int]:
        succession = Succession(policy=replace(PLAIN, prefill_chunk=8))
        succession.load()
        succession.submit(make_request(8, max_tokens=4), make_request(30, max_tokens=4))
        assert succession.twin is not None
        assert [[row.sequence for row in step.rows] for step in succession.twin.sent] == [[1], [2], [2]]
        succession.lose(killer(0))
        succession.judge(killer(0), {FIRST: 1})
        return {live.sequence.prompt_length: live.losses for live in succession.held.take()}

    assert asyncio.run(run()) == {8: 1, 30: 0}


def test_a_rank_that_ran_no_row_of_a_request_does_not_make_it_a_suspect() -> None:
    """Lose the last stage, which has kept KV of the answer, while only the stage before it computes."""

    async def run() -> None:
        succession = Succession(policy=replace(PLAIN, prefill_chunk=8))
        succession.load()
        (stream,) = succession.submit(make_request(40, max_tokens=20, ignore_eos=True))
        run_to(succession, stream, 4)
        succession.lose()
        succession.judge(LOSS)
        succession.patch(succession.choose_kept(1))
        assert succession.in_progress
        succession.lose(killer(0))
        assert succession.judge(killer(0), {LAST: math.inf}) is False
        assert [live.losses for live in succession.held.take()] == [0]

    asyncio.run(run())
