"""Requests outlive their instance: the next one continues each answer where it was, whenever the loss came."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.default_settings import make_policy
from tests.engine.engines import (
    LIMITS,
    PLAIN,
    Answer,
    answer_of,
    drafting_at_no_cost,
    draw_by_parameters,
    make_request,
    scripted,
)
from tests.engine.successions import (
    LOSS,
    Succession,
    check_nothing_is_left,
    lose_and_load,
    run_to,
    tokens_of,
)
from tests.examples import examples

from mlx_ring.api.openai.sampling import with_derived_seed
from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.errors import ContextExceeded, RepeatedLoss, WorkerLost
from mlx_ring.core.generation import Delta, GenerateRequest, RequestStream
from mlx_ring.core.types import Grammar, PoolingKind, RankId
from mlx_ring.engine.kv_budget import RankKv

SMALL_KV = RankKv(limit_bytes=8 * 3 * 256, bytes_per_token=8, bytes_per_sequence=0)
"""KV memory for three sequences."""


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@dataclass(frozen=True)
class Wanted:
    """A request, and the number of its answers."""

    request: GenerateRequest
    answers: int = 1

    @property
    def requests(self) -> list[GenerateRequest]:
        """One request for each answer, with a seed of its own."""
        sampling = self.request.sampling
        choices = (with_derived_seed(sampling, choice) for choice in range(self.answers))
        return [replace(self.request, sampling=choice) for choice in choices]


POISON = 100
"""Token that no answer has."""


def is_poison(request: GenerateRequest) -> bool:
    """Return True if a request kills each rank that begins to compute it."""
    return request.prompt_tokens[0] == POISON


def undisturbed(request: GenerateRequest) -> Answer:
    return answer_of(None, request, draw=draw_by_parameters)


def make_wanted(
    request: GenerateRequest, stop_at: int | None, answers: int, kind: str, pooling: PoolingKind
) -> Wanted:
    """Make a request of a kind. With `stop_at`, its stop string stands at that place of the first answer."""
    if kind == "pooled":
        return Wanted(replace(request, sampling=replace(request.sampling, max_tokens=0), pooling=pooling))
    if kind == "poison":
        return Wanted(replace(request, prompt_tokens=(POISON, *request.prompt_tokens)))
    text = "" if stop_at is None else undisturbed(request).text[stop_at : stop_at + 4]
    grammar = Grammar("regex", ".*") if kind == "grammar" else None
    sampling = replace(request.sampling, stop=(text,) if text else (), grammar=grammar)
    return Wanted(replace(request, sampling=sampling), answers)


wanted_requests = st.builds(
    make_wanted,
    st.builds(
        make_request,
        st.integers(1, 40),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        max_tokens=st.integers(1, 24),
        logprobs=st.booleans(),
        top_logprobs=st.sampled_from([0, 2]),
        min_tokens=st.integers(0, 2),
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
        seed=st.integers(0, 9),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.7]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.3]),
        logit_bias=st.sampled_from([(), (), ((7, 1.8),)]),
    ),
    stop_at=st.sampled_from([None, None, 0, 3, 9]),
    answers=st.sampled_from([1, 1, 2, 3]),
    kind=st.sampled_from(["plain", "plain", "grammar", "pooled", "poison"]),
    pooling=st.sampled_from(get_args(PoolingKind)),
)


class Disturbed:
    """Requests to a model that is lost and loaded again; some kill workers, and some clients leave in a pause."""

    def __init__(self, policy: Policy, kv: RankKv | None) -> None:
        self.succession = Succession(None, policy, draw=draw_by_parameters, kv=kv)
        self.wanted: list[GenerateRequest] = []
        """The request of each stream."""
        self.streams: list[RequestStream] = []
        self.deltas: list[list[Delta]] = []
        self.left: set[int] = set()
        """Streams whose clients left."""
        self.kills = 0

    def submit(self, wanted: Wanted) -> None:
        self.wanted += wanted.requests
        self.streams += self.succession.submit(*wanted.requests)
        self.deltas += [[] for _ in range(wanted.answers)]

    def lose(self, loss: WorkerLost = LOSS, lost: Mapping[RankId, float] | None = None) -> None:
        if self.succession.engine is not None:
            self.succession.lose(loss)
            self.succession.judge(loss, lost)

    def proceed(self, choice: int) -> bool:
        """Let a rank proceed, or die if it has to compute a request that kills it."""
        for rank in self.poisoned():
            self.kills += 1
            self.lose(WorkerLost("It died.").of_worker(), {rank: math.inf})
            return True
        return self.succession.proceed(choice)

    def poisoned(self) -> list[RankId]:
        """Return ranks that have begun to compute a request that kills them."""
        twin = self.succession.twin
        if twin is None:
            return []
        opened = {
            operation.open.sequence: operation.open.prompt_length
            for step in twin.sent
            for operation in step.operations
            if operation.HasField("open")
        }
        rows = [row for step in twin.sent for row in step.rows if row.sequence in opened and not row.start]
        found = any(row.tokens.ids[:1] == [POISON] for row in rows)
        return [twin.ranks[0]] if found else []

    def take(self) -> None:
        """Take each stream's new deltas."""
        for stream, deltas in zip(self.streams, self.deltas, strict=True):
            deltas.extend(stream.take())

    async def leave(self, choice: int) -> None:
        """Let a client leave."""
        if self.streams:
            self.left.add(choice % len(self.streams))
            await self.streams[choice % len(self.streams)].aclose()

    def finish(self) -> None:
        """Answer all requests; none may wait for ever."""
        moves = 0
        while self.succession.has_requests or self.succession.engine is None:
            if self.succession.engine is None:
                self.succession.load()
            assert self.proceed(0) or not self.succession.has_requests, "a request starves"
            moves += 1
            assert moves < 20_000
        self.succession.finish()
        self.take()

    def check(self) -> None:
        """Check that every answer is the one of an engine that was never lost, and that nothing is left."""
        check_nothing_is_left(self.succession)
        assert self.kills <= 3 * sum(map(is_poison, self.wanted))
        assert not sum(totals.resume_disagreements for totals in self.succession.totals)
        for number, (request, stream) in enumerate(zip(self.wanted, self.streams, strict=True)):
            if is_poison(request) and number not in self.left:
                assert isinstance(stream.error, RepeatedLoss)
            elif number not in self.left:
                assert stream.error is None
                check(request, self.deltas[number])


@examples(0.6)
@given(
    wanted=st.lists(wanted_requests, min_size=1, max_size=5),
    random=st.randoms(use_true_random=False),
    moves=st.sampled_from([20, 100, 300]),
    drafts=st.sampled_from([0, 4]),
    kv=st.sampled_from([None, SMALL_KV]),
)
def test_a_loss_at_any_step_changes_no_answer(
    wanted: list[Wanted], random: Random, moves: int, drafts: int, kv: RankKv | None
) -> None:
    """Lose instances at random steps, also during a replay and with requests in the queue."""

    async def run() -> Disturbed:
        disturbed = Disturbed(make_policy(max_num_seqs=3, prefill_chunk=8, num_speculative_tokens=drafts), kv)
        succession = disturbed.succession
        succession.load()
        waiting = iter(wanted)
        for _ in range(moves):
            choice = random.randrange(1000)
            if choice % 23 == 0:
                disturbed.lose()
            elif choice % 23 == 1 and succession.engine is None:
                succession.load(tp_sizes=(1,) * (1 + choice % 3))
            elif choice % 23 == 2 and (request := next(waiting, None)) is not None:
                disturbed.submit(request)
            elif choice % 23 in range(3, 7) and succession.engine is None:
                await disturbed.leave(choice // 23)
            else:
                disturbed.proceed(choice)
            disturbed.take()
        for request in waiting:
            disturbed.submit(request)
        disturbed.finish()
        return disturbed

    with drafting_at_no_cost():
        disturbed = asyncio.run(run())
    disturbed.check()


def check(request: GenerateRequest, deltas: Sequence[Delta]) -> None:
    """Compare an answer with the one of an engine that was never lost."""
    expected = undisturbed(request)
    assert tokens_of(deltas) == expected.token_ids
    assert text_of(deltas) == expected.text
    last = deltas[-1]
    assert (last.finish_reason, last.stop_match) == (expected.last.finish_reason, expected.last.stop_match)
    assert last.pooled == expected.last.pooled
    assert [delta.completion_tokens for delta in deltas][-1] == expected.last.completion_tokens
    logprobs, others = ([each for delta in of for each in delta.logprobs] for of in (deltas, expected.deltas))
    assert logprobs == others
    scored = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    assert scored == [delta.prompt_logprobs for delta in expected.deltas if delta.prompt_logprobs is not None]


def test_a_stop_string_is_found_across_a_loss() -> None:
    async def run() -> tuple[list[Delta], list[Delta]]:
        succession = Succession(scripted(b"one. END two"))
        succession.load()
        (stream,) = succession.submit(make_request(stop=("END",)))
        before = run_to(succession, stream, 7)
        succession.lose()
        succession.finish()
        return before, stream.take()

    before, after = asyncio.run(run())
    assert text_of([*before, *after]) == "one. "
    assert (after[-1].finish_reason, after[-1].stop_match) == ("stop", "END")


def test_the_last_delivered_token_is_drawn_again_and_a_disagreement_is_counted() -> None:
    answers = [b"abcdef", b"abXdef"]

    def next_token(history: Sequence[int]) -> int:
        return scripted(answers[0])(history)

    async def run() -> tuple[str, int]:
        succession = Succession(next_token)
        succession.load()
        (stream,) = succession.submit(make_request())
        deltas = run_to(succession, stream, 3)
        succession.lose()
        answers.pop(0)
        engine = succession.load()
        succession.finish()
        deltas += stream.take()
        return text_of(deltas), engine.totals().resume_disagreements

    text, disagreements = asyncio.run(run())
    assert text == "abcdef", "what was delivered stays"
    assert disagreements == 1


def test_an_undisturbed_replay_agrees() -> None:
    async def run() -> int:
        succession = Succession()
        succession.load()
        (stream,) = succession.submit(make_request(max_tokens=20))
        run_to(succession, stream, 5)
        succession.lose()
        engine = succession.load()
        succession.finish()
        assert engine.totals().resume_redrawn == 1
        return engine.totals().resume_disagreements

    assert asyncio.run(run()) == 0


def test_only_the_known_tokens_are_computed_again() -> None:
    async def run() -> list[int]:
        succession = Succession()
        succession.load()
        (stream,) = succession.submit(make_request(10, max_tokens=20))
        deltas = run_to(succession, stream, 5)
        succession.lose()
        succession.load()
        succession.finish()
        assert succession.twin is not None
        rows = [row for step in succession.twin.sent for row in step.rows]
        assert list(rows[0].tokens.ids) == [*range(65, 75), *tokens_of(deltas)[:-1]]
        assert rows[1].token == tokens_of(deltas)[-1]
        return tokens_of([*deltas, *stream.take()])

    assert len(asyncio.run(run())) == 20


def test_an_answer_goes_on_to_the_smaller_context_of_the_next_instance() -> None:
    async def run() -> list[Delta]:
        succession = Succession()
        succession.load()
        (stream,) = succession.submit(make_request(10, ignore_eos=True))
        deltas = run_to(succession, stream, 5)
        succession.lose()
        succession.load(limits=replace(LIMITS, context_length=20))
        succession.finish()
        return [*deltas, *stream.take()]

    deltas = asyncio.run(run())
    assert (deltas[-1].finish_reason, deltas[-1].completion_tokens) == ("length", 10)


@pytest.mark.parametrize(("context", "finish_reason"), [(15, "length"), (14, None), (10, None)])
def test_an_answer_that_fills_the_smaller_context_ends_and_one_that_exceeds_it_fails(
    context: int, finish_reason: str | None
) -> None:
    async def run() -> tuple[list[Delta], RequestStream]:
        succession = Succession()
        succession.load()
        (stream,) = succession.submit(make_request(10, ignore_eos=True))
        run_to(succession, stream, 5)
        succession.lose()
        succession.load(limits=replace(LIMITS, context_length=context))
        return stream.take(), stream

    deltas, stream = asyncio.run(run())
    if finish_reason is None:
        assert isinstance(stream.error, ContextExceeded)
    else:
        assert deltas[-1].finish_reason == finish_reason


def test_pooled_prompts_are_computed_again() -> None:
    async def run() -> list[Delta]:
        succession = Succession(policy=replace(PLAIN, prefill_chunk=4))
        succession.load()
        request = replace(make_request(10, max_tokens=0), pooling="mean")
        (stream,) = succession.submit(request)
        for _ in range(3):
            succession.proceed(0)
        succession.lose()
        succession.finish()
        return stream.take()

    (delta,) = asyncio.run(run())
    assert delta.pooled == (sum(range(65, 75)) / 10, 4.5, 1.0)


def test_ranks_hold_nothing_after_interrupted_answers() -> None:
    async def run() -> None:
        succession = Succession()
        succession.load()
        streams = succession.submit(*(make_request(length, max_tokens=9) for length in (3, 5, 7)))
        run_to(succession, streams[0], 2)
        succession.lose(LOSS)
        succession.finish()
        assert succession.twin is not None
        assert succession.twin.held() == {RankId(0, 0): set(), RankId(1, 0): set()}

    asyncio.run(run())


@pytest.mark.parametrize("stages", [1, 2])
def test_equal_answers_share_what_is_computed_again(stages: int) -> None:
    async def run() -> None:
        succession = Succession(policy=make_policy(num_speculative_tokens=0, prefill_chunk=4))
        succession.load()
        streams = succession.submit(make_request(40, max_tokens=20), make_request(40, max_tokens=20))
        run_to(succession, streams[1], 4)
        succession.lose()
        succession.load(tp_sizes=(1,) * stages)
        succession.finish()
        assert succession.engine is not None
        assert succession.engine.totals().steps_failed == 0
        assert [stream.take()[-1].finish_reason for stream in streams] == ["length"] * 2

    asyncio.run(run())


def test_a_resumed_answer_that_is_preempted_later_is_no_longer_read_at_full_speed() -> None:
    async def run() -> None:
        succession = Succession()
        succession.load()
        (stream,) = succession.submit(make_request(max_tokens=20))
        run_to(succession, stream, 2)
        (live,) = lose_and_load(succession)
        assert live.sequence.is_resumed
        run_to(succession, stream, 1)
        assert not live.sequence.is_resumed

    asyncio.run(run())
