"""Times of steps: their summary, and the sizes of chunks that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.timings import timing
from tests.examples import examples

from mlx_ring.core.engine_stats import StepTiming
from mlx_ring.core.types import RankId
from mlx_ring.engine.in_flight import StepWindow
from mlx_ring.engine.step_times import SMALLEST_CHUNK, ChunkSizer, ChunkTimes, DecodeRound


def window(*timings: StepTiming) -> StepWindow:
    steps = StepWindow()
    for one in timings:
        steps.record(one)
    return steps


def test_decode_steps_are_reported_by_rows_with_their_median() -> None:
    ones = [timing(step, compute_us) for step, compute_us in enumerate((10, 12, 9000))]
    fours = [timing(step, 30, rows=4, tokens=4) for step in (7, 8)]
    (stage,) = window(*ones, *fours).read().stages
    assert [(row.rows, row.steps, row.compute_us) for row in stage.decode] == [(1, 3, 12), (4, 2, 30)]


def test_drafted_steps_bare_operations_and_chunks_of_several_prompts_are_left_out() -> None:
    steps = window(
        timing(1, 50, tokens=5),
        timing(2, 1, rows=0, tokens=0),
        timing(3, 90, rows=2, tokens=64, is_decode=False),
        timing(4, 90, rank=RankId(0, 1)),
    )
    (stage,) = steps.read().stages
    assert (stage.decode, stage.chunks) == ((), ())
    assert [(row.rows, row.tokens, row.compute_us) for row in stage.last] == [(1, 5, 50)]


def test_chunks_are_reported_by_stage_and_tokens_with_their_context() -> None:
    steps = window(
        *(timing(step, 800, tokens=512, is_decode=False, context_tokens=512 * step) for step in range(3)),
        timing(3, 100, tokens=64, is_decode=False),
        timing(3, 70, tokens=64, is_decode=False, rank=RankId(1, 0)),
    )
    first, second = steps.read().stages
    assert [(row.tokens, row.steps, row.context_tokens) for row in first.chunks] == [
        (64, 1, 0),
        (512, 3, 512),
    ]
    assert [row.compute_us for row in second.chunks] == [70]


def test_time_per_token_is_measured_between_successive_steps_of_the_last_stage() -> None:
    last = RankId(1, 0)
    alone = [timing(step, 5, rank=last, sequence=1, finished_us=40 * step) for step in range(1, 5)]
    other = [timing(step, 5, rank=last, sequence=2, finished_us=1000 + 7 * step) for step in (5, 9)]
    stream = window(timing(1, 5, sequence=1), *alone, *other).read().stream
    assert stream is not None
    assert (stream.token_us, stream.tokens) == (40, 3), (
        "gaps between sequences or across steps of others do not count"
    )


def test_time_per_token_needs_a_sequence_that_ran_alone() -> None:
    assert window(timing(1, 5, sequence=1)).read().stream is None
    assert window(timing(1, 5, rows=2, tokens=2), timing(2, 5, rows=2, tokens=2)).read().stream is None
    assert window().read().stream is None


def rounds_of(*steps: tuple[int, int, int, int], drafts: int = 0) -> DecodeRound | None:
    """Return the round of decode steps on two stages: number, first sequence, rows, and the end in microseconds."""

    def on(stage: int) -> list[StepTiming]:
        return [
            timing(
                step,
                5 + stage,
                rank=RankId(stage, 0),
                sequence=sequence,
                rows=rows,
                tokens=rows + drafts,
                finished_us=finished_us,
            )
            for step, sequence, rows, finished_us in steps
        ]

    return window(*on(0), *on(1)).read().round


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_round_is_measured_between_steps_of_one_micro_batch(drafts: int) -> None:
    turns = [(step, 1 + 2 * (step % 2), 2, 500 * step + 90 * (step % 2)) for step in range(1, 9)]
    assert rounds_of(*turns, drafts=drafts) == DecodeRound(
        batches=2,
        rows=2,
        tokens=2 + drafts,
        rounds=6,
        context_tokens=0,
        round_us=1000,
        compute_us=(5, 6),
        mean_us=(5, 6),
    )
    assert rounds_of(*((step, 7, 1, 30 * step) for step in range(1, 4))) == DecodeRound(
        batches=1,
        rows=1,
        tokens=1,
        rounds=2,
        context_tokens=0,
        round_us=30,
        compute_us=(5, 6),
        mean_us=(5, 6),
    )


def test_a_round_is_the_mean_of_those_that_stall_now_and_then() -> None:
    ends = [0, 10, 20, 30, 50, 60, 70, 80, 100]
    found = rounds_of(*((step, 7, 1, end_us) for step, end_us in enumerate(ends, 1)))
    assert found is not None
    assert found.round_us == 12.5
    found = rounds_of(*((step, 7, 1, end_us) for step, end_us in enumerate([*ends, 9_000_000], 1)))
    assert found is not None
    assert found.round_us == pytest.approx((100 + 4 * 10) / 9)


def test_a_round_with_other_steps_or_rows_does_not_count() -> None:
    assert rounds_of((1, 1, 2, 10), (3, 1, 2, 20)) is None
    assert rounds_of((1, 1, 2, 10), (2, 1, 1, 20)) is None
    assert rounds_of((1, 1, 2, 10), (2, 3, 2, 20)) is None
    assert rounds_of() is None


def step_timing(stage: int, *, rows: int, tokens: int, compute_us: int) -> StepTiming:
    return StepTiming(
        step=1,
        rank=RankId(stage, 0),
        rows=rows,
        tokens=tokens,
        is_decode=rows > 1,
        started_us=0,
        finished_us=compute_us,
        queue_us=0,
        link_wait_us=0,
        compute_us=compute_us,
        link_send_us=0,
    )


def make_sizer(
    *, decode_us: int, token_us: int, stages: int = 1, ratio: float = 3.0, steps: int = 1
) -> ChunkSizer:
    """Return a sizer that has seen a chunk of 100 tokens and decode steps of four rows on each stage."""
    sizer = ChunkSizer(stages, chunk=512, max_itl_ratio=ratio)
    for stage in range(stages):
        sizer.record(step_timing(stage, rows=1, tokens=100, compute_us=100 * token_us), is_prefill=True)
    for _ in range(steps):
        for stage in reversed(range(stages)):
            sizer.record(step_timing(stage, rows=4, tokens=4, compute_us=decode_us), is_prefill=False)
    return sizer


def test_a_chunk_beside_decode_takes_the_time_that_the_itl_ratio_leaves() -> None:
    size = make_sizer(decode_us=10_000, token_us=100).beside_decode()
    assert 150 <= size <= 200, "two decode steps' time is left, some of it as a margin"


def test_drafted_steps_leave_time_for_prompts_too() -> None:
    sizer = make_sizer(decode_us=10_000, token_us=100)
    sizer.sent(9, 200, beside_decode=True)
    sizer.record(step_timing(0, rows=4, tokens=20, compute_us=14_000), is_prefill=False)
    assert sizer.beside_decode() >= 150


def test_a_sent_chunk_uses_up_the_time_until_decode_steps_earn_more() -> None:
    sizer = make_sizer(decode_us=10_000, token_us=100, steps=2)
    size = sizer.beside_decode()
    sizer.sent(9, size, beside_decode=True)
    assert sizer.beside_decode() == 0
    sizer.record(step_timing(0, rows=4, tokens=4, compute_us=10_000), is_prefill=False)
    assert sizer.beside_decode() == size // 2


def test_undisturbed_decode_saves_at_most_eight_steps_and_one_full_chunk() -> None:
    sizer = make_sizer(decode_us=1_000, token_us=100, steps=100)
    assert sizer.beside_decode() == 144, "eight steps, 18 tokens each"
    sizer.sent(9, 144, beside_decode=True)
    assert sizer.beside_decode() == 0
    assert make_sizer(decode_us=10_000, token_us=100, steps=100).beside_decode() == 512


def test_several_steps_save_up_for_a_chunk_larger_than_the_smallest() -> None:
    sizer = make_sizer(decode_us=10_000, token_us=5_000, ratio=1.5)
    sizes: list[int] = []
    for _ in range(16):
        sizes.append(sizer.beside_decode())
        if sizes[-1]:
            sizer.sent(9, sizes[-1], beside_decode=True)
        sizer.record(step_timing(0, rows=4, tokens=4, compute_us=10_000), is_prefill=False)
    assert sizes.count(0) >= 12
    assert max(sizes) > SMALLEST_CHUNK


def test_a_chunk_slower_than_predicted_delays_the_next_one() -> None:
    sizer = make_sizer(decode_us=10_000, token_us=100, steps=4)
    size = sizer.beside_decode()
    sizer.sent(1, size, beside_decode=True)
    sizer.record(step_timing(0, rows=1, tokens=size, compute_us=size * 100 + 30_000), is_prefill=True)
    for _ in range(2):
        assert sizer.beside_decode() == 0
        sizer.record(step_timing(0, rows=4, tokens=4, compute_us=10_000), is_prefill=False)
    assert sizer.beside_decode() > 0


def test_drafted_steps_alone_earn_time_for_chunks() -> None:
    sizer = make_sizer(decode_us=10_000, token_us=100, steps=0)
    sizer.record(step_timing(0, rows=4, tokens=20, compute_us=10_000), is_prefill=False)
    assert sizer.beside_decode() >= 150


def test_unmeasured_chunks_beside_decode_have_the_smallest_size() -> None:
    assert ChunkSizer(1, chunk=512, max_itl_ratio=2.0).beside_decode() == SMALLEST_CHUNK


def test_chunks_never_exceed_the_configured_size() -> None:
    assert make_sizer(decode_us=10_000, token_us=1).beside_decode() == 512
    assert ChunkSizer(1, chunk=2, max_itl_ratio=2.0).beside_decode() == 2


# ---- chunks whose time is no multiple of their tokens


Curve = Callable[[int], float]
"""Microseconds of a chunk by its tokens."""


def linear(fixed_us: float, token_us: float) -> Curve:
    return lambda tokens: fixed_us + token_us * tokens


def concave(fixed_us: float, most_us: float, tokens_of_most: float) -> Curve:
    """Return the curve of a mixture of experts, of which few tokens already read many."""
    return lambda tokens: fixed_us + most_us * (1 - math.exp(-tokens / tokens_of_most))


def stepped(fixed_us: float, tile_us: float, tile: int) -> Curve:
    return lambda tokens: fixed_us + tile_us * math.ceil(tokens / tile)


SMOOTH = st.one_of(
    st.builds(linear, st.floats(0, 30_000), st.floats(1, 1000)),
    st.builds(concave, st.floats(1000, 30_000), st.floats(0, 30_000), st.floats(20, 1000)),
)
STEPPED = st.builds(stepped, st.floats(0, 10_000), st.floats(500, 20_000), st.sampled_from([16, 64, 128]))
MOST = 512


def largest(curve: Curve, us: float) -> int:
    return max(tokens for tokens in range(1, MOST + 1) if curve(tokens) <= us)


def chosen(times: ChunkTimes, curve: Curve, us: float, chunks: int) -> list[int]:
    """Return the sizes that are chosen for a number of chunks within a time."""
    sizes: list[int] = []
    for _ in range(chunks):
        sizes.append(max(1, min(MOST, times.most(us))))
        times.record(sizes[-1], curve(sizes[-1]))
    return sizes


@given(SMOOTH | STEPPED, st.floats(1, 20))
def test_no_size_takes_more_than_twice_the_given_time_if_double_takes_double(
    curve: Curve, room: float
) -> None:
    times, us = ChunkTimes(), room * curve(SMALLEST_CHUNK)
    times.record(SMALLEST_CHUNK, curve(SMALLEST_CHUNK))
    sizes = chosen(times, curve, us, 200)
    assert max(map(curve, sizes)) <= 2 * us * (1 + 1e-9)


@given(SMOOTH, st.floats(1.05, 20), st.sampled_from([SMALLEST_CHUNK, 100, MOST]))
def test_sizes_reach_the_largest_one_within_the_time(curve: Curve, room: float, first: int) -> None:
    times, us = ChunkTimes(), room * curve(SMALLEST_CHUNK)
    times.record(first, curve(first))
    sizes = chosen(times, curve, us, 120)
    assert min(sizes[80:]) >= 0.9 * largest(curve, us) - 1
    assert max(curve(size - 1) for size in sizes[80:]) <= 1.15 * us


@given(STEPPED, st.floats(1.05, 20))
def test_sizes_on_steps_are_on_average_as_long_as_the_time_allows(curve: Curve, room: float) -> None:
    times, us = ChunkTimes(), room * curve(SMALLEST_CHUNK)
    times.record(SMALLEST_CHUNK, curve(SMALLEST_CHUNK))
    sizes = chosen(times, curve, us, 200)[50:]
    assert sum(sizes) / len(sizes) >= 0.6 * largest(curve, us)
    assert sum(map(curve, sizes)) / len(sizes) <= 1.3 * us


@given(SMOOTH, st.floats(1.5, 10), st.sampled_from([0.25, 0.5, 2.0, 4.0]))
def test_sizes_follow_when_the_speed_changes(curve: Curve, room: float, slower: float) -> None:
    times, us = ChunkTimes(), 4 * room * curve(SMALLEST_CHUNK)
    times.record(SMALLEST_CHUNK, curve(SMALLEST_CHUNK))
    chosen(times, curve, us, 100)

    def changed(tokens: int) -> float:
        return slower * curve(tokens)

    sizes = chosen(times, changed, us, 150)[100:]
    assert sum(map(changed, sizes)) / len(sizes) <= 1.1 * us
    assert sum(sizes) / len(sizes) >= 0.7 * largest(changed, us) - 1


def test_a_chunk_that_stalled_for_a_minute_keeps_prompts_waiting_for_few_steps() -> None:
    sizer = ChunkSizer(1, chunk=512, max_itl_ratio=2.5)
    for step in range(20):
        sizer.record_decode(0, 1, 1, 20_000)
        sizer.record_chunk(0, step, 64, 10_000)
    sizer.sent(20, 64, beside_decode=True)
    sizer.record_chunk(0, 20, 64, 60e6)
    waited = 0
    while not sizer.beside_decode():
        sizer.record_decode(0, 1, 1, 20_000)
        waited += 1
    assert waited < 100


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_of_a_group_earn_the_time_of_one(ranks: int) -> None:
    sizes: list[int] = []
    sizer = ChunkSizer(1, chunk=512, max_itl_ratio=2.0)
    for step in range(200):
        for rank in range(ranks):
            sizer.record(timing(step, 20_000, rank=RankId(0, rank)), is_prefill=False)
        if tokens := sizer.beside_decode():
            sizer.sent(step, tokens, beside_decode=True)
            for rank in range(ranks):
                chunk = timing(
                    step, 5_000 + 100 * tokens, tokens=tokens, is_decode=False, rank=RankId(0, rank)
                )
                sizer.record(chunk, is_prefill=True)
        sizes.append(tokens)
    taken_us = sum(5_000 + 100 * tokens for tokens in sizes if tokens)
    assert taken_us <= 200 * 20_000 * 1.02


@given(SMOOTH, st.floats(0.3, 20), st.sampled_from([0.05, 0.2]), st.integers(0, 9))
@examples(0.6)
def test_noisy_chunks_use_the_time_that_decode_leaves_and_no_more(
    curve: Curve, room: float, noise: float, seed: int
) -> None:
    """Let every hundredth chunk take ten times as long, too."""
    random, sizer = Random(seed), ChunkSizer(1, chunk=MOST, max_itl_ratio=2.5)
    decode_us = room * curve(SMALLEST_CHUNK)
    left_us, spent_us, lost_us, tokens = 1.5 * 0.9 * decode_us, 0.0, 0.0, 0
    for step in range(500):
        sizer.record_decode(0, 4, 4, decode_us)
        if (size := sizer.beside_decode()) and step >= 100:
            tokens += size
        if size:
            sizer.sent(step, size, beside_decode=True)
            outlier = 10 if random.random() < 0.01 else 1
            measured_us = outlier * curve(size) * (1 + random.uniform(-noise, noise))
            sizer.record_chunk(0, step, size, measured_us)
            spent_us += measured_us
            lost_us += measured_us * (1 - 1 / outlier)
    assert spent_us <= 500 * left_us + 10 * curve(MOST)
    left_us -= lost_us / 500
    assert tokens / 400 >= 0.6 * (
        largest(curve, left_us) if left_us >= curve(SMALLEST_CHUNK) else left_us / curve(1)
    )


def test_a_prompt_of_many_experts_beside_decode_is_read_in_large_chunks() -> None:
    """Take the times of a model of 128 experts on a GPU: 18 ms for two tokens, 26 ms for 512."""
    curve = concave(17_900, 8_200, 120)
    times = ChunkTimes()
    times.record(SMALLEST_CHUNK, curve(SMALLEST_CHUNK))
    assert chosen(times, curve, 27_000, 12)[-1] == MOST


def test_an_outlier_is_tried_again() -> None:
    times = ChunkTimes()
    for tokens, us in ((64, 10_000), (128, 900_000)):
        times.record(tokens, us)
    assert chosen(times, linear(5_000, 80), 20_000, 120)[-1] == pytest.approx(187, abs=1)


def test_chunks_behind_a_long_context_do_not_count_for_prompts_alone() -> None:
    sizer = ChunkSizer(2, chunk=512, max_itl_ratio=2.0)
    for step, before in enumerate((0, 2048, 2049, 9000)):
        sizer.sent(step, 256, before, beside_decode=False)
    for step in (3, 1, 2, 0):
        for stage in (0, 1):
            sizer.record_chunk(stage, step, 256, 1000.0 * (1 + step + stage))
    assert sizer.largest_early == 256
    assert sizer.early_us(256) is None, "one size does not show what a token takes"
    for stage in (0, 1):
        sizer.record_chunk(stage, 4, 128, 1000.0 + 500.0 * stage)
    assert sizer.early_us(256) == 2000.0
    assert sizer.measured_us(256) == 3000.0
    assert sizer.early_us(64) == 1250.0
    assert sizer.early_us(63) is None, "less than half of what was measured"


def test_the_verifying_cost_is_the_measured_one() -> None:
    sizer = make_sizer(decode_us=10_000, token_us=100, stages=2)
    sizer.record(step_timing(1, rows=4, tokens=14, compute_us=15_000), is_prefill=False)
    assert sizer.verifying_cost(0) == 1.0
    assert sizer.verifying_cost(4) == 1.2


def test_one_draft_token_is_tried_once_plain_steps_are_measured() -> None:
    assert ChunkSizer(1, chunk=512, max_itl_ratio=2.0).verifying_cost(1) == math.inf
    sizer = make_sizer(decode_us=10_000, token_us=100, stages=2)
    assert sizer.verifying_cost(1) == 1.0
    assert sizer.verifying_cost(2) == math.inf
