"""KV that stages keep across a loss: every stage computes what it lacks, and memory is freed."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
from tests.default_settings import make_policy
from tests.engine.engines import (
    PLAIN,
    kv_of,
    make_request,
)
from tests.engine.successions import Succession, check_nothing_is_left, run_to, tokens_of
from tests.engine.twin_rank import hash_token

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.generation import Delta, GenerateRequest, RequestStream

MODEL = hash_token(97)


def at_present(present: int, _reached: int, length: int) -> bool:
    """Allow what a recurrent model allows."""
    return length == present


def answer_to(request: GenerateRequest) -> list[int]:
    """Return the model's answer to a request that ends at its length."""
    history = list(request.prompt_tokens)
    for _ in range(request.sampling.max_tokens or 0):
        history.append(MODEL(history))
    return history[len(request.prompt_tokens) :]


def long_request(prompt: int, answer: int = 20) -> GenerateRequest:
    return make_request(prompt, max_tokens=answer, ignore_eos=True)


def complete_steps(succession: Succession, steps: int) -> None:
    """Proceed until every rank has answered so many steps."""
    assert succession.engine is not None
    while succession.engine.stats().scheduler.steps_completed < steps:
        succession.proceed(0)


def resumed(
    succession: Succession, kept_from: int, *requests: GenerateRequest, tokens: int = 4
) -> list[tuple[RequestStream, list[Delta]]]:
    """Run requests until the first answer has so many tokens, and patch the instance."""
    streams = succession.submit(*requests)
    deltas = [run_to(succession, streams[0], tokens), *(stream.take() for stream in streams[1:])]
    succession.lose()
    succession.patch(succession.choose_kept(kept_from))
    return list(zip(streams, deltas, strict=True))


def rows_of(succession: Succession, stage: int) -> list[tuple[int, int]]:
    """Return start and number of tokens of every prefill row that a stage ran."""
    assert succession.twin is not None
    return [
        (row.start, len(row.tokens.ids))
        for step in succession.twin.sent
        if not step.end_stage or stage < step.end_stage
        for row in step.rows
        if row.tokens.ids
    ]


def succession_of(stages: int, policy: Policy = PLAIN, **options: Any) -> Succession:
    succession = Succession(MODEL, policy, **options)
    succession.load((1,) * stages)
    return succession


@pytest.mark.parametrize(
    ("kept_from", "computed"),
    [(0, (1, 1, 1)), (1, (43, 1, 1)), (2, (43, 43, 1)), (3, (43, 43, 43))],
    ids=["only a link was lost", "stage 0", "stage 1", "the last stage"],
)
def test_the_stages_behind_the_lost_one_compute_only_the_last_tokens(
    kept_from: int, computed: tuple[int, ...]
) -> None:
    async def run() -> None:
        succession = succession_of(3)
        ((stream, deltas),) = resumed(succession, kept_from, long_request(40))
        succession.finish()
        assert tuple(sum(count for _, count in rows_of(succession, stage)) for stage in range(3)) == computed
        assert tokens_of([*deltas, *stream.take()]) == answer_to(long_request(40))
        assert succession.engine is not None
        totals = succession.engine.totals()
        kept = 42 if kept_from < 3 else 0
        assert (totals.resume_kept, totals.resume_replayed) == (kept, 44 - kept)

    asyncio.run(run())


@pytest.mark.parametrize("prompts", [[40] * 8, [10, 40], [3, *[40] * 6, 5]])
def test_several_answers_keep_their_kv_whatever_shares_their_steps(prompts: list[int]) -> None:
    """Lose stage 0 of three, whose chunks take several answers at once; prompts differ."""

    async def run() -> None:
        requests = [
            replace(each, prompt_tokens=(number, *each.prompt_tokens[1:]))
            for number, each in enumerate(map(long_request, prompts))
        ]
        succession = succession_of(3, replace(PLAIN, max_num_seqs=8))
        streams = succession.submit(*requests)
        last = run_to(succession, streams[-1], 6)
        deltas = [*(stream.take() for stream in streams[:-1]), last]
        succession.lose()
        kept = succession.choose_kept(1)
        lengths = [each.length for each in kept.values()]
        assert len(lengths) == sum(prompt == 40 for prompt in prompts)
        succession.patch(kept)
        succession.finish()
        assert not succession.steps_failed
        unkept = sum(prompt + 20 for prompt in prompts if prompt != 40)
        for stage in (1, 2):
            assert sum(count for _, count in rows_of(succession, stage)) <= unkept + 3 * len(lengths)
        assert succession.engine is not None
        assert succession.engine.totals().resume_kept == sum(lengths)
        for request, stream, each in zip(requests, streams, deltas, strict=True):
            assert tokens_of([*each, *stream.take()]) == answer_to(request)

    asyncio.run(run())


def test_the_count_of_kept_tokens_leaves_out_those_that_were_computed_again() -> None:
    async def run() -> None:
        succession = succession_of(2)
        (stream,) = succession.submit(long_request(40))
        run_to(succession, stream, 4)
        succession.lose()
        kept = succession.choose_kept(1)
        succession.before = None
        succession.load((1, 1), kept=kept)
        succession.finish()
        assert succession.engine is not None
        totals = succession.engine.totals()
        assert (totals.resume_kept, totals.resume_replayed) == (0, 44)

    asyncio.run(run())


def test_a_prompt_in_prefill_keeps_the_chunks_that_every_rank_has_answered() -> None:
    async def run() -> None:
        succession = succession_of(2, replace(PLAIN, prefill_chunk=20))
        (stream,) = succession.submit(long_request(40, 3))
        complete_steps(succession, 1)
        succession.lose()
        kept = succession.choose_kept(1)
        (length,) = (each.length for each in kept.values())
        assert length == 20
        succession.patch(kept)
        succession.finish()
        assert rows_of(succession, 1)[0][0] == length
        assert tokens_of(stream.take()) == answer_to(long_request(40, 3))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("request_", "options"),
    [
        (long_request(40), {"kv": kv_of(12, recurrent=True), "reach": at_present}),
        (replace(make_request(40, max_tokens=0), pooling="mean"), {}),
        (make_request(40, max_tokens=2, prompt_logprobs=0), {}),
    ],
    ids=["recurrent", "pooled", "prompt logprobs"],
)
def test_what_needs_every_position_or_cannot_be_cut_is_computed_as_a_whole(
    request_: GenerateRequest, options: dict[str, Any]
) -> None:
    async def run() -> None:
        succession = succession_of(2, replace(PLAIN, prefill_chunk=10), **options)
        succession.submit(request_)
        while len(rows_of(succession, 0)) < 4:
            succession.proceed(0)
        succession.lose()
        assert succession.choose_kept(1) == {}

    asyncio.run(run())


def test_kept_kv_of_a_client_that_leaves_is_freed() -> None:
    async def run() -> None:
        succession = succession_of(2)
        ended, stays = succession.submit(long_request(30), long_request(40, 9))
        run_to(succession, stays, 4)
        succession.lose()
        kept = succession.choose_kept(1)
        assert len(kept) == 2
        await ended.aclose()
        succession.patch(kept)
        succession.finish()
        check_nothing_is_left(succession)

    asyncio.run(run())


@pytest.mark.parametrize("blocks", [1, 3])
def test_kept_kv_gives_way_to_requests_that_run(blocks: int) -> None:
    """Free what was kept for the newest sequence first."""

    async def run() -> None:
        policy = replace(PLAIN, max_num_seqs=4)
        wanted = [long_request(length) for length in (40, 41, 42)]
        succession = succession_of(2, policy, kv=kv_of(8))
        streams = succession.submit(*wanted)
        deltas = [list[Delta]() for _ in streams]
        while min(len(tokens_of(each)) for each in deltas) < 4:
            succession.proceed(0)
            for stream, each in zip(streams, deltas, strict=True):
                each.extend(stream.take())
        succession.lose()
        succession.kv = kv_of(blocks)
        kept = succession.choose_kept(1)
        assert len(kept) == 3
        succession.patch(kept)
        succession.finish()
        assert not succession.steps_failed
        assert succession.engine is not None
        assert 40 < succession.engine.totals().resume_kept < 100
        for request, stream, each in zip(wanted, streams, deltas, strict=True):
            assert tokens_of([*each, *stream.take()]) == answer_to(request)
        check_nothing_is_left(succession)

    asyncio.run(run())


def test_nothing_remembers_a_request_that_has_ended() -> None:
    """Take a loss that leaves KV of it; what the head remembers of the present epoch stays."""

    async def run() -> None:
        succession = succession_of(2)
        streams = succession.submit(long_request(40))
        run_to(succession, streams[0], 4)
        succession.lose()
        epoch = succession.choose_kept(1)
        (request,) = map(weakref.ref, epoch)
        succession.patch(epoch)
        succession.finish()
        streams.clear()
        succession.forget_loss()
        await asyncio.sleep(0)
        gc.collect()
        assert request() is None

    asyncio.run(run())


def test_equal_prompts_are_computed_once_on_the_stages_that_kept_nothing() -> None:
    async def run() -> None:
        succession = succession_of(3, make_policy(num_speculative_tokens=0, prefill_chunk=8))
        pairs = resumed(succession, 2, long_request(40), long_request(40), tokens=6)
        succession.finish()
        first, last = (sum(count for _, count in rows_of(succession, stage)) for stage in (0, 2))
        assert first < 60
        assert last <= 8
        assert not succession.steps_failed
        for stream, deltas in pairs:
            assert len(tokens_of([*deltas, *stream.take()])) == 20

    asyncio.run(run())


def test_a_loss_during_the_replay_leaves_what_the_stages_behind_kept() -> None:
    async def run() -> None:
        request = long_request(40)
        succession = succession_of(3, replace(PLAIN, prefill_chunk=8))
        ((stream, deltas),) = resumed(succession, 2, request)
        complete_steps(succession, 2)
        assert sum(count for _, count in rows_of(succession, 2)) == 0
        succession.lose()
        kept = succession.choose_kept(2)
        assert [each.length for each in kept.values()] == [42]
        succession.patch(kept)
        succession.finish()
        assert sum(count for _, count in rows_of(succession, 2)) == 1
        assert tokens_of([*deltas, *stream.take()]) == answer_to(request)

    asyncio.run(run())


def test_a_rank_that_lost_kept_kv_makes_the_head_compute_the_answer_as_a_whole() -> None:
    async def run() -> None:
        request = long_request(40)
        succession = succession_of(2)
        (stream,) = succession.submit(request)
        deltas = run_to(succession, stream, 4)
        succession.lose()
        kept = succession.choose_kept(1)
        before, succession.before = succession.before, None
        assert before is not None
        succession.load((1, 1), kept=kept)
        succession.finish()
        assert succession.steps_failed
        assert tokens_of([*deltas, *stream.take()]) == answer_to(request)
        check_nothing_is_left(succession)

    asyncio.run(run())
