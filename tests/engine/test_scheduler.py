"""Scheduler over ranks that continue in every possible order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.default_settings import make_policy
from tests.engine.pipeline import EOS, PLAIN, Pipeline, budget
from tests.engine.twin_rank import Reach
from tests.examples import examples

from mlx_ring.core.engine_stats import BLOCK
from mlx_ring.core.errors import ProtocolError, StepFailed
from mlx_ring.core.types import SamplingParams
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.protos import step_pb2

RANDOM = st.builds(Random, st.integers(0, 2**32))


TP_SIZES = st.sampled_from([(1,), (2,), (1, 1), (1, 1, 1), (2, 2), (1, 2, 1), (1,) * 5])


SAMPLING = st.builds(SamplingParams, max_tokens=st.integers(0, 12) | st.none(), ignore_eos=st.booleans())


REQUESTS = st.lists(st.tuples(st.integers(1, 30), SAMPLING), min_size=1, max_size=9)


@given(TP_SIZES, REQUESTS, st.integers(1, 9), st.integers(1, 10), RANDOM)
def test_every_answer_equals_that_of_the_sequence_alone(
    tp_sizes: tuple[int, ...],
    requests: list[tuple[int, SamplingParams]],
    max_num_seqs: int,
    chunk: int,
    random: Random,
) -> None:
    pipeline = Pipeline(tp_sizes, replace(PLAIN, max_num_seqs=max_num_seqs, prefill_chunk=chunk))
    for prompt, sampling in requests:
        pipeline.add(prompt, sampling)
        assert pipeline.scheduler.stats().running <= max_num_seqs
        for _ in range(random.randrange(6)):
            pipeline.run_any(random)
    pipeline.run_out(random)
    for sequence in pipeline.sequences.values():
        assert sequence.output == pipeline.alone(sequence)
    pipeline.check_nothing_is_left()


@given(TP_SIZES, REQUESTS, st.integers(1, 9), RANDOM)
def test_cancelled_sequences_free_their_kv_and_change_no_other_answer(
    tp_sizes: tuple[int, ...],
    requests: list[tuple[int, SamplingParams]],
    max_num_seqs: int,
    random: Random,
) -> None:
    pipeline = Pipeline(tp_sizes, replace(PLAIN, max_num_seqs=max_num_seqs))
    cancelled: set[int] = set()
    for prompt, sampling in requests:
        pipeline.add(prompt, sampling)
        for _ in range(random.randrange(12)):
            pipeline.run_any(random)
        living = [one for number, one in pipeline.sequences.items() if number not in pipeline.ended]
        if living and random.random() < 0.5:
            victim = random.choice(living)
            pipeline.cancel(victim)
            cancelled.add(victim.id)
    pipeline.run_out(random)
    for sequence in pipeline.sequences.values():
        whole = pipeline.alone(sequence)
        assert sequence.output == (whole[: len(sequence.output)] if sequence.id in cancelled else whole)
    pipeline.check_nothing_is_left()


@given(TP_SIZES, REQUESTS, st.booleans(), RANDOM)
def test_a_failed_step_ends_only_the_sequences_it_names(
    tp_sizes: tuple[int, ...],
    requests: list[tuple[int, SamplingParams]],
    name_rows: bool,  # noqa: FBT001 - drawn by hypothesis
    random: Random,
) -> None:
    blamed: set[int] = set()

    def inject_fault(step: step_pb2.Step, stage: int) -> step_pb2.Failure | None:
        del stage
        if not step.rows or random.random() > 0.05:
            return None
        rows = [row.sequence for row in step.rows]
        named = rows[:1] if name_rows else rows
        blamed.update(named)
        return error_to_failure(StepFailed("boom"), named if name_rows else ())

    pipeline = Pipeline(tp_sizes, inject_fault=inject_fault)
    for prompt, sampling in requests:
        pipeline.add(prompt, sampling)
    pipeline.run_out(random)
    for number, error in pipeline.ended.items():
        assert error is None or number in blamed
        if number not in blamed:
            assert pipeline.sequences[number].output == pipeline.alone(pipeline.sequences[number])
    # A row sent after a failed one may be reported first, because its KV length is wrong.
    errors = [error for error in pipeline.ended.values() if error is not None]
    assert all(isinstance(error, StepFailed | ProtocolError) for error in errors)
    pipeline.check_nothing_is_left()


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_arrivals_and_cancellations_take_effect_within_four_tokens(stages: int) -> None:
    """Check that only steps sent before a change may lack it."""
    pipeline = Pipeline((1,) * stages, replace(PLAIN, max_num_seqs=2 * stages + 1))
    endless = SamplingParams(max_tokens=50, ignore_eos=True)
    running = [pipeline.add(3, endless) for _ in range(2 * stages)]
    while any(sequence.length < sequence.prompt_length + 8 for sequence in running):
        pipeline.run_any(Random(0))
    cancelled, stays = running[0], running[1]
    sent = len(pipeline.twin.sent)
    pipeline.cancel(cancelled)
    pipeline.add(3, endless)
    newcomer = len(running) + 1
    (first,) = [
        step.step for step in pipeline.twin.sent if any(row.sequence == newcomer for row in step.rows)
    ]
    before = [step for step in pipeline.twin.sent[:first] if pipeline.answers[step.step] < stages]
    assert sum(row.sequence == stays.id for step in before for row in step.rows) <= 4
    assert sum(row.sequence == cancelled.id for step in before for row in step.rows) <= 4
    frees = [
        step.step
        for step in pipeline.twin.sent
        if any(
            operation.HasField("free") and operation.free.sequence == cancelled.id
            for operation in step.operations
        )
    ]
    assert frees == [sent + 1]


def test_a_cancelled_sequence_returns_the_cached_prefix_that_it_took() -> None:
    pipeline = Pipeline((1,), replace(PLAIN, prefix_cache=True), context=700)
    pipeline.add(SHARED[:300], SamplingParams(max_tokens=1))
    pipeline.run_out()
    leaving = pipeline.add((*SHARED[:300], 3, 4, 5), SamplingParams(ignore_eos=True))
    pipeline.run(0)
    assert leaving.taken == 300
    pipeline.cancel(leaving)
    pipeline.run_out()
    stays = pipeline.add((*SHARED[:300], 6, 7))
    pipeline.run_out()
    assert (stays.cached_tokens, stays.output) == (300, pipeline.alone(stays))
    pipeline.check_nothing_is_left()


def test_nothing_is_evicted_for_a_prompt_that_would_still_not_fit() -> None:
    pipeline = Pipeline(
        (1,), replace(PLAIN, prefix_cache=True), kv=budget((1,), 5), context=5 * 256, next_token=lambda _: 7
    )
    pipeline.add(SHARED[:200], SamplingParams(max_tokens=1))
    pipeline.run_out()
    pipeline.add(3, SamplingParams(ignore_eos=True, max_tokens=700))
    for _ in range(400):
        pipeline.run(0)
    waiting = pipeline.add(1000)
    pipeline.run(0)
    assert not waiting.scheduled
    assert pipeline.scheduler.cache_stats().entries == 1
    pipeline.run_out()
    assert pipeline.scheduler.cache_stats().evictions > 0
    assert waiting.finish_reason is not None


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_padded_rows_cause_preemption_and_all_sequences_end(*, prefix_cache: bool) -> None:
    policy = replace(PLAIN, prefix_cache=prefix_cache, prefill_chunk=64)
    pipeline = Pipeline((1,), policy, kv=budget((1,), 8), context=1500, next_token=lambda _: 7, pads=True)
    pipeline.add(1000, SamplingParams(max_tokens=300))
    for _ in range(4):
        pipeline.add(20, SamplingParams(max_tokens=100))
    pipeline.run_out()
    assert all(sequence.finish_reason for sequence in pipeline.sequences.values())
    assert pipeline.scheduler.stats().num_preemptions > 0
    prefilled = sum(len(row.tokens.ids) for step in pipeline.twin.sent for row in step.rows)
    assert prefilled <= 2 * sum(sequence.prompt_length for sequence in pipeline.sequences.values()), (
        "a preempted sequence returns when another has ended, and not at once"
    )
    pipeline.check_nothing_is_left()


def test_sequences_that_must_give_way_to_the_rows_of_a_step_are_freed_in_one_step() -> None:
    policy = replace(PLAIN, max_num_seqs=9, prefill_chunk=512)
    pipeline = Pipeline(
        (1,), policy, kv=budget((1,), 18), context=1000, next_token=lambda tokens: 1 + len(tokens) % 7
    )
    # The first one is a step ahead of the others. At the end of their second blocks all of the memory is taken.
    added = [pipeline.add(200, SamplingParams(max_tokens=2 * BLOCK - 180)) for _ in range(9)]
    pipeline.run_out()
    freed = [
        [one.free.sequence for one in step.operations if one.HasField("free")] for step in pipeline.twin.sent
    ]
    assert [sequences for sequences in freed if sequences][:2] == [[9], [8, 7]]
    assert pipeline.scheduler.stats().num_preemptions == 3
    assert all(sequence.output == pipeline.alone(sequence) for sequence in added)
    pipeline.check_nothing_is_left()


def test_a_free_operation_is_sent_alone_without_other_work() -> None:
    pipeline = Pipeline((1, 1))
    sequence = pipeline.add(3)
    pipeline.cancel(sequence)
    assert all(not one.HasField("free") for step in pipeline.twin.sent for one in step.operations)
    while any(step.rows for step in pipeline.twin.sent[-1:]):
        pipeline.run_any(Random(0))
    step = pipeline.twin.sent[-1]
    assert [operation.free.sequence for operation in step.operations] == [sequence.id]
    pipeline.run(0)
    assert pipeline.scheduler.stats().sequences_held == 1
    pipeline.run(1)
    pipeline.check_nothing_is_left()


def test_a_free_operation_is_sent_with_the_next_rows() -> None:
    pipeline = Pipeline((1,))
    ending = pipeline.add(3, SamplingParams(max_tokens=2, ignore_eos=True))
    lasting = pipeline.add(3, SamplingParams(ignore_eos=True))
    freed: list[step_pb2.Step] = []
    while not freed:
        pipeline.run(0)
        freed = [step for step in pipeline.twin.sent if any(one.HasField("free") for one in step.operations)]
    assert [operation.free.sequence for operation in freed[0].operations] == [ending.id]
    assert [row.sequence for row in freed[0].rows] == [lasting.id]


def test_cancelling_a_waiting_sequence_sends_no_step() -> None:
    pipeline = Pipeline((1,), replace(PLAIN, max_num_seqs=1))
    pipeline.add(3)
    waiting = pipeline.add(3)
    sent = len(pipeline.twin.sent)
    pipeline.cancel(waiting)
    assert len(pipeline.twin.sent) == sent


ALL_ON = make_policy(prefill_chunk=5, num_speculative_tokens=4, step_deadline_s=5.0)


def random_tokens(count: int, random: Random) -> tuple[int, ...]:
    return tuple(random.randrange(1, 50) for _ in range(count))


SHARED = random_tokens(300, Random(0))


REACHES: dict[str, Reach] = {
    "plain": lambda _present, _reached, _length: True,
    "recurrent": lambda present, _reached, length: length == present,
    "sliding": lambda _present, reached, length: reached <= 12 or length >= reached - 8,
}


TRAITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recurrent": {"recurrent": True},
    "sliding": {"slack": 8, "exact_length": 12},
}


def next_repetitive_token(history: Sequence[int]) -> int:
    """Return the next token of repetitive answers, which make drafts right and seldom end."""
    last = history[-1]
    return EOS if sum(history) % 97 == 0 else (last + 1 + len(history) % 3) % 7 + 1


@given(TP_SIZES, st.data(), st.integers(3, 6), st.sampled_from(["plain", "recurrent", "sliding"]), RANDOM)
@examples(0.75)
def test_caching_drafts_eviction_and_preemption_change_no_answer(
    tp_sizes: tuple[int, ...], data: st.DataObject, blocks: int, kind: str, random: Random
) -> None:
    kv = budget(tp_sizes, blocks, **TRAITS[kind])
    policy = replace(
        ALL_ON,
        max_num_seqs=data.draw(st.integers(1, 6)),
        steps_ahead=data.draw(st.integers(1, 3)),
        prefill_chunk=data.draw(st.integers(1, 64)),
    )
    pads = data.draw(st.booleans())
    pipeline = Pipeline(
        tp_sizes, policy, kv=kv, context=700, next_token=next_repetitive_token, reach=REACHES[kind], pads=pads
    )
    cancelled: set[int] = set()
    for _ in range(data.draw(st.integers(1, 8))):
        prompt = SHARED[: random.choice([1, 30, 100, 200, 300])] + tuple(
            random.randrange(1, 8) for _ in range(random.randrange(20))
        )
        pipeline.add(
            prompt,
            SamplingParams(max_tokens=random.choice([1, 5, 30, 300, None]), ignore_eos=random.random() < 0.5),
        )
        for _ in range(random.randrange(200)):
            pipeline.run_any(random)
        living = [one for number, one in pipeline.sequences.items() if number not in pipeline.ended]
        if living and random.random() < 0.3:
            victim = random.choice(living)
            pipeline.cancel(victim)
            cancelled.add(victim.id)
    pipeline.run_out(random)
    assert not any(pipeline.ended.values()), "a sequence ended with an error"
    for sequence in pipeline.sequences.values():
        whole = pipeline.alone(sequence)
        assert sequence.output == (whole[: len(sequence.output)] if sequence.id in cancelled else whole)
    pipeline.check_nothing_is_left()


def cached_pipeline(kind: str) -> Pipeline:
    """Return two ranks with a prefix cache, whose caches are of this kind."""
    kv, policy = budget((1, 1), 20, **TRAITS[kind]), replace(PLAIN, prefix_cache=True, prefill_chunk=32)
    return Pipeline((1, 1), policy, kv=kv, context=700, next_token=next_repetitive_token, reach=REACHES[kind])


@pytest.mark.parametrize("kind", REACHES)
def test_a_prompt_whose_client_left_continues_where_it_was_left(kind: str) -> None:
    pipeline = cached_pipeline(kind)
    computed = 0
    for _ in range(2):
        leaving = pipeline.add(SHARED, SamplingParams(max_tokens=2))
        for stage in (0, 1):
            pipeline.run(stage)
        assert leaving.cached_tokens == computed < leaving.scheduled < len(SHARED)
        computed = leaving.scheduled
        pipeline.cancel(leaving)
        pipeline.run_out()
    last = pipeline.add(SHARED, SamplingParams(max_tokens=2))
    pipeline.run_out()
    assert (last.cached_tokens, last.output) == (computed, pipeline.alone(last))
    pipeline.check_nothing_is_left()


@pytest.mark.parametrize("kind", ["recurrent", "sliding"])
def test_a_conversation_outlasts_answers_that_are_stopped_or_made_again(kind: str) -> None:
    pipeline = cached_pipeline(kind)
    ends = SamplingParams(max_tokens=40, ignore_eos=True)
    first = pipeline.add(SHARED[:100], ends)
    pipeline.run_out()
    conversation = (*SHARED[:100], *first.output)
    stopped = pipeline.add((*conversation, *SHARED[:10]), SamplingParams(ignore_eos=True))
    while len(stopped.output) < 30:
        pipeline.run_any(Random(0))
    pipeline.cancel(stopped)
    edited = pipeline.add((*conversation, *SHARED[10:20]), ends)
    pipeline.run_out()
    assert edited.cached_tokens >= 139, "the end of the first answer is not lost"
    assert edited.output == pipeline.alone(edited)
    pipeline.check_nothing_is_left()


def test_a_sliding_cache_answers_a_prompt_again() -> None:
    pipeline = cached_pipeline("sliding")
    for reused in (0, 99, 99):
        answer = pipeline.add(SHARED[:100], SamplingParams(max_tokens=40, ignore_eos=True))
        pipeline.run_out()
        assert (answer.cached_tokens, answer.output) == (reused, pipeline.alone(answer))
    assert pipeline.scheduler.cache_stats().entries == 2, "the end of the prompt, and that of the answer"
    pipeline.check_nothing_is_left()


def test_a_snapshot_is_dropped_where_a_short_answer_can_be_cut_to_it() -> None:
    policy = replace(PLAIN, prefix_cache=True, prefill_chunk=32)
    pipeline = Pipeline(
        (1,),
        policy,
        kv=budget((1,), 20, slack=8, exact_length=150),
        context=700,
        next_token=next_repetitive_token,
    )
    pipeline.add(SHARED[:100], SamplingParams(max_tokens=400, ignore_eos=True, stop_token_ids=(1, 2, 3)))
    pipeline.run_out()
    assert pipeline.scheduler.cache_stats().entries == 1


def test_an_entry_of_a_step_that_failed_is_dropped_though_its_sequence_has_ended() -> None:
    pipeline = Pipeline((1,), replace(PLAIN, prefix_cache=True, prefill_chunk=32))
    pipeline.cancel(pipeline.add(40))
    assert pipeline.scheduler.cache_stats().entries == 1
    failure = error_to_failure(StepFailed("out of memory"))
    pipeline.scheduler.on_answer(
        step_pb2.StepDone(instance="demo", epoch=1, step=1, failure=failure), pipeline.now
    )
    assert pipeline.scheduler.cache_stats().entries == 0


def test_a_cached_prefix_that_a_rank_lost_is_dropped() -> None:
    pipeline = Pipeline((1,), replace(PLAIN, prefix_cache=True))
    cached = pipeline.add(20)
    pipeline.run_out()
    assert pipeline.scheduler.cache_stats().entries == 1
    pipeline.add(20)
    number = pipeline.scheduler.stats().steps_completed + 1
    failure = error_to_failure(ProtocolError("lost"), [cached.id])
    done = step_pb2.StepDone(instance="demo", epoch=1, step=number, failure=failure)
    pipeline.scheduler.on_answer(done, pipeline.now)
    assert pipeline.scheduler.cache_stats().entries == 0
