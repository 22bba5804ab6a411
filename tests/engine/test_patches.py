"""Instances that are lost and patched again and again, at any step: no answer changes, and memory is freed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.default_settings import make_policy
from tests.engine.engines import (
    answer_of,
    drafting_at_no_cost,
    draw_by_parameters,
    kv_of,
    make_request,
)
from tests.engine.successions import Succession, check_nothing_is_left, tokens_of
from tests.engine.twin_rank import Reach, anywhere
from tests.examples import examples

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.generation import Delta, GenerateRequest, RequestStream
from mlx_ring.engine.kv_budget import RankKv

SLACK, WINDOW = 4, 24


def within_window(present: int, reached: int, length: int) -> bool:
    """Allow what a model with sliding windows allows."""
    return length <= present and (reached <= WINDOW or length >= reached - SLACK)


def at_present(present: int, _reached: int, length: int) -> bool:
    """Allow what a recurrent model allows."""
    return length == present


SLIDING = {"slack": SLACK, "exact_length": WINDOW}


KINDS: dict[str, tuple[RankKv, Reach]] = {
    "roomy": (kv_of(40), anywhere),
    "narrow": (kv_of(4), anywhere),
    "sliding": (kv_of(12, **SLIDING), within_window),
    "recurrent": (kv_of(12, recurrent=True), at_present),
}


class Course:
    """Requests to a model that is lost and patched again and again, with every rule checked at each move."""

    def __init__(self, random: Random, kind: str, policy: Policy, stages: int) -> None:
        self.random = random
        self.kv, reach = KINDS[kind]
        self.succession = Succession(None, policy, draw=draw_by_parameters, kv=self.kv, reach=reach)
        self.succession.load((1,) * stages)
        self.stages = stages
        self.wanted: list[GenerateRequest] = []
        self.streams: list[RequestStream] = []
        self.deltas: list[list[Delta]] = []
        self.left: set[int] = set()
        """Requests whose clients left."""
        self._is_within = True
        """True once the ranks hold no more than their limits, which may be lower after a loss."""

    def submit(self, number: int) -> None:
        for _ in range(number):
            self.wanted.append(random_request(self.random))
            self.streams += self.succession.submit(self.wanted[-1])
            self.deltas.append([])

    def proceed(self) -> bool:
        """Let one rank proceed; return False if there is nothing to do."""
        done = self.succession.proceed(self.random.randrange(1000))
        self._check_budget()
        for stream, deltas in zip(self.streams, self.deltas, strict=True):
            deltas.extend(stream.take())
        return done

    def _check_budget(self) -> None:
        assert self.succession.engine is not None
        assert self.succession.twin is not None
        uses = self.succession.engine.stats().cache.ranks.items()
        is_within = all(
            max(use.used_bytes, self.succession.twin.kv_bytes(place)) <= use.limit_bytes
            for place, use in uses
        )
        assert is_within or not self._is_within
        self._is_within = is_within

    async def lose_and_patch(self) -> None:
        """Lose a stage, several stages, or a link; ranks that are left continue for a moment, and clients leave."""
        random, succession = self.random, self.succession
        succession.lose()
        succession.drift(random.randrange(1000) for _ in range(random.randrange(6)))
        kept = succession.choose_kept(random.randint(0, self.stages))
        if random.random() < 0.3:
            leaving = random.randrange(len(self.streams))
            self.left.add(leaving)
            await self.streams[leaving].aclose()
        if random.random() < 0.3:
            succession.kv = replace(self.kv, limit_bytes=self.kv.limit_bytes // random.choice([1, 2]))
        self._is_within = False
        succession.patch(kept)

    def finish(self) -> None:
        while self.proceed():
            pass
        assert not self.succession.steps_failed
        assert not sum(totals.resume_disagreements for totals in self.succession.totals)
        assert not len(self.succession.held)
        check_nothing_is_left(self.succession)

    def check_answers(self) -> None:
        for number, (request, deltas) in enumerate(zip(self.wanted, self.deltas, strict=True)):
            if number not in self.left:
                assert self.streams[number].error is None
                check(request, deltas)


def random_request(random: Random) -> GenerateRequest:
    request = make_request(
        random.choice([5, 20, 30, 40, 40]),
        prompt_logprobs=random.choice([None, None, None, 0]),
        max_tokens=random.choice([1, 10, 20, 24, 24]),
        logprobs=random.random() < 0.5,
        top_logprobs=random.choice([0, 2]),
        min_tokens=random.randint(0, 2),
        temperature=random.choice([0.0, 0.0, 1.0]),
        seed=random.randrange(9),
        repetition_penalty=random.choice([1.0, 1.0, 1.5]),
        presence_penalty=random.choice([0.0, 0.0, 0.7]),
        frequency_penalty=random.choice([0.0, 0.0, 0.3]),
    )
    first = random.randrange(3)
    return replace(request, prompt_tokens=(first, *request.prompt_tokens[1:]))


@pytest.mark.slow
@examples(1.0)
@given(
    random=st.randoms(use_true_random=False),
    drafts=st.sampled_from([0, 4]),
    kind=st.sampled_from([*KINDS]),
    stages=st.integers(2, 4),
    caches=st.booleans(),
    chunk=st.sampled_from([8, 16, 64, 512]),
)
def test_patches_after_losses_at_any_step_change_no_answer(
    random: Random,
    drafts: int,
    kind: str,
    stages: int,
    caches: bool,  # noqa: FBT001 - drawn
    chunk: int,
) -> None:
    policy = make_policy(
        max_num_seqs=4, prefill_chunk=chunk, num_speculative_tokens=drafts, prefix_cache=caches
    )

    async def run() -> Course:
        course = Course(random, kind, policy, stages)
        course.submit(4)
        for _ in range(random.randint(2, 5)):
            course.submit(random.randrange(3))
            for _ in range(random.choice([8, 20, 40, 80, 160])):
                course.proceed()
            await course.lose_and_patch()
        course.finish()
        return course

    with drafting_at_no_cost():
        course = asyncio.run(run())
    course.check_answers()


def check(request: GenerateRequest, deltas: Sequence[Delta]) -> None:
    """Compare an answer with the one of an engine that was never lost."""
    expected = answer_of(None, request, draw=draw_by_parameters)
    assert tokens_of(deltas) == expected.token_ids
    logprobs, others = ([each for delta in of for each in delta.logprobs] for of in (deltas, expected.deltas))
    assert logprobs == others
    assert deltas[-1].finish_reason == expected.last.finish_reason
    scored = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    assert scored == [delta.prompt_logprobs for delta in expected.deltas if delta.prompt_logprobs is not None]
